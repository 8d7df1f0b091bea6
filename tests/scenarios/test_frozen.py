"""R1–R5: each service frozen (SIGSTOP) for longer than every lease it holds, under load, and continued.

Leases and ack waits are two seconds here, so that a freeze of four outlasts all of them; everything else is the
product's own. While the router is frozen another one is there, who could become a second writer.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from support_fault_round import FaultRound, HastySet, talk
from support_hasty_service import LEASE_S
from tether import subjects
from tether.ids import sandbox_id
from tether.kv import Bucket
from tether_chaos.plan import SERVICES

FROZEN_S: Final = 2.0 * LEASE_S  # and half a second to be told of it
TEXT: Final = "!lines 100 40\n!ask during\n!tool work 100"


async def lapsed(run: FaultRound, service: str) -> bool:
    """Whether what the frozen service holds has run out at the server."""
    up = run.up
    async with run.bus() as bus:
        match service:
            case "collector":
                key = subjects.registration_key(up.tenant, "w0", sandbox_id(up.tenant, "w0"))
                return await Bucket(bus, subjects.SANDBOXES).get(key) is None
            case "backend":
                return await Bucket(bus, subjects.LEASES).get(subjects.projector_lease_key(up.tenant, 0)) is None
            case _:
                return True


def second_router(run: FaultRound, folder: Path) -> subprocess.Popen[bytes]:
    first = run.victim("router").process.pid
    entries = Path(f"/proc/{first}/environ").read_bytes().split(b"\0")
    environment = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    argv = [os.fsdecode(word) for word in Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0") if word]
    environment["TETHER_READY_FILE"] = str(folder / "second-router.json")
    with (folder / "second-router.log").open("wb") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log)


@asynccontextmanager
async def another_router(run: FaultRound, folder: Path) -> AsyncIterator[None]:
    process = second_router(run, folder)
    try:

        async def ready() -> bool:
            assert process.poll() is None, (folder / "second-router.log").read_text()[-2000:]
            return (folder / "second-router.json").exists()

        await run.until(ready, "the second router")
        yield
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.timeout(240)
async def test_whoever_is_frozen_beyond_its_leases_and_continued_loses_nothing_and_no_second_writer_comes(
    tmp_path: Path,
) -> None:
    async def freeze(run: FaultRound, service: str) -> None:
        running, coming = run.begin(service), None
        await run.reads(service, 12)
        async with run.frozen(service, "w0" if service == "collector" else ""):
            coming = run.begin(f"{service}-new")  # a prompt, and an approval, that meet the frozen one
            await asyncio.sleep(FROZEN_S)
            if service != "nats":

                async def over() -> bool:
                    return await lapsed(run, service)

                await run.until(over, f"the end of what the {service} holds")
        await asyncio.gather(running, coming)

    async def harm(run: FaultRound) -> None:
        async with another_router(run, tmp_path):
            for service in SERVICES:
                await freeze(run, service)

    plans = [
        conversation
        for service in SERVICES
        for conversation in (talk(service, TEXT, "second"), talk(f"{service}-new", "!ask new\n!lines 20 5"))
    ]
    result = await FaultRound(plans, tmp_path, harm, made=HastySet).judged()
    assert result.prompts == 3 * len(SERVICES)
