"""A process that is many readers: raw sockets in one epoll loop, told what to do by lines of JSON on stdin.

    {"do": "open", "host", "port", "hello", "ready", "count"}    → {"open": n}     all of them have got `ready`
    {"do": "collect", "until", "timeout_s"}                      → {"there": n, "cut": n}
    {"do": "judge", "printed": {token: unix seconds}}            → {"delays": {tenths of a ms: samples}, "lost",
                                                                    "doubled", "bytes"}; the recorded is let go
    {"do": "close"}                                              → {"closed": n}

Each `open` makes a group; the other commands are for the newest one, or for the one that `group` names (counted from
0). While a round runs a reader costs one `recv` and the time: pieces are kept and looked through afterwards. A delta is
found by its line (`"type":"text.delta"`), so that the same text in the completed segment is no second sample. `PING` is
answered as nats-server wants it. Standard library only: it starts fast and weighs little.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

_PIECE_BYTES: Final = 1 << 18
_OPENING_MAX: Final = 32  # connections that wait for `ready` at a time
_OPEN_S: Final = 60.0
_DELTA: Final = re.compile(rb'"type":"text\.delta"[^\n]*')
_TOKEN: Final = re.compile(rb"e\d{6}")
_TAIL_BYTES: Final = 64


class Connection:
    """One reader. `pieces`: (unix seconds, bytes) in order of arrival."""

    __slots__ = ("cut", "needle", "pieces", "socket", "tail")

    def __init__(self, connected: socket.socket, needle: bytes) -> None:
        self.socket = connected
        self.pieces: list[tuple[float, bytes]] = []
        self.needle = needle  # what is waited for; empty once it has come
        self.tail = b""
        self.cut = False

    def look_for(self, needle: bytes) -> None:
        self.needle = needle
        self.tail = b""
        for _, data in self.pieces:
            self.see(data)

    def see(self, data: bytes) -> None:
        if self.needle:
            if self.needle in self.tail + data:
                self.needle = b""
            self.tail = (self.tail + data)[-_TAIL_BYTES:]


class Readers:
    """The loop. Commands come between its turns."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self.groups: list[list[Connection]] = []

    def open(self, host: str, port: int, hello: bytes, ready: bytes, count: int) -> list[Connection]:
        """Raises OSError, TimeoutError."""
        group: list[Connection] = []
        waiting: list[Connection] = []
        until_s = time.monotonic() + _OPEN_S
        while len(group) < count or waiting:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{len(waiting)} of {len(group)} readers were not ready within {_OPEN_S:g} s")
            while len(group) < count and len(waiting) < _OPENING_MAX:
                waiting.append(self._connect(host, port, hello, ready))
                group.append(waiting[-1])
            self.turn(0.05)
            if refused := [one for one in waiting if one.cut]:
                said = b"".join(data for _, data in refused[0].pieces)
                raise ConnectionError(f"a reader was refused: {said[:300]!r}")
            waiting = [one for one in waiting if one.needle]
        for one in group:
            one.pieces.clear()
        self.groups.append(group)
        return group

    def _connect(self, host: str, port: int, hello: bytes, ready: bytes) -> Connection:
        connected = socket.create_connection((host, port), timeout=10.0)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(hello)
        connected.setblocking(False)
        one = Connection(connected, ready)
        self._by_descriptor[connected.fileno()] = one
        self._poll.register(connected, select.EPOLLIN)
        return one

    def turn(self, timeout_s: float) -> None:
        for descriptor, _ in self._poll.poll(timeout_s, 256):
            one = self._by_descriptor.get(descriptor)
            if one is not None:
                self._receive(one)

    def _receive(self, one: Connection) -> None:
        try:
            data = one.socket.recv(_PIECE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            one.cut = True
            self.drop(one)
            return
        one.pieces.append((time.time(), data))
        one.see(data)
        if data == b"PING\r\n" or data.endswith(b"\r\nPING\r\n"):
            one.socket.send(b"PONG\r\n")

    def drop(self, one: Connection) -> None:
        if self._by_descriptor.pop(one.socket.fileno(), None) is not None:
            self._poll.unregister(one.socket)
            one.socket.close()

    def collect(self, group: list[Connection], until: bytes, timeout_s: float) -> None:
        for one in group:
            one.look_for(until)
        until_s = time.monotonic() + timeout_s
        left = [one for one in group if not one.cut]
        while time.monotonic() < until_s and (left := [one for one in left if one.needle and not one.cut]):
            self.turn(0.05)


def deltas(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[str, float]]:
    """Each token of each delta with the time at which its line was whole."""
    data = b"".join(piece for _, piece in pieces)
    ends: list[int] = []
    end = 0
    for _, piece in pieces:
        end += len(piece)
        ends.append(end)
    place = 0
    for line in _DELTA.finditer(data):
        while ends[place] < line.end():
            place += 1
        for token in _TOKEN.finditer(line.group()):
            yield token.group().decode(), pieces[place][0]


def judge(group: list[Connection], printed: dict[str, float]) -> dict[str, Any]:
    """Over all readers; a reader that was cut lost what it had not got."""
    delays: dict[int, int] = {}
    lost = doubled = size_bytes = 0
    for one in group:
        seen: set[str] = set()
        for token, received_s in deltas(one.pieces):
            at_s = printed.get(token)
            if at_s is None:
                continue
            if token in seen:
                doubled += 1
                continue
            seen.add(token)
            tenths = round((received_s - at_s) * 10_000)
            delays[tenths] = delays.get(tenths, 0) + 1
        lost += len(printed) - len(seen)
        size_bytes += sum(len(data) for _, data in one.pieces)
        one.pieces.clear()
    return {"delays": delays, "lost": lost, "doubled": doubled, "bytes": size_bytes}


def perform(readers: Readers, command: dict[str, Any]) -> dict[str, Any]:
    """Raises OSError, KeyError."""
    if command["do"] == "open":
        hello, ready = command["hello"].encode(), command["ready"].encode()
        return {"open": len(readers.open(command["host"], command["port"], hello, ready, command["count"]))}
    group = readers.groups[command.get("group", -1)]
    match command["do"]:
        case "collect":
            readers.collect(group, command["until"].encode(), command["timeout_s"])
            return {"there": sum(not one.needle for one in group), "cut": sum(one.cut for one in group)}
        case "judge":
            return judge(group, command["printed"])
        case _:
            readers.groups.remove(group)
            for one in group:
                readers.drop(one)
            return {"closed": len(group)}


def main() -> int:
    readers = Readers()
    commands = select.poll()
    commands.register(0, select.POLLIN)
    buffered = b""
    while True:
        readers.turn(0.02)
        if b"\n" not in buffered:
            if not commands.poll(0):
                continue
            piece = os.read(0, 1 << 16)
            if not piece:
                return 0
            buffered += piece
            continue
        line, _, buffered = buffered.partition(b"\n")
        try:
            answer = perform(readers, json.loads(line))
        except (OSError, KeyError) as error:
            answer = {"problem": str(error) or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
