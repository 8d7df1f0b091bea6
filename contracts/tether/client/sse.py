"""Server-sent events, parsed strictly: bytes in, whole events out. Pure; chunks may cut anywhere.

    bytes ─▶ UTF-8 (incremental) ─▶ lines (CRLF, LF, CR; one BOM at the start) ─▶ fields ─▶ dispatch on a blank line

As the standard has it: `data` lines are joined by a newline; an `id` with NUL is ignored and an `id` lasts until
the next one; `retry` counts only as digits; an event without `data` is dropped; what the stream's end cuts off was
never an event. Beyond the standard it is strict: bytes that are not UTF-8 and an event beyond the limit end the stream,
since a reader that guesses would apply something that nobody sent.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Final

from tether.errors import TetherError
from tether.limits import MIB

EVENT_BYTES_MAX: Final = 16 * MIB  # a snapshot frame holds a whole page of history
DEFAULT_NAME: Final = "message"
_LINE_END: Final = re.compile(r"\r\n?|\n")


class StreamDamagedError(TetherError):
    """The stream is no event stream any more: connect again from the last id."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `id`: the last one that the stream has named, this event's own where `own_id`."""

    name: str
    data: str
    id: str
    own_id: bool


class SseParser:
    """Feed it chunks; it answers with the events that they complete. `retry_ms` as the server last asked for."""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._max = event_bytes_max
        self._pieces: list[str] = []  # of the line that is not complete
        self._size = 0  # characters since the last dispatch: a bound on what one event costs
        self._after_cr = False
        self._at_start = True
        self._name = ""
        self._data: list[str] = []
        self._id = ""
        self._own_id = False
        self.retry_ms: int | None = None
        self.comments = 0

    @property
    def last_id(self) -> str:
        return self._id

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that are whole now. Raises StreamDamagedError."""
        try:
            text = self._decoder.decode(chunk)
        except UnicodeDecodeError as error:
            raise StreamDamagedError(f"the event stream is not UTF-8 ({error.reason})") from None
        if not text:
            return []
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\ufeff")
        if self._after_cr:
            text = text.removeprefix("\n")
        return self._lines(text)

    def _lines(self, text: str) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        start = 0
        for end in _LINE_END.finditer(text):
            self._grow(end.start() - start)
            self._pieces.append(text[start : end.start()])
            line = "".join(self._pieces)
            self._pieces.clear()
            event = self._line(line)
            if event is not None:
                events.append(event)
            start = end.end()
        self._after_cr = text.endswith("\r")  # the LF of this CR may come with the next chunk
        if start < len(text):
            self._grow(len(text) - start)
            self._pieces.append(text[start:])
        return events

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._max:
            raise StreamDamagedError(f"an event of more than {self._max} characters")

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            self.comments += 1
            if not self._data:
                self._size = 0  # heartbeats add up to nothing
            return None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._name = value
            case "id" if "\0" not in value:
                self._id, self._own_id = value, True
            case "retry" if value.isascii() and value.isdigit():
                self.retry_ms = int(value[:9])
            case _:
                pass  # an unknown field is ignored
        return None

    def _dispatch(self) -> ServerEvent | None:
        event = None
        if self._data:
            event = ServerEvent(self._name or DEFAULT_NAME, "\n".join(self._data), self._id, self._own_id)
        self._name, self._own_id, self._size = "", False, 0
        self._data.clear()
        return event
