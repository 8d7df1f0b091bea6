"""The backend as a process: readiness, kill -9 and restart under a reader (R1), orderly stop, configuration errors."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx2

from support_backend import Log, Reader, ended, ensure_tenants, eventually, text_delta, token_of, write_tokens
from support_backend_process import backend_process
from support_nats import NatsServer
from tether.bus import NatsBus


async def test_a_backend_killed_under_a_reader_is_replaced_and_the_reader_goes_on_from_its_cursor(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    """R1, R11: the history of the new process is whole at once, though the old one acked nothing of the last batch."""
    write_tokens(tmp_path / "tokens.json", [tenant])
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    async with backend_process(nats_server, tenant, tmp_path) as (child, port):
        reader = await Reader(port, tenant, "c1").open()
        await log.prompt("q1", "r1", "e1")
        await log.frame("e1", [log.started("e1"), text_delta(2, "before")])
        seen = [one.key for one in await reader.events(4)]
        child.kill()
        await child.wait()
        await reader.close()
    await log.frame("e1", [text_delta(3, " while", offset=6)])
    async with backend_process(nats_server, tenant, tmp_path, port) as (child, _):
        await reader.open()
        await log.frame("e1", [text_delta(4, " after", offset=12), *ended(5)])
        seen += [one.key for one in await reader.events(4)]
        assert seen == ["q1/prompt.admitted", "q1/response.created", *(("e1", n) for n in range(1, 7))]
        headers = {"Authorization": f"Bearer {token_of(tenant)}"}
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:

            async def whole() -> bool:
                answer = await client.get("/v1/conversations/c1")
                items = answer.json().get("items", [])
                return [item["state"].get("text") for item in items] == ["before while after"]

            await eventually(whole, "the history is whole", timeout_s=15)
        # An orderly stop ends streams and the process, without an error.
        child.send_signal(signal.SIGTERM)
        while await reader.next() is not None:
            pass  # what is left of the stream, then its orderly end
        assert await asyncio.wait_for(child.wait(), 15) == 0
        await reader.close()


async def test_a_wrong_configuration_is_told_whole_and_ends_with_78(tmp_path: Path) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "TETHER_HTTP_PORT": "99999",
        "TETHER_HTTP_PROT": "80",
        "TETHER_LOG_LEVEL": "loud",
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tether_backend", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 78
    for name in (b"TETHER_HTTP_PORT", b"TETHER_HTTP_PROT", b"TETHER_LOG_LEVEL", b"did you mean"):
        assert name in errors
    assert b"Traceback" not in errors
