"""What drives an execution: every input is a spool record first, so replaying the spool rebuilds everything.

`from_record`-like conversion is the shell's; here are the values. Times are unix milliseconds, taken from the record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Stream = Literal["stdout", "stderr"]


# A flood makes one of these a line: a named tuple, which is made in a third of a frozen dataclass's time.


class OutputLine(NamedTuple):
    """One whole line of the CLI, without its newline. `bytes_total` > len(data) where the line was cut at its limit.
    `complete` is False for a last line without a newline."""

    at: int
    stream: Stream
    data: bytes
    bytes_total: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StdinLine:
    """A write to the CLI's stdin is about to happen; recorded before it does. `control` caused it."""

    at: int
    control: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StdinDone:
    """What became of the write: all of it, a part, or stdin was closed."""

    at: int
    control: str
    result: Literal["written", "partial", "closed"]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The CLI (and whoever inherited it) closed a stream. No end: the process may live on. `stdin`: the keeper's end
    is closed, nothing more can be written."""

    at: int
    stream: Literal["stdout", "stderr", "stdin"]


@dataclass(frozen=True, slots=True)
class Exited:
    """The CLI's process was reaped: `rc` as Popen gives it (a signal is negative)."""

    at: int
    rc: int


@dataclass(frozen=True, slots=True)
class Proved:
    """Nothing of the process is left, known by `method` (events.Proof)."""

    at: int
    method: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Timer:
    """A deadline that the machine wanted has passed. `name` as in the `Deadline` that asked for it."""

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the collector decided or learnt, as data: `kind` is one of

    * `adapter`  {name, version}                         the adapter that reads what follows
    * `control`  {control, verb, payload}                a control was accepted (journaled before)
    * `gap`      {from?, to?, reason, detail?}           inputs or events were lost
    * `spawn_failed` {detail, errno?}                    exec failed: no process ever ran
    * `process`  {process, why, session, resume, instance, history?, recovered?}   how the next process is launched
    * `offers`   {offers}                                what an earlier process of the session left unapplied
    * `process_refused` {code, detail}                   there is no next process
    """

    at: int
    kind: str
    body: dict[str, Any] = field(default_factory=dict)


Input = OutputLine | StdinLine | StdinDone | StreamClosed | Exited | Proved | Timer | Note


class Draft(NamedTuple):
    """An event without ordinal and time: the execution gives both. `body` as `tether.events.BODIES[type]`."""

    type: str
    body: dict[str, Any]


# --- what the machine wants of its shell: level-triggered, so a restarted shell simply looks again ---


@dataclass(frozen=True, slots=True)
class WriteStdin:
    """Write `data` under `control`; the keeper ignores a control id that it knows."""

    control: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CloseStdin:
    pass


@dataclass(frozen=True, slots=True)
class SendSignal:
    """A signal to the CLI (not a proof of anything), once per `control`: a stop's id, or `watchdog`. A shell that was
    restarted sends it again, which changes nothing."""

    control: str
    name: Literal["SIGTERM", "SIGINT"]


@dataclass(frozen=True, slots=True)
class KillAll:
    """SIGKILL everything of this process: namespace, cgroup or sweep."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Record a `Timer(name)` once the clock reaches `at` (unix ms), unless the want is gone by then."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class NextProcess:
    """Prepare the process generation `process` and note it, not before `not_before` (unix ms). `why`: the same session
    once `again`, or the conversation's `history` in a session of its own. Wanted of the shell, not of the keeper."""

    process: int
    why: Literal["again", "history"]
    not_before: int


Want = WriteStdin | CloseStdin | SendSignal | KillAll | Deadline
