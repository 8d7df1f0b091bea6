"""The loop around `core`: every signal is blocked and waited for, so nothing comes in between two steps.

Whether anything but the collector lives is the kernel's word: a process that reaps orphans and has no child left has
no descendant. As pid 1 it is that by nature; elsewhere it makes itself the subreaper.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from . import core, files

PR_SET_CHILD_SUBREAPER: Final = 36
USAGE: Final = "usage: init run FOLDER -- COMMAND… | init put FOLDER"
NOT_STARTED: Final = 127
_SIGNALS: Final[dict[int, core.Name]] = {
    signal.SIGTERM: "TERM",
    signal.SIGINT: "TERM",
    signal.SIGHUP: "HUP",
    signal.SIGUSR1: "USR1",
}
_WAITED_FOR: Final = frozenset({*_SIGNALS, signal.SIGCHLD})
_NUMBERS: Final = {"TERM": signal.SIGTERM, "HUP": signal.SIGHUP, "KILL": signal.SIGKILL}
_IDLE_S: Final = 3600.0


def log(event: str, **facts: object) -> None:
    """One line of JSON on stderr, as the services write theirs."""
    line = {"event": event, "level": "info", "service": "init", "at": round(time.time(), 3), **facts}
    sys.stderr.write(json.dumps(line) + "\n")
    sys.stderr.flush()


class Init:
    """See the module's docstring. `command` starts a collector."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._folder = folder
        self._command = command
        self._collector = 0  # its pid, 0 where none lives
        self._state = core.begin(time.monotonic())
        self._left: int | None = None

    def run(self) -> int:
        """Until there is nothing more to do; the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        if os.getpid() != 1:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        log("init_ready")
        while self._left is None:
            due_s = self._state.due_s
            wait_s = max(0.0, due_s - time.monotonic()) if due_s else _IDLE_S
            found = signal.sigtimedwait(_WAITED_FOR, min(wait_s, _IDLE_S))
            if found is not None and found.si_signo in _SIGNALS:
                log("signal", name=signal.Signals(found.si_signo).name, phase=self._state.phase)
                self._take(core.Signal(_SIGNALS[found.si_signo]))
            code, others = self._reap()
            if self._left is not None:
                break
            self._take(core.Look(others, self._ready()) if code is None else core.Exited(code, others))
        log("init_leaves", code=self._left)
        return self._left

    def _ready(self) -> bool:
        return self._state.phase != "start" or (self._folder / files.ENVIRONMENT).exists()

    def _reap(self) -> tuple[int | None, bool]:
        """The collector's exit code, if it has ended now; whether any child is left."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code, False
            if pid == 0:
                return code, True
            if pid == self._collector:
                self._collector = 0
                code = os.waitstatus_to_exitcode(status)
                log("collector_ended", code=code, phase=self._state.phase)

    def _take(self, event: core.Event) -> None:
        self._state, effects = core.decide(self._state, event, time.monotonic())
        for effect in effects:
            match effect:
                case core.Spawn():
                    self._spawn()
                case core.Tell(name):
                    if self._collector:  # ours, and not reaped: its pid is nobody else's
                        os.kill(self._collector, _NUMBERS[name])
                case core.TellRest(name):
                    self._tell_rest(_NUMBERS[name])
                case core.Leave(code):
                    self._left = code

    def _spawn(self) -> None:
        try:
            variables = files.environment(self._folder, dict(os.environ))
            self._collector = os.posix_spawnp(
                self._command[0],
                self._command,
                variables,
                setsid=True,
                setsigmask=[],
                setsigdef=[number for number in signal.valid_signals() if number not in _UNCHANGED],
            )
        except (OSError, files.FilesError) as error:
            log("collector_not_started", level="error", reason=str(error))
            self._take(core.Exited(NOT_STARTED, self._reap()[1]))
            return
        log("collector_started", collector=self._collector, phase=self._state.phase)

    @staticmethod
    def _tell_rest(number: signal.Signals) -> None:
        own = str(os.getpid())
        for entry in os.listdir("/proc"):  # noqa: PTH208 - names alone
            if entry.isdigit() and _parent(entry) == own:
                try:
                    os.kill(int(entry), number)
                except OSError:
                    continue


_UNCHANGED: Final = (signal.SIGKILL, signal.SIGSTOP)


def _parent(pid: str) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[text.rindex(")") + 2 :].split()[1]


def main(arguments: list[str]) -> int:
    match arguments:
        case ["run", folder, "--", command, *rest]:
            return Init(Path(folder), [command, *rest]).run()
        case ["put", folder]:
            return _put(Path(folder))
        case _:
            sys.stderr.write(USAGE + "\n")
            return 64


def _put(folder: Path) -> int:
    stream: Any = sys.stdin.buffer
    try:
        files.put(folder, stream)
    except (OSError, files.FilesError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
