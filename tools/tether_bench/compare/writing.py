"""What every writer shares: the plan, the truth file, the pace. Standard library only; also a program.

    python -m tether_bench.compare.writing PLAN      PLAN: JSON, {"kind": "http" | "redis", "host", "port", "name",
                                                     "truth", "segments": [{"go", "count", "interval_ms"}, …]}

A segment begins once its `go` file is there. Before an event is written its token and the time go to the truth file by
one `write`. As a program it appends to a server and waits for the answer each time; what got none is sent again, over a
new connection, until it is answered. What has no pace is appended in batches, as one would who wants it to be fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

_LOOK_S: Final = 0.005
_RETRY_S: Final = 0.02
_ANSWER_S: Final = 5.0
BATCH: Final = 64  # events of one append where there is no pace


def perform(plan: dict[str, Any], write: Callable[[Sequence[str]], None], batch: int = 1) -> None:
    """Each token of the plan, in order, numbered through all segments; up to `batch` at once where there is no pace."""
    truth = os.open(plan["truth"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    number = 0
    for segment in plan["segments"]:
        go = Path(segment["go"])
        while not go.exists():
            time.sleep(_LOOK_S)
        next_s = time.monotonic() + segment.get("phase_ms", 0) / 1000
        last = number + segment["count"]
        while number < last:
            if segment["interval_ms"]:
                time.sleep(max(0.0, next_s - time.monotonic()))
                next_s += segment["interval_ms"] / 1000
            size = 1 if segment["interval_ms"] else min(batch, last - number)
            tokens = [f"e{index:06d}" for index in range(number + 1, number + size + 1)]
            number += size
            now_s = time.time()
            os.write(truth, "".join(f"{token} {now_s:.6f}\n" for token in tokens).encode())
            write(tokens)
    os.close(truth)


def read_truth(path: Path) -> dict[str, float]:
    """Token → unix seconds of its write."""
    if not path.exists():
        return {}
    pairs = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}


def event(token: str) -> str:
    """As long as Tether's own data of a delta."""
    head = f'{{"execution":"exe_{"0" * 22}","ordinal":10000,"at":1700000000000,"type":"text.delta",'
    return head + f'"body":{{"segment":"s1","text":"{token} "}},"replay":false}}'


class Appender:
    """One kept connection; `append` returns once the server has answered."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._socket: socket.socket | None = None
        self._appends = 0

    def append(self, tokens: Sequence[str]) -> None:
        data = self._request([event(token).encode() for token in tokens])
        self._appends += 1
        while True:
            try:
                if self._socket is None:
                    self._socket = socket.create_connection((self._plan["host"], self._plan["port"]), timeout=_ANSWER_S)
                    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket.sendall(data)
                self._answer(self._socket, len(tokens))
                return
            except OSError:
                self.close()
                time.sleep(_RETRY_S)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _request(self, events: list[bytes]) -> bytes:
        """Redis: so many commands in one pipeline. HTTP: one event, or an array of them."""
        if self._plan["kind"] == "redis":
            name = self._plan["name"].encode()
            return b"".join(redis_command(b"XADD", name, b"*", b"e", one) for one in events)
        body = events[0] if len(events) == 1 else b"[%s]" % b",".join(events)
        head = f"POST {self._plan['name']} HTTP/1.1\r\nHost: {self._plan['host']}\r\nContent-Type: application/json\r\n"
        # By these the server drops an append that it has.
        head += f"Producer-Id: writer\r\nProducer-Epoch: 0\r\nProducer-Seq: {self._appends}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _answer(self, connected: socket.socket, events: int) -> None:
        """Raises OSError unless the append was accepted. HTTP: an empty body. Redis: two lines for each event."""
        end, times = (b"\r\n\r\n", 1) if self._plan["kind"] == "http" else (b"\r\n", 2 * events)
        data = b""
        while data.count(end) < times:
            piece = connected.recv(1 << 16)
            if not piece:
                raise ConnectionError("closed before the answer")
            data += piece
            if data.startswith((b"-", b"HTTP/1.1 5", b"HTTP/1.1 4")):
                raise ConnectionError(data[:100].decode("latin-1"))


def redis_command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def main(arguments: list[str]) -> int:
    plan = json.loads(arguments[0])
    with contextlib.closing(Appender(plan)) as appender:
        perform(plan, appender.append, BATCH)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
