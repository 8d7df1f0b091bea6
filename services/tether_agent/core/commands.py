"""One start command, from its delivery to the collector's receipt.

    log ──claimed──────────────────────────────────────────────▶ settled(claimed)
     │└──never_started──▶ tell ─────────────────────────────────▶ settled(gave_up)
     │empty
    owner ──not named──────────────────────────────────────────▶ settled(stale)
     │└──named in stopping──▶ give_up(quiet)
     │named in starting
    sandbox ──not now──▶ later            ──cannot be──▶ give_up
     │ready (record bumped by compare-and-set)
    ask ──accepted | delivered | settled───────────────────────▶ settled(receipt)
      │ ──no reply | unknown | rejected, retryable──▶ later
      └──rejected for good──▶ give_up ──claim in the log───────▶ settled(claimed)
                                │stored
                               tell ───────────────────────────▶ settled(gave_up)

One effect at a time; its result is the next input. Later gives the command back to the queue, and the next delivery
begins at the top, with the same control id: whatever was done before is found in the log, the owner record or the
collector's journal. Hence the log is read first: a crash between `execution.ended{never_started}` and
`response.failed` finds the owner idle by then, and still has to tell the failure.

A start is never given up for lack of an answer: the collector may have it. What gives up is a final word (of the
provider or the collector), and even then the log decides: `execution.ended{never_started}` is stored at base 0, where
the claim would be, so exactly one of the two is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from tether.control import ControlReply, StartCommand
from tether.errors import Code, Problem, problem
from tether.limits import NAK_DELAY_MAX_S, NAK_DELAY_MIN_S
from tether.owner import OwnerRecord

SOON_S: Final = 0.5  # a start that meets a drain: tried again so often until the sandbox can be woken
RESTART_LOOK_S: Final = 1.0  # a collector that was killed is up again within about so long, however often it was asked

Phase = Literal["log", "owner", "sandbox", "ask", "give_up", "tell", "over"]
Result = Literal["receipt", "claimed", "stale", "gave_up"]


@dataclass(frozen=True, slots=True)
class Drive:
    """Where a command stands in this delivery (`deliveries` counts from 1). `quiet`: nothing is told on `_`, since
    whoever takes the conversation over says so."""

    command: StartCommand
    deliveries: int
    phase: Phase = "log"
    failure: Problem | None = None
    quiet: bool = False


# --- inputs ---


@dataclass(frozen=True, slots=True)
class LogSeen:
    """The execution's subject, read from the leader. `failure` of a `never_started`, as it was stored."""

    state: Literal["empty", "claimed", "never_started"]
    failure: Problem | None = None


@dataclass(frozen=True, slots=True)
class OwnerSeen:
    record: OwnerRecord | None
    revision: int


@dataclass(frozen=True, slots=True)
class SandboxReady:
    """The collector is registered, the record bumped: its revision is the authority. `command` as it is forwarded."""

    revision: int
    command: StartCommand


@dataclass(frozen=True, slots=True)
class NotNow:
    """The bus or the sandbox: to be tried again. `soon`: something ends that is not worth a long pause."""

    reason: str
    soon: bool = False


@dataclass(frozen=True, slots=True)
class SandboxImpossible:
    failure: Problem


@dataclass(frozen=True, slots=True)
class Answered:
    reply: ControlReply


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No reply: the collector may have it or not."""


@dataclass(frozen=True, slots=True)
class Told:
    """`response.failed` is on `_`."""


CommandInput = LogSeen | OwnerSeen | SandboxReady | NotNow | SandboxImpossible | Answered | Unanswered | Told

# --- effects ---


@dataclass(frozen=True, slots=True)
class ReadLog:
    pass


@dataclass(frozen=True, slots=True)
class ReadOwner:
    pass


@dataclass(frozen=True, slots=True)
class EnsureSandbox:
    pass


@dataclass(frozen=True, slots=True)
class Ask:
    """Send `start` with this authority (the sandbox record's revision)."""

    revision: int
    command: StartCommand


@dataclass(frozen=True, slots=True)
class StoreNeverStarted:
    """Append the end at base 0; answered by LogSeen of what is there then."""

    failure: Problem


@dataclass(frozen=True, slots=True)
class TellFailure:
    failure: Problem


@dataclass(frozen=True, slots=True)
class Settle:
    """Ack the command."""

    result: Result
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Later:
    """Give the command back for `delay_s` seconds."""

    delay_s: float
    reason: str


Effect = ReadLog | ReadOwner | EnsureSandbox | Ask | StoreNeverStarted | TellFailure | Settle | Later


def begin(command: StartCommand, deliveries: int) -> tuple[Drive, Effect]:
    """A delivery begins by reading the log."""
    return Drive(command, max(1, deliveries)), ReadLog()


def step(drive: Drive, event: CommandInput) -> tuple[Drive, Effect]:
    """The next effect. Pure."""
    match event:
        case LogSeen():
            return _log(drive, event)
        case OwnerSeen():
            return _owner(drive, event)
        case SandboxReady():
            return replace(drive, phase="ask"), Ask(event.revision, event.command)
        case SandboxImpossible():
            return _give_up(drive, event.failure)
        case NotNow():
            return _later(drive, event.reason, soon=event.soon)
        case Answered():
            return _answered(drive, event.reply)
        case Unanswered():
            return _later(drive, "the collector did not answer", at_most_s=RESTART_LOOK_S)
        case Told():
            return _settle(drive, "gave_up", drive.failure.detail if drive.failure else "")
        case _:
            assert_never(event)


def _log(drive: Drive, event: LogSeen) -> tuple[Drive, Effect]:
    match event.state:
        case "claimed":
            return _settle(drive, "claimed")
        case "never_started":
            failure = event.failure or drive.failure or _unknown_failure()
            if drive.quiet:
                return _settle(drive, "gave_up", failure.detail)
            return replace(drive, phase="tell", failure=failure), TellFailure(failure)
        case "empty":
            if drive.phase == "give_up":
                return _later(drive, "the end could not be stored")
            return replace(drive, phase="owner"), ReadOwner()
        case _:
            assert_never(event.state)


def _owner(drive: Drive, event: OwnerSeen) -> tuple[Drive, Effect]:
    record, wanted = event.record, drive.command.target
    if record is None or record.state == "idle" or record.target is None:
        return _settle(drive, "stale", "the conversation is idle")
    if record.target.execution != wanted.execution or record.target.execution_generation != wanted.execution_generation:
        return _settle(drive, "stale", "the owner record names another execution")
    if event.revision < drive.command.owner_revision:
        return _later(drive, "the owner record is older than the command")
    match record.state:
        case "starting":
            return replace(drive, phase="sandbox"), EnsureSandbox()
        case "stopping":
            # A takeover of an execution that has not begun: storing its end where the claim would be is the proof
            # that the takeover waits for. The router says what became of the response.
            failure = problem(Code.REQUEST_SUPERSEDED, "taken over before it started")
            return _give_up(replace(drive, quiet=True), failure)
        case "running" | "exiting":
            return _settle(drive, "claimed", f"the conversation is {record.state}")
        case _:
            assert_never(record.state)


def _answered(drive: Drive, reply: ControlReply) -> tuple[Drive, Effect]:
    match reply.status:
        case "accepted" | "delivered" | "settled":
            return _settle(drive, "receipt", reply.status)
        case "unknown":
            return _later(drive, "the collector does not know yet")
        case "rejected":
            failure = reply.problem or problem(Code.INVALID, "the collector refused the start without a reason")
            if failure.retryable:
                soon = failure.code is Code.DRAINING
                return _later(drive, f"{failure.code.value}: {failure.detail}", soon=soon)
            return _give_up(drive, failure)
        case _:
            assert_never(reply.status)


def _give_up(drive: Drive, failure: Problem) -> tuple[Drive, Effect]:
    return replace(drive, phase="give_up", failure=failure), StoreNeverStarted(failure)


def _settle(drive: Drive, result: Result, detail: str = "") -> tuple[Drive, Effect]:
    return replace(drive, phase="over"), Settle(result, detail)


def _later(
    drive: Drive, reason: str, *, soon: bool = False, at_most_s: float = NAK_DELAY_MAX_S
) -> tuple[Drive, Effect]:
    delay_s = SOON_S if soon else min(at_most_s, back_off_s(drive.deliveries))
    return replace(drive, phase="over"), Later(delay_s, reason)


def _unknown_failure() -> Problem:
    return problem(Code.RUNTIME_UNAVAILABLE, "the execution was never started")


def back_off_s(deliveries: int) -> float:
    """Doubling from NAK_DELAY_MIN_S to NAK_DELAY_MAX_S."""
    exponent = min(max(0, deliveries - 1), 16)
    return min(NAK_DELAY_MAX_S, NAK_DELAY_MIN_S * float(2**exponent))
