"""What the rounds need of a contender, and what several share."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tether_bench.compare.writing import read_truth
from tether_bench.tap import BenchError, Recording, SseReplay, Tap

_TOKEN: Final = re.compile(r"e\d{6}(?= )")
_UP_S: Final = 20.0
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` events, one each `interval_ms` (0: as fast as it can)."""

    count: int
    interval_ms: float


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a reader got: `position` is where it goes on after it (None: the same as before)."""

    received_s: float
    position: str | None
    tokens: tuple[str, ...]


class Stream(ABC):
    """One stream with its writer, which waits for its first segment."""

    def __init__(self, name: str, folder: Path, segments: Sequence[Segment]) -> None:
        self.name = name
        self.segments = tuple(segments)
        self._folder = folder / name
        self._folder.mkdir(parents=True)

    def go_file(self, number: int) -> Path:
        return self._folder / f"go-{number}"

    def go(self, number: int) -> list[str]:
        """Begin a segment; returns its tokens."""
        self.go_file(number).touch()
        first = sum(segment.count for segment in self.segments[:number]) + 1
        return [f"e{index:06d}" for index in range(first, first + self.segments[number].count)]

    def plan(self, phase_ms: float = 0.0) -> dict[str, Any]:
        """For `writing.perform`."""
        segments = [
            {"go": str(self.go_file(index)), "count": one.count, "interval_ms": one.interval_ms, "phase_ms": phase_ms}
            for index, one in enumerate(self.segments)
        ]
        return {"truth": str(self._folder / "truth"), "segments": segments}

    def written(self) -> Mapping[str, float]:
        """Token → when it was written."""
        return read_truth(self._folder / "truth")

    @abstractmethod
    def follow(self, tap: Tap, position: str | None) -> Recording:
        """A reader from this position, or from the beginning. Raises BenchError where it cannot connect."""

    @abstractmethod
    def steps(self, recording: Recording) -> Iterator[Step]:
        """What a recording has, in order; goes on where the last call of the same recording stopped."""

    @abstractmethod
    def close(self) -> None:
        """End the writer."""


class Contender(ABC):
    """Up between `start` and `stop`. `kills`: what `kill` can name. `resumes`: a reader can connect with a position."""

    name: str
    version: str
    kills: tuple[str, ...] = ()
    resumes = True

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def stream(self, segments: Sequence[Segment], phase_ms: float) -> Stream: ...

    def kill(self, what: str) -> None:
        """By SIGKILL; what does not come back by itself is started again before this returns."""
        raise BenchError(f"{self.name} has no {what}")


class SseSteps:
    """`Stream.steps` over event streams. `position_of`: the position that an event gives, or None."""

    def __init__(self, position_of: Callable[[str, str, str], str | None]) -> None:
        self._position_of = position_of
        self._replays: dict[Recording, SseReplay] = {}

    def steps(self, recording: Recording) -> Iterator[Step]:
        replay = self._replays.setdefault(recording, SseReplay(recording))
        for received_s, event in replay.events():
            is_delta = "text.delta" in event.data or "agent_message_chunk" in event.data
            tokens = tuple(_TOKEN.findall(event.data)) if is_delta else ()
            yield Step(received_s, self._position_of(event.name, event.data, event.id), tokens)


@dataclass(slots=True)
class Server:
    """A process that listens on a port of this machine."""

    command: Sequence[str]
    port: int
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it accepts connections. Raises BenchError."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until_s = time.monotonic() + _UP_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until_s:
                    last = self.log.read_text(encoding="utf-8", errors="replace")[-300:]
                    raise BenchError(f"{self.command[0]} does not listen: {last}") from None
                time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
