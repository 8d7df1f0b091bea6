"""L10, what a sandbox sends: a hostile collector beside honest ones, on a real server. Nothing of theirs is lost,
nothing of its lies is believed, all of them are in quarantine with their reason, and what it can grow is bounded."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support_admission import admit_execution
from support_backend import Log, ended, event, eventually, running_backend, text_delta
from tether import events as ev
from tether import subjects, topology
from tether.events import Event
from tether.frame_rules import Refusal
from tether.frames import Frame, Position, encode
from tether.limits import INTERACTIONS_OPEN_MAX, ITEM_CHARS_MAX
from tether.ports import Bus
from tether.quarantine import QuarantineWriter, Refused, entries_of, parse_entry, read_page
from tether.subjects import EventAddress
from tether_chaos.hostile_collector import HostileCollector

SEED = 20_7


async def honest_work(log: Log, execution: str, count: int) -> None:
    """One execution from its claim to its end, with an open question answered on the way."""
    await log.prompt(f"q-{log.conversation}", "r1", execution)
    await log.frame(execution, [log.started(execution)])
    asked = {"interaction": "r1", "kind": "approval"}
    await log.frame(execution, [event(2, ev.INTERACTION_REQUESTED, asked)])
    await log.frame(execution, [event(3, ev.INTERACTION_RESOLVED, {"interaction": "r1", "outcome": "denied"})])
    offset = 0
    for number in range(count):
        await log.frame(execution, [text_delta(4 + number, f"{number} ", offset=offset)])
        offset += len(f"{number} ")
    await log.frame(execution, ended(4 + count))


async def frame_after(log: Log, execution: str, events: list[Event]) -> None:
    """A frame behind whatever another wrote there."""
    last = await log.bus.last(subjects.events_stream(log.tenant), log.subject(execution))
    log._last[execution] = 0 if last is None else last.sequence
    await log.frame(execution, events)


async def entries(bus: Bus, tenant: str) -> Counter[Refusal]:
    """How many messages quarantine tells of, by reason."""
    told: Counter[Refusal] = Counter()
    before = None
    while True:
        page, before = await read_page(bus, tenant, before=before, limit=200)
        for entry in page:
            told[entry.reason] += entry.count
        if before is None:
            return told


async def test_a_hostile_collector_takes_nothing_from_honest_ones_and_is_believed_in_nothing(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    async with running_backend(bus, [tenant], tmp_path) as backend:
        logs = [Log(bus, tenant, f"honest-{n}") for n in range(3)]
        own = EventAddress(tenant, "w-hostile", "c-hostile", "exe-hostile")
        await admit_execution(bus, tenant, own.workspace, own.conversation, own.execution)
        victim = EventAddress(tenant, logs[0].workspace, logs[0].conversation, "exe-0")
        await logs[0].admit("exe-0")
        hostile = HostileCollector(bus, own, victim, random.Random(SEED))
        async with asyncio.TaskGroup() as group:
            group.create_task(
                hostile.everything(interactions=10_000, output_bytes=6 << 20, strangers=60), name="hostile"
            )
            for number, log in enumerate(logs):
                group.create_task(honest_work(log, f"exe-{number}", 40), name=log.conversation)
        for number, log in enumerate(logs):
            page = await backend.projected(log.conversation, f"exe-{number}", 45)
            assert page["gaps"] == [] and page["executions"][0]["state"] == "ended"
            text = next(item["state"]["text"] for item in page["items"] if item["state"]["kind"] == "text")
            assert text == "".join(f"{n} " for n in range(40))
            assert len(page["messages"]) == 1 and page["executions"][0]["outcome"] == "completed"
        # The victim's end was awaited above; the hostile one's own comes last.
        found = await eventually(lambda: _ended(backend, "c-hostile"), "the end of the hostile execution", 90.0)
        hostile.expected[Refusal.LIMIT] = found["limits"]
        told = await eventually(lambda: _all_told(bus, tenant, hostile), "quarantine", 60.0)
        assert told == hostile.expected
        assert found["pending"] <= INTERACTIONS_OPEN_MAX and found["longest"] <= ITEM_CHARS_MAX
        assert found["reasons"] == {"limit"}
        listed = (await backend.client.get("/v1/conversations")).json()
        assert {one["conversation"] for one in listed["conversations"]} == {
            "c-hostile",
            *(log.conversation for log in logs),
        }
        executions = (await backend.client.get("/v1/executions")).json()["executions"]
        assert {one["execution"] for one in executions} == {"exe-hostile", "exe-0", "exe-1", "exe-2"}
        kept = backend.deps.projectors[tenant].writer._builders
        assert kept.size_bytes < 64 << 20


async def _ended(backend: Any, conversation: str) -> dict[str, Any] | None:
    answer = await backend.client.get("/v1/executions/exe-hostile")
    if answer.status_code != 200 or answer.json()["state"] != "ended":
        return None
    found = await backend.deps.history.state(backend.tenant, "exe-hostile")
    assert found is not None
    state = found[1]
    gaps = [item for item in state.items if item.kind == "gap"]
    return {
        "pending": sum(item.kind == "interaction" for item in state.items),
        "longest": max(len(getattr(item, "progress", "") or getattr(item, "text", "")) for item in state.items),
        "reasons": {gap.reason for gap in gaps},
        "limits": sum(gap.reason == "limit" for gap in gaps),
    }


async def _all_told(bus: Bus, tenant: str, hostile: HostileCollector) -> Counter[Refusal] | None:
    told = await entries(bus, tenant)
    return told if told.total() >= hostile.expected.total() else None


async def test_an_operator_reads_quarantine_by_page_and_by_entry(bus: Bus, tenant: str, tmp_path: Path) -> None:
    log = Log(bus, tenant)
    async with running_backend(bus, [tenant], tmp_path) as backend:
        await log.frame("e1", [log.started("e1")])
        for number in range(5):
            await bus.publish(log.subject("e1"), f"junk {number}".encode())
        await frame_after(log, "e1", [text_delta(2, "on")])
        await backend.projected("c1", "e1", 2)

        async def all_five() -> list[dict[str, Any]] | None:
            page = (await backend.client.get("/v1/quarantine", params={"limit": 200})).json()
            return page["entries"] if len(page["entries"]) == 5 else None

        found = await eventually(all_five, "five entries")
        assert [one["sequence"] for one in found] == sorted((one["sequence"] for one in found), reverse=True)
        assert {one["reason"] for one in found} == {"unreadable"}
        first = (await backend.client.get("/v1/quarantine", params={"limit": 2})).json()
        rest = (await backend.client.get("/v1/quarantine", params={"before": first["next_page"]})).json()
        assert [one["id"] for one in first["entries"] + rest["entries"]] == [one["id"] for one in found]
        assert rest.get("next_page") is None
        one = (await backend.client.get(f"/v1/quarantine/{found[0]['id']}")).json()
        assert one == found[0] and one["bytes"] == 6
        other = (await backend.client.get("/v1/quarantine", params={"conversation": "another"})).json()
        assert other["entries"] == []
        assert (await backend.client.get("/v1/quarantine/999999")).status_code == 404


async def test_what_is_missing_behind_a_refused_frame_is_a_gap_that_says_so(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    log = Log(bus, tenant)
    async with running_backend(bus, [tenant], tmp_path) as backend:
        await log.frame("e1", [log.started("e1")])
        bad = {"v": 1, "first": 2, "last": 3, "pos": {"record": 0, "index": 0}, "events": [{"ordinal": 2}]}
        await bus.publish(log.subject("e1"), json.dumps(bad).encode())
        await frame_after(log, "e1", [text_delta(4, "on")])
        page = await backend.projected("c1", "e1", 4)
        assert [(gap["first"], gap["last"], gap["reason"]) for gap in page["gaps"]] == [(2, 3, "quarantined")]


async def test_messages_that_come_again_are_told_once_also_beyond_the_duplicate_window(bus: Bus, tenant: str) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    log = Log(bus, tenant)
    for number in range(30):
        await bus.publish(log.subject("e1"), f"junk {number}".encode())
    stored = await bus.read(subjects.events_stream(tenant), 0, log.subject("e1"))
    refused = [
        Refused(subjects.parse_event(one.subject), one, Refusal.UNREADABLE if n % 2 else Refusal.SIZE)
        for n, one in enumerate(stored)
    ]
    made = entries_of(refused, 1)
    assert sum(entry.count for entry in made) == 30 and len(made) == 18
    now_ms = time.time_ns() // 1_000_000
    first = QuarantineWriter(bus, tenant)
    assert await first.write(refused, now_ms) == 18
    assert await first.write(refused, now_ms) == 0
    assert await QuarantineWriter(bus, tenant).write(refused, now_ms) == 0  # as after a restart
    last = await bus.last(subjects.quarantine_stream(tenant), subjects.quarantine(refused[0].address))
    entry = None if last is None else parse_entry(last)
    assert entry is not None and (entry.count, entry.last_sequence) == (7, stored[-1].sequence)


async def test_an_open_reader_is_shown_nothing_that_another_workspace_wrote_into_its_conversation(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    log = Log(bus, tenant)
    async with running_backend(bus, [tenant], tmp_path) as backend:
        await log.frame("e1", [log.started("e1")])
        forged = Log(bus, tenant, "c1", "w-hostile")  # its own workspace, the neighbour's conversation
        forged._admitted.update({"e1", "e2"})

        async def write_over(number: int) -> None:
            last = [text_delta(2, f"forged {number}")]
            await bus.publish(forged.subject("e1"), encode(_frame(last)))
            await bus.publish(forged.subject("e2"), encode(_frame(ended(1))))
            note = {"v": 1, "id": f"n{number}", "generation": 1, "at": 1, "type": "x", "body": {}}
            await bus.publish(forged.subject("_"), json.dumps(note).encode())

        await write_over(0)  # before: it would be read from the log
        reader = backend.reader("c1")
        await reader.open()
        while (one := await reader.next()) is not None and one.name != "live":
            assert "forged" not in json.dumps(one.data) and one.data.get("execution") in (None, "e1")
        await write_over(1)  # while it is open: it would come as a live copy
        await log.frame("e1", [text_delta(2, "honest")])
        while True:
            one = await reader.next()
            assert one is not None
            if one.name == "message":
                break
        assert (one.data["execution"], one.data["body"]["text"]) == ("e1", "honest")
        await reader.close()


async def test_a_receipt_that_another_conversation_tells_is_not_the_controls(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    async with running_backend(bus, [tenant], tmp_path) as backend:
        honest, hostile = Log(bus, tenant, "c1"), Log(bus, tenant, "c2")
        await honest.frame("e1", [honest.started("e1")])
        receipt = {"control": "ctl-1", "verb": "answer", "status": "settled"}
        await hostile.note(ev.CONTROL_RECEIPT, "ctl-1", receipt)
        await hostile.frame("e2", [hostile.started("e2")])
        await backend.projected("c1", "e1", 1)
        await backend.projected("c2", "e2", 1)
        assert await backend.deps.history.receipt(tenant, "ctl-1", "e1") is None
        accepted = {**receipt, "status": "accepted"}
        await honest.frame("e1", [event(2, ev.CONTROL_RECEIPT, accepted)])
        await backend.projected("c1", "e1", 2)
        assert await backend.deps.history.receipt(tenant, "ctl-1", "e1") == ("e1", accepted)
        assert await backend.deps.history.receipt(tenant, "ctl-1", None) is None  # two tell of it: say which


def _frame(events: list[Event]) -> Frame:
    return Frame(first=events[0].ordinal, last=events[-1].end, pos=Position(record=0, index=0), events=events)
