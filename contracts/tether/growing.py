"""A text that grows by deltas: pieces, joined once somebody asks. Adding is O(1) amortised, whatever its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class GrowingText:
    """Pieces, and their total length in Unicode code points."""

    __slots__ = ("_pieces", "length")

    def __init__(self, text: str = "") -> None:
        self._pieces = [text] if text else []
        self.length = len(text)

    def add(self, body: Mapping[str, Any], room: int) -> tuple[int, bool]:
        """Append what lies beyond the present end, at most `room` code points of it: how many, and whether that was
        all. A merged delta may overlap what is there already. Raises KeyError, TypeError for the body of a delta that
        lies: before anything was changed."""
        text, offset = body["text"], body["offset"]
        if not isinstance(text, str) or not isinstance(offset, int):
            raise TypeError("a delta has a text and an offset")
        fresh = text[self.length - offset :] if offset < self.length else text
        size = len(fresh)
        whole = size <= room
        if not whole:
            size = max(0, room)
            fresh = fresh[:size]
        if size:
            self._pieces.append(fresh)
            self.length += size
        return size, whole

    def value(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""
