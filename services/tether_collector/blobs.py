"""Large bodies: cut to a preview in the event, kept whole in `BLOBS_{tenant}`.

`externalise` is pure, and the same event always gives the same blob, so a replayed spool refers to the same digest.
A blob is stored before its event is offered to the log: chunks first, the manifest last, so a manifest that can be
read means that the blob is whole. Every message is stored under compare-and-set on an empty subject; subjects are
named by digest, so "there is something already" means "it is there already".
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any, Final

import structlog

from tether import events as ev
from tether import subjects
from tether.blobs import MANIFEST, Manifest, chunk, chunk_count, encode_manifest
from tether.errors import BusError, WrongLastSequenceError
from tether.events import Event
from tether.limits import EVENT_BODY_BYTES_MAX, EVENT_PREVIEW_BYTES
from tether.ports import Bus

RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
STRING_BYTES_MAX: Final = 2048  # of a text inside a body that is too large and has no field for a blob
LIST_ITEMS_MAX: Final = 16  # of a list in such a body
# The field of each type that may be large, in order; a blob takes the first that is.
_LARGE: Final = {
    ev.TEXT_COMPLETED: "text",
    ev.REASONING_COMPLETED: "text",
    ev.TOOL_STARTED: "input",
    ev.TOOL_COMPLETED: "output",
    ev.INTERACTION_REQUESTED: "input",
    ev.RAW: "preview",
}
_log = structlog.get_logger("tether.collector")


@dataclass(frozen=True, slots=True)
class Blob:
    """Content by its sha-256 (hex). `media`: text or json."""

    digest: str
    data: bytes
    media: str


def externalise(event: Event) -> tuple[Event, Blob | None]:
    """The event with a body of at most EVENT_BODY_BYTES_MAX, and the blob that it refers to then."""
    if event.type in ev.DELTAS and len(event.body["text"]) * 6 < EVENT_BODY_BYTES_MAX // 2:
        return event, None  # the common case, asked for every token
    # A character takes at most 6 bytes in JSON; the exact size is asked only where it can matter.
    if _rough_chars(event.body) * 6 < EVENT_BODY_BYTES_MAX or _size(event.body) <= EVENT_BODY_BYTES_MAX:
        return event, None
    body = dict(event.body)
    blob = None
    if event.type in ev.DELTAS:
        # Provisional text: what is cut here comes whole with the completed text.
        body["text"] = _cut(body["text"], EVENT_BODY_BYTES_MAX // 8)
    field = _LARGE.get(event.type)
    if field is not None and _size(body.get(field)) > EVENT_PREVIEW_BYTES:
        blob = _take(body, field)
    if _size(body) > EVENT_BODY_BYTES_MAX:
        body = {name: value if name in ("blob", field) else _shorten(value) for name, value in body.items()}
        if body.get("offered") != event.body.get("offered"):
            del body["offered"]  # a part of an answer is another answer, and would be given as it stands
    return event.model_copy(update={"body": body}), blob


def _take(body: dict[str, Any], field: str) -> Blob:
    value = body[field]
    media = "text" if isinstance(value, str) else "json"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    blob, reference = blob_of_text(text, media)
    if field == "text":
        body["chars"] = len(text)
    body[field] = _cut(text, EVENT_PREVIEW_BYTES)
    body["blob"] = reference
    return blob


def blob_of_text(text: str, media: str) -> tuple[Blob, dict[str, Any]]:
    """The blob of a text, and the reference that stands for it (`events.BlobRef`)."""
    data = text.encode("utf-8", "replace")
    digest = hashlib.sha256(data).hexdigest()
    return Blob(digest, data, media), {"digest": digest, "bytes": len(data), "kind": "artifact"}


def _cut(text: str, size_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:size_bytes].decode("utf-8", "ignore")


def _shorten(value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value, STRING_BYTES_MAX)
    if isinstance(value, dict):
        return {_cut(str(key), 256): _shorten(item) for key, item in list(value.items())[:LIST_ITEMS_MAX]}
    if isinstance(value, list):
        return [_shorten(item) for item in value[:LIST_ITEMS_MAX]]
    return value


def _rough_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + 8 + _rough_chars(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(_rough_chars(item) + 2 for item in value)
    return 8


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))


class BlobStore:
    """Writes blobs of one workspace. Remembers the latest digests, so that a repeated output costs nothing."""

    REMEMBERED_MAX: Final = 256

    def __init__(self, bus: Bus, tenant: str, workspace: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self._workspace = workspace
        self._stored: dict[str, None] = {}

    async def put(self, blob: Blob) -> None:
        """Return once the whole blob is stored; waits for a bus that is away."""
        if blob.digest in self._stored:
            return
        count = chunk_count(len(blob.data))
        for number in range(count):
            await self._store(blob.digest, str(number), chunk(blob.data, number))
        manifest = Manifest(digest=blob.digest, bytes=len(blob.data), chunks=count, media=blob.media)
        await self._store(blob.digest, MANIFEST, encode_manifest(manifest))
        self._stored[blob.digest] = None
        while len(self._stored) > self.REMEMBERED_MAX:
            del self._stored[next(iter(self._stored))]

    def forget(self) -> None:
        """Something may have been erased: store again what is asked for again."""
        self._stored.clear()

    async def _store(self, digest: str, part: str, data: bytes) -> None:
        subject = subjects.blob(self._tenant, self._workspace, "artifact", digest, part)
        pause_s = RETRY_MIN_S
        while True:
            try:
                await self._bus.publish(subject, data, expect_last=0)
            except WrongLastSequenceError:
                return
            except BusError as error:
                if pause_s >= RETRY_MAX_S:
                    _log.warning("blob_delayed", digest=digest, part=part, error=str(error))
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(pause_s * 2, RETRY_MAX_S)
            else:
                return
