"""sandbox-agent, durable-streams and redis-streams, each as one server process on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tether_bench.compare.contender import Contender, Segment, Server, SseSteps, Step, Stream, free_port
from tether_bench.compare.install import Pin
from tether_bench.compare.writing import redis_command
from tether_bench.rig import Http
from tether_bench.tap import BenchError, Recording, Tap, open_sse

_PYTHON: Final = (sys.executable, "-P", "-m")
_BLOCK_MS: Final = 200
_ENTRY: Final = re.compile(rb"\$\d+\r\n(\d+-\d+)\r\n\*2\r\n\$1\r\ne\r\n\$\d+\r\n([^\r]*)\r\n")
_TOKEN: Final = re.compile(r"e\d{6}(?= )")


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)}


class _Served(Contender):
    """A contender that is one server. It does not come back by itself: a supervisor's restart is done here."""

    kills: tuple[str, ...] = ("server",)

    def __init__(self, pin: Pin, folder: Path) -> None:
        self.version = pin.version
        self._pin = pin
        self._folder = folder / f"compare-{self.name}"
        self._folder.mkdir()
        self._port = free_port()
        self._count = 0
        self._server = Server(self._command(), self._port, _environment(self._folder), self._folder / "log")

    @abstractmethod
    def _command(self) -> list[str]: ...

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def kill(self, what: str) -> None:
        self._server.kill()
        self._server.start()

    def _next(self) -> str:
        self._count += 1
        return f"{self.name}-{self._count}"


# --- sandbox-agent ---


class SandboxStream(Stream):
    """An ACP server instance of its own: its agent process is the writer."""

    def __init__(self, url: str, name: str, folder: Path, segments: Sequence[Segment], phase_ms: float) -> None:
        super().__init__(name, folder, segments)
        self._url = url
        self._path = f"/v1/acp/{name}"
        self._reader = SseSteps(lambda _name, _data, identity: identity or None)
        begin = {"protocolVersion": 1, "clientCapabilities": {}}
        with contextlib.closing(Http(url, "")) as client:
            client.ask("POST", f"{self._path}?agent=mock", _rpc(1, "initialize", begin))
            client.ask("POST", self._path, _rpc(2, "session/new", {"cwd": str(self._folder), "mcpServers": []}))
        prompt = [{"type": "text", "text": json.dumps(self.plan(phase_ms))}]
        body = json.dumps(_rpc(3, "session/prompt", {"sessionId": "bench", "prompt": prompt})).encode()
        host, port = url.removeprefix("http://").split(":")
        # Answered when the turn is over: the connection is kept, the answer is not waited for.
        self._turn = socket.create_connection((host, int(port)), timeout=10.0)
        head = f"POST {self._path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._turn.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def follow(self, tap: Tap, position: str | None) -> Recording:
        headers = {} if position is None else {"Last-Event-ID": position}
        return open_sse(tap, self._url, "", self._path, headers)

    def steps(self, recording: Recording) -> Iterator[Step]:
        return self._reader.steps(recording)

    def close(self) -> None:
        for number in range(len(self.segments)):
            self.go_file(number).touch()
        self._turn.close()  # the agent ends with its turn; a DELETE would be waited for up to half a minute


def _rpc(identity: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identity, "method": method, "params": params}


class SandboxAgent(_Served):
    name = "sandbox-agent"

    def _command(self) -> list[str]:
        return [str(self._pin.path), "server", "--no-token", "--no-telemetry", "--port", str(self._port)]

    def start(self) -> None:
        launchers = self._folder / ".local" / "share" / "sandbox-agent" / "bin" / "agent_processes"
        launchers.mkdir(parents=True, exist_ok=True)
        launcher = launchers / "mock-acp"
        command = " ".join([*_PYTHON, "tether_bench.compare.acp_agent"])
        launcher.write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
        launcher.chmod(0o755)
        super().start()

    def stream(self, segments: Sequence[Segment], phase_ms: float) -> SandboxStream:
        return SandboxStream(f"http://127.0.0.1:{self._port}", self._next(), self._folder, segments, phase_ms)


# --- what a client appends to ---


class AppendedStream(Stream):
    """A writer process that appends to the server."""

    def __init__(
        self, name: str, folder: Path, segments: Sequence[Segment], phase_ms: float, to: dict[str, Any]
    ) -> None:
        super().__init__(name, folder, segments)
        plan = {**self.plan(phase_ms), **to}
        command = [*_PYTHON, "tether_bench.compare.writing", json.dumps(plan)]
        self._writer = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self._writer.kill()
        self._writer.wait()


class DurableStream(AppendedStream):
    def __init__(self, port: int, name: str, folder: Path, segments: Sequence[Segment], phase_ms: float) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._path = f"/v1/stream/{name}"
        request = f"PUT {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connected:
            connected.sendall(f"{request}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            if b" 201 " not in (answer := connected.recv(4096))[:20]:
                raise BenchError(f"no stream was made: {answer[:100]!r}")
        self._reader = SseSteps(_offset_of)
        to = {"kind": "http", "host": "127.0.0.1", "port": port, "name": self._path}
        super().__init__(name, folder, segments, phase_ms, to)

    def follow(self, tap: Tap, position: str | None) -> Recording:
        return open_sse(tap, self._url, "", f"{self._path}?offset={position or '-1'}&live=sse")

    def steps(self, recording: Recording) -> Iterator[Step]:
        return self._reader.steps(recording)


def _offset_of(name: str, data: str, _identity: str) -> str | None:
    return str(json.loads(data)["streamNextOffset"]) if name == "control" else None


class DurableStreams(_Served):
    name = "durable-streams"
    stored = True

    def _command(self) -> list[str]:
        node = shutil.which("node")
        if node is None:
            raise BenchError("durable-streams needs node on PATH")
        options: dict[str, Any] = {"port": self._port, "host": "127.0.0.1", "compression": False}
        if self.stored:
            options["dataDir"] = str(self._folder / "data")
        program = self._folder / "server.mjs"
        program.write_text(
            f"import {{ DurableStreamTestServer }} from {json.dumps(str(self._pin.path))}\n"
            f"await new DurableStreamTestServer({json.dumps(options)}).start()\n",
            encoding="utf-8",
        )
        return [node, str(program)]

    def stream(self, segments: Sequence[Segment], phase_ms: float) -> DurableStream:
        return DurableStream(self._port, self._next(), self._folder, segments, phase_ms)


class DurableStreamsInMemory(DurableStreams):
    name = "durable-streams-memory"
    stored = False


class RedisStream(AppendedStream):
    """A reader is a thread that asks for what comes after the last entry that it has."""

    def __init__(self, port: int, name: str, folder: Path, segments: Sequence[Segment], phase_ms: float) -> None:
        self._port = port
        self._parsed: dict[Recording, int] = {}
        to = {"kind": "redis", "host": "127.0.0.1", "port": port, "name": name}
        super().__init__(name, folder, segments, phase_ms, to)
        self._stop = threading.Event()
        self._readers: list[threading.Thread] = []

    def follow(self, tap: Tap, position: str | None) -> Recording:
        try:
            connected = socket.create_connection(("127.0.0.1", self._port), timeout=10.0)
        except OSError as error:
            raise BenchError(f"no connection to redis: {error}") from None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        recording = Recording(self.name)
        arguments = (connected, recording, (position or "0").encode())
        reader = threading.Thread(target=self._read, args=arguments, name="bench-redis", daemon=True)
        reader.start()
        self._readers.append(reader)
        return recording

    def _read(self, connected: socket.socket, recording: Recording, after: bytes) -> None:
        """One piece for each answer, whole."""
        with connected:
            try:
                while not self._stop.is_set():
                    asked = (b"COUNT", b"1000", b"BLOCK", b"%d" % _BLOCK_MS, b"STREAMS", self.name.encode(), after)
                    connected.sendall(redis_command(b"XREAD", *asked))
                    data = _whole_answer(connected)
                    received_s = time.time()
                    found = _ENTRY.findall(data)
                    recording.size_bytes += len(data)
                    if found:
                        after = found[-1][0]
                        recording.pieces.append((received_s, data))
            except OSError:
                recording.closed = True

    def steps(self, recording: Recording) -> Iterator[Step]:
        while (place := self._parsed.get(recording, 0)) < len(recording.pieces):
            received_s, data = recording.pieces[place]
            self._parsed[recording] = place + 1
            for identity, content in _ENTRY.findall(data):
                yield Step(received_s, identity.decode(), tuple(_TOKEN.findall(content.decode())))

    def close(self) -> None:
        self._stop.set()
        for reader in self._readers:
            reader.join()
        super().close()


def _whole_answer(connected: socket.socket) -> bytes:
    """An `XREAD`'s answer: nothing (`*-1`), or one stream with so many entries of one field. Raises OSError."""
    data = b""
    while True:
        piece = connected.recv(1 << 18)
        if not piece:
            raise ConnectionError("redis is gone")
        data += piece
        if data.startswith((b"*-1\r\n", b"$-1\r\n")):
            return data
        if data.startswith(b"-"):
            raise ConnectionError(data[:100].decode("latin-1"))
        head = re.match(rb"\*1\r\n\*2\r\n\$\d+\r\n[^\r]*\r\n\*(\d+)\r\n", data)
        if head is not None and data.endswith(b"\r\n") and len(_ENTRY.findall(data)) == int(head.group(1)):
            return data


class RedisStreams(_Served):
    name = "redis-streams"

    def _command(self) -> list[str]:
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        options += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        return [str(self._pin.path), *options]

    def stream(self, segments: Sequence[Segment], phase_ms: float) -> RedisStream:
        return RedisStream(self._port, self._next(), self._folder, segments, phase_ms)


# Name → the pin's name, what to make of it.
OTHERS: Final[dict[str, tuple[str, Callable[[Pin, Path], Contender]]]] = {
    "sandbox-agent": ("sandbox-agent", SandboxAgent),
    "durable-streams": ("durable-streams", DurableStreams),
    "durable-streams-memory": ("durable-streams", DurableStreamsInMemory),
    "redis-streams": ("redis-streams", RedisStreams),
}
