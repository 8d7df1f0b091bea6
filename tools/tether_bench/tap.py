"""Byte streams recorded with the time at which each piece was received: SSE connections and agents' pipes.

One thread waits on all of them, takes the time and keeps the piece; nothing is parsed while a round runs, so the
reader adds a `recv` and no more. `SseReplay` reads a recording afterwards.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from tether.client.sse import ServerEvent, SseParser

_PIECE_BYTES: Final = 256 * 1024
_LOOK_S: Final = 0.01
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
RECORDED_BYTES_MAX: Final = 256 << 20  # of one stream


class BenchError(Exception):
    """A figure cannot be measured; the message says why."""


@dataclass(slots=True, eq=False)
class Recording:
    """`pieces`: (unix seconds, bytes), in order. Written by the tap's thread alone; others only read."""

    name: str
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    size_bytes: int = 0
    closed: bool = False
    _scanned: int = 0
    _tail: bytes = b""

    def has(self, needle: bytes) -> bool:
        """Whether the needle has come since the last time that this was true. One caller, one needle at a time."""
        while self._scanned < len(self.pieces):
            data = self._tail + self.pieces[self._scanned][1]
            self._scanned += 1
            if needle in data:
                self._tail = b""
                return True
            self._tail = data[-len(needle) :]
        return False


class Tap:
    """The recording thread. `add` a descriptor; it is closed here at its end, or with the tap."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-tap", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, name: str) -> Recording:
        recording = Recording(name)
        with self._lock:
            self._selector.register(descriptor, selectors.EVENT_READ, recording)
        return recording

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(_LOOK_S):
                self._take(key)

    def _take(self, key: selectors.SelectorKey) -> None:
        recording: Recording = key.data
        try:
            data = os.read(key.fd, _PIECE_BYTES)
        except ConnectionResetError:
            data = b""
        received_s = time.time()
        recording.size_bytes += len(data)
        if data and recording.size_bytes <= RECORDED_BYTES_MAX:
            recording.pieces.append((received_s, data))
            return
        recording.closed = True
        self._forget(key.fd)

    def _forget(self, descriptor: int) -> None:
        with self._lock:
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        self._selector.close()


def open_sse(tap: Tap, url: str, token: str, path: str, headers: Mapping[str, str] = _NO_HEADERS) -> Recording:
    """Connect and ask for an event stream; the answer's head is part of the recording. Raises BenchError."""
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    try:
        connection = socket.create_connection((host, port), timeout=10.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"{head}Accept: text/event-stream\r\n\r\n".encode())
    except OSError as error:
        raise BenchError(f"no event stream at {path}: {error}") from None
    connection.settimeout(None)
    return tap.add(connection.detach(), path)


class _Body:
    """An HTTP/1.1 answer's body out of its bytes: the head is checked, chunks are joined."""

    def __init__(self) -> None:
        self._data = b""
        self._left = -1  # of the chunk; -1: in the head, 0: a size line comes next
        self._chunked = True

    def feed(self, data: bytes) -> bytes:
        self._data += data
        if self._left < 0:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return b""
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise BenchError(f"no event stream: {head[:200].decode('latin-1')} {rest[:500].decode('latin-1')}")
            self._chunked = b"transfer-encoding: chunked" in head.lower()
            self._data, self._left = rest, 0
        if not self._chunked:
            body, self._data = self._data, b""
            return body
        parts: list[bytes] = []
        while self._data:
            if self._left == 0:
                line, found, rest = self._data.removeprefix(b"\r\n").partition(b"\r\n")
                if not found:
                    break
                self._left, self._data = int(line, 16), rest
                if self._left == 0:
                    break
            parts.append(self._data[: self._left])
            self._left -= len(parts[-1])
            self._data = self._data[len(parts[-1]) :]
        return b"".join(parts)


class SseReplay:
    """Events of a recording with the time at which each was whole; goes on where it stopped."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._next = 0
        self._body = _Body()
        self._parser = SseParser()

    @property
    def behind(self) -> bool:
        """Whether something has come that was not looked at."""
        return self._next < len(self.recording.pieces)

    def events(self) -> Iterator[tuple[float, ServerEvent]]:
        while self._next < len(self.recording.pieces):
            received_s, data = self.recording.pieces[self._next]
            self._next += 1
            for event in self._parser.feed(self._body.feed(data)):
                yield received_s, event

    def told(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The product's events alone (not `open`, `live`, …), decoded."""
        for received_s, event in self.events():
            if event.name == "message":
                yield received_s, json.loads(event.data)


class LineReplay:
    """Lines of a pipe's recording with the time at which each was whole."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._next = 0
        self._rest = b""

    def lines(self) -> Iterator[tuple[float, bytes]]:
        while self._next < len(self.recording.pieces):
            received_s, data = self.recording.pieces[self._next]
            self._next += 1
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield received_s, line
