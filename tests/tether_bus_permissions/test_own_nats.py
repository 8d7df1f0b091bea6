"""What a NATS of one's own is given: made by the command, kept by making it again, told to servers that run."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from support_nats import NatsServer
from support_permissions import plain
from tether import nats_authority, topology
from tether.bus import connect
from tether_cli.nats_server import EmbeddedServer, credentials, find_binary
from tether_cli.state import Paths


def made(folder: Path, *tenants: str, push: str | None = None) -> dict[str, Any]:
    names = [part for tenant in tenants for part in ("--tenant", tenant)]
    command = [sys.executable, "-m", "tether.nats_authority", str(folder), "--accounts-dir", str(folder / "accounts")]
    names += [] if push is None else ["--push", push]
    done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_a_new_tenant_is_known_to_servers_that_were_told_and_after_their_restart(tmp_path: Path) -> None:
    told = await asyncio.to_thread(made, tmp_path / "own", "acme")

    async def router_may(subject: str) -> bool:
        text = await asyncio.to_thread(Path(told["credentials"]["router"]).read_text)
        async with plain(server, text) as client:
            return not (await client.tried([subject], [])).publish

    server = NatsServer(tmp_path / "server", extra='include "../own/tether-accounts.conf"').start()
    try:
        assert await router_may("tether.command.acme.w")
        assert not await router_may("tether.command.rival.w")
        again = await asyncio.to_thread(made, tmp_path / "own", "acme", "rival", push=server.url)
        assert again == told
        assert await router_may("tether.command.rival.w")
        server.terminate()
        server.start()
        assert await router_may("tether.command.rival.w")
    finally:
        server.kill()


def test_nothing_of_it_is_open_to_others_and_the_servers_part_holds_no_secret(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    told = made(folder, "acme")
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    config = Path(told["server_config"]).read_text()
    assert not [path for path in folder.glob("*.seed") if path.read_text() in config]


async def test_a_set_of_a_version_without_accounts_keeps_its_streams(tmp_path: Path) -> None:
    await _keeps_streams(tmp_path, lambda paths: None)


async def test_a_set_whose_keys_were_lost_keeps_its_streams(tmp_path: Path) -> None:
    def lose(paths: Paths) -> None:
        EmbeddedServer(paths, credentials(paths), ["default"]).prepare()
        for path in paths.secrets.iterdir():
            path.unlink()

    await _keeps_streams(tmp_path, lose)


async def _keeps_streams(tmp_path: Path, between: Any) -> None:
    paths = Paths(tmp_path / "data")
    paths.make()
    old = NatsServer(paths.nats).start()
    try:
        async with await connect(old.url, name="old") as bus:
            await bus.ensure(topology.base())
            await bus.publish("$KV.tether_owners.default.w.c", b"{}")
    finally:
        old.terminate()
    between(paths)
    own = credentials(paths)
    embedded = EmbeddedServer(paths, own, ["default"])
    embedded.prepare()
    process = subprocess.Popen([str(find_binary()), "-c", str(embedded.config)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        async with asyncio.timeout(30):
            while (facts := embedded.ready(process.pid)) is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        embedded.started(facts)
        creds = str(own.creds_file(nats_authority.PERSON))
        async with await connect(embedded.url, name="new", creds_file=creds) as bus:
            found = await bus.last("KV_tether_owners", "$KV.tether_owners.default.w.c")
            assert found is not None and found.data == b"{}"
    finally:
        process.terminate()
        process.wait(20)
