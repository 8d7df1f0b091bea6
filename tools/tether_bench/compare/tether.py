"""Tether itself, and the bare pipe: the scripted agent is the writer of both."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tether import __version__
from tether_bench import processes
from tether_bench.compare.contender import Contender, Segment, SseSteps, Step, Stream
from tether_bench.rig import START_S, WORKSPACE, Rig, lines_of
from tether_bench.tap import BenchError, Recording, SseReplay, Tap, open_sse

_LIVE: Final = b"event: live"


def _script(stream: Stream, phase_ms: float) -> str:
    lines = []
    for number, segment in enumerate(stream.segments):
        lines += [f"!wait_file {stream.go_file(number)}", f"!sleep {phase_ms / 1000:.4f}"]
        lines.append(f"!deltas {segment.count} {segment.interval_ms:g}")
    return "\n".join(lines)


def _written(rig: Rig, session: str) -> dict[str, float]:
    return {line["text"].strip(): at_s for at_s, line in rig.printed(session) if line["type"] == "delta"}


class TetherStream(Stream):
    def __init__(self, rig: Rig, name: str, segments: Sequence[Segment], phase_ms: float) -> None:
        super().__init__(name, rig.folder / "compare-tether", segments)
        self._rig = rig
        self._session = ""
        self._reader = SseSteps(lambda _name, _data, identity: identity or None)
        with rig.http() as client, rig.tap() as tap:
            watch = rig.follow(tap, name)
            rig.prompt(client, name, _script(self, phase_ms))
            rig.wait(lambda: watch.has(b'"model.request"'), START_S, "an agent's start")
            for _, event in SseReplay(watch).told():
                if event["type"] == "session.bound":
                    self._session = str(event["body"]["native_session"])

    def written(self) -> Mapping[str, float]:
        return _written(self._rig, self._session)

    def follow(self, tap: Tap, position: str | None) -> Recording:
        state = self._rig.state
        path = f"/v1/conversations/{self.name}/events" + (f"?cursor={position}" if position else "")
        return open_sse(tap, state.http_url, state.token, path)

    def steps(self, recording: Recording) -> Iterator[Step]:
        return self._reader.steps(recording)

    def close(self) -> None:
        for number in range(len(self.segments)):
            self.go_file(number).touch()


class Tether(Contender):
    name = "tether"
    version = __version__
    kills = ("backend", "collector", "nats", "router", "agent")

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def start(self) -> None:
        self._rig.warm()

    def stop(self) -> None:
        """The set is ended by who started it."""

    def stream(self, segments: Sequence[Segment], phase_ms: float) -> TetherStream:
        return TetherStream(self._rig, self._rig.name("compare"), segments, phase_ms)

    def kill(self, what: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes.pids(self._rig.state, WORKSPACE)[what], signal.SIGKILL)


class PipeStream(Stream):
    def __init__(self, rig: Rig, name: str, segments: Sequence[Segment], phase_ms: float) -> None:
        super().__init__(name, rig.folder / "compare-pipe", segments)
        self._rig = rig
        self._stack = contextlib.ExitStack()
        read, write = os.pipe()
        try:
            _, self._session = self._stack.enter_context(rig.agent_process(_script(self, phase_ms), write))
        finally:
            os.close(write)
        self._read = read

    def written(self) -> Mapping[str, float]:
        return _written(self._rig, self._session)

    def follow(self, tap: Tap, position: str | None) -> Recording:
        if position is not None or self._read < 0:
            raise BenchError("a pipe has one reader and no position")
        read, self._read = self._read, -1
        return tap.add(read, self.name)

    def steps(self, recording: Recording) -> Iterator[Step]:
        for received_s, line in lines_of(recording):
            if line["type"] == "delta":
                yield Step(received_s, None, (line["text"].strip(),))

    def close(self) -> None:
        if self._read >= 0:
            os.close(self._read)
        self._stack.close()


class Pipe(Contender):
    name = "pipe"
    version = ""
    resumes = False

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def start(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""

    def stream(self, segments: Sequence[Segment], phase_ms: float) -> PipeStream:
        return PipeStream(self._rig, self._rig.name("pipe"), segments, phase_ms)
