"""What is measured of each contender (see the package)."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tether_bench.compare.contender import Contender, Segment, Step, Stream
from tether_bench.rig import END_S, Rig
from tether_bench.stats import percentile
from tether_bench.tap import BenchError, Recording, Tap

RATE: Final = 20
FLOOD: Final = 20_000
BEHIND: Final = (1_000, FLOOD)
KILL_RATE: Final = 50
KILL_EVENTS: Final = 200
KILL_AFTER_S: Final = 1.5
_FLOOD_S: Final = 120.0
_CATCH_UP_S: Final = 30.0
_COME_BACK_S: Final = 10.0  # how long a reader tries after the last event was due
_RETRY_S: Final = 0.02


@dataclass(slots=True)
class Results:
    """Metric → the values of its rounds; None where a contender cannot. `notes`: what a value does not say."""

    values: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, metric: str, value: float) -> None:
        self.values.setdefault(metric, []).append(value)


@contextlib.contextmanager
def _streams(contender: Contender, count: int, segments: Sequence[Segment]) -> Iterator[list[Stream]]:
    """Writers that wait; their phases spread over one interval."""
    found: list[Stream] = []
    try:
        for index in range(count):
            phase_ms = index / count * segments[0].interval_ms
            found.append(contender.stream(segments, phase_ms))
        yield found
    finally:
        for stream in found:
            stream.close()


def latency(rig: Rig, contender: Contender, executions: int, seconds: float, results: Results) -> None:
    """A second of warm-up, then one segment."""
    segments = [Segment(RATE, 1000 / RATE), Segment(round(seconds * RATE), 1000 / RATE)]
    delays_s: list[float] = []
    with _streams(contender, executions, segments) as streams, rig.tap() as tap:
        recordings = [stream.follow(tap, None) for stream in streams]
        wanted: list[str] = []
        for number in range(len(segments)):
            for stream in streams:
                wanted = stream.go(number)
            for recording in recordings:
                _until(rig, recording, wanted[-1], 30.0)
        for stream, recording in zip(streams, recordings, strict=True):
            written = stream.written()
            came = {token: step.received_s for step in stream.steps(recording) for token in reversed(step.tokens)}
            if missing := [token for token in wanted if token not in came]:
                raise BenchError(f"{contender.name}: {len(missing)} of {len(wanted)} events did not come")
            delays_s += [came[token] - written[token] for token in wanted]
    results.add(f"latency_ms_p50_x{executions}", 1000 * percentile(delays_s, 0.5))
    results.add(f"latency_ms_p99_x{executions}", 1000 * percentile(delays_s, 0.99))


def _until(rig: Rig, recording: Recording, token: str, timeout_s: float) -> None:
    needle = f"{token} ".encode()
    rig.wait(lambda: recording.has(needle) or recording.closed, timeout_s, f"event {token}", poll_s=0.005)
    if recording.closed:
        raise BenchError(f"the stream was closed: {b''.join(data for _, data in recording.pieces)[:200]!r}")


def flood_and_reconnect(rig: Rig, contender: Contender, results: Results) -> None:
    """One live reader of a flood; then readers that come back to where it was."""
    with _streams(contender, 1, [Segment(FLOOD, 0)]) as (stream,):
        with rig.tap() as tap:
            live = stream.follow(tap, None)
            tokens = stream.go(0)
            _until(rig, live, tokens[-1], _FLOOD_S)
            steps = list(stream.steps(live))
        got = [(step.received_s, token) for step in steps for token in step.tokens]
        results.add("events_lost", FLOOD - len({token for _, token in got}))
        results.add("events_per_s", FLOOD / (max(at_s for at_s, _ in got) - min(stream.written().values())))
        if not contender.resumes:
            return
        for behind in BEHIND:
            position, seen = _position(steps, tokens, FLOOD - behind)
            _reconnect(rig, stream, position, tokens[seen:], behind, results)


def _position(steps: Sequence[Step], tokens: Sequence[str], seen: int) -> tuple[str | None, int]:
    """The first position behind so many tokens, and behind how many it is. Raises BenchError."""
    if not seen:
        return None, 0
    furthest = ""
    for step in steps:
        furthest = max(furthest, *step.tokens, "")
        if furthest >= tokens[seen - 1] and step.position is not None:
            return step.position, tokens.index(furthest) + 1
    raise BenchError(f"no position after {seen} events")


def _reconnect(
    rig: Rig, stream: Stream, position: str | None, wanted: Sequence[str], behind: int, results: Results
) -> None:
    """From the position until the last of what follows it."""
    with rig.tap() as tap:
        begun_s = time.time()
        recording = stream.follow(tap, position)
        _until(rig, recording, wanted[-1], _CATCH_UP_S)
        steps = list(stream.steps(recording))
    last_s = next(step.received_s for step in steps if wanted[-1] in step.tokens)
    size_bytes = sum(len(data) for at_s, data in recording.pieces if at_s <= last_s)
    results.add(f"reconnect_{behind}_ms", 1000 * (last_s - begun_s))
    results.add(f"reconnect_{behind}_kb", size_bytes / 1000)
    results.add(f"reconnect_{behind}_lost", len(set(wanted) - {token for step in steps for token in step.tokens}))


# --- kills ---


@dataclass(slots=True)
class _Follower:
    """A reader that connects again with its position for as long as it may."""

    stream: Stream
    tap: Tap
    position: str | None = None
    times: dict[str, int] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)
    recording: Recording | None = None
    connects: int = 0

    def look(self) -> None:
        """Take what came; connect where there is no connection."""
        if self.recording is not None:
            for step in self.stream.steps(self.recording):
                self.position = step.position or self.position
                for token in step.tokens:
                    self.times[token] = self.times.get(token, 0) + 1
                    self.arrivals_s.append(step.received_s)
        if self.recording is None or self.recording.closed:
            self.recording = None
            with contextlib.suppress(BenchError):
                self.recording = self.stream.follow(self.tap, self.position)
                self.connects += 1


def kill(rig: Rig, contender: Contender, what: str, results: Results) -> None:
    """Lost, repeated, and the longest time without an event."""
    segments = [Segment(KILL_EVENTS, 1000 / KILL_RATE)]
    run_s = KILL_EVENTS / KILL_RATE
    with _streams(contender, 1, segments) as (stream,), rig.tap() as tap:
        follower = _Follower(stream, tap)
        follower.look()
        tokens = stream.go(0)
        begun_s = time.monotonic()
        killed = False
        while len(follower.times) < KILL_EVENTS and time.monotonic() < begun_s + run_s + _COME_BACK_S:
            if not killed and time.monotonic() >= begun_s + KILL_AFTER_S:
                killed = True
                contender.kill(what)
            with contextlib.suppress(BenchError):  # a connection that was refused: another one follows
                follower.look()
            rig.pause(_RETRY_S)
        written = set(stream.written())
    arrivals_s = sorted(follower.arrivals_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(arrivals_s)]
    name = f"kill {what}"
    results.add(f"{name}: lost", len(tokens) - len(follower.times))
    results.add(f"{name}: repeated", sum(count - 1 for count in follower.times.values()))
    results.add(f"{name}: silence_ms", 1000 * max(gaps_s, default=0.0))
    if len(written) < len(tokens):
        results.notes[f"{name}: lost"] = f"its writer wrote {len(written)} of {len(tokens)}"
    settle(rig)


def settle(rig: Rig) -> None:
    """What was killed is up again before the next thing is measured."""
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        try:
            with rig.http() as client:
                client.ask("GET", "/readyz")
            return
        except BenchError:
            rig.pause(0.1)
    raise BenchError("the set did not come back after a kill")
