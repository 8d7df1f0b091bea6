"""`tether nats-permissions`: who may do what on NATS, and what an own NATS is to be given for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from tether import nats_authority, permissions
from tether.errors import BusError, InvalidError
from tether.ids import check_token, sandbox_id
from tether.nkey_jwt import Allowed, CredentialError
from tether.permissions import ROLES, SANDBOX, Role
from tether.tls import TlsFilesError
from tether_cli.options import JsonOption
from tether_cli.output import CliError, Exit, Output


def register(app: typer.Typer) -> None:
    app.command("nats-permissions")(nats_permissions)


def nats_permissions(
    tenant: Annotated[list[str] | None, typer.Option(help="A tenant of the set; may be given several times.")] = None,
    role: Annotated[str | None, typer.Option(help=f"Only this one: {', '.join((*ROLES, SANDBOX))}.")] = None,
    workspace: Annotated[str, typer.Option(help="The workspace of the sandbox that is shown.")] = "WORKSPACE",
    write: Annotated[
        Path | None, typer.Option(help="Folder for keys, credentials and the server's configuration, made or renewed.")
    ] = None,
    accounts_dir: Annotated[
        str, typer.Option(help="With --write: where a server keeps accounts; each server has its own such folder.")
    ] = nats_authority.ACCOUNTS_DIR,
    push: Annotated[
        str | None, typer.Option(help="With --write: URL of running servers, which are told of it at once.")
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="With --push: authorities that their certificate is checked against.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the permissions of each role on NATS; with --write, make all that a NATS of your own needs for them."""
    output = Output(as_json)
    tenants = tenant or ["default"]
    try:
        for name in tenants:
            check_token(name, "tenant")
        check_token(workspace, "workspace")
    except InvalidError as error:
        raise CliError(f"--{error.field} {error.remedy}", exit_code=Exit.USAGE) from None
    if role is not None and role not in (*ROLES, SANDBOX):
        raise CliError(f"--role must be one of {', '.join((*ROLES, SANDBOX))}", exit_code=Exit.USAGE)
    if write is not None:
        _write(output, write, tenants, accounts_dir)
        if push is not None:
            _push(output, write, tenants, push, ca_file)
        return
    if push is not None:
        raise CliError("--push needs --write: it tells servers of what was written", exit_code=Exit.USAGE)
    wanted = (*ROLES, SANDBOX) if role is None else (role,)
    table = {name: _allowed(name, tenants, workspace) for name in wanted}
    output.value({name: _told(allowed) for name, allowed in table.items()})
    for name, allowed in table.items():
        output.say(f"{name}: {_about(name)}")
        for verb, subjects in (("publish", allowed.publish), ("subscribe", allowed.subscribe)):
            output.say(f"  {verb}")
            for subject in subjects:
                output.say(f"    {subject}")


def _allowed(name: str, tenants: list[str], workspace: str) -> Allowed:
    if name == SANDBOX:
        return permissions.sandbox(tenants[0], workspace, sandbox_id(tenants[0], workspace))
    return permissions.service(_role(name), tenants)


def _role(name: str) -> Role:
    assert name in get_args(Role)
    return cast(Role, name)


def _about(name: str) -> str:
    return "in the account of its workspace" if name == SANDBOX else permissions.ABOUT[_role(name)]


def _told(allowed: Allowed) -> dict[str, Any]:
    return {
        "publish": list(allowed.publish),
        "subscribe": list(allowed.subscribe),
        "allow_responses": allowed.responses,
    }


def _write(output: Output, folder: Path, tenants: list[str], accounts_dir: str) -> None:
    try:
        own = nats_authority.write_all(folder, tenants, accounts_dir)
    except CredentialError as error:
        remedy = "restore it, or take a new folder"
        raise CliError(f"a key in {folder} cannot be used: {error}", remedy=remedy) from None
    except OSError as error:
        raise CliError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    names = [*ROLES, nats_authority.PERSON]
    output.value(nats_authority.places(own))
    output.say(
        f"servers: include {folder / nats_authority.SERVER_CONFIG} in each one's configuration (it holds no secret)"
    )
    output.say("services: each its own credentials, 0600")
    for name in names:
        output.say(f"  {name:10} TETHER_NATS_CREDS_FILE={own.creds_file(name)}")
    output.say("the agent service besides, for the accounts of workspaces:")
    output.say(f"  TETHER_AGENT_AUTHORITY_KEY_FILE={own.authority_file}")
    output.say(f"  TETHER_AGENT_AUTHORITY_CREDS_FILE={own.creds_file(nats_authority.AUTHORITY_USER)}")
    output.say(f"  TETHER_AGENT_AUTHORITY_ACCOUNT={own.services.public}")
    output.say(f"keep {own.folder / 'operator.seed'} away from all of them: it is needed only here")


def _push(output: Output, folder: Path, tenants: list[str], url: str, ca_file: Path | None) -> None:
    try:
        asyncio.run(nats_authority.push(nats_authority.keys(folder), tenants, url, ca_file))
    except (BusError, CredentialError, TlsFilesError) as error:
        raise CliError(f"{url} was not told: {error}", exit_code=Exit.UNREACHABLE) from None
    output.say(f"{url} knows of it")
