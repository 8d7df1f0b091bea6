"""`tether import-login claude`: take the user's own Claude Code login for Tether's sandboxes, with their consent.

A sandbox's CLI has a configuration folder of its own and never sees `~/.claude`. This copies the access token of that
login to `${XDG_CONFIG_HOME:-~/.config}/tether/claude.env` (0600), which the next set uses as the key file of `claude`
where the agents file names no other. The login itself is not changed; the copy ends when the token expires.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from tether.service import write_whole
from tether_cli.agents_config import imported_login
from tether_cli.options import JsonOption
from tether_cli.output import CliError, Exit, Output

_BYTES_MAX: Final = 1 << 20


def register(app: typer.Typer) -> None:
    app.command("import-login")(import_login)


def import_login(
    agent: Annotated[str, typer.Argument(help="Only claude.")] = "claude",
    yes: Annotated[bool, typer.Option("--yes", help="Consent without being asked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy your own Claude Code login to a key file that sandboxes may use."""
    if agent != "claude":
        raise CliError(f"there is no login of {agent} to import", remedy="only claude is known", exit_code=Exit.USAGE)
    output = Output(as_json)
    source = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / ".credentials.json"
    token, expires = _token_of(source)
    target = imported_login()
    if not yes:
        _ask(source, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(target, f"# imported from {source}\nCLAUDE_CODE_OAUTH_TOKEN={token}\n".encode())
    except OSError as error:
        raise CliError(f"cannot write {target}: {error.strerror}") from None
    output.value({"agent": agent, "source": str(source), "file": str(target), "expires": expires})
    output.say(f"the login of {source} is in {target}; sets that start from now on use it")
    if expires is not None:
        output.say(f"it expires at {expires}; import it again then")


def _ask(source: Path, target: Path) -> None:
    if not sys.stdin.isatty():
        raise CliError(
            "your consent is needed, and there is no terminal to ask", remedy="say --yes", exit_code=Exit.USAGE
        )
    sys.stderr.write(f"Copy the access token of {source} to {target}, for agents in Tether's sandboxes? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("nothing was imported", exit_code=Exit.FAILED)


def _token_of(path: Path) -> tuple[str, str | None]:
    """The access token, and when it expires (ISO 8601). Raises CliError that shows nothing of the file."""
    remedy = "log in with `claude` first, or set ANTHROPIC_API_KEY"
    try:
        with path.open("rb") as file:
            login = json.loads(file.read(_BYTES_MAX))["claudeAiOauth"]
        token, expires_ms = login["accessToken"], login.get("expiresAt")
    except FileNotFoundError:
        raise CliError(f"there is no login in {path}", remedy=remedy) from None
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CliError(f"{path} holds no login that is understood", remedy=remedy) from None
    if not isinstance(token, str) or not token.isprintable() or not token:
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
