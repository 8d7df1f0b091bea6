"""Under what a CLI runs: its user, its limits, its namespaces; checked before a launch, and told in the registration.

As another user than the collector (`TETHER_COLLECTOR_CLI_USER`; the collector is root then) a CLI reaches neither the
collector's state nor its processes. That holds only where the CLI cannot put another `.tether` in the place of ours, so
the workspace must be root's, shared with the CLI's group, and sticky:

    workspace                root:GROUP 1770     the CLI makes files; what is root's it cannot move
    .tether, .tether/agents  root       0711     passed through, not listed
    .tether/agents/{kind}    USER       0700     sessions of the CLI
    everything else          root       0700
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tether_collector.config import CollectorSettings
from tether_collector.keeper_link import KEEPER_MAIN

PROBE_S: Final = 10.0
_PASS: Final = 0o711


@dataclass(frozen=True, slots=True)
class CliUser:
    uid: int
    gid: int
    name: str
    home: str


class ConfinementError(Exception):
    """A CLI cannot be run as configured; the message names the setting or the path, and the remedy."""


def cli_user(settings: CollectorSettings) -> CliUser | None:
    """Whom CLIs run as; None: as the collector. Raises ConfinementError."""
    named = settings.collector_cli_user
    if named is None:
        return None
    if os.geteuid() != 0:
        raise ConfinementError("TETHER_COLLECTOR_CLI_USER: only a collector of root can run a CLI as another user")
    number, _, group = named.partition(":")
    try:
        found = pwd.getpwuid(int(number)) if number.isdigit() else pwd.getpwnam(number)
        user = CliUser(found.pw_uid, int(group) if group else found.pw_gid, found.pw_name, found.pw_dir)
    except KeyError:
        if not number.isdigit() or not group:
            raise ConfinementError(f"TETHER_COLLECTOR_CLI_USER: {named} is no user here; give UID:GID") from None
        user = CliUser(int(number), int(group), number, "/")
    if user.uid == 0 or user.gid == 0:
        raise ConfinementError("TETHER_COLLECTOR_CLI_USER: must not be root, nor of root's group")
    return user


def confine(settings: CollectorSettings, user: CliUser | None) -> dict[str, Any]:
    """For the keeper (`keeper.confine`)."""
    found: dict[str, Any] = {
        "umask": int(settings.collector_cli_umask, 8),
        "new_privileges": settings.collector_cli_new_privileges,
        "limits": settings.collector_cli_limits.model_dump(exclude_none=True),
    }
    return found if user is None else {**found, "uid": user.uid, "gid": user.gid}


def make_home(settings: CollectorSettings, user: CliUser | None, home: Path) -> None:
    """The CLI's own folder below `.tether/agents`, before its launch. Raises OSError, ConfinementError."""
    if user is None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    facts = settings.workspace_dir.lstat()
    if facts.st_uid != 0 or facts.st_gid != user.gid or stat.S_IMODE(facts.st_mode) & 0o1077 != 0o1070:
        raise ConfinementError(
            f"{settings.workspace_dir} must be shared with the user of CLIs and keep what is the collector's: "
            f"chown 0:{user.gid}, chmod 1770"
        )
    for folder in (settings.state_dir, home.parent):
        folder.mkdir(mode=_PASS, parents=True, exist_ok=True)
        _change(folder, 0, 0, _PASS)
    home.mkdir(mode=0o700, exist_ok=True)
    _change(home, user.uid, user.gid, 0o700)


def _change(folder: Path, uid: int, gid: int, mode: int) -> None:
    """Of the folder itself, never of what a link leads to. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(descriptor, uid, gid)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def user_variables(user: CliUser | None, home: Path) -> dict[str, str]:
    """In place of the collector's own."""
    if user is None:
        return {}
    own = user.home if user.home != "/" and os.path.isdir(user.home) else str(home)  # noqa: PTH112
    return {"HOME": own, "USER": user.name, "LOGNAME": user.name}


def told(settings: CollectorSettings) -> dict[str, Any]:
    """What the registration says of it, before it is known what holds a CLI's processes together."""
    try:
        user = cli_user(settings)
    except ConfinementError as error:
        return {"problem": str(error)}
    return {
        "user": "the collector's" if user is None else f"{user.uid}:{user.gid}",
        "root": user is None and os.geteuid() == 0,
        "new_privileges": settings.collector_cli_new_privileges,
        "umask": settings.collector_cli_umask,
        "limits": settings.collector_cli_limits.model_dump(exclude_none=True),
    }


async def probe(settings: CollectorSettings) -> Mapping[str, Any]:
    """How a CLI that is launched now would be isolated: {"isolation", "user_namespace"}; {} where that is not known."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-E", str(KEEPER_MAIN), "--probe", settings.isolation),
        *(["other-user"] if settings.collector_cli_user is not None else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(PROBE_S):
            data, _ = await process.communicate()
        found = json.loads(data)
    except (TimeoutError, ValueError):
        return {}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return found if isinstance(found, dict) else {}
