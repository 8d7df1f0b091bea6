"""A child process of the set: started, waited for until it is ready, restarted when it crashes, ended.

    (new) ── start ──▶ starting ── ready file ──▶ ready ──┐ ends by itself
                          ▲   └─ ends, or too late ─▶ CliError (the first time; with its last lines)
                          └──── back-off ◀─────────────────┘
                          stop: SIGTERM, after a while SIGKILL ─▶ ended

Its output is read line by line: kept (the last lines), appended to its log file, shown with its name before it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tether.processes import ProcessId, identify
from tether_cli.output import CliError

LogMode = Literal["console", "json", "quiet"]
READY_S: Final = 60.0  # a service on a loaded machine is ready long before
TERM_S: Final = 15.0
TAIL_LINES: Final = 20
LINE_SHOWN_CHARS: Final = 600  # of a line in an error; its log has the whole
LINE_BYTES_MAX: Final = 256 * 1024
LOG_BYTES_MAX: Final = 8 << 20  # then it is put aside, once
BACK_OFF_MIN_S: Final = 0.2
BACK_OFF_MAX_S: Final = 10.0
STABLE_S: Final = 60.0  # who lived so long starts the back-off afresh
EX_CONFIG: Final = 78  # a configuration that is refused: another start changes nothing
_POLL_S: Final = 0.02
_LAUNCHER: Final = (sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`ready` looks whether the child (given its pid) is ready and returns its facts; `restarted` is told the facts
    of every start, and may change `env` for the next one."""

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(repr=False)
    log: Path
    ready: Callable[[int], dict[str, Any] | None]
    restarted: Callable[[dict[str, Any]], None]
    json_lines: bool = True  # its own lines are JSON
    file_only: str = ""  # lines that contain this go to the log file alone


class LogSink:
    """Shows children's lines on stderr: with the name before each, as JSON, or not at all."""

    def __init__(self, mode: LogMode) -> None:
        self._mode = mode

    def show(self, name: str, line: str, *, is_json: bool) -> None:
        if self._mode == "quiet":
            return
        if self._mode == "console":
            text = f"{name:<8}| {line}"
        else:
            text = line if is_json and line.startswith("{") else json.dumps({"service": name, "event": line})
        sys.stderr.write(text + "\n")

    def say(self, event: str, **facts: object) -> None:
        """The set's own lines."""
        if self._mode == "console":
            self.show("set", " ".join([event, *(f"{key}={value}" for key, value in facts.items())]), is_json=False)
        else:
            self.show("set", json.dumps({"service": "set", "event": event, **facts}, default=str), is_json=True)


class _LogFile:
    """A child's log: appended to, put aside once when it is too long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._bytes = self._file.tell()

    def write(self, line: bytes) -> None:
        if self._bytes > LOG_BYTES_MAX:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab", buffering=0)
            self._bytes = 0
        self._bytes += self._file.write(line + b"\n")

    def close(self) -> None:
        self._file.close()


class Child:
    """One child. `keep` is run in a task of the set's; everything else is called by the set."""

    def __init__(self, spec: ChildSpec, sink: LogSink, *, back_off_max_s: float = BACK_OFF_MAX_S) -> None:
        self.spec = spec
        self._back_off_max_s = back_off_max_s
        self.identity: ProcessId | None = None
        self._sink = sink
        self._process: asyncio.subprocess.Process | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._stopping = False
        self._pump: asyncio.Task[None] | None = None

    async def start(self, *, ready_s: float = READY_S) -> None:
        """Start and wait until it is ready. Raises CliError, after which it does not run."""
        self._tail.clear()
        process = self._process = await asyncio.create_subprocess_exec(
            *(*_LAUNCHER, str(os.getpid()), *self.spec.argv),
            env=self.spec.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_BYTES_MAX,
            cwd="/",
            start_new_session=True,  # a terminal's Ctrl-C is for the set, which ends its children in order
        )
        self._pump = asyncio.create_task(self._read(process), name=f"log-{self.spec.name}")
        facts = None
        try:
            async with asyncio.timeout(ready_s):
                while facts is None:
                    if process.returncode is not None:
                        await self._drained()
                        raise self._failure(f"ended with {process.returncode} before it was ready")
                    await asyncio.sleep(_POLL_S)
                    facts = self.spec.ready(process.pid)
        except TimeoutError:
            await self.stop()
            raise self._failure(f"was not ready within {ready_s:g} s") from None
        self.identity = identify(process.pid)
        self.spec.restarted(facts)

    async def keep(self) -> None:
        """Restart it whenever it ends by itself. Raises CliError where that is of no use."""
        loop = asyncio.get_running_loop()
        in_a_row = 0
        while not self._stopping:
            started_s = loop.time()
            process = self._process
            assert process is not None
            code = await process.wait()
            await self._drained()
            if self._stopping:
                return
            in_a_row = 1 if loop.time() - started_s > STABLE_S else in_a_row + 1
            pause_s = min(self._back_off_max_s, BACK_OFF_MIN_S * float(2 ** min(in_a_row - 1, 10)))
            self._sink.say("child_ended", name=self.spec.name, exit=code, restart_in_s=pause_s)
            if code == EX_CONFIG:
                raise self._failure("refuses its configuration")
            await asyncio.sleep(pause_s)
            if self._stopping:
                return
            with contextlib.suppress(CliError):  # it has ended again: the loop counts it
                await self.start()

    async def stop(self, *, term_s: float = TERM_S) -> None:
        """SIGTERM, after `term_s` SIGKILL; gone when this returns. Idempotent."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(term_s):
                    await process.wait()
            except TimeoutError:
                self._sink.say("child_killed", name=self.spec.name)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await self._drained()

    def _failure(self, what: str) -> CliError:
        lines = "\n".join(f"  {_readable(line)[:LINE_SHOWN_CHARS]}" for line in self._tail)
        shown = f"; its last lines:\n{lines}" if lines else ""
        return CliError(f"{self.spec.name} {what} (its log is {self.spec.log}){shown}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        file = _LogFile(self.spec.log)
        try:
            while True:
                try:
                    raw = await process.stdout.readline()
                except ValueError:  # a line longer than the limit: its parts are dropped
                    continue
                if not raw:
                    return
                line = raw.rstrip(b"\r\n")
                file.write(line)
                text = line.decode("utf-8", "replace")
                self._tail.append(text)
                if not self.spec.file_only or self.spec.file_only not in text:
                    self._sink.show(self.spec.name, text, is_json=self.spec.json_lines)
        finally:
            file.close()

    async def _drained(self) -> None:
        """What the child has said is read. A process of its own that holds the pipe does not hold us up.

        `keep` and `stop` are both here, at once, when a child is stopped; `keep` may be cancelled in the middle.
        """
        pump = self._pump
        if pump is not None:
            await asyncio.wait({pump}, timeout=1.0)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            if self._pump is pump:
                self._pump = None


def ready_by_file(path: Path) -> Callable[[int], dict[str, Any] | None]:
    """Ready once the file is there and names the child's pid (an older one is a predecessor's)."""

    def look(pid: int) -> dict[str, Any] | None:
        try:
            facts = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return facts if isinstance(facts, dict) and facts.get("pid") == pid else None

    return look


def _readable(line: str) -> str:
    """A JSON line that carries an exception, in words: its traceback is in the log."""
    try:
        entry = json.loads(line)
        return f"{entry['event']}: " + "; ".join(f"{one['exc_type']}: {one['exc_value']}" for one in entry["exception"])
    except (ValueError, KeyError, TypeError):
        return line


def inherited(environ: Mapping[str, str], *, everything: bool) -> dict[str, str]:
    """What a child takes over of the environment. `everything`: for who reads agents' keys in it; never `TETHER_…`."""
    names = (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "COVERAGE_PROCESS_START"),
    )
    if everything:
        return {name: value for name, value in environ.items() if not name.startswith("TETHER_")}
    return {name: environ[name] for name in names if name in environ}
