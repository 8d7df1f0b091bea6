"""The owner record of a conversation: who may write, and how it passes on. One compare-and-set value per conversation.

    idle                                   → starting   Admit
    starting                               → running    Started
    starting | running                     → stopping   TakeOver
    stopping                               → stopping   TakeOver, where no prompt waits for the end any more
    stopping                               → running    StopRefused (→ starting, where nothing was claimed yet)
    stopping                               → stopping   StopUnconfirmed: no prompt waits for the end any more
    running                                → exiting    ResponseEnded
    starting | running | exiting           → idle       Ended
    stopping                               → idle       Ended with proof; `pending_request` stays until its Admit
    idle | starting | running | stopping | exiting → starting   Repair: the log names a later generation
    any state keeps its place                DeletionOrdered: no prompt is admitted any more; idle loses all it names

`decide(record, input)` is pure: Accepted(record) is written by compare-and-set before anything else happens,
Ignored means that the record says so already, Denied names why not. Generations only grow and are issued here.

A takeover leaves the execution that it stops the owner until the end of it is in the log with proof. A stop that was
refused did nothing: the execution goes on as before. One that nobody could confirm may yet take effect, so the record
stays `stopping`, with the stop's id, and whoever comes next finds out by that id what became of it.
`superseded` is the response that a takeover has cut short: from the end of its execution until the next end, so the
prompt that is admitted in between tells it, after whatever crash.

Ended executions never come back: the last `TOMBSTONES_MAX` are named here. An older one is stopped by the log
(its subject is not empty, so no claim at base 0 succeeds), which routers read before they admit.

Repair is for a bucket that lost its acked tail (power loss): conversation-level events carry the generation that
their writer saw, so a router notices. The log's newest `response.created` names the owner again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field

from tether.ids import ExecutionTarget, Token
from tether.limits import KIB

OwnerState = Literal["idle", "starting", "running", "stopping", "exiting"]
# Of an execution that a takeover stops: these the response had of itself, so nothing was taken from it.
OWN_OUTCOMES: Final = frozenset({"completed", "failed", "drained", "lost"})
TOMBSTONES_MAX = 16  # ended executions that the record still names
RECORD_BYTES_MAX = 64 * KIB


class Tombstone(BaseModel):
    """An execution that has ended; nothing revives it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    execution: str
    outcome: str
    at: int


class Superseded(BaseModel):
    """A response that a takeover has cut short; `attempt` is its request's."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    request: str
    response: str
    attempt: int = 1


class OwnerRecord(BaseModel):
    """`tether_owners/{tenant}.{workspace}.{conversation}`. `op` is the operation id that wrote it.

    `target` names the execution that owns the conversation in every state but idle. `prompt_sequence` and
    `prompt_stored_at_ns` identify the prompt that it answers, `request` and `attempt` likewise.
    `log_base` is the last sequence of the conversation's `_` subject before that admission: what the admission, and
    interjections into it, wrote there comes after it, so a continuing router searches no further back.
    `native_session`, `native_agent`, `native_cli_version`: the last session that can be resumed, and of what. Nothing
    clears it; another one takes its place once it is bound. `fallback`: the owner's execution may go on from the
    history where that session does not exist; `history_cut` is the log's last sequence that such a history may tell.
    `cut`: a drain or a takeover has cut a turn that is in no session which can be resumed, until one is bound or the
    user begins a fresh one.
    `checkpoint_revision`: of the newest reference that a generation of this conversation went on from, which was
    `checkpoint_generation`.
    `deletion`: the operation that deletes the conversation; nothing is admitted to it any more.
    `stop_control` stops the target while `stopping`; `stopping_since` (unix ms) is when that was decided, and
    `pending_request` which prompt waits for its end.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Literal[1] = 1
    op: str = ""
    state: OwnerState = "idle"
    generation: int = 0
    target: ExecutionTarget | None = None
    request: str | None = None
    attempt: int = 1
    prompt_sequence: int = 0
    prompt_stored_at_ns: int = 0
    log_base: int = 0
    agent: dict[str, Any] = Field(default_factory=dict)
    pending_request: str | None = None
    stop_control: str | None = None
    stopping_since: int = 0
    superseded: Superseded | None = None
    native_session: str | None = None
    native_agent: str | None = None
    native_cli_version: str | None = None
    fallback: bool = False
    cut: bool = False
    history_cut: int = 0
    checkpoint_revision: int = 0
    checkpoint_generation: int = 0
    tombstones: tuple[Tombstone, ...] = ()
    deletion: str | None = None
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})

    def buried(self, execution: str) -> bool:
        """The record says that this execution has ended."""
        return any(stone.execution == execution for stone in self.tombstones)

    @property
    def begins_cut(self) -> bool:
        """The owner's execution has no session to resume, and what was cut before it is in none: unless the user chose,
        only the history can tell it. `fallback` says whether that may stand in."""
        return self.cut and self.target is not None and self.target.native_session is None


@dataclass(frozen=True, slots=True)
class Admit:
    """A prompt takes the conversation. `response`, `execution`, `sandbox`: derived ids.

    `resume`: the user chose to go on without the conversation's native session. `history_fallback`: when an execution
    may fall back to the history. `history_cut`: the log's last sequence now. `checkpoint_revision`: of the reference
    that this generation may go on from, 0 where there is none; an older one than the record's counts as none.
    """

    tenant: Token
    workspace: Token
    conversation: Token
    request: str
    attempt: int
    response: str
    execution: str
    sandbox: str
    prompt_sequence: int
    prompt_stored_at_ns: int
    agent: dict[str, Any]
    at: int
    log_base: int = 0
    resume: Literal["fresh", "history"] | None = None
    history_fallback: Literal["takeover", "always", "never"] = "takeover"
    history_cut: int = 0
    checkpoint_revision: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """`execution.started` was read in the log. Again with a higher process generation after a fallback."""

    execution: str
    boot: str
    process_generation: int
    at: int


@dataclass(frozen=True, slots=True)
class SessionBound:
    """`session.bound` was read in the log. Only a `resumable` session is one that a later prompt may resume."""

    execution: str
    native_session: str
    agent: str
    resumable: bool = True
    cli_version: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    """`response.ended` was read in the log."""

    execution: str
    at: int


@dataclass(frozen=True, slots=True)
class Ended:
    """`execution.ended` was read in the log. `proved`: it carries a proof."""

    execution: str
    outcome: str
    proved: bool
    at: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A prompt wants the conversation from the execution that has it; `stop_control` will stop exactly that one."""

    execution: str
    stop_control: str
    pending_request: str
    at: int


@dataclass(frozen=True, slots=True)
class StopRefused:
    """The stop was refused, or never arrived: it has done nothing, and will do nothing from now on."""

    stop_control: str
    at: int


@dataclass(frozen=True, slots=True)
class StopUnconfirmed:
    """The prompt that wanted the takeover waits no more; what became of the stop is not known."""

    stop_control: str
    at: int


@dataclass(frozen=True, slots=True)
class Repair:
    """The log carries `generation`, later than the record's. `target`: the execution that its newest
    `response.created` names, where one is later than the record; `request` and `attempt` are that response's."""

    generation: int
    target: ExecutionTarget | None
    request: str | None
    attempt: int
    at: int


@dataclass(frozen=True, slots=True)
class DeletionOrdered:
    """The conversation is to be deleted. Unless `force`, only where it is idle."""

    deletion: str
    force: bool
    at: int


OwnerInput = (
    Admit
    | Started
    | SessionBound
    | ResponseEnded
    | Ended
    | TakeOver
    | StopRefused
    | StopUnconfirmed
    | Repair
    | DeletionOrdered
)


@dataclass(frozen=True, slots=True)
class Accepted:
    record: OwnerRecord


@dataclass(frozen=True, slots=True)
class Ignored:
    """The record says so already, or the input is of an execution that is not the owner's."""


@dataclass(frozen=True, slots=True)
class Denied:
    reason: str


Decision = Accepted | Ignored | Denied


def decide(record: OwnerRecord, event: OwnerInput) -> Decision:
    """What the record becomes. Pure."""
    match event:
        case Admit():
            return _admit(record, event)
        case Started():
            return _started(record, event)
        case SessionBound():
            return _bound(record, event)
        case ResponseEnded():
            if not _owns(record, event.execution) or record.state != "running":
                return Ignored()
            return Accepted(record.model_copy(update={"state": "exiting", "updated_at": event.at}))
        case Ended():
            return _ended(record, event)
        case TakeOver():
            return _take_over(record, event)
        case StopRefused():
            return _stop_refused(record, event)
        case StopUnconfirmed():
            if record.state != "stopping" or record.stop_control != event.stop_control:
                return Ignored()
            if record.pending_request is None:
                return Ignored()
            return Accepted(record.model_copy(update={"pending_request": None, "updated_at": event.at}))
        case Repair():
            return _repair(record, event)
        case DeletionOrdered():
            return _deletion_ordered(record, event)
        case _:
            assert_never(event)


def _owns(record: OwnerRecord, execution: str) -> bool:
    return record.state != "idle" and record.target is not None and record.target.execution == execution


def _admit(record: OwnerRecord, event: Admit) -> Decision:
    if record.request == event.request and record.attempt == event.attempt and record.state != "idle":
        return Ignored()  # a replayed admission
    if record.buried(event.execution):
        return Denied("the execution of this attempt has ended")
    if record.deletion is not None:
        return Denied("the conversation is deleted")
    if record.state != "idle":
        return Denied(f"the conversation is {record.state}")
    generation = record.generation + 1
    takes_over = record.pending_request is not None or record.superseded is not None or record.cut
    goes_on = event.checkpoint_revision > record.checkpoint_revision
    resumes = event.resume is None and record.native_agent == event.agent.get("kind")
    target = ExecutionTarget(
        tenant=event.tenant,
        workspace=event.workspace,
        conversation=event.conversation,
        response=event.response,
        response_generation=generation,
        execution=event.execution,
        execution_generation=generation,
        sandbox=event.sandbox,
        native_session=record.native_session if resumes else None,
    )
    cut = record.cut and event.resume != "fresh"
    return Accepted(
        record.model_copy(
            update={
                "state": "starting",
                "generation": generation,
                "target": target,
                "request": event.request,
                "attempt": event.attempt,
                "prompt_sequence": event.prompt_sequence,
                "prompt_stored_at_ns": event.prompt_stored_at_ns,
                "log_base": event.log_base,
                "agent": event.agent,
                "pending_request": None,
                "fallback": event.history_fallback == "always" or (event.history_fallback == "takeover" and takes_over),
                "cut": cut,
                "history_cut": event.history_cut,
                "checkpoint_revision": event.checkpoint_revision if goes_on else record.checkpoint_revision,
                "checkpoint_generation": generation if goes_on else record.checkpoint_generation,
                "updated_at": event.at,
            }
        )
    )


def _started(record: OwnerRecord, event: Started) -> Decision:
    if not _owns(record, event.execution) or record.target is None:
        return Ignored()
    if event.process_generation < record.target.process_generation:
        return Ignored()  # generations only grow
    learned: dict[str, Any] = {"boot": event.boot, "process_generation": event.process_generation}
    if 0 < record.target.process_generation < event.process_generation:
        learned["native_session"] = None  # the next process has one of its own, which it tells
    target = record.target.model_copy(update=learned)
    if record.state == "starting":
        return Accepted(record.model_copy(update={"state": "running", "target": target, "updated_at": event.at}))
    if record.target != target:  # stopping before it was seen to start: the identity is still worth knowing
        return Accepted(record.model_copy(update={"target": target, "updated_at": event.at}))
    return Ignored()


def _bound(record: OwnerRecord, event: SessionBound) -> Decision:
    if not _owns(record, event.execution) or record.target is None:
        return Ignored()
    update: dict[str, Any] = {"target": record.target.model_copy(update={"native_session": event.native_session})}
    if event.resumable:
        update |= {"native_session": event.native_session, "native_agent": event.agent, "cut": False}
        version = event.cli_version or (record.native_cli_version if record.native_agent == event.agent else None)
        update["native_cli_version"] = version
    changed = record.model_copy(update=update)
    return Ignored() if changed == record else Accepted(changed)


def _bury(record: OwnerRecord, execution: str, outcome: str, at: int) -> tuple[Tombstone, ...]:
    return (*record.tombstones, Tombstone(execution=execution, outcome=outcome, at=at))[-TOMBSTONES_MAX:]


def _ended(record: OwnerRecord, event: Ended) -> Decision:
    if not _owns(record, event.execution):
        return Ignored()
    if record.state == "stopping" and not event.proved:
        return Denied("the end carries no proof, and a takeover waits for it")
    superseded = None
    if record.state == "stopping" and event.outcome not in OWN_OUTCOMES and record.request is not None:
        assert record.target is not None
        superseded = Superseded(request=record.request, response=record.target.response, attempt=record.attempt)
    session = None if record.target is None else record.target.native_session
    kept = session is not None and session == record.native_session
    cut = not kept and (superseded is not None or event.outcome == "drained")
    return Accepted(
        record.model_copy(
            update={
                "state": "idle",
                "target": None,
                "request": None,
                "stop_control": None,
                "stopping_since": 0,
                "superseded": superseded,
                "cut": record.cut or cut,
                "tombstones": _bury(record, event.execution, event.outcome, event.at),
                "updated_at": event.at,
            }
        )
    )


def _take_over(record: OwnerRecord, event: TakeOver) -> Decision:
    if not _owns(record, event.execution) or record.state == "exiting":
        return Denied(f"the conversation is {record.state}")
    if record.state == "stopping" and record.pending_request is not None:
        same = (record.stop_control, record.pending_request) == (event.stop_control, event.pending_request)
        return Ignored() if same else Denied("another takeover is under way")
    return Accepted(
        record.model_copy(
            update={
                "state": "stopping",
                "stop_control": event.stop_control,
                "stopping_since": event.at,
                "pending_request": event.pending_request,
                "updated_at": event.at,
            }
        )
    )


def _stop_refused(record: OwnerRecord, event: StopRefused) -> Decision:
    if record.state != "stopping" or record.stop_control != event.stop_control or record.target is None:
        return Ignored()
    return Accepted(
        record.model_copy(
            update={
                "state": "running" if record.target.boot else "starting",
                "stop_control": None,
                "stopping_since": 0,
                "pending_request": None,
                "updated_at": event.at,
            }
        )
    )


def _repair(record: OwnerRecord, event: Repair) -> Decision:
    if event.generation <= record.generation:
        return Ignored()
    update: dict[str, Any] = {"generation": event.generation, "updated_at": event.at}
    target = event.target
    if target is not None and record.generation < target.execution_generation and not record.buried(target.execution):
        if record.target is not None and record.target.execution == target.execution:
            known = ("boot", "process_generation", "native_session")  # of its process: nothing of that goes back
            return Accepted(
                record.model_copy(
                    update=update
                    | {"target": target.model_copy(update={name: getattr(record.target, name) for name in known})}
                )
            )
        # An admission needs an idle record: whoever owned at the older generation had ended by then.
        if record.target is not None:
            update["tombstones"] = _bury(record, record.target.execution, "unknown", event.at)
        update |= {
            "state": "starting",
            "target": target,
            "request": event.request,
            "attempt": event.attempt,
            "pending_request": None,
            "stop_control": None,
            "stopping_since": 0,
            "superseded": None,
        }
    return Accepted(record.model_copy(update=update))


def _deletion_ordered(record: OwnerRecord, event: DeletionOrdered) -> Decision:
    if record.state != "idle":
        if not event.force:
            return Denied(f"the conversation is {record.state}")
        if record.deletion == event.deletion:
            return Ignored()
        return Accepted(record.model_copy(update={"deletion": event.deletion, "updated_at": event.at}))
    # What remains refuses prompts, and names what has ended and the session that is to be deleted.
    bare = OwnerRecord(
        generation=record.generation,
        tombstones=record.tombstones,
        native_session=record.native_session,
        prompt_sequence=record.prompt_sequence,
        prompt_stored_at_ns=record.prompt_stored_at_ns,
        log_base=record.log_base,
        deletion=event.deletion,
        updated_at=event.at,
    )
    same = bare.model_copy(update={"updated_at": record.updated_at, "op": record.op}) == record
    return Ignored() if same else Accepted(bare)
