"""C4: a collector that dies at a named step of a control: `unknown` first, then what can be proved, and one effect.

Steps are failpoints (`tether.failpoints`), armed while the collector runs, just before the control is sent. Some steps
of a control are passed by every event: then the one that is met first counts, which is the point.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support_nats import NatsServer
from support_shell import Rig, Run, collector, eventually
from tether.bus import NatsBus
from tether.control import ControlReply
from tether.errors import BusError, Code
from tether.failpoints import FOLDER_VARIABLE
from tether_oracle import load_truth

OF_A_CONTROL = ("control_journaled", "offered", "receipt_journaled", "frame.cut", "frame.stored")
OF_THE_END = ("terminal_stored", "final_written", "end_journaled", "keeper_dismissed")
FINAL = ("settled", "rejected", "unknown")
STUBBORN = "!ignore SIGTERM\n!ignore SIGINT\n!fork2 60\nready\n!stay\n!tool build 60000"


@asynccontextmanager
async def armed(bus: NatsBus, server: NatsServer, tenant: str, root: Path) -> AsyncIterator[tuple[Rig, Path]]:
    """A collector, and the folder in which a file of a step's name kills it there."""
    folder = root / "failpoints"
    folder.mkdir()
    environment = {FOLDER_VARIABLE: str(folder)}
    async with collector(bus, server.url, tenant, root, environment=environment) as rig:
        yield rig, folder


async def asked_into_the_crash(rig: Rig, folder: Path, step: str, verb: str, run: Run, **more: Any) -> None:
    """Send it to a collector that dies at the step, and start the next one."""
    (folder / f"collector.{step}").touch()
    sending = asyncio.create_task(rig.ask(verb, target=run.target, control="ctl_1", **more), name="ask")
    assert await rig.exited() == -signal.SIGKILL, step
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await rig.start()


async def receipt(rig: Rig) -> ControlReply:
    return await rig.ask("receipt", payload={"control": "ctl_1"})


async def the_truth(rig: Rig, *statuses: str) -> ControlReply:
    """What the receipt says in the end; never anything else that is final."""

    async def known() -> ControlReply | None:
        try:
            reply = await receipt(rig)
        except BusError:
            return None
        return reply if reply.status in FINAL and reply.problem is None else None

    found: ControlReply = await eventually(known, "a final receipt")
    assert found.status in statuses, found
    return found


def read(rig: Rig, kind: str) -> int:
    """How many lines of this kind the agents read on stdin, by their own word."""
    records = [record for one in load_truth(rig.truth).processes for record in one.stdin]
    return sum(f'"{kind}"' in str(record) for record in records)


@pytest.mark.parametrize("step", OF_A_CONTROL)
async def test_c4_an_answer_whose_collector_died_at_any_step_has_one_effect_and_its_receipt_tells(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with armed(bus, nats_server, tenant, tmp_path) as (rig, folder):
        run = await rig.begin("before\n!ask write\nafter")
        asked = await run.until("interaction.requested")
        payload = {"interaction": asked.body["interaction"], "decision": "allow"}
        await asked_into_the_crash(rig, folder, step, "answer", run, payload=payload)
        known = await receipt(rig)
        if known.problem is not None:  # it died before it had journaled anything: nothing happened, and asking is safe
            assert (known.status, known.problem.code) == ("unknown", Code.NOT_FOUND)
            await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
        assert (await run.ended()).body["outcome"] == "completed"
        await the_truth(rig, "settled")
        again = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
        assert again.status == "settled", "the same control again is the same receipt"
        assert len(run.of("interaction.resolved")) == 1 and read(rig, "answer") == 1
        run.check_whole()


@pytest.mark.parametrize("step", ["control_journaled", "receipt_journaled", "frame.stored"])
async def test_an_interrupt_whose_collector_died_is_settled_by_the_agents_own_output(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with armed(bus, nats_server, tenant, tmp_path) as (rig, folder):
        run = await rig.begin("ready\n!hang")
        await run.until("text.completed")
        await asked_into_the_crash(rig, folder, step, "interrupt", run)
        ended = await run.ended()
        assert ended.body["outcome"] == "cancelled"
        await the_truth(rig, "settled")
        assert read(rig, "interrupt") == 1
        [turn] = run.of("turn.completed")
        [settled] = run.of("control.receipt", control="ctl_1", status="settled")
        assert turn.body["outcome"] == "interrupted" and settled.ordinal <= turn.ordinal, "seen in its output"
        run.check_whole()


@pytest.mark.parametrize("step", [*OF_A_CONTROL, *OF_THE_END])
async def test_c6_a_stop_whose_collector_died_at_any_step_goes_on_to_the_proof(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with armed(bus, nats_server, tenant, tmp_path) as (rig, folder):
        run = await rig.begin("ready\n!hang")
        await run.until("text.completed")
        await asked_into_the_crash(rig, folder, step, "stop", run)
        known = await receipt(rig)
        if known.problem is not None:
            assert known.problem.code == Code.NOT_FOUND
            await rig.ask("stop", target=run.target, control="ctl_1")
        ended = await run.ended()
        assert ended.body["outcome"] in ("stopped", "cancelled")
        assert ended.body["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
        await the_truth(rig, "settled")
        assert len(run.of("execution.ended")) == 1 and len(run.of("response.ended")) == 1
        assert len(run.of("control.receipt", control="ctl_1", status="accepted")) == 1
        run.check_whole()
