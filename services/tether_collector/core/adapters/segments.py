"""Streaming text of an adapter's state: which segments are open, and how long each is.

    opened ──deltas──▶ open ──completed line──▶ text.completed      the line's own text is what counts
                        │──the request was made anew──▶ text.discarded
                        └──turn cut, process gone──▶ text.completed{partial}, of what had come

`offset` of a delta is a counter, so no text is built while it streams; the parts are joined once, if at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tether.events import REASONING_COMPLETED, REASONING_DELTA, TEXT_COMPLETED, TEXT_DELTA, TEXT_DISCARDED
from tether_collector.core.inputs import Draft

TEXT: Final = "text"
REASONING: Final = "reasoning"
_DELTA: Final = {TEXT: TEXT_DELTA, REASONING: REASONING_DELTA}
_COMPLETED: Final = {TEXT: TEXT_COMPLETED, REASONING: REASONING_COMPLETED}

Segments = dict[str, dict[str, Any]]  # segment → {kind, chars, parts, parent, group}


def open_segment(segments: Segments, segment: str, kind: str, parent: str | None, group: str = "") -> dict[str, Any]:
    """The open segment, made where it is not; `group` is what is discarded together."""
    entry = segments.get(segment)
    if entry is None:
        entry = {"kind": kind, "chars": 0, "parts": [], "parent": parent, "group": group}
        segments[segment] = entry
    return entry


def delta(entry: dict[str, Any], segment: str, text: str) -> Draft:
    offset = entry["chars"]
    entry["chars"] = offset + len(text)
    entry["parts"].append(text)
    body: dict[str, Any] = {"segment": segment, "text": text, "offset": offset}
    if entry["parent"] is not None:
        body["parent"] = entry["parent"]
    return Draft(_DELTA[entry["kind"]], body)


def completed(segment: str, kind: str, text: str, parent: str | None, *, partial: bool = False) -> Draft:
    body: dict[str, Any] = {"segment": segment, "text": text}
    if partial:
        body["partial"] = True
    if parent is not None:
        body["parent"] = parent
    return Draft(_COMPLETED[kind], body)


def discard(segments: Segments, which: Callable[[str, dict[str, Any]], bool]) -> list[Draft]:
    """Void the open segments that `which` picks; one that never had text needs no word."""
    drafts: list[Draft] = []
    for segment in [key for key, entry in segments.items() if which(key, entry)]:
        if segments.pop(segment)["chars"]:
            drafts.append(Draft(TEXT_DISCARDED, {"segment": segment}))
    return drafts


def cut(segments: Segments, which: Callable[[str, dict[str, Any]], bool] = lambda _key, _entry: True) -> list[Draft]:
    """Close open segments as far as they came."""
    drafts: list[Draft] = []
    for segment in [key for key, entry in segments.items() if which(key, entry)]:
        entry = segments.pop(segment)
        if entry["chars"]:
            drafts.append(completed(segment, entry["kind"], "".join(entry["parts"]), entry["parent"], partial=True))
    return drafts
