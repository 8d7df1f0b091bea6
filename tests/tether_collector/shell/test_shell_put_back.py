"""NATS comes back without what it acknowledged last: ended executions are put back, what was deleted is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support_nats import NatsServer, running_server
from support_shell import Rig, Run, collector, eventually
from tether import frames, subjects, topology
from tether.bus import NatsBus, connect
from tether.errors import BusError
from tether.events import ConversationEvent
from tether_collector.core.review import End, Remains, Verdict, judge_empty, judge_frame
from tether_collector.review import stream_end

END = End("exe_1", ordinal=9, sequence=100, at=5000)


@asynccontextmanager
async def harmed(tenant: str, root: Path) -> AsyncIterator[tuple[NatsServer, NatsBus, Rig]]:
    """A server of one's own, and a collector."""
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, root) as rig:
                yield server, bus, rig


def keep(server: NatsServer, copy: Path) -> None:
    """A copy of the store as it is now."""
    server.kill()
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(server.root / "store", copy)
    server.start()


def put_older(server: NatsServer, copy: Path) -> None:
    """The server comes back with the copy for its store."""
    server.kill()
    shutil.rmtree(server.root / "store")
    shutil.copytree(copy, server.root / "store")
    server.start()


async def say_prompt(bus: NatsBus, run: Run) -> None:
    """What a router tells of the conversation before the start."""
    target = run.target
    body = {"request": run.command.request_id, "prompt_sequence": 1, "content": []}
    name = f"{run.command.request_id}/prompt.admitted"
    event = ConversationEvent(id=name, at=1, type="prompt.admitted", generation=1, body=body)
    subject = subjects.event(target.tenant, target.workspace, target.conversation, "_")
    await bus.publish(subject, frames.encode_event(event))


async def reviewed(rig: Rig, run: Run, what: str) -> None:
    async def told() -> bool:
        return any(line.get("execution") == run.target.execution for line in rig.lines(what))

    await eventually(told, what)


async def taken(rig: Rig, run: Run) -> bool:
    """The start was accepted; the same again where the server was away."""
    try:
        return (await rig.ask_start(run)).status in ("accepted", "delivered", "settled")
    except BusError:
        return False


async def same_again(rig: Rig, run: Run) -> Run:
    """The execution as the log has it now: whole, with every event where it was."""
    again = Run(rig, run.command)
    await again.ended()
    assert [event.ordinal for event in again.events if event.type == "execution.ended"] == [run.events[-1].ordinal]
    again.check_whole()
    return again


async def test_the_lost_tail_of_an_ended_execution_is_put_back_after_the_reconnect(tenant: str, tmp_path: Path) -> None:
    async with harmed(tenant, tmp_path) as (server, _, rig):
        gate = tmp_path / "gate"
        run = await rig.begin(f"one\n!wait_file {gate}\n!flood 300\ntwo")
        await run.until("text.completed", text="one")
        keep(server, tmp_path / "older")
        gate.touch()
        await run.ended()
        await eventually(lambda: _ended_there(rig, run), "the final snapshot")
        ended_at = await _kept_from(rig, run)
        put_older(server, tmp_path / "older")
        again = await same_again(rig, run)
        final = await again.snapshot()
        assert final.terminal and final.completeness == "complete"
        await eventually(lambda: _marked(rig, again), "a watermark of where it is stored now")
        assert not rig.lines("end_deleted")
        assert await _kept_from(rig, run) == ended_at, "captured again, it still counts from its end"


async def _kept_from(rig: Rig, run: Run) -> int:
    """From when on the final snapshot's retention counts, as its file says."""
    path = rig.state_dir / "execution-recovery" / f"{run.target.execution}.json"

    async def there() -> bool:
        return path.exists()

    await eventually(there, "the final snapshot's file")
    found: int = json.loads(path.read_text())["ended_at"]
    return found


async def _ended_there(rig: Rig, run: Run) -> bool:
    try:
        reply = await rig.ask("discover")
    except BusError:
        return False
    assert reply.result is not None
    return [entry["state"] for entry in reply.result["executions"]] == ["ended"]


async def _marked(rig: Rig, run: Run) -> bool:
    return (await run.snapshot()).watermark.sequence == run.sequences[-1]


@pytest.mark.parametrize("away", [False, True])
async def test_an_execution_that_was_lost_from_its_first_event_on_is_put_back_whole(
    tenant: str, tmp_path: Path, away: bool
) -> None:
    async with harmed(tenant, tmp_path) as (server, bus, rig):
        run = await rig.admit("one\n!flood 50\ntwo")
        await say_prompt(bus, run)
        keep(server, tmp_path / "older")
        await eventually(lambda: taken(rig, run), "the start's receipt")
        await run.ended()
        await eventually(lambda: _ended_there(rig, run), "the journaled end")
        if away:
            await rig.hand_over()
        put_older(server, tmp_path / "older")
        if away:
            await rig.start()
        await same_again(rig, run)
        await eventually(lambda: _ended_there(rig, run), "an execution that ended")


async def test_what_an_operator_purged_is_never_put_back(tenant: str, tmp_path: Path) -> None:
    async with harmed(tenant, tmp_path) as (server, bus, rig):
        run = await rig.admit("one")
        await say_prompt(bus, run)
        await rig.ask_start(run)
        await run.ended()
        await eventually(lambda: _ended_there(rig, run), "the journaled end")
        await bus.purge(subjects.events_stream(tenant), run.subject)
        server.restart()
        await reviewed(rig, run, "end_deleted")
        await rig.kill()
        await rig.start()
        other = await rig.begin("two", conversation="c2")
        await other.ended()
        assert await bus.last(subjects.events_stream(tenant), run.subject) is None
        assert not rig.lines("end_lost")


async def test_a_log_that_was_deleted_and_made_anew_is_not_filled_with_what_it_held(
    tenant: str, tmp_path: Path
) -> None:
    async with harmed(tenant, tmp_path) as (server, bus, rig):
        run = await rig.admit("one\n!flood 20")
        await say_prompt(bus, run)
        await rig.ask_start(run)
        await run.ended()
        await eventually(lambda: _ended_there(rig, run), "the journaled end")
        await bus.delete_stream(subjects.events_stream(tenant))
        await bus.ensure(topology.tenant(tenant, max_bytes=256 << 20))
        server.restart()
        await reviewed(rig, run, "end_deleted")
        assert await bus.last(subjects.events_stream(tenant), run.subject) is None


async def test_where_a_stream_ends_is_asked_without_storing_anything(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    address = subjects.EventAddress(tenant, "w1", "c1", "exe_1")
    assert await stream_end(bus, address) == 0
    ack = await bus.publish(subjects.event(tenant, "w1", "c1", "_"), b"x")
    assert await stream_end(bus, address) == ack.sequence
    state = await bus.state(subjects.events_stream(tenant))
    assert state is not None and state.messages == 1
    with pytest.raises(BusError):
        await stream_end(bus, subjects.EventAddress("nobody", "w1", "c1", "exe_1"))


def test_only_a_stream_that_went_back_and_kept_what_came_before_has_lost_an_end() -> None:
    assert judge_frame(END, 9) is Verdict.THERE and judge_frame(END, 8) is Verdict.PUT_BACK
    assert judge_empty(END, Remains(stream_end=60, conversation_at=4000, owned=True)) is Verdict.PUT_BACK
    for remains in (
        Remains(stream_end=100, conversation_at=4000, owned=True),
        Remains(stream_end=60, conversation_at=None, owned=True),
        Remains(stream_end=60, conversation_at=6000, owned=True),
        Remains(stream_end=60, conversation_at=4000, owned=False),
    ):
        assert judge_empty(END, remains) is Verdict.DELETED
