"""What is written to the CLI: in order, each control id once, in the spool before the CLI can see it.

A write is accepted by making its record durable; only then is it tried. Its end is a second record, `stdin_done`,
with `written`, `partial` or `closed` (not a byte went out). A control id that is known is never written again,
whatever became of it: the keeper is the only writer, so its memory is the truth for as long as the CLI lives.
"""

from __future__ import annotations

import os

from . import records
from .jsonlite import Json, dumps
from .spool import SpoolWriter

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE_BYTES_MAX = 4 * 1024 * 1024  # accepted but not yet taken by the CLI
CONTROL_IDS_MAX = 16384  # ids are never forgotten, so they are bounded; more than that is refused
WRITE_BYTES = 65536


class _Write:
    __slots__ = ("control_id", "data", "sent_bytes")

    def __init__(self, control_id: str, data: bytes) -> None:
        self.control_id = control_id
        self.data = data
        self.sent_bytes = 0


class StdinPipe:
    """The CLI's standard input."""

    def __init__(self, fd: int, spool: SpoolWriter, before_close: Callable[[int], None]) -> None:
        self.fd = fd  # -1 once closed
        self._before_close = before_close
        self._spool = spool
        self._queue: list[_Write] = []
        self._close_wanted = False
        self._results: dict[str, str] = {}

    @property
    def queued_bytes(self) -> int:
        """Accepted bytes that the CLI has not taken."""
        return sum(len(write.data) - write.sent_bytes for write in self._queue)

    @property
    def wants_to_write(self) -> bool:
        """True while the pipe should be watched for room."""
        return self.fd >= 0 and bool(self._queue)

    def submit(self, control_id: str, data: bytes) -> Json | str:
        """The reply, or the error code."""
        known = self._results.get(control_id)
        if known is not None:
            return {"status": "known", "result": known}
        if self.fd < 0 or self._close_wanted:
            return "stdin_closed"
        if len(self._results) >= CONTROL_IDS_MAX:
            return "stdin_ids_full"
        if self.queued_bytes + len(data) > QUEUE_BYTES_MAX:
            return "stdin_full"
        if not self._spool.flush():
            return "spool_blocked"
        number = self._spool.append(records.STDIN, data, dumps({"control_id": control_id}))
        if not self._spool.flush(sync=True):
            if self._spool.last < number:
                self._spool.discard_last()
                return "spool_blocked"
            # The record is there, its durability is not: nothing may be written, and the spool says so.
            self._finish(control_id, "closed")
            return "spool_blocked"
        self._results[control_id] = "queued"
        self._queue.append(_Write(control_id, data))
        self.pump()
        return {"status": self._results[control_id], "record": number}

    def pump(self) -> None:
        """Write what the CLI takes now."""
        while self._queue and self.fd >= 0:
            write = self._queue[0]
            try:
                view = memoryview(write.data)[write.sent_bytes : write.sent_bytes + WRITE_BYTES]
                write.sent_bytes += os.write(self.fd, view)
            except BlockingIOError:
                return
            except OSError:
                self.close_now()
                return
            if write.sent_bytes >= len(write.data):
                self._queue.pop(0)
                self._finish(write.control_id, "written")
        if self._close_wanted:
            self.close_now()

    def close_after_queue(self) -> str:
        """Close once everything accepted is written: "closed" or "closing"."""
        self._close_wanted = True
        self.pump()
        return "closed" if self.fd < 0 else "closing"

    def close_now(self) -> None:
        """The pipe is gone: what waits ends `partial` or `closed`. Idempotent."""
        if self.fd < 0:
            return
        self._before_close(self.fd)
        os.close(self.fd)
        self.fd = -1
        for write in self._queue:
            self._finish(write.control_id, "partial" if write.sent_bytes else "closed")
        self._queue.clear()
        self._spool.append(records.EOF, meta=dumps({"stream": "stdin"}))
        self._spool.flush()

    def _finish(self, control_id: str, result: str) -> None:
        self._results[control_id] = result
        self._spool.append(records.STDIN_DONE, meta=dumps({"control_id": control_id, "result": result}))
        self._spool.flush()
