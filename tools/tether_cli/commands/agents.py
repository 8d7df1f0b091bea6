"""`tether agents list|login|logout`: which agent CLIs a set would run, and where their keys come from.

A sandbox's CLI has a configuration folder of its own and never sees `~/.claude`. `login` copies the access token of
that login, with consent, to `${XDG_CONFIG_HOME:-~/.config}/tether/claude.env` (0600): the next set uses it as the key
file of `claude`, where neither the shell nor the agents file names another. The login itself is not changed; the copy
is good until the token expires.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from tether.service import write_whole
from tether_agents.locate import load_pins
from tether_cli import agents_config
from tether_cli.agents_config import AgentFinding, imported_login
from tether_cli.options import AgentsDirOption, JsonOption
from tether_cli.output import CliError, Exit, Output

_BYTES_MAX: Final = 1 << 20
AgentArgument = Annotated[str, typer.Argument(help="Only claude.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Agent CLIs and their keys: list, login, logout.", no_args_is_help=True)
    group.command("list")(list_agents)
    group.command("login")(login)
    group.command("logout")(logout)
    app.add_typer(group, name="agents")


def list_agents(
    agents_dir: AgentsDirOption = None,
    agents_file: Annotated[
        Path | None, typer.Option("--agents-file", metavar="FILE", help="As for `tether up`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Every agent that is known or configured: where its CLI lies, which version, and whence its key. Needs no set."""
    output = Output(as_json)
    pins = load_pins()
    found = agents_config.findings(agents_dir=agents_dir, agents_file=agents_file)
    output.value(
        {
            "agents": [
                {
                    **{name: value for name, value in asdict(each).items() if name != "settings"},
                    "pinned_version": pins[each.kind].version if each.kind in pins else None,
                }
                for each in found
            ]
        }
    )
    output.table(
        ("AGENT", "VERSION", "KEY FROM", "COMMAND"),
        ((each.kind, each.version or "-", _key(each), " ".join(each.command) or each.problem) for each in found),
    )


def _key(found: AgentFinding) -> str:
    return found.key_source or ("-" if found.kind == "scripted" else "no key")


def login(
    agent: AgentArgument = "claude",
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Folder with the login.  [default: $CLAUDE_CONFIG_DIR or ~/.claude]"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Consent without being asked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy your own Claude Code login to a key file that sandboxes may use. Asks first."""
    _check(agent)
    output = Output(as_json)
    folder = source or Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    path = folder.expanduser() / ".credentials.json"
    token, expires = _token_of(path)
    target = imported_login()
    if not yes:
        _ask(path, target)
    until = f", expires at {expires}" if expires is not None else ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(target, f"# imported from {path}{until}\nCLAUDE_CODE_OAUTH_TOKEN={token}\n".encode())
    except OSError as error:
        raise CliError(f"cannot write {target}: {error.strerror}") from None
    output.value({"agent": agent, "source": str(path), "file": str(target), "expires": expires})
    output.say(f"the login of {path} is in {target}; sets that start from now on use it")
    if expires is not None:
        output.say(f"it expires at {expires}; log in again then")


def logout(agent: AgentArgument = "claude", as_json: JsonOption = False) -> None:
    """Delete the copy that `login` made. Your own login stays as it is."""
    _check(agent)
    output = Output(as_json)
    target = imported_login()
    try:
        target.unlink()
    except FileNotFoundError:
        raise CliError(f"there is no copied login: {target} does not exist", exit_code=Exit.FAILED) from None
    except OSError as error:
        raise CliError(f"cannot delete {target}: {error.strerror}") from None
    output.value({"agent": agent, "file": str(target)})
    output.say(f"{target} is deleted; a set that is up has read it already")


def _check(agent: str) -> None:
    if agent != "claude":
        raise CliError(
            f"{agent} has no login that could be copied", remedy="only claude is known", exit_code=Exit.USAGE
        )


def _ask(source: Path, target: Path) -> None:
    if not sys.stdin.isatty():
        raise CliError(
            "your consent is needed, and there is no terminal to ask", remedy="say --yes", exit_code=Exit.USAGE
        )
    sys.stderr.write(f"Copy the access token of {source} to {target}, for agents in Tether's sandboxes? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("nothing was copied", exit_code=Exit.FAILED)


def _token_of(path: Path) -> tuple[str, str | None]:
    """The access token, and when it expires (ISO 8601). Raises CliError that shows nothing of the file."""
    remedy = "log in with `claude` first, or set ANTHROPIC_API_KEY"
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_BYTES_MAX))["claudeAiOauth"]
        token, expires_ms = found["accessToken"], found.get("expiresAt")
    except FileNotFoundError:
        raise CliError(f"there is no login in {path}", remedy=remedy) from None
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CliError(f"{path} holds no login that is understood", remedy=remedy) from None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token or " " in token:
        raise CliError(f"{path} holds no login that is understood", remedy=remedy)
    expires = None
    if isinstance(expires_ms, int) and 0 < expires_ms < 1 << 46:
        moment = datetime.fromtimestamp(expires_ms / 1000, UTC)
        if moment < datetime.now(UTC):
            raise CliError(
                f"the login in {path} expired at {moment.isoformat()}", remedy="run `claude` once, it renews"
            )
        expires = moment.isoformat()
    return token, expires
