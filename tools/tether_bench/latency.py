"""added_latency_ms_*: from the CLI's write to the reader, against a bare pipe and a raw publish → subscribe."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tether.bus import NatsBus
from tether_bench.processes import CpuMeter, pids
from tether_bench.rig import END_S, START_S, Rig, lines_of
from tether_bench.stats import Figure, Target, percentile
from tether_bench.tap import BenchError, Recording, SseReplay

RATE: Final = 20  # events a second of one execution
INTERVAL_MS: Final = 1000 // RATE
SETTLE_S: Final = 1.0  # between everybody being there and the first round
_BUDGET_S: Final = 11.0  # of a short run's rounds
_LATE_S: Final = 20.0  # how long after its time a round's last delta may come


@dataclass(frozen=True, slots=True)
class Shape:
    """`seconds` of a round; of a baseline's."""

    executions: int
    rounds: int
    seconds: float
    baseline_seconds: float


@dataclass(slots=True)
class Samples:
    """Percentiles of each round, in ms."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def add(self, latencies_s: list[float]) -> None:
        if not latencies_s:
            raise BenchError("no event came")
        self.p50.append(1000 * percentile(latencies_s, 0.5))
        self.p99.append(1000 * percentile(latencies_s, 0.99))


def shape(executions: int, *, short: bool) -> Shape:
    if short:
        return Shape(executions, 3, 1.2 if executions == 1 else 2.0, 0.8)
    return Shape(executions, 5, 4.0, 2.0)


def added_latency(rig: Rig, executions: int, wanted: Iterable[str]) -> list[Figure]:
    """One run at this number of executions; the figures of `wanted` that it gives."""
    how = shape(executions, short=rig.short)
    pipe, nats, tether = Samples(), Samples(), Samples()
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(_running(rig, how))
        for number in rig.rounds(how.rounds, _BUDGET_S):
            pipe.add(_bare_pipe(rig, how))
            nats.add(_bare_nats(rig, how))
            load.cpu.start()
            tether.add(load.round(number))
            load.cpu.stop()
        load.end()
    events = len(tether.p50) * load.deltas * executions
    note = f"{executions} execution{'s' if executions > 1 else ''} × {RATE}/s in one sandbox"
    targets = {f"p50_x{executions}": 2.0, "p99_x20": 10.0}
    figures = []
    for share in ("p50", "p99"):
        name = f"added_latency_ms_{share}_x{executions}"
        if name not in wanted:
            continue
        limit = targets.get(f"{share}_x{executions}") if executions == 20 else None
        figures.append(
            Figure(
                name,
                "ms",
                tuple(getattr(tether, share)),
                {"pipe": tuple(getattr(pipe, share)), "nats": tuple(getattr(nats, share))},
                None if limit is None else Target("at most", limit),
                note=note,
                cpu_us=load.cpu.per(events) if share == "p50" else {},
            )
        )
    return figures


# --- the product ---


@dataclass(slots=True)
class _Load:
    rig: Rig
    how: Shape
    deltas: int  # of one execution in one round
    folder: Path
    streams: list[Recording]
    cpu: CpuMeter
    measured: int = 0  # rounds
    sessions: list[str] = field(default_factory=list)
    replays: list[SseReplay] = field(default_factory=list)
    came: list[dict[str, float]] = field(default_factory=list)  # by execution: delta → when it was received
    times: list[dict[str, int]] = field(default_factory=list)  # by execution: delta → how often it came

    def round(self, number: int) -> list[float]:
        """One round: latencies in seconds. What is missing counts as lost."""
        self.measured = number + 1
        last = (number + 1) * self.deltas
        (self.folder / f"go-{number}").touch()
        needle = f"e{last:06d} ".encode()
        left = list(self.streams)

        def all_there() -> bool:
            left[:] = [stream for stream in left if not stream.has(needle)]
            return not left

        self.rig.wait(all_there, self.how.seconds + _LATE_S, f"the deltas of {self.how.executions} executions")
        latencies: list[float] = []
        wanted = {f"e{index:06d}" for index in range(number * self.deltas + 1, last + 1)}
        for index, session in enumerate(self.sessions):
            self._read(index)
            printed = _printed(self.rig.printed(session))
            came = self.came[index]
            latencies += [came[token] - printed[token] for token in wanted if token in came]
        return latencies

    def _read(self, index: int) -> None:
        came, times = self.came[index], self.times[index]
        for received_s, event in self.replays[index].told():
            if event["type"] == "text.delta":
                for token in event["body"]["text"].split():
                    came.setdefault(token, received_s)
                    times[token] = times.get(token, 0) + 1

    def end(self) -> None:
        self.release()
        left = list(self.streams)

        def all_ended() -> bool:
            left[:] = [stream for stream in left if not stream.has(b'"execution.ended"')]
            return not left

        rest_s = (self.how.rounds - self.measured) * self.how.seconds
        self.rig.wait(all_ended, END_S + 0.3 * self.how.executions + rest_s, "the end of the executions")
        for index in range(len(self.streams)):
            self._read(index)
            expected = self.how.rounds * self.deltas
            self.rig.losses.count(f"deltas of {self.sessions[index]}", expected=expected, got=self.times[index])

    def release(self) -> None:
        """Rounds that were left out run, too: nobody waits for ever, whatever happened."""
        for number in range(self.how.rounds):
            (self.folder / f"go-{number}").touch()


@contextlib.contextmanager
def _running(rig: Rig, how: Shape) -> Iterator[_Load]:
    """Executions that wait for their first round, each with a live reader."""
    folder = rig.folder / rig.name("latency")
    folder.mkdir()
    deltas = max(1, round(how.seconds * RATE))
    workspace = rig.warm()
    with rig.tap() as tap, rig.http() as client:
        conversations = [rig.name(f"x{how.executions}") for _ in range(how.executions)]
        cpu = CpuMeter(pids(rig.state, workspace))
        load = _Load(rig, how, deltas, folder, [rig.follow(tap, name) for name in conversations], cpu)
        for index, conversation in enumerate(conversations):
            phase_s = index / how.executions * INTERVAL_MS / 1000
            steps = [
                f"!wait_file {folder}/go-{number}\n!sleep {phase_s:.4f}\n!deltas {deltas} {INTERVAL_MS}"
                for number in range(how.rounds)
            ]
            rig.prompt(client, conversation, "\n".join(steps))
        try:
            for stream in load.streams:
                rig.wait(lambda s=stream: s.has(b'"model.request"'), START_S, "an agent's start")  # type: ignore[misc]
                replay = SseReplay(stream)
                bound = [event for _, event in replay.told() if event["type"] == "session.bound"]
                load.sessions.append(str(bound[0]["body"]["native_session"]))
                load.replays.append(replay)
                load.came.append({})
                load.times.append({})
            time.sleep(SETTLE_S)
            yield load
        finally:
            load.release()


def _printed(lines: Iterable[tuple[float, dict[str, Any]]]) -> dict[str, float]:
    return {line["text"].strip(): at_s for at_s, line in lines if line["type"] == "delta"}


# --- baselines ---


def _bare_pipe(rig: Rig, how: Shape) -> list[float]:
    """The same agents on bare pipes; they wait for each other, so that no start falls into the measuring."""
    deltas = max(1, round(how.baseline_seconds * RATE))
    go = rig.folder / rig.name("go")
    scripts = [
        f"!wait_file {go}\n!sleep {index / how.executions * INTERVAL_MS / 1000:.4f}\n!deltas {deltas} {INTERVAL_MS}"
        for index in range(how.executions)
    ]
    latencies: list[float] = []
    with rig.tap() as tap, rig.bare_agents(tap, scripts) as agents:
        for pipe, _ in agents:
            rig.wait(lambda p=pipe: p.has(b'"model"'), START_S, "a bare agent's start")  # type: ignore[misc]
        go.touch()
        for pipe, _ in agents:
            rig.wait(lambda p=pipe: p.has(b'"result"'), how.seconds + _LATE_S, "a bare agent's end")  # type: ignore[misc]
        for pipe, session in agents:
            came = _printed(lines_of(pipe))
            latencies += [came[token] - at_s for token, at_s in _printed(rig.printed(session)).items()]
    return latencies


def _bare_nats(rig: Rig, how: Shape) -> list[float]:
    """A core publish → subscribe at the same rates; the payload is the time of its publish."""
    count = max(1, round(how.baseline_seconds * RATE))
    latencies: list[float] = []

    async def publish(bus: NatsBus, index: int) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time() + index / how.executions * INTERVAL_MS / 1000
        for _ in range(count):
            await asyncio.sleep(next_s - loop.time())
            await bus.send(f"bench.latency.{index}", b"%d" % time.time_ns())
            next_s += INTERVAL_MS / 1000

    async def work(bus: NatsBus) -> None:
        async with rig.bus() as reader:
            subscription = await reader.subscribe("bench.latency.*")
            await reader.barrier()

            async def take() -> None:
                for _ in range(count * how.executions):
                    message = await subscription.next()
                    assert message is not None
                    latencies.append((time.time_ns() - int(message.data)) / 1e9)

            async with asyncio.TaskGroup() as group:
                group.create_task(take(), name="bench-take")
                for index in range(how.executions):
                    group.create_task(publish(bus, index), name=f"bench-publish-{index}")
            await subscription.close()

    rig.on_bus(work, timeout_s=how.baseline_seconds + _LATE_S)
    return latencies
