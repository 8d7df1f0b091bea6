"""Large bodies: cut in the event, whole in the blob store, the same every time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether import subjects, topology
from tether.bus import NatsBus
from tether.events import BODIES, Event
from tether.frames import size_of
from tether.limits import EVENT_BODY_BYTES_MAX, EVENT_PREVIEW_BYTES, FRAME_BYTES_MAX
from tether_collector.blobs import Blob, BlobStore, blob_of_text, externalise


def event(type_: str, /, **body: Any) -> Event:
    return Event(ordinal=7, at=1, type=type_, body=body)


def test_a_body_within_the_limit_stays_as_it_is() -> None:
    small = event("tool.completed", tool="t", status="ok", output="x" * 1000)
    assert externalise(small) == (small, None)


def test_a_large_text_keeps_its_length_and_a_preview() -> None:
    text = "ä" * 100_000
    cut, blob = externalise(event("text.completed", segment="s", text=text))
    assert blob is not None and blob.data == text.encode() and blob.media == "text"
    assert cut.body["chars"] == 100_000
    assert cut.body["blob"] == {"digest": blob.digest, "bytes": 200_000, "kind": "artifact"}
    assert text.startswith(cut.body["text"]) and len(cut.body["text"].encode()) == EVENT_PREVIEW_BYTES


def test_a_large_json_input_becomes_a_blob_of_json() -> None:
    value = {"content": "y" * 70_000, "lines": list(range(100))}
    cut, blob = externalise(event("tool.started", tool="t", name="write", input=value))
    assert blob is not None and blob.media == "json" and json.loads(blob.data) == value
    assert isinstance(cut.body["input"], str) and cut.body["name"] == "write"


def test_a_large_body_without_a_field_for_a_blob_is_shortened() -> None:
    questions = [{"id": f"q{n}", "question": "why? " * 5000, "options": []} for n in range(40)]
    asked = event("interaction.requested", interaction="i", kind="question", questions=questions)
    cut, blob = externalise(asked)
    assert blob is None and size_of(cut) < EVENT_BODY_BYTES_MAX + 200
    assert BODIES[cut.type].model_validate(cut.body)


@pytest.mark.parametrize("long", [False, True], ids=["whole", "in-part"])
def test_an_answer_that_is_offered_again_is_told_whole_or_not_at_all(long: bool) -> None:
    offered = {"decision": "allow", "input": {"content": "y" * (5_000 if long else 500)}}
    questions = [{"id": f"q{n}", "question": "why? " * 5000, "options": []} for n in range(40)]
    asked = event("interaction.requested", interaction="i", kind="question", questions=questions, offered=offered)
    cut, _ = externalise(asked)
    assert cut.body.get("offered") == (None if long else offered), "a part of an answer is another answer"


@pytest.mark.parametrize("kind", ["text.delta", "reasoning.delta", "tool.progress"])
def test_a_huge_delta_is_cut_since_the_completed_text_comes_whole(kind: str) -> None:
    cut, blob = externalise(event(kind, segment="s", tool="t", text="\x01" * 300_000, offset=5))
    assert blob is None and size_of(cut) < FRAME_BYTES_MAX and cut.body["offset"] == 5


@given(
    kind=st.sampled_from(["text.completed", "tool.completed", "tool.started", "interaction.requested", "usage"]),
    value=st.one_of(
        st.text(max_size=40).map(lambda text: text * 4000),
        st.lists(st.text(max_size=200), max_size=50).map(lambda items: {"items": items * 40}),
        st.integers(),
        st.none(),
    ),
)
def test_whatever_comes_the_result_fits_and_is_the_same_again(kind: str, value: Any) -> None:
    field = {"text.completed": "text", "tool.completed": "output", "usage": "turn"}.get(kind, "input")
    once = externalise(event(kind, **{field: value, "tool": "t"}))
    again = externalise(event(kind, **{field: value, "tool": "t"}))
    assert once == again
    assert size_of(once[0]) <= EVENT_BODY_BYTES_MAX * 3  # its bound is without JSON's escapes


async def test_a_blob_is_whole_once_its_manifest_is_there_and_storing_it_again_changes_nothing(
    bus: NatsBus, tenant: str
) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    blob, reference = blob_of_text("0123456789abcdef" * 20_000, "text")
    await asyncio.gather(*(BlobStore(bus, tenant, "w1").put(blob) for _ in range(3)))
    await BlobStore(bus, tenant, "w1").put(blob)
    stream = subjects.blobs_stream(tenant)
    state = await bus.state(stream)
    assert state is not None and state.messages == 4
    manifest = await bus.last(stream, subjects.blob(tenant, "w1", "artifact", blob.digest, "manifest"))
    assert manifest is not None
    facts = json.loads(manifest.data)
    assert facts == {
        "v": 1,
        "digest": reference["digest"],
        "bytes": 320_000,
        "chunks": 3,
        "chunk_bytes": 131072,
        "media": "text",
    }


async def test_an_empty_blob_has_one_empty_chunk(bus: NatsBus, tenant: str) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    blob = Blob("0" * 64, b"", "text")
    await BlobStore(bus, tenant, "w1").put(blob)
    chunk = await bus.last(subjects.blobs_stream(tenant), subjects.blob(tenant, "w1", "artifact", blob.digest, 0))
    assert chunk is not None and chunk.data == b""
