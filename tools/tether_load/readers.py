"""A thousand SSE readers of one tenant, broken off all at once and connected again all at once, several times.

While an execution speaks, every reader keeps the cursor of what it got, as a browser does. Judged: a connection is
answered with a stream or with a problem document that has a code, nothing else; each reader has every event of the
execution once, in order, whatever was cut; afterwards the backend's open files are as many as before, and its memory is
where it was after the first storm (which makes what a process keeps for good).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tether import Client
from tether.client.sse import SseParser
from tether.errors import Problem
from tether_bench.processes import rss_mib
from tether_bench.readers import raise_descriptors
from tether_bench.stats import percentile
from tether_load.load_set import Plane, plane
from tether_load.report import Finding

TENANT: Final = "crowd"
CONVERSATION: Final = "talk"
DESCRIPTORS_SPARE: Final = 8  # kept-alive connections of clients that asked meanwhile
RSS_SHARE_MAX: Final = 1.15
RSS_SPARE_MIB: Final = 24.0
_BACK_S: Final = 60.0  # for files to be closed
_CONNECT_S: Final = 60.0  # of all readers
_DELTA_MS: Final = 500
_STRETCH_S: Final = 2.0  # of one directive of the script
_HEAD_BYTES_MAX: Final = 64 * 1024
_PIECE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Size:
    readers: int
    storms: int
    stay_s: float  # between storms
    connect_s: float  # about so long each takes: what is said goes on as long


FULL: Final = Size(readers=1000, storms=6, stay_s=3.0, connect_s=4.0)
SHORT: Final = Size(readers=60, storms=3, stay_s=0.3, connect_s=0.7)


@dataclass(slots=True)
class Crowd:
    """What all readers met. `answers`: status, or the code of a problem → how often; `faults`: what had no code."""

    host: str
    port: int
    token: str
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)  # of each connection until it was live

    def fault(self, text: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(text)


class Reader:
    """One user: keeps its cursor and what it has over its connections. `once`: over with an execution's end."""

    def __init__(self, number: int, crowd: Crowd, conversation: str = CONVERSATION, *, once: bool = True) -> None:
        self.number = number
        self._crowd = crowd
        self._conversation = conversation
        self._once = once
        self._broken_off = False
        self._cursor: str | None = None
        self.applied: dict[str, int] = {}
        self.ended = False
        self.live = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Until the execution's end; connects again as often as it is broken off."""
        rng = random.Random(self.number)
        while not self.ended:
            self.live.clear()
            try:
                await self._connection()
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, OSError) as error:
                if not self._broken_off:
                    self._crowd.fault(f"reader {self.number}: {type(error).__name__} {error}")
                    self._crowd.answers["no answer"] += 1
            if not self.ended and not self._broken_off:
                await asyncio.sleep(rng.uniform(0.5, 1.5))  # as the server asks of browsers
            self._broken_off = False

    def break_off(self) -> None:
        """Without a good-bye, as a network that goes away."""
        self._broken_off = True
        self.live.clear()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _connection(self) -> None:
        crowd, begun_s = self._crowd, time.monotonic()
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(crowd.host, crowd.port, limit=_PIECE_BYTES)
        self._writer = writer
        try:
            cursor = "" if self._cursor is None else f"Last-Event-ID: {self._cursor}\r\n"
            writer.write(
                f"GET /v1/conversations/{self._conversation}/events HTTP/1.1\r\nHost: {crowd.host}:{crowd.port}\r\n"
                f"Authorization: Bearer {crowd.token}\r\n{cursor}Accept: text/event-stream\r\n\r\n".encode()
            )
            async with asyncio.timeout(_CONNECT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1].decode("ascii", "replace")
            if status != "200":
                await self._refused(reader, head, status)
                return
            crowd.answers[status] += 1
            await self._read(reader, begun_s)
        finally:
            self._writer = None
            writer.transport.abort()

    async def _refused(self, reader: asyncio.StreamReader, head: bytes, status: str) -> None:
        """Must be a problem document with a code."""
        length = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        body = await reader.readexactly(min(length, _HEAD_BYTES_MAX))
        try:
            self._crowd.answers[Problem.model_validate_json(body).code] += 1
        except ValueError:
            self._crowd.answers[status] += 1
            self._crowd.fault(f"reader {self.number}: {status} without a code: {body[:100]!r}")

    async def _read(self, reader: asyncio.StreamReader, begun_s: float) -> None:
        parser = SseParser()
        while True:
            # HTTP/1.1 chunks: `{size}\r\n{data}\r\n`
            size = int(await reader.readline() or b"0", 16)
            data = await reader.readexactly(size + 2)
            for event in parser.feed(data[:-2]):
                if event.id:
                    self._cursor = event.id
                if event.name == "live":
                    self.live.set()
                    self._crowd.live_s.append(time.monotonic() - begun_s)
                elif event.name == "message":
                    self._take(json.loads(event.data))
            if self.ended or size == 0:
                return

    def _take(self, told: dict[str, object]) -> None:
        ordinal, execution = told.get("ordinal"), str(told.get("execution"))
        if not isinstance(ordinal, int):
            return
        applied = self.applied.get(execution, 0)
        if ordinal != applied + 1:
            what = "lost" if ordinal > applied else "doubled"
            self._crowd.fault(f"reader {self.number}: {what} at ordinal {applied + 1}: got {ordinal}")
        last = told.get("last")
        self.applied[execution] = max(applied, last if isinstance(last, int) else ordinal)
        self.ended = self.ended or (self._once and told.get("type") == "execution.ended")


async def run(size: Size, say: Callable[[str], None]) -> Finding:
    """Raises CliError where the set fails, BenchError where the machine cannot have so many files."""
    raise_descriptors(4 * size.readers + 512)
    finding = Finding("readers")
    async with plane([TENANT, "other"], {}, say) as up:
        await _storm(up, size, finding)
    return finding


async def _storm(up: Plane, size: Size, finding: Finding) -> None:
    backend = up.process("backend").pid
    address = urlsplit(up.state.http_url)
    crowd = Crowd(address.hostname or "127.0.0.1", address.port or 80, up.tokens[TENANT])
    go = up.folder / "go"
    async with contextlib.AsyncExitStack() as stack:
        client = Client.http(up.state.http_url, up.tokens[TENANT])
        stack.push_async_callback(client.close)
        # It speaks until the storms are over: a file says so.
        stretches = math.ceil(size.storms * (size.stay_s + size.connect_s) / _STRETCH_S)
        script = f"!deltas {round(_STRETCH_S * 1000 / _DELTA_MS)} {_DELTA_MS}\n" * stretches
        told = await client.prompt(CONVERSATION, f"{script}!wait_file {go}\n!say over", agent="scripted")
        warm = [Reader(-number - 1, Crowd(crowd.host, crowd.port, crowd.token)) for number in range(size.readers)]
        await _once(warm, size.stay_s)
        before_files, warm_mib = await _files_settled(backend), rss_mib(backend)
        up.say(f"before: {before_files} open files, {warm_mib:.0f} MiB")
        readers = [Reader(number, crowd) for number in range(size.readers)]
        peak_mib, peak_files = 0.0, 0
        async with asyncio.TaskGroup() as group:
            for one in readers:
                group.create_task(one.run(), name=f"reader-{one.number}")
            for number in range(size.storms):
                await _all_live(readers)
                peak_mib, peak_files = max(peak_mib, rss_mib(backend)), max(peak_files, _files(backend))
                await asyncio.sleep(size.stay_s)
                if number + 1 < size.storms:
                    for one in readers:
                        one.break_off()
            go.touch()
        execution = told.execution or ""
        ends = Counter(one.applied.get(execution, 0) for one in readers)
        if len(ends) != 1:
            crowd.fault(f"not all readers have the same events of {execution}: {dict(ends)}")
        await client.close()
    after_files = await _files_settled(backend, before_files + DESCRIPTORS_SPARE)
    after_mib = rss_mib(backend)
    finding.faults += crowd.faults
    refusals = sum(count for answer, count in crowd.answers.items() if answer not in ("200", "no answer"))
    finding.row("readers", size.readers, "")
    wanted = size.readers * size.storms
    finding.row("connections", crowd.answers["200"], "", f"≥ {wanted}", crowd.answers["200"] >= wanted)
    finding.row("typed_refusals", refusals, "")
    finding.row("untyped", len(crowd.faults), "", "= 0", not crowd.faults)
    finding.row("live_s_p50", percentile(crowd.live_s, 0.5), "s")
    finding.row("live_s_p99", percentile(crowd.live_s, 0.99), "s")
    finding.row("files_most", peak_files, "")
    limit = before_files + DESCRIPTORS_SPARE
    finding.row("files_after", after_files, "", f"≤ {limit} (before {before_files})", after_files <= limit)
    most_mib = warm_mib * RSS_SHARE_MAX + RSS_SPARE_MIB
    finding.row("backend_mib_most", peak_mib, "MiB")
    finding.row(
        "backend_mib_after", after_mib, "MiB", f"≤ {most_mib:.0f} (before {warm_mib:.0f})", after_mib <= most_mib
    )


async def _once(readers: list[Reader], stay_s: float) -> None:
    """Connect all of them, and be gone."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.run(), name="reader-warm") for one in readers]
        await _all_live(readers)
        await asyncio.sleep(stay_s)
        for task in tasks:
            task.cancel()


async def _all_live(readers: list[Reader]) -> None:
    async with asyncio.timeout(2 * _CONNECT_S):
        await asyncio.gather(*(one.live.wait() for one in readers))


def _files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def _files_settled(pid: int, enough: int = 0) -> int:
    """How many are open once no more are being closed, or `enough` are reached."""
    until_s = time.monotonic() + _BACK_S
    last, same = _files(pid), 0
    while time.monotonic() < until_s and same < 6 and not last <= enough:
        await asyncio.sleep(0.25)
        now = _files(pid)
        same = same + 1 if now == last else 0
        last = now
    return last
