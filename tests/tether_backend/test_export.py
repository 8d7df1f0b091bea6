"""Exports: everything in order, whole or not at all, and nothing that is written in them means anything to Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support_backend import Log, ended, event, running_backend
from tether import events as ev
from tether.export_format import (
    ConversationExport,
    ExportedItem,
    ExportedMessage,
    ExportedNote,
    ExportedResponse,
)
from tether.fold import GapItem, InteractionItem, RawItem, SessionItem, TextItem, ToolItem
from tether.testing import MemoryBus, MemoryServer
from tether_backend.core import markdown
from tether_backend.http import export as route
from tether_backend.store import conversation_export

TENANT: Final = "acme"
LARGE: Final = "0123456789" * 10_000


async def talked(bus: MemoryBus, requests: int = 1) -> Log:
    """A conversation of so many responses, each with a text, a tool with a blob, an approval, usage; then a gap."""
    log = Log(bus, TENANT, "c1")
    for number in range(requests):
        name = f"e{number}"
        await log.prompt(f"q{number}", f"r{number}", name, f"question {number}")
        digest = f"{number:064x}"
        blob = {"digest": digest, "bytes": len(LARGE), "kind": "artifact"}
        asked = {"interaction": "i1", "kind": "approval", "name": "dig", "input": {"where": "here"}}
        events = [
            log.started(name),
            event(2, ev.TEXT_COMPLETED, {"segment": "s1", "text": f"answer {number}"}),
            event(3, ev.TOOL_STARTED, {"tool": "t1", "name": "dig", "input": {"what": "```"}}),
            event(4, ev.TOOL_COMPLETED, {"tool": "t1", "status": "ok", "output": "0123", "blob": blob}),
            event(5, ev.INTERACTION_REQUESTED, asked),
            event(6, ev.INTERACTION_RESOLVED, {"interaction": "i1", "outcome": "denied", "control": "k1"}),
            event(7, ev.CONTROL_RECEIPT, {"control": "k1", "verb": "answer", "status": "settled"}),
            event(8, ev.USAGE, {"turn": "1", "input_tokens": 3, "output_tokens": 4, "cost_usd": 0.5}),
            event(9, ev.GAP, {"from": 7, "to": 8, "reason": "spool_evicted"}),
            *ended(10),
        ]
        await log.frame(name, events)
    return log


async def test_an_export_is_what_the_schema_says_with_everything_in_order(tmp_path: Path) -> None:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = await talked(bus, 3)
        await log.note(ev.RECOVERY, "e0/recovery", {"execution": "e0", "first": 7, "last": 8})
        await backend.projected("c1", "e2", 11)
        answer = await backend.client.get("/v1/conversations/c1/export")
    assert answer.headers["content-disposition"] == 'attachment; filename="c1.json"'
    assert json.loads(answer.content)
    export = ConversationExport.model_validate_json(answer.content)
    assert [entry.kind for entry in export.entries] == ["message", "response"] * 3 + ["note"]
    first = export.entries[1]
    assert isinstance(first, ExportedResponse) and first.execution is not None
    run = first.execution
    assert [one.item.kind for one in run.items] == ["text", "tool", "interaction", "gap"]
    assert (run.outcome, run.usage[0].output_tokens, run.receipts["k1"]["status"]) == ("completed", 4, "settled")
    assert run.items[1].content_missing and run.items[1].content is None, "its blob is not stored"
    note = export.entries[-1]
    assert isinstance(note, ExportedNote) and note.body["first"] == 7


async def test_the_pages_of_a_long_conversation_join_without_a_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_export, "ENTRIES_MAX", 3)
    monkeypatch.setattr(conversation_export, "ITEMS_MAX", 2)
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        await talked(bus, 5)
        await backend.projected("c1", "e4", 11)
        answer = await backend.client.get("/v1/conversations/c1/export")
        told = await backend.client.get("/v1/conversations/c1/export?format=markdown")
    export = ConversationExport.model_validate_json(answer.content)
    assert [entry.request for entry in export.entries if isinstance(entry, ExportedMessage)] == [
        f"q{number}" for number in range(5)
    ]
    runs = [entry.execution for entry in export.entries if isinstance(entry, ExportedResponse)]
    assert all(run is not None and [one.position for one in run.items] == [0, 1, 2, 3] for run in runs)
    assert told.headers["content-type"].startswith("text/markdown")
    assert [told.text.index(f"question {number}") for number in range(5)] == sorted(
        told.text.index(f"question {number}") for number in range(5)
    )
    assert told.text.endswith(markdown.END)


async def test_a_document_that_cannot_be_whole_does_not_look_as_if_it_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBus(MemoryServer())

    async def breaks(*_: object) -> Any:
        raise OSError("the disk")
        yield

    async with running_backend(bus, [TENANT], tmp_path) as backend:
        await talked(bus)
        await backend.projected("c1", "e0", 11)
        monkeypatch.setattr(route, "items_of", breaks)
        backend.client.event_hooks = {}
        with pytest.raises(httpx2.TransportError):
            await backend.client.get("/v1/conversations/c1/export")


async def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT, "other"], tmp_path) as backend:
        await talked(bus)
        await backend.projected("c1", "e0", 11)
        assert (await backend.client.get("/v1/conversations/c9/export")).status_code == 404
        bad = await backend.client.get("/v1/conversations/c1/export?format=pdf")
        assert (bad.status_code, bad.json()["fields"][0]["field"]) == (422, "query.format")
        foreign = await backend.client.get("/v1/conversations/c1/export", headers=backend.headers("other"))
        assert foreign.status_code == 404, "another tenant's"


# --- Markdown ---

HOSTILE: Final = st.text(st.characters(codec="utf-8"), max_size=80) | st.sampled_from(
    ["```", "````\n# not a heading\n````", "~~~", "`", "``", "a\n```\nb", "<script>", "\n---\n", "> x", "| a |"]
)


@given(HOSTILE)
def test_a_fence_is_never_ended_by_what_is_in_it(text: str) -> None:
    block = markdown.fenced(text)
    fence = block.partition("\n")[0]
    assert set(fence) == {"`"} and len(fence) >= 3
    lines = block.rstrip("\n").split("\n")
    assert lines[-1] == fence
    assert all(not line.strip().startswith(fence) for line in lines[1:-1])


@given(HOSTILE)
def test_a_code_span_is_one_line_and_closed_by_its_own_ticks(text: str) -> None:
    span = markdown.code(text)
    assert "\n" not in span
    ticks = len(span) - len(span.lstrip("`"))
    assert ticks >= 1 and span.endswith("`" * ticks)
    assert "`" * ticks not in span[ticks:-ticks].strip("`") or "`" * ticks not in " ".join(text.split())


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (TextItem(id="s1", state="completed", text="**bold** stays"), ["**bold** stays"]),
        (TextItem(id="s1", state="partial", text="half"), ["half", "> Cut off here."]),
        (TextItem(id="s1", kind="reasoning", state="completed", text="one\ntwo"), ["> *Reasoning*", "> one", "> two"]),
        (ToolItem(id="t1", name="dig", state="error", input={"a": 1}, output="no"), ["Tool `dig`: failed", '"a": 1']),
        (ToolItem(id="t1", state="interrupted", progress="so far"), ["Tool `t1`: interrupted", "so far"]),
        (InteractionItem(id="i1", name="dig", state="denied"), ["Approval `dig`: denied"]),
        (InteractionItem(id="i1", asks="question", questions=[{"question": "Which?"}]), ["Question `i1`", "Which?"]),
        (SessionItem(id="9", process=2, why="cut", source="export", rows=7), ["A new session", "7 messages"]),
        (RawItem(id="9", stream="stdout", preview="\x1b[1m", bytes=4, why="no JSON"), ["not understood (no JSON)"]),
        (GapItem(id="9", reason="spool_evicted", from_ordinal=3, to_ordinal=5), ["spool evicted", "events 3 to 5"]),
    ],
)
def test_every_kind_of_item_has_its_words(item: Any, words: list[str]) -> None:
    told = markdown.item(ExportedItem(position=0, item=item))
    assert all(word in told for word in words), told


def test_discarded_text_is_no_part_of_an_export() -> None:
    item = TextItem(id="s1", state="discarded", text="void")
    assert markdown.item(ExportedItem(position=0, item=item)) == ""


def test_what_is_missing_is_said() -> None:
    item = ToolItem(id="t1", name="dig", state="ok", output="beginning")
    told = markdown.item(ExportedItem(position=0, item=item, content_missing=True))
    assert "> The rest of it is not stored any more." in told
