"""The keeper's life with one CLI: output into the spool, the end in its fixed order, and the proof.

    RUNNING ──CLI reaped──▶ DRAINING ──both streams ended, or 1.5 s──▶ EXITED ──nothing left──▶ PROVEN
       │                                                                  ▲
       └── kill (asked for, or SIGTERM to the keeper): the tree is killed at once; the rest is the same way

1. The CLI's end is its wait status, never the end of a stream: a CLI may close stdout and live, and a descendant
   may hold the pipe for ever.
2. What is in the pipes is read, for at most 1.5 s where somebody still holds them.
3. `eof` of each stream, then `exit`, both in the spool (fsync).
4. What is left of the tree is killed; `proof` is written when nothing is left, never before.
5. The keeper answers questions until it is told to go, or until nobody has owned it for a while.

Reading stops (the CLI feels it as back-pressure) during a rotation, when the quota is used up, and while the disk
takes nothing. One read is one write to the spool, and subscribers hear of it in the same turn of the loop.
"""

from __future__ import annotations

import _socket
import os
import time

from . import linux, records
from .control import Control
from .jsonlite import Json, dumps
from .lines import LineSplitter
from .loop import READ, WRITE, Loop
from .spawn import Child, arm_signals, wait_result
from .spool import SpoolWriter, now_us
from .stdin_pipe import StdinPipe

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 65536
DRAIN_S = 1.5  # longest wait for streams that descendants hold after the CLI's exit
PAUSE_S = 2.0  # a rotation that does not come does not stop the CLI for longer
RETRY_S = 0.25  # between attempts on a disk that takes nothing
SWEEP_FIRST_S, SWEEP_LAST_S = 0.005, 0.25  # pause between passes of the sweep, doubling
SWEEP_CLEAN_PASSES = 2  # passes in a row that must find nothing
TERMINATE_S = 5.0  # a keeper told to go leaves after this even if the disk refuses the last records

RUNNING, DRAINING, EXITED, PROVEN = "running", "draining", "exited", "proven"


class Stream:
    """One output of the CLI."""

    __slots__ = ("fd", "kind", "name", "on_readable", "splitter")

    def __init__(self, name: str, kind: int, fd: int, chunk_bytes: int, on_readable: Callable[[Stream], None]) -> None:
        self.name = name
        self.kind = kind
        self.fd = fd  # -1 once ended
        self.splitter = LineSplitter(chunk_bytes)
        self.on_readable = on_readable

    def read(self, _mask: int) -> None:
        """There is output, or the end of it."""
        self.on_readable(self)


class Keeper:
    """Everything of one CLI. `run` returns when the keeper may go."""

    def __init__(
        self,
        child: Child,
        spool: SpoolWriter,
        listener: _socket.socket,
        facts: Json,
        quota_bytes: int,
        chunk_bytes: int,
        linger_s: float,
    ) -> None:
        self.nonce = str(facts["nonce"])
        self.quota_bytes = quota_bytes
        self.spool = spool
        self.state = RUNNING
        self._facts = facts
        self._child = child
        self._marker = f"TETHER_PROCESS_NONCE={self.nonce}".encode()
        self._linger_s = linger_s
        self._loop = Loop()
        self.stdin = StdinPipe(child.stdin, spool, self._loop.forget)
        self._streams = [
            Stream("stdout", records.STDOUT, child.stdout, chunk_bytes, self._read),
            Stream("stderr", records.STDERR, child.stderr, chunk_bytes, self._read),
        ]
        self._status: int | None = None  # the CLI's wait status
        self._init_died = False
        self._init_gone = False
        self._exit: Json | None = None
        self._proof: Json | None = None
        self._paused_until = 0.0
        self._drain_until = 0.0
        self._kill_wanted = False
        self._kill_sent = False
        self._empty = False
        self._clean_passes = 0
        self._sweep_at = 0.0
        self._sweep_pause_s = SWEEP_FIRST_S
        self._throttled = False
        self._reading = False
        self._retry_at = 0.0
        self._linger_until = 0.0
        self._terminate = False
        self._terminate_until = 0.0
        self._done = False
        self._control = Control(listener, self._loop, self)
        self._wake_fd = -1

    # What the operations ask for.

    @property
    def proven(self) -> bool:
        """True once exit and proof are recorded."""
        return self.state == PROVEN

    @property
    def mid_line(self) -> bool:
        """True where a chunk of a long line is in the spool and its rest is not."""
        return any(stream.splitter.mid_line for stream in self._streams)

    def status(self) -> Json:
        """What `hello` and `status` answer."""
        return {
            **self._facts,
            "v": 1,
            "pid": os.getpid(),
            "pid_cli": self._child.pid,
            "state": self.state,
            "last_record": self.spool.last,
            "exited": self._exit,
            "proof": self._proof,
            "spool_bytes": self.spool.total_bytes,
            "backpressure": self._throttled,
            "spool_blocked": self.spool.blocked,
            "stdin_open": self.stdin.fd >= 0,
            "stdin_queued_bytes": self.stdin.queued_bytes,
        }

    def pause(self) -> int:
        """Stop reading for a rotation; the last record."""
        self._paused_until = time.monotonic() + PAUSE_S
        return self.spool.last

    def resume(self) -> None:
        """Read again. Idempotent."""
        self._paused_until = 0.0

    def signal_cli(self, number: int) -> bool:
        """Signal the CLI alone; False where it has ended."""
        return self._status is None and linux.send_signal(self._child.pidfd, number)

    def kill_all(self) -> None:
        """Kill everything of the CLI; exit and proof follow. Idempotent."""
        self._kill_wanted = True

    def finish(self) -> None:
        """Leave after this turn of the loop."""
        self._done = True

    def owner_left(self) -> None:
        """The owner's connection is gone: the time to live on after the proof starts anew."""
        self._linger_until = time.monotonic() + self._linger_s

    # The loop.

    def run(self) -> None:
        """Serve until told to go."""
        wake_read, self._wake_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        arm_signals(self._wake_fd, self._on_terminate)
        self._loop.watch(wake_read, READ, lambda _mask: _drain_pipe(wake_read))
        if self._child.status_fd >= 0:
            self._loop.watch(self._child.status_fd, READ, lambda _mask: self._read_status())
        self._reap()
        while not self._done:
            deadline = self._step(time.monotonic())
            owned = self._control.has_owner
            self._control.push()
            if self._control.has_owner != owned:
                continue  # the push found the owner gone, which changes what comes next
            if not self._done:
                wait_s = -1.0 if deadline == 0.0 else max(0.0, deadline - time.monotonic())
                self._loop.turn(wait_s)
                self._reap()

    def emergency_kill(self) -> None:
        """After a failure of the keeper itself: leave nothing running."""
        if self._child.init_pidfd >= 0:
            linux.send_signal(self._child.init_pidfd, linux.SIGKILL)
            return
        deadline = time.monotonic() + TERMINATE_S
        while linux.sweep(os.getpid(), self._marker) and time.monotonic() < deadline:
            time.sleep(SWEEP_FIRST_S)

    def _on_terminate(self, *_: object) -> None:
        self._terminate = True

    def _step(self, now: float) -> float:
        """Do what is due; the time of what comes next, 0.0 for nothing."""
        due: list[float] = []
        if self._terminate and not self._terminate_until:
            self._terminate_until = now + TERMINATE_S
            self._kill_wanted = True
        if self.spool.blocked:
            if now >= self._retry_at:
                self.spool.flush(sync=self.state in (EXITED, PROVEN))
                self._retry_at = now + RETRY_S
            due.append(self._retry_at)
        if self._paused_until:
            if now >= self._paused_until:
                self._paused_until = 0.0
            else:
                due.append(self._paused_until)
        if self._status is not None and self.state in (RUNNING, DRAINING):
            due.append(self._drain(now))
        if self._kill_wanted and not self._empty:
            due.append(self._kill(now))
        if self.state == EXITED and self._empty:
            self._prove(now)
        if self.state == PROVEN or self._terminate:
            due.append(self._leave(now))
        self._throttle()
        self._watch()
        pending = [at for at in due if at]
        return min(pending) if pending else 0.0

    @property
    def _may_read(self) -> bool:
        held_back = self._throttled and self._status is None
        return not (self._paused_until or self.spool.blocked or held_back)

    def _watch(self) -> None:
        """Watch exactly what may be read or written now."""
        may_read = self._may_read
        if may_read != self._reading:
            self._reading = may_read
            for stream in self._streams:
                if stream.fd >= 0 and may_read:
                    self._loop.watch(stream.fd, READ, stream.read)
                elif stream.fd >= 0:
                    self._loop.forget(stream.fd)
        if self.stdin.fd >= 0:
            self._loop.watch(self.stdin.fd, WRITE if self.stdin.wants_to_write else 0, self._on_stdin)

    def _throttle(self) -> None:
        over = self.spool.over_quota
        if over != self._throttled and not self.spool.blocked and self.state in (RUNNING, DRAINING):
            self._throttled = over
            self.spool.append(records.NOTE, meta=dumps({"note": "backpressure", "on": over}))
            self.spool.flush()

    def _on_stdin(self, mask: int) -> None:
        if mask & WRITE:
            self.stdin.pump()
        elif self.stdin.fd >= 0:
            self.stdin.close_now()  # the CLI closed its end

    def _read(self, stream: Stream) -> None:
        if not self._may_read:
            return  # stopped by an operation in this same turn, whose events were already collected
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return
        at_us = now_us()
        if not data:
            self._end_stream(stream, forced=False)
            return
        for meta, line in stream.splitter.feed(data):
            self.spool.append(stream.kind, line, meta, at_us)
        self.spool.flush()

    def _end_stream(self, stream: Stream, forced: bool) -> None:
        self._loop.forget(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        for meta, line in stream.splitter.finish():
            self.spool.append(stream.kind, line, meta)
        meta_eof: Json = {"stream": stream.name}
        if forced:
            meta_eof["forced"] = True
        self.spool.append(records.EOF, meta=dumps(meta_eof))
        self.spool.flush()

    # The end.

    def _reap(self) -> bool:
        """Collect every child that has ended (in a namespace that is the init alone); True where none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._child.init_pid:
                self._read_status()
                self._init_gone = self._empty = True
                if self._status is None:  # with the init everything was killed
                    self._init_died = not self._kill_sent
                    self._status = linux.SIGKILL
            elif pid == self._child.pid:
                self._status = status

    def _read_status(self) -> None:
        if self._child.status_fd < 0:
            return
        try:
            raw = os.read(self._child.status_fd, 4)
        except BlockingIOError:
            return
        if len(raw) == 4:
            self._status = int.from_bytes(raw, "little")
        self._loop.forget(self._child.status_fd)
        os.close(self._child.status_fd)
        self._child.status_fd = -1

    def _drain(self, now: float) -> float:
        if self.state == RUNNING:
            self.state = DRAINING
            self._drain_until = now + DRAIN_S
            self.stdin.close_now()
        if self._paused_until:
            self._drain_until = self._paused_until + DRAIN_S
            return self._paused_until
        held = [stream for stream in self._streams if stream.fd >= 0]
        if held and now < self._drain_until:
            return self._drain_until
        self._kill_wanted = True
        if self.spool.blocked:
            self._drain_until = now + DRAIN_S  # the rest is safe in the pipes until the disk takes it, and read then
            return 0.0
        for stream in held:
            self._end_stream(stream, forced=True)
        assert self._status is not None
        meta = wait_result(self._status)
        if self._init_died:
            meta["init_died"] = True
        number = self.spool.append(records.EXIT, meta=dumps(meta))
        self._exit = {**meta, "record": number}
        self.state = EXITED
        self.spool.flush(sync=True)
        return 0.0

    def _kill(self, now: float) -> float:
        if self._child.init_pid:
            if not self._kill_sent:
                self._kill_sent = True
                linux.send_signal(self._child.init_pidfd, linux.SIGKILL)
            return 0.0  # SIGCHLD wakes the loop
        if now >= self._sweep_at:
            found = linux.sweep(os.getpid(), self._marker)
            # A look at /proc can miss a process that forks and ends all the time. The kernel's word does not: a
            # subreaper without children has no descendants. The passes are for what the marker alone can find.
            childless = self._reap()
            self._clean_passes = 0 if found or not childless else self._clean_passes + 1
            if self._clean_passes >= SWEEP_CLEAN_PASSES:
                self._empty = True
                return now
            self._sweep_at = now + self._sweep_pause_s
            self._sweep_pause_s = min(self._sweep_pause_s * 2, SWEEP_LAST_S)
        return self._sweep_at

    def _prove(self, now: float) -> None:
        method = "pid_namespace" if self._child.init_pid else "subreaper_sweep"
        proof: Json = {"method": method, "empty": True, "at": now_us()}
        number = self.spool.append(records.PROOF, meta=dumps(proof))
        self._proof = {**proof, "record": number}
        self.state = PROVEN
        self._linger_until = now + self._linger_s
        self.spool.flush(sync=True)

    def _leave(self, now: float) -> float:
        if self._terminate:
            if (self.state == PROVEN and not self.spool.blocked) or now >= self._terminate_until:
                self._done = True
            return self._terminate_until
        if self._control.has_owner:
            return 0.0
        if now >= self._linger_until:
            self._done = True
        return self._linger_until


def _drain_pipe(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except BlockingIOError:
        pass
