"""The projection: rows equal the fold of the log, whatever is delivered when, and wherever the projector dies."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support_backend import (
    Log,
    ended,
    ensure_tenants,
    event,
    eventually,
    project_all,
    projecting,
    running_backend,
    text_delta,
)
from tether import events as ev
from tether import frames, subjects
from tether.bus import NatsBus
from tether.conversation_fold import ConversationFold
from tether.events import ConversationEvent, Event
from tether.fold import ExecutionFold, ExecutionState
from tether.frames import Frame, Position
from tether.kv import Bucket
from tether.ports import Bus
from tether.testing import MemoryBus, MemoryServer
from tether_backend.core.projection import Builder
from tether_backend.core.stream import LogMessage, decode
from tether_backend.metrics import Metrics
from tether_backend.projector import Projector
from tether_backend.store.engine import Database, open_database
from tether_backend.store.history import History
from tether_backend.store.projection import ProjectionWriter

TENANT = "acme"


def story(execution_seed: int, texts: Sequence[str]) -> list[Event]:
    """A plausible execution: text with deltas, a discarded attempt, a tool, an approval, usage, a receipt, the end."""
    made: list[Event] = []

    def add(kind: str, body: dict[str, Any]) -> None:
        made.append(event(len(made) + 1, kind, body))

    add(ev.SESSION_BOUND, {"native_session": f"n{execution_seed}", "resumable": True})
    for index, text in enumerate(texts):
        offset = 0
        for piece in (text[:3], text[3:]):
            if piece:
                add(ev.TEXT_DELTA, {"segment": f"s{index}", "text": piece, "offset": offset})
                offset += len(piece)
        if index % 3 == 1:
            add(ev.TEXT_DISCARDED, {"segment": f"s{index}", "reason": "model_request_retried"})
        else:
            add(ev.TEXT_COMPLETED, {"segment": f"s{index}", "text": text})
        add(ev.TOOL_STARTED, {"tool": f"t{index}", "name": "Bash", "input": {"command": text}})
        add(ev.INTERACTION_REQUESTED, {"interaction": f"i{index}", "kind": "approval", "tool": f"t{index}"})
        if index % 2:
            add(ev.CONTROL_RECEIPT, {"control": f"k{index}", "verb": "answer", "status": "settled"})
            add(ev.INTERACTION_RESOLVED, {"interaction": f"i{index}", "outcome": "answered", "control": f"k{index}"})
            add(ev.TOOL_COMPLETED, {"tool": f"t{index}", "status": "ok", "output": "done"})
        add(ev.USAGE, {"turn": f"u{index}", "input_tokens": index, "output_tokens": 2, "cost_usd": 0.5})
    add(ev.RAW, {"stream": "stdout", "preview": "?", "bytes": 1, "why": "not known"})
    add(ev.RESPONSE_ENDED, {"outcome": "completed"})
    add(ev.EXECUTION_ENDED, {"outcome": "completed", "exit": 0})
    return made


def cut(events: Sequence[Event], sizes: Sequence[int]) -> list[list[Event]]:
    """Events in frames of these sizes (the last size repeats), each frame merged."""
    found, at, index = [], 0, 0
    while at < len(events):
        size = sizes[min(index, len(sizes) - 1)]
        found.append(frames.merge(events[at : at + size]))
        at += size
        index += 1
    return found


def notes(request: str, execution: str) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (
            ev.PROMPT_ADMITTED,
            f"{request}/prompt.admitted",
            {"request": request, "prompt_sequence": 1, "content": [{"type": "text", "text": request}]},
        ),
        (
            ev.RESPONSE_CREATED,
            f"{request}/response.created",
            {
                "request": request,
                "response": f"r-{request}",
                "response_generation": 1,
                "execution": execution,
                "execution_generation": 1,
                "agent": "scripted",
            },
        ),
    ]


async def logged(bus: Bus, conversation: str = "c1") -> list[LogMessage]:
    stream = subjects.events_stream(TENANT)
    found: list[LogMessage] = []
    while True:
        batch = await bus.read(stream, found[-1].sequence if found else 0, f"tether.event.{TENANT}.*.{conversation}.*")
        if not batch:
            return found
        found += [decode(one.subject, one.sequence, one.stored_at_ns, one.data) for one in batch]


async def assert_rows_are_the_fold_of_the_log(bus: Bus, database: Database, conversation: str = "c1") -> None:
    messages = await logged(bus, conversation)
    talk = ConversationFold()
    runs: dict[str, ExecutionFold] = {}
    for message in messages:
        if isinstance(message.content, ConversationEvent):
            talk.apply(message.content)
        elif isinstance(message.content, Frame):
            fold = runs.setdefault(message.address.execution, ExecutionFold())
            for one in message.content.events:
                fold.apply(one)
    history = History(database)
    page = await history.conversation(TENANT, conversation, cursor="", workspace="w", before=None, limit=200)
    assert {one.execution for one in page.executions} == set(runs)
    for name, fold in runs.items():
        found = await history.state(TENANT, name)
        assert found is not None
        assert found[1] == fold.freeze()
    expected = talk.freeze()
    assert [(one.request, one.content, one.response) for one in page.messages] == [
        (one.request, one.content, one.response) for one in expected.messages
    ]
    known = {one.response: (one.request, one.execution, one.state) for one in expected.responses}
    assert {one.response: (one.request, one.execution) for one in page.responses} == {
        name: value[:2] for name, value in known.items() if value[1] is not None
    }
    for view in page.responses:
        if known[view.response][2] == "superseded":
            assert view.outcome == "superseded"
    used = {(one.execution, one.turn): one.output_tokens for one in page.usage}
    assert used == {
        (name, turn): body["output_tokens"]
        for name, fold in runs.items()
        for turn, body in fold.freeze().usage_by_turn.items()
    }


async def write_story(bus: Bus, texts: Sequence[str] = ("hello", "world", "again"), sizes: Sequence[int] = (3,)) -> Log:
    """Two prompts and their executions in one conversation, the second superseding the first."""
    log = Log(bus, TENANT)
    for index, execution in enumerate(("e1", "e2")):
        for kind, id_, body in notes(f"q{index}", execution):
            await log.note(kind, id_, body)
        for frame in cut(story(index, texts), sizes):
            await log.frame(execution, frame)
    await log.note(ev.RESPONSE_SUPERSEDED, "q0/response.superseded", {"request": "q0", "response": "r-q0", "by": "q1"})
    await log.note(ev.RESPONSE_FAILED, "q7/response.failed", {"request": "q7", "code": "SESSION_BUSY"})
    return log


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[tuple[MemoryBus, Database]]:
    bus = MemoryBus(MemoryServer())
    await ensure_tenants(bus, [TENANT])
    database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        yield bus, database
    finally:
        await database.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_equal_the_fold_of_the_log_for_any_cuts_batches_order_and_repetition(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = data.draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))

    async def check() -> None:
        bus = MemoryBus(MemoryServer())
        await ensure_tenants(bus, [TENANT])
        await write_story(bus, texts, sizes)
        messages = await logged(bus)
        extra = data.draw(st.lists(st.sampled_from(messages), max_size=5), label="redelivered")
        order = data.draw(st.permutations([*messages, *extra]), label="order")
        cuts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), label="batches")
        folder = tmp_path_factory.mktemp("db")
        database = await open_database(f"sqlite+aiosqlite:///{folder / 'db.sqlite3'}")
        try:
            writer = ProjectionWriter(bus, database, TENANT, 0, Metrics())
            number = at = 0
            while at < len(order):
                size = cuts[number % len(cuts)]
                number += 1
                await writer.commit(number, order[at : at + size])
                at += size
                if number % 3 == 0:
                    writer.forget()  # as after a restart
            await assert_rows_are_the_fold_of_the_log(bus, database)
        finally:
            await database.close()
        shutil.rmtree(folder)

    asyncio.run(check())


class KilledError(Exception):
    """The projector dies here."""


@pytest.mark.parametrize("step", ["committed", "numbered", "acked"])
@pytest.mark.parametrize("batch", [1, 2])
async def test_a_projector_killed_after_any_step_leaves_rows_that_the_next_one_completes(
    memory: tuple[MemoryBus, Database], step: str, batch: int
) -> None:
    bus, database = memory
    await write_story(bus)
    seen: list[str] = []

    def die(name: str) -> None:
        seen.append(name)
        if seen.count(step) == batch:
            raise KilledError(step)

    first = Projector(bus, database, TENANT, Metrics(), step=die)
    work = asyncio.create_task(first.run(), name="projector")
    if batch == 2:

        async def begun() -> bool:
            return "acked" in seen

        await eventually(begun, "the first batch")
        await Log(bus, TENANT, _last={"e3": 0}).frame("e3", [Log(bus, TENANT).started("e3")])
    with contextlib.suppress(KilledError):
        async with asyncio.timeout(10):
            await work
    assert seen.count(step) == batch
    number = await first.writer.number()

    async def complete() -> bool:
        try:
            await assert_rows_are_the_fold_of_the_log(bus, database)
        except AssertionError:
            return False
        return await first.writer.number() >= number

    # What the dead one did not ack comes again only after the ack wait; the next one does not wait for that.
    async with projecting(Projector(bus, database, TENANT, Metrics())):
        await eventually(complete, "the rows are the fold of the log", timeout_s=10)


async def test_an_older_copy_of_the_database_is_noticed_and_rebuilt_from_the_log(tmp_path: Path, bus: NatsBus) -> None:
    """R12. Usage is not counted twice, and text that the log no longer has stays."""
    tenant_bus: Bus = bus
    await ensure_tenants(tenant_bus, [TENANT])
    path, backup = tmp_path / "db.sqlite3", tmp_path / "backup.sqlite3"
    url = f"sqlite+aiosqlite:///{path}"
    log = Log(bus, TENANT, conversation=f"c{tmp_path.name}"[:40])
    conversation = log.conversation
    await log.frame("o1", [*story(1, ["early"])])
    database = await open_database(url)
    await project_all(Projector(bus, database, TENANT, Metrics()), bus)
    await database.close()
    shutil.copy(path, backup)
    database = await open_database(url)
    await log.frame("o2", [*story(2, ["late"])])
    await project_all(Projector(bus, database, TENANT, Metrics()), bus)
    newest = await ProjectionWriter(bus, database, TENANT, 0, Metrics()).number()
    await database.close()

    shutil.copy(backup, path)  # SQLite's journal was folded in when the database was closed
    await bus.purge(subjects.events_stream(TENANT), log.subject("o1"))  # evicted: only the rows have it
    database = await open_database(url)
    try:
        projector = Projector(bus, database, TENANT, Metrics())
        assert await projector.writer.number() < newest
        await project_all(projector, bus)
        assert await projector.writer.number() > newest
        history = History(database)
        for name, text in (("o1", "early"), ("o2", "late")):
            found = await history.state(TENANT, name)
            assert found is not None and found[1].text == text
        page = await history.conversation(TENANT, conversation, cursor="", workspace="w", before=None, limit=50)
        assert [one.output_tokens for one in page.usage] == [2, 2]
        entry = await Bucket(bus, subjects.PROJECTIONS).get(subjects.projection_key(database.id, TENANT, 0))
        assert entry is not None and entry.value["number"] == await projector.writer.number()
    finally:
        await database.close()


async def test_history_of_an_unproven_database_is_not_served(tmp_path: Path, tenant: str) -> None:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        answer = await backend.client.get("/v1/conversations/c1")
        assert answer.status_code == 503 and answer.json()["code"] == "RUNTIME_UNAVAILABLE"
        assert (await backend.client.get("/readyz")).status_code == 503


async def test_a_second_projector_on_the_same_database_cannot_commit_the_same_number(
    memory: tuple[MemoryBus, Database],
) -> None:
    bus, database = memory
    await write_story(bus)
    messages = await logged(bus)
    one = ProjectionWriter(bus, database, TENANT, 0, Metrics())
    other = ProjectionWriter(bus, database, TENANT, 0, Metrics())
    await one.commit(1, messages[:3])
    with pytest.raises(Exception, match="batch 1"):
        await other.commit(1, messages)
    await other.commit(2, messages)
    await assert_rows_are_the_fold_of_the_log(bus, database)


async def test_a_consumer_that_went_with_its_stream_is_made_again(memory: tuple[MemoryBus, Database]) -> None:
    bus, database = memory
    log = await write_story(bus)
    projector = Projector(bus, database, TENANT, Metrics())
    await project_all(projector, bus)
    await bus.delete_stream(subjects.events_stream(TENANT))
    await ensure_tenants(bus, [TENANT])
    anew = Log(bus, TENANT)
    await anew.note(ev.PROMPT_ADMITTED, "n1/prompt.admitted", {"request": "n1", "prompt_sequence": 1, "content": []})
    await anew.frame("e9", [anew.started("e9"), text_delta(2, "new"), *ended(3)])
    await project_all(projector, bus)
    history = History(database)
    page = await history.conversation(TENANT, log.conversation, cursor="", workspace="w", before=None, limit=50)
    assert [one.execution for one in page.executions if one.execution == "e9"] == ["e9"]
    assert [one.request for one in page.messages] == ["q0", "q1", "n1"]
    kept = await history.state(TENANT, "e1")
    assert kept is not None and kept[1].outcome == "completed"


def test_a_body_that_lies_becomes_a_corrupt_gap_and_the_rest_is_applied() -> None:
    builder = Builder(decode(Log(MemoryBus(MemoryServer()), TENANT).subject("e1"), 1, 1, b"{}").address)
    frame = Frame(
        first=1,
        last=4,
        pos=Position(record=0, index=0),
        events=[
            event(1, ev.TEXT_DELTA, {"segment": "s"}),
            event(2, ev.TOOL_STARTED, {"name": 3}),
            event(3, ev.EXECUTION_ENDED, {"outcome": "great"}),
            event(4, ev.TEXT_COMPLETED, {"segment": "s", "text": "whole"}),
        ],
    )
    assert builder.apply(frame)
    change = builder.changes()
    assert change is not None and change.head.applied == 4
    assert [item.key for item in change.items if item.kind == "gap"] == ["gap/1", "gap/2", "gap/3"]
    texts = [item.state.get("text") for item in change.items if item.kind == "text"]
    assert texts == ["whole"]


def test_many_deltas_of_one_batch_are_one_upsert() -> None:
    log = Log(MemoryBus(MemoryServer()), TENANT)
    builder = Builder(decode(log.subject("e1"), 1, 1, b"{}").address)
    for start in range(1, 2001, 100):
        events = [text_delta(n, "x", offset=n - 1) for n in range(start, start + 100)]
        assert builder.apply(Frame(first=start, last=start + 99, pos=Position(record=0, index=0), events=events))
    change = builder.changes()
    assert change is not None and len(change.items) == 1 and len(change.items[0].state["text"]) == 2000
    assert builder.changes() is None


def test_a_builder_loaded_from_its_rows_goes_on_as_if_it_had_never_stopped() -> None:
    events = story(1, ["abcdef", "ghi"])
    whole = ExecutionFold()
    for one in events:
        whole.apply(one)
    log = Log(MemoryBus(MemoryServer()), TENANT)
    address = decode(log.subject("e1"), 1, 1, b"{}").address
    for at in range(1, len(events)):
        first = Builder(address)
        first.apply(Frame(first=1, last=at, pos=Position(record=0, index=0), events=events[:at]))
        change = first.changes()
        assert change is not None
        items = [item.state for item in sorted(change.items, key=lambda item: item.position)]
        state = ExecutionState.model_validate({**change.head.model_dump(mode="json"), "items": items})
        keys = [item.key for item in sorted(change.items, key=lambda item: item.position)]
        second = Builder.load(address, state, keys)
        second.apply(Frame(first=at + 1, last=len(events), pos=Position(record=0, index=0), events=events[at:]))
        assert second.fold.freeze() == whole.freeze()
