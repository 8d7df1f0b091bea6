"""One client on the keeper's socket: NDJSON in, NDJSON out, both bounded."""

from __future__ import annotations

import _socket

from .jsonlite import Json, dumps
from .loop import BROKEN, READ, WRITE, Loop

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_BYTES_MAX = 2 * 1024 * 1024
OUT_BYTES_MAX = 256 * 1024  # unread replies; a client that is further behind is cut
RECEIVE_BYTES = 65536


class Connection:
    """Lines and pushes of one client. `records` pushes are merged: only the newest number matters."""

    def __init__(
        self,
        sock: _socket.socket,
        loop: Loop,
        on_line: Callable[[Connection, bytes], None],
        on_gone: Callable[[Connection], None],
    ) -> None:
        self.role = ""  # "" before hello, then "owner", "observer" or "superseded"
        self.subscribed = False
        self.open = True
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._on_line = on_line
        self._on_gone = on_gone
        self._in = bytearray()
        self._searched_bytes = 0
        self._out = bytearray()
        self._last_to_push = 0
        loop.watch(self._fd, READ, self._on_event)

    def send(self, message: Json) -> None:
        """Queue one message and write what the socket takes."""
        if not self.open:
            return
        self._out += dumps(message)
        self._out += b"\n"
        if len(self._out) > OUT_BYTES_MAX:
            self.close()
            return
        self._flush()

    def push_records(self, last: int) -> None:
        """Say that records up to `last` can be read; merged with an earlier one that has not left yet."""
        if self._out:
            self._last_to_push = last
        else:
            self._last_to_push = 0
            self.send({"push": "records", "last": last})

    def close(self) -> None:
        """Idempotent."""
        if self.open:
            self.open = False
            self._loop.forget(self._fd)
            self._sock.close()
            self._on_gone(self)

    def _on_event(self, mask: int) -> None:
        if mask & READ:
            self._receive()
        elif mask & BROKEN:
            self.close()
        if mask & WRITE and self.open:
            self._flush()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._in += data
        while self.open:
            end = self._in.find(b"\n", self._searched_bytes)
            if end < 0:
                break
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            self._searched_bytes = 0
            if len(line) > REQUEST_BYTES_MAX:
                break
            self._on_line(self, line)
        else:
            return
        self._searched_bytes = len(self._in)
        if len(self._in) > REQUEST_BYTES_MAX or end >= 0:
            self.send({"id": None, "ok": False, "error": "too_large", "detail": f"{REQUEST_BYTES_MAX} bytes"})
            self.close()

    def _flush(self) -> None:
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            del self._out[:sent]
        if not self._out and self._last_to_push:
            last, self._last_to_push = self._last_to_push, 0
            self._out += dumps({"push": "records", "last": last}) + b"\n"
        self._loop.watch(self._fd, READ | WRITE if self._out else READ, self._on_event)
