"""The owner record of a conversation: who may write, and how it passes on. One compare-and-set value per conversation.

    idle                        → starting   Admit
    starting                    → running    Started
    starting                    → idle       Ended(never_started)
    starting | running          → stopping   TakeOver
    running                     → exiting    ResponseEnded
    starting | running | exiting → idle      Ended, nothing pending
    stopping | exiting          → starting   Ended with proof, pending prompt   (Admit of the pending one)

`decide(record, input)` is pure: Accepted(record) is written by compare-and-set before anything else happens,
Ignored means that the record says so already, Denied names why not. Generations only grow and are issued here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field

from tether.ids import ExecutionTarget, Token
from tether.limits import KIB

OwnerState = Literal["idle", "starting", "running", "stopping", "exiting"]
TOMBSTONES_MAX = 16  # ended executions that the record still names
RECORD_BYTES_MAX = 64 * KIB


class Tombstone(BaseModel):
    """An execution that has ended; nothing revives it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    execution: str
    outcome: str
    at: int


class OwnerRecord(BaseModel):
    """`tether_owners/{tenant}.{workspace}.{conversation}`. `op` is the operation id that wrote it.

    `target` names the execution that owns the conversation in every state but idle. `prompt_sequence` and
    `prompt_stored_at_ns` identify the prompt that it answers, `request` and `attempt` likewise.
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
    agent: dict[str, Any] = Field(default_factory=dict)
    pending_request: str | None = None
    stop_control: str | None = None
    native_session: str | None = None
    native_agent: str | None = None
    checkpoint_revision: int = 0
    tombstones: tuple[Tombstone, ...] = ()
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})


@dataclass(frozen=True, slots=True)
class Admit:
    """A prompt takes the conversation. `response`, `execution`, `sandbox`: derived ids."""

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


@dataclass(frozen=True, slots=True)
class Started:
    """`execution.started` was read in the log."""

    execution: str
    boot: str
    process_generation: int
    at: int


@dataclass(frozen=True, slots=True)
class SessionBound:
    """`session.bound` was read in the log."""

    execution: str
    native_session: str
    agent: str


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


OwnerInput = Admit | Started | SessionBound | ResponseEnded | Ended | TakeOver


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
            if not _owns(record, event.execution) or record.state not in ("starting", "running"):
                return Ignored()
            return Accepted(record.model_copy(update={"state": "exiting", "updated_at": event.at}))
        case Ended():
            return _ended(record, event)
        case TakeOver():
            return _take_over(record, event)
        case _:
            assert_never(event)


def _owns(record: OwnerRecord, execution: str) -> bool:
    return record.state != "idle" and record.target is not None and record.target.execution == execution


def _admit(record: OwnerRecord, event: Admit) -> Decision:
    if record.request == event.request and record.attempt == event.attempt and record.state != "idle":
        return Ignored()  # a replayed admission
    if any(stone.execution == event.execution for stone in record.tombstones):
        return Denied("the execution of this attempt has ended")
    if record.state != "idle":
        return Denied(f"the conversation is {record.state}")
    generation = record.generation + 1
    target = ExecutionTarget(
        tenant=event.tenant,
        workspace=event.workspace,
        conversation=event.conversation,
        response=event.response,
        response_generation=generation,
        execution=event.execution,
        execution_generation=generation,
        sandbox=event.sandbox,
        native_session=record.native_session if record.native_agent == event.agent.get("kind") else None,
    )
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
                "agent": event.agent,
                "pending_request": None,
                "stop_control": None,
                "updated_at": event.at,
            }
        )
    )


def _started(record: OwnerRecord, event: Started) -> Decision:
    if not _owns(record, event.execution) or record.target is None:
        return Ignored()
    target = record.target.model_copy(update={"boot": event.boot, "process_generation": event.process_generation})
    if record.state == "starting":
        return Accepted(record.model_copy(update={"state": "running", "target": target, "updated_at": event.at}))
    if record.target != target:  # stopping before it was seen to start: the identity is still worth knowing
        return Accepted(record.model_copy(update={"target": target, "updated_at": event.at}))
    return Ignored()


def _bound(record: OwnerRecord, event: SessionBound) -> Decision:
    if not _owns(record, event.execution) or record.target is None:
        return Ignored()
    if record.native_session == event.native_session and record.native_agent == event.agent:
        return Ignored()
    target = record.target.model_copy(update={"native_session": event.native_session})
    return Accepted(
        record.model_copy(
            update={"target": target, "native_session": event.native_session, "native_agent": event.agent}
        )
    )


def _ended(record: OwnerRecord, event: Ended) -> Decision:
    if not _owns(record, event.execution):
        return Ignored()
    if record.state == "stopping" and not event.proved:
        return Denied("the end carries no proof, and a takeover waits for it")
    stone = Tombstone(execution=event.execution, outcome=event.outcome, at=event.at)
    return Accepted(
        record.model_copy(
            update={
                "state": "idle",
                "target": None,
                "request": None,
                "stop_control": None,
                "tombstones": (*record.tombstones, stone)[-TOMBSTONES_MAX:],
                "updated_at": event.at,
            }
        )
    )


def _take_over(record: OwnerRecord, event: TakeOver) -> Decision:
    if record.state == "stopping":
        return Ignored() if record.stop_control == event.stop_control else Denied("another takeover is under way")
    if not _owns(record, event.execution) or record.state not in ("starting", "running"):
        return Denied(f"the conversation is {record.state}")
    return Accepted(
        record.model_copy(
            update={
                "state": "stopping",
                "stop_control": event.stop_control,
                "pending_request": event.pending_request,
                "updated_at": event.at,
            }
        )
    )
