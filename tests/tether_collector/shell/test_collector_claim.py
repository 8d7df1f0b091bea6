"""The claim: what a subject that is not empty says of it, and what is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from tether import frames, topology
from tether.bus import NatsBus
from tether.events import Event
from tether.frames import Frame, Position
from tether.ports import StoredMessage
from tether.sandbox import ExecutionState, ExecutionSummary
from tether.subjects import EventAddress
from tether_collector.claim import Claimed, Orphaned, Refused, claim, claim_frame, end_orphan, judge, last_message
from tether_collector.core.discovery import bounded

BODY = {"boot": "boot_1", "instance": "i", "process": 1, "target": {}, "agent": "a", "request": "r",
    "adapter_version": "1"}  # fmt: skip
OURS = claim_frame(BODY, 5)


def address(tenant: str = "t") -> EventAddress:
    return EventAddress(tenant, "w", "c", "exe_1")


def stored(*events: Event, data: bytes | None = None) -> StoredMessage:
    frame = Frame(first=events[0].ordinal, last=events[-1].end, pos=Position(record=0, index=0), events=list(events))
    return StoredMessage(address().subject, 3, 1, data or frames.encode(frame))


def an_event(ordinal: int, kind: str, **body: Any) -> Event:
    return Event(ordinal=ordinal, at=1, type=kind, body=body)


@pytest.mark.parametrize(
    ("message", "outcome", "detail"),
    [
        (stored(an_event(1, "execution.started"), data=OURS), Claimed, ""),
        (stored(an_event(1, "execution.started", **{**BODY, "instance": "j"})), Orphaned, ""),
        (stored(an_event(1, "execution.started", **{**BODY, "boot": "boot_2"})), Refused, "claimed by another"),
        (stored(an_event(1, "execution.ended", outcome="never_started")), Refused, "never_started"),
        (stored(an_event(7, "text.completed", segment="s", text="x")), Refused, "claimed by another"),
        (stored(an_event(1, "raw"), data=b"\xff not a frame"), Refused, "another writer"),
    ],
)
def test_what_is_there_decides(message: StoredMessage, outcome: type, detail: str) -> None:
    found = judge(address(), message, OURS, "boot_1")
    assert isinstance(found, outcome)
    if isinstance(found, Refused):
        assert found.problem.code == "TARGET_STALE" and detail in found.problem.detail


async def test_a_claim_is_stored_once_also_after_a_purge_within_the_duplicate_window(bus: NatsBus, tenant: str) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    for _ in range(2):
        assert isinstance(await claim(bus, address(tenant), OURS, "boot_1"), Claimed)
    message = await last_message(bus, address(tenant))
    assert message is not None and message.data == OURS
    await bus.purge(f"EVENTS_{tenant}", address(tenant).subject)
    assert isinstance(await claim(bus, address(tenant), OURS, "boot_1"), Claimed)
    again = await last_message(bus, address(tenant))
    assert again is not None and again.sequence > message.sequence


async def test_an_orphan_ends_lost_once(bus: NatsBus, tenant: str) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    await claim(bus, address(tenant), OURS, "boot_1")
    message = await last_message(bus, address(tenant))
    assert message is not None
    for _ in range(2):
        await end_orphan(bus, address(tenant), message, 9)
    newest = await last_message(bus, address(tenant))
    assert newest is not None
    frame = frames.decode(newest.subject, newest.data)
    assert isinstance(frame, Frame) and (frame.first, frame.last) == (2, 3)
    assert [event.type for event in frame.events] == ["response.ended", "execution.ended"]
    state = await bus.state(f"EVENTS_{tenant}")
    assert state is not None and state.messages == 2


def summary(number: int, state: ExecutionState, width: int = 1) -> ExecutionSummary:
    target = {
        "tenant": "t", "workspace": "w", "conversation": "c", "response": "r", "response_generation": 1,
        "execution": f"exe_{number}", "execution_generation": 1, "sandbox": "s", "native_session": "n" * width,
    }  # fmt: skip
    return ExecutionSummary.model_validate({"target": target, "state": state, "started_at": number})


def test_a_registration_lists_what_waits_first_and_says_what_it_leaves_out() -> None:
    many = [summary(n, "ended") for n in range(300)] + [summary(300, "waiting"), summary(301, "running")]
    kept, omitted = bounded(many)
    assert len(kept) == 256 and omitted == 46
    assert [entry.target.execution for entry in kept[:3]] == ["exe_300", "exe_301", "exe_299"]


def test_a_registration_stays_within_its_bytes() -> None:
    kept, omitted = bounded([summary(n, "running", 20_000) for n in range(40)])
    assert 0 < len(kept) < 12 and len(kept) + omitted == 40
    assert sum(len(entry.model_dump_json()) for entry in kept) <= (256 - 32) * 1024
