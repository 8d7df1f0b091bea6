"""The whole set for tests, as a user starts and ends it: `tether up --detach` and `tether down --wipe`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether_cli import state
from tether_cli.state import Paths, SetState

UP_S = 120.0
COMMAND_S = 60.0
Keys = str | Callable[[], str]  # what is typed, or what happens elsewhere before that is typed


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without anything of the developer's own configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TETHER_", "ANTHROPIC_", "XDG_"))}
    return {**kept, "HOME": str(home), "TERM": "dumb", "PYTHONUNBUFFERED": "1", **(extra or {})}


@dataclass(frozen=True)
class TetherSet:
    """A set that is up, and commands against it."""

    home: Path
    data: Path

    @property
    def state(self) -> SetState:
        found = state.read(Paths(self.data))
        assert found is not None
        return found

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tether_cli", *arguments, "--data", str(self.data)]

    def tether(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=environment(self.home),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )


@contextlib.contextmanager
def running_set(extra: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> Iterator[TetherSet]:
    """`extra`: further variables of the shell that starts it; `options` of `tether up`."""
    with tempfile.TemporaryDirectory(prefix="tether-set-") as root:
        up = TetherSet(Path(root), Path(root) / "data")
        command = up.command("up", "--detach", *options)
        started = subprocess.run(
            command, env=environment(up.home, extra), capture_output=True, text=True, timeout=UP_S, check=False
        )
        assert started.returncode == 0, started.stdout + started.stderr
        try:
            yield up
        finally:
            down = up.tether("down", "--wipe")
            assert down.returncode == 0, down.stdout + down.stderr


def on_terminal(
    argv: Sequence[str], env: Mapping[str, str], steps: Sequence[tuple[str, Keys]], *, timeout_s: float = COMMAND_S
) -> tuple[int, str]:
    """Run a command on a terminal of its own: once a step's text has appeared (after the step before), its keys are
    typed. Returns the exit code and everything shown; fails where a text never appears."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        argv,
        env=dict(env),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    shown, position = b"", 0
    waiting = list(steps)
    deadline_s = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline_s:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    data = os.read(master, 4096)
                except OSError:
                    break  # the last one that had the terminal has gone
                shown += data
            if waiting and (at := shown.find(waiting[0][0].encode(), position)) >= 0:
                position = at + len(waiting[0][0].encode())
                keys = waiting.pop(0)[1]
                os.write(master, (keys if isinstance(keys, str) else keys()).encode())
        text = shown.decode("utf-8", "replace").replace("\r\n", "\n")
        assert not waiting, f"never shown: {waiting[0][0]!r} in\n{text}"
        return process.wait(max(1.0, deadline_s - time.monotonic())), text
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
