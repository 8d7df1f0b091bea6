"""stdin, stdout and signals of one single-threaded process.

Nothing here blocks on one of them while another has news: a poll watches stdin, the signal pipe and, during a
write, the output. So an interrupt gets through while a slow reader holds stdout, and SIGTERM works in the middle
of a line. Writes go out in pieces of PIPE_BUF, which a pipe that polls writable takes without blocking.

The channel collects; it decides nothing: messages wait in `inbox`, signals are given to `on_signal`, which may raise.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from scripted_agent.truth import Truth

STDIN_LINE_BYTES_MAX = 16 << 20
INBOX_MESSAGES_MAX = 1024
_READ_BYTES = 1 << 16
_PIECE_BYTES = 4096
_CAUGHT = ("SIGTERM", "SIGHUP", "SIGINT")
_TEXT_FIELDS = {"prompt": ("id", "text"), "answer": ("request", "decision"), "interrupt": ("id",)}


class BadLineError(ValueError):
    """A stdin line that is not a message; the text says why."""


def dumps(message: object) -> str:
    """One line of JSON; a lone surrogate, which UTF-8 cannot carry, is written as an escape."""
    line = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(message, separators=(",", ":"))
    return line


def parse_message(raw: bytes) -> dict[str, object]:
    """A stdin line as a message whose required fields are strings; raises BadLineError."""
    try:
        message = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise BadLineError("not UTF-8") from None
    except RecursionError:
        raise BadLineError("nested too deep") from None
    except ValueError as error:
        raise BadLineError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadLineError("not an object")
    kind = message.get("type")
    fields = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise BadLineError(f"unknown type {str(kind)[:80]!r}")
    for field in fields:
        if not isinstance(message.get(field), str):
            raise BadLineError(f"{kind}: {field} must be a string")
    if kind == "answer" and message["decision"] not in ("allow", "deny"):
        raise BadLineError("answer: decision must be allow or deny")
    return message


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class Channel:
    """The process's three ends. `stdout_is_open` turns False when nobody can read any more."""

    def __init__(self, truth: Truth, on_signal: Callable[[str], None]) -> None:
        self.inbox: deque[dict[str, object]] = deque()
        self.stdin_is_open = True
        self.stdout_is_open = True
        self._truth = truth
        self._on_signal = on_signal
        self._buffer = bytearray()
        self._line_is_too_long = False
        self._owes_newline = False
        self._unconfirmed = 0
        self._writing = 0
        self._stdin_is_watched = False
        self._signal_pipe, signal_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signal_write)
        for name in _CAUGHT:
            signal.signal(getattr(signal, name), _noted)
        self._quiet = select.poll()
        self._printing = select.poll()
        for poller in (self._quiet, self._printing):
            poller.register(self._signal_pipe, select.POLLIN)
        self._printing.register(1, select.POLLOUT)

    def emit(self, message: dict[str, object]) -> None:
        """Print one line: into the truth, then out."""
        self.emit_raw(dumps(message).encode(), {})

    def emit_raw(self, line: bytes, marks: dict[str, object], *, newline: bool = True) -> None:
        """Print these bytes as a line. `marks` tell the oracle that it is no line to be expected."""
        fields: dict[str, object] = {"line": line.decode("utf-8", "backslashreplace")} if not marks else {}
        fields.update(marks)
        if not newline:
            fields["newline"] = False
        if not self.stdout_is_open:
            self._truth.record("unprinted", fields)
            return
        number = self._truth.record("stdout", fields)
        data = b"\n" + line if self._owes_newline else line
        self._owes_newline = not newline
        self._writing = number
        self._write(1, data + b"\n" if newline else data, self._printing)
        if self.stdout_is_open:
            self._writing, self._unconfirmed = 0, number

    def complain(self, text: str) -> None:
        """One line to stderr."""
        poller = select.poll()
        poller.register(self._signal_pipe, select.POLLIN)
        poller.register(2, select.POLLOUT)
        self._write(2, f"scripted: {text}\n".encode("utf-8", "backslashreplace"), poller)

    def pump(self, timeout_s: float | None) -> None:
        """Take in what stdin and signals have; wait up to `timeout_s` (None: for ever) for the first news."""
        if timeout_s != 0:
            self.confirm()
        self._poll(self._quiet, None if timeout_s is None else max(0.0, timeout_s))

    def confirm(self) -> None:
        """Record that the last line was written whole."""
        if self._unconfirmed:
            self._truth.record("written", {"of": self._unconfirmed})
            self._unconfirmed = 0

    def close_stdout(self) -> None:
        """Give up the pipe; the process lives on with nowhere to print."""
        if self.stdout_is_open:
            self._stdout_lost()
            self._truth.record("stdout_closed")
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)  # closes the pipe and keeps the number taken: nothing else becomes stdout
            os.close(nowhere)

    def record_exit(self, code: int) -> None:
        fields: dict[str, object] = {"code": code}
        if self._writing:
            fields["unfinished"] = self._writing
        self._truth.record("exit", fields)

    def _stdout_lost(self) -> None:
        self.stdout_is_open = False
        self._printing.unregister(1)

    def _write(self, descriptor: int, data: bytes, poller: select.poll) -> None:
        rest = memoryview(data)
        while rest:
            if not self._poll(poller, None, descriptor):
                continue
            try:
                rest = rest[os.write(descriptor, rest[:_PIECE_BYTES]) :]
            except BrokenPipeError:
                if descriptor == 1:
                    self._stdout_lost()
                    self._truth.record("stdout_broken", {"unfinished": self._writing})
                return

    def _poll(self, poller: select.poll, timeout_s: float | None, writing: int = -1) -> bool:
        """One poll; True if `writing` may be written to."""
        self._watch_stdin(self.stdin_is_open and len(self.inbox) < INBOX_MESSAGES_MAX)
        may_write = False
        for descriptor, _events in poller.poll(None if timeout_s is None else timeout_s * 1000):
            if descriptor == self._signal_pipe:
                for number in os.read(self._signal_pipe, 64):
                    self._on_signal(signal.Signals(number).name)
            elif descriptor == writing:
                may_write = True
            else:
                self._read_stdin()
        return may_write

    def _watch_stdin(self, wanted: bool) -> None:
        if wanted != self._stdin_is_watched:
            self._stdin_is_watched = wanted
            for poller in (self._quiet, self._printing):
                if wanted:
                    poller.register(0, select.POLLIN)
                else:
                    poller.unregister(0)

    def _read_stdin(self) -> None:
        try:
            data = os.read(0, _READ_BYTES)
        except OSError:  # a terminal that hung up
            data = b""
        if not data:
            if self._buffer:
                self._take_line(bytes(self._buffer))
                self._buffer.clear()
            self.stdin_is_open = False
            self._truth.record("stdin_eof")
            return
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._buffer += line
            if not self._line_is_too_long:
                self._take_line(bytes(self._buffer))
            self._line_is_too_long = False
            self._buffer.clear()
        if not self._line_is_too_long:
            self._buffer += rest
        if len(self._buffer) > STDIN_LINE_BYTES_MAX:
            self._reject(bytes(self._buffer), f"longer than {STDIN_LINE_BYTES_MAX} bytes")
            self._line_is_too_long = True
            self._buffer.clear()

    def _take_line(self, raw: bytes) -> None:
        if not raw.strip():
            return
        try:
            message = parse_message(raw)
        except BadLineError as bad:
            self._reject(raw, str(bad))
            return
        self._truth.stdin(raw, None)
        self.inbox.append(message)

    def _reject(self, raw: bytes, problem: str) -> None:
        self._truth.stdin(raw, problem)
        # Not through `complain`: this may already be inside a write.
        try:
            os.write(2, f"scripted: stdin line ignored: {problem}\n".encode("utf-8", "backslashreplace")[:_PIECE_BYTES])
        except BrokenPipeError:
            pass


def _noted(_number: int, _frame: object) -> None:
    """The signal's number is already in the signal pipe; the poll takes it from there."""
