"""Drive the scripted agent as a process: write messages, read lines, wait for what is to come with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0


class Scripted:
    """One process. Every read has a deadline; a line that is not JSON is given as `{"type": "<bad>", "raw"}`."""

    def __init__(self, folder: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.home, self.truth = folder / "home", folder / "truth"
        self.seen: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripted_agent", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"],
                "TETHER_SCRIPTED_HOME": str(self.home),
                "TETHER_SCRIPTED_TRUTH": str(self.truth),
                **(environment or {}),
            },
            cwd=folder,
        )
        self.errors = bytearray()
        self._threads = [threading.Thread(target=target) for target in (self._read_stdout, self._read_stderr)]
        for thread in self._threads:
            thread.start()

    def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def send(self, **message: Any) -> None:
        self.send_raw(json.dumps(message).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def prompt(self, text: str, prompt_id: str = "p1") -> None:
        self.send(type="prompt", id=prompt_id, text=text)

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def next(self) -> dict[str, Any] | None:
        """The next line; None at the end of stdout."""
        raw = self._lines.get(timeout=DEADLINE_S)
        if raw is None:
            self._lines.put(None)
            return None
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            message = {"type": "<bad>", "raw": raw}
        self.seen.append(message)
        return message

    def until(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Read on until a line of this type with these fields."""
        while (message := self.next()) is not None:
            if message["type"] == kind and all(message.get(k) == v for k, v in fields.items()):
                return message
        raise AssertionError(f"stdout ended without {kind} {fields}; got {[m['type'] for m in self.seen]}")

    def until_seen(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """The first line already read of this type with these fields."""
        for message in self.seen:
            if message["type"] == kind and all(message.get(k) == v for k, v in fields.items()):
                return message
        raise AssertionError(f"no {kind} {fields} among {self.types()}")

    def finish(self) -> int:
        """Close stdin, read the rest, return the exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.close_stdin()
        while self.next() is not None:
            pass
        return self.process.wait(DEADLINE_S)

    def types(self) -> list[str]:
        return [str(message["type"]) for message in self.seen]

    def texts(self) -> list[str]:
        return [str(message["text"]) for message in self.seen if message["type"] == "text"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        # A stray child that holds the pipes keeps the readers until it goes; they are waited for with a bound.
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def scripted(folder: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Scripted]:
    agent = Scripted(folder, *options, environment=environment)
    try:
        yield agent
    finally:
        agent.end()


def run_script(folder: Path, text: str, *options: str) -> tuple[int, Scripted]:
    """One prompt, run to the end: (exit code, what was seen)."""
    with scripted(folder, *options) as agent:
        agent.prompt(text)
        return agent.finish(), agent


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition on something that gives no notice, such as a file."""
    deadline = threading.Event()
    timer = threading.Timer(DEADLINE_S, deadline.set)
    timer.start()
    try:
        while not condition():
            if deadline.wait(0.01):
                raise AssertionError(f"after {DEADLINE_S} s still not: {what}")
    finally:
        timer.cancel()
