"""Inputs and effects of an admission: what the machine learns, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass

from tether.checkpoint import CheckpointReference
from tether.control import ControlReply, ControlRequest, StartCommand
from tether.errors import Problem
from tether.events import ConversationEvent
from tether.ids import ExecutionTarget
from tether.limits import CONTROL_REPLY_S
from tether.owner import OwnerRecord
from tether.prompt import RequestRecord
from tether_router.core.facts import ConversationView, ExecutionFacts, Position

# --- inputs ---


@dataclass(frozen=True, slots=True)
class Begin:
    """A delivery of the prompt."""


@dataclass(frozen=True, slots=True)
class OldestRead:
    """The oldest stored prompt of the subject, from the stream's leader; None where the subject is empty."""

    sequence: int | None


@dataclass(frozen=True, slots=True)
class RequestRead:
    """`tether_requests`; revision 0 where there is no record. Also after a lost compare-and-set."""

    record: RequestRecord | None
    revision: int


@dataclass(frozen=True, slots=True)
class RequestWritten:
    revision: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The workspace that `tether_conversations` has for the conversation, now or since long."""

    workspace: str


@dataclass(frozen=True, slots=True)
class Observation:
    """The owner record and what the log says by now.

    `facts`: of the execution that owns the conversation. `marked`: of the one into which this prompt was sent.
    `own`: of the execution that this request's attempt would be or is, where the record does not name it.
    """

    record: OwnerRecord
    revision: int
    view: ConversationView
    facts: ExecutionFacts | None
    marked: ExecutionFacts | None
    own: ExecutionFacts | None


@dataclass(frozen=True, slots=True)
class OwnerWritten:
    revision: int


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """Compare-and-set on the owner record lost."""


@dataclass(frozen=True, slots=True)
class EventStored:
    position: Position


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A later generation stands on `_`: the record that this admission goes by is not the newest. Nothing written."""


@dataclass(frozen=True, slots=True)
class CommandStored:
    """The command's own ack was seen."""


@dataclass(frozen=True, slots=True)
class ControlAnswered:
    """None: no answer, or none that can be read as one."""

    reply: ControlReply | None


@dataclass(frozen=True, slots=True)
class LaterRead:
    """The request whose takeover waits behind this prompt, the last of them; None where there is none."""

    by: str | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Whom a stop would go to: `target` as it is registered now, or why there is nobody."""

    target: ExecutionTarget
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class OriginRead:
    """What an execution would begin from: the workspace's checkpoint reference with its revision (None, 0 where there
    is none), and the log's last sequence (0 where nobody asked for it)."""

    reference: CheckpointReference | None
    revision: int
    log_end: int


@dataclass(frozen=True, slots=True)
class PlaceTaken:
    """Whether the conversation has a place for a running execution; `full` says whose limit is used up where not."""

    full: str | None = None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The bus could not do an effect, or what it did is not known."""

    reason: str


Input = (
    Begin
    | OldestRead
    | RequestRead
    | RequestWritten
    | Bound
    | Observation
    | OwnerWritten
    | OwnerLost
    | EventStored
    | Overtaken
    | CommandStored
    | ControlAnswered
    | LaterRead
    | Resolved
    | OriginRead
    | PlaceTaken
    | Unreachable
)

# --- effects; each but the last two answers with one of the inputs above ---


@dataclass(frozen=True, slots=True)
class ReadOldest:
    subject: str


@dataclass(frozen=True, slots=True)
class ReadRequest:
    key: str


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Compare-and-set; revision 0 creates."""

    key: str
    record: RequestRecord
    revision: int
    op: str


@dataclass(frozen=True, slots=True)
class Bind:
    """Create-only: the conversation's workspace, or which one it has."""

    key: str
    workspace: str


@dataclass(frozen=True, slots=True)
class Observe:
    """Read the owner record, then the log."""

    key: str
    own_execution: str
    marked: str | None


@dataclass(frozen=True, slots=True)
class ReadOrigin:
    """Read the reference under `key`, and with `cut` the log's end."""

    key: str
    tenant: str
    cut: bool


@dataclass(frozen=True, slots=True)
class TakePlace:
    """A place for this execution, where the tenant's or the set's running executions are limited."""

    execution: str


@dataclass(frozen=True, slots=True)
class WriteOwner:
    """Compare-and-set; revision 0 creates."""

    key: str
    record: OwnerRecord
    revision: int
    op: str


@dataclass(frozen=True, slots=True)
class AppendEvent:
    """One event on `_`, by compare-and-set from sequence `base`. `known`: where its id was found up to there; then
    nothing is written."""

    event: ConversationEvent
    base: int
    known: Position | None = None


@dataclass(frozen=True, slots=True)
class PublishCommand:
    command: StartCommand


@dataclass(frozen=True, slots=True)
class SendControl:
    """`timeout_s`: how long a reply is waited for."""

    request: ControlRequest
    timeout_s: float = CONTROL_REPLY_S


@dataclass(frozen=True, slots=True)
class AskReceipt:
    request: ControlRequest


@dataclass(frozen=True, slots=True)
class ReadLater:
    """Look for prompts stored after `sequence` that ask for a takeover and can have one."""

    subject: str
    sequence: int
    request: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """Find the collector that has the target and can stop exactly it. `claimed`: a process of it is or was there;
    else nobody need be registered yet."""

    target: ExecutionTarget
    claimed: bool


@dataclass(frozen=True, slots=True)
class Ack:
    """The prompt is settled. `outcome` for whoever watches; the record of it is in `tether_requests`."""

    outcome: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: hold the prompt or give it back with a delay. `changed`: what happens in the conversation may end the
    wait early; otherwise only time helps. `behind`: an older prompt has to be settled first. `place`: an execution
    has to end first, of this tenant or of any."""

    reason: str
    changed: bool = True
    behind: bool = False
    place: bool = False


Effect = (
    ReadOldest
    | ReadRequest
    | WriteRequest
    | Bind
    | Observe
    | ReadOrigin
    | TakePlace
    | WriteOwner
    | AppendEvent
    | PublishCommand
    | SendControl
    | AskReceipt
    | ReadLater
    | Resolve
    | Ack
    | Wait
)
