"""The life cycle of a sandbox, as its record says it. One compare-and-set value per workspace.

    (none)       → provisioning   Wanted
    provisioning → active         Provisioned
    active       → active         Provisioned (other facts), Forwarded (`starts` + 1), Kept (`wanted_at`)
    active       → draining       DrainOrdered
    draining     → draining       DrainReported: progress, and the end of it that went well; Provisioned for its sake
    draining     → active         DrainReported: failed; what runs is kept, and said not to be saved
    draining     → suspended      Released, once the report is done (purpose drain, suspend)
    draining     → deleting       Released (purpose delete)
    active       → suspended      DrainedItself: its collector was told to go by the machine;
                                  ComputeEnded: it was stopped without a drain, and everything of it is told
    suspended    → resuming       Wanted, Woken
    resuming     → active         Provisioned
    resuming     → suspended      WakeFailed
    any          → deleting       DeleteOrdered; of `active` and `draining` only where no checkpoint is wanted
    deleting     → (none)         Deleted

`active` says what is wanted, not what lives: whether its compute is there is the provider's word, asked before each
start. Each forwarded start bumps `starts`, and with it the record's revision, before the start is sent, and the
revision is the authority that the collector is shown. A drain that asks for idleness first is ordered by
compare-and-set on the revision that was read before that check: a start that was forwarded in between wins. A start
that meets `draining` waits, and then resumes: Wanted on `suspended` is written by one of however many ask at once.

A report is `done` for callers once its compute is released: until then it says `running`, phase `releasing`.

An operation is known by its drain id. The same id never begins twice: it joins what it began, or is told how it ended
(`drained`, `failed`; of older ones that went well the references tell, which the caller looks at first). While one
runs, another id joins that one.

`decide(record, input)` is pure: Write(record) and Remove go by compare-and-set before anything else happens, Keep means
that the record says so already, Wait names what has to end first, Refuse what cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from tether.errors import Code, Problem, problem
from tether.sandbox import FAILED_MAX, DrainOrder, DrainReport, SandboxRecord, no_sandbox

Purpose = Literal["drain", "suspend", "delete"]
START_RETRY_S = 1.0  # told to who asks while a sandbox is being started


@dataclass(frozen=True, slots=True)
class Wanted:
    """A start needs the sandbox of this workspace. `at` in unix milliseconds; `checkpoint_revision` of the reference
    that a sandbox begins with that has no record."""

    tenant: str
    workspace: str
    sandbox: str
    provider: str
    at: int
    checkpoint_revision: int = 0


@dataclass(frozen=True, slots=True)
class Woken:
    """Somebody asks for the sandbox without a prompt."""

    at: int


@dataclass(frozen=True, slots=True)
class Provisioned:
    """The provider says that the compute is there, with these facts. `drains`: it was asked for the sake of a drain."""

    facts: Mapping[str, Any]
    at: int
    drains: bool = False


@dataclass(frozen=True, slots=True)
class WakeFailed:
    """The provider cannot bring it back, and trying again by itself changes nothing."""

    at: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A start is about to be sent to the collector."""

    at: int


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    order: DrainOrder
    at: int


@dataclass(frozen=True, slots=True)
class DrainReported:
    """What the collector says of the drain, or what is said of it where the collector cannot be asked."""

    report: DrainReport
    at: int


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing of the drained sandbox runs any more, by the provider's proof."""

    drain: str
    at: int


@dataclass(frozen=True, slots=True)
class DrainedItself:
    """The collector of `boot` was drained without an order of ours, and nothing of it runs any more."""

    boot: str
    report: DrainReport
    at: int


@dataclass(frozen=True, slots=True)
class ComputeEnded:
    """The provider's proof that nothing of it runs any more, though nobody drained it: its volume has everything.
    Nothing of it is open in the log, and no work waits for it."""

    at: int


@dataclass(frozen=True, slots=True)
class DeleteOrdered:
    """End it without a drain. `over`: the provider says that nothing of it runs, so a drain has nothing to save.
    `report` tells of the checkpoint that there is."""

    order: DrainOrder
    report: DrainReport
    at: int
    checkpoint: bool = True
    over: bool = False


@dataclass(frozen=True, slots=True)
class Deleted:
    """Nothing of it is left, but for its checkpoint."""

    at: int


@dataclass(frozen=True, slots=True)
class ConversationForgotten:
    """The conversation is deleted: reports name it no more."""

    conversation: str
    at: int


SandboxInput = (
    Wanted
    | Woken
    | Provisioned
    | WakeFailed
    | Forwarded
    | DrainOrdered
    | DrainReported
    | Released
    | DrainedItself
    | ComputeEnded
    | DeleteOrdered
    | Deleted
    | ConversationForgotten
)


@dataclass(frozen=True, slots=True)
class Write:
    record: SandboxRecord


@dataclass(frozen=True, slots=True)
class Remove:
    """The key is deleted."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The record says so already."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: the sandbox is on its way elsewhere."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    problem: Problem


Decision = Write | Remove | Keep | Wait | Refuse


def decide(record: SandboxRecord | None, event: SandboxInput) -> Decision:
    """What the record becomes. Pure."""
    match event:
        case Wanted():
            return _wanted(record, event)
        case Woken():
            return _woken(record, event)
        case Provisioned():
            return _provisioned(record, event)
        case WakeFailed():
            return _wake_failed(record, event)
        case Forwarded():
            return _forwarded(record, event)
        case DrainOrdered():
            return _drain_ordered(record, event)
        case DrainReported():
            return _drain_reported(record, event)
        case Released():
            return _released(record, event)
        case DrainedItself():
            return _drained_itself(record, event)
        case ComputeEnded():
            return _compute_ended(record, event)
        case DeleteOrdered():
            return _delete_ordered(record, event)
        case Deleted():
            return Remove() if record is not None and record.state == "deleting" else Keep()
        case ConversationForgotten():
            return _forgotten(record, event)
        case _:
            assert_never(event)


def _forgotten(record: SandboxRecord | None, event: ConversationForgotten) -> Decision:
    if record is None:
        return Keep()
    if record.state in ("draining", "deleting"):
        return Wait(f"the sandbox is {record.state}")
    drained = None if record.drained is None else _without(record.drained, event.conversation)
    failed = tuple(_without(report, event.conversation) for report in record.failed)
    if (drained, failed) == (record.drained, record.failed):
        return Keep()
    return Write(record.model_copy(update={"drained": drained, "failed": failed, "updated_at": event.at}))


def _without(report: DrainReport, conversation: str) -> DrainReport:
    kept = tuple(one for one in report.executions if one.target.conversation != conversation)
    reference = report.checkpoint
    if reference is not None:
        others = tuple(one for one in reference.executions if one.target.conversation != conversation)
        may_use = {name: generation for name, generation in reference.may_use.items() if name != conversation}
        reference = reference.model_copy(update={"executions": others, "may_use": may_use})
    return report.model_copy(update={"executions": kept, "checkpoint": reference})


def joins(record: SandboxRecord, drain: str) -> bool:
    """This id has begun its operation before, or one runs that it joins."""
    return told_of(record, drain) is not None or (record.state in ("draining", "deleting") and record.drain is not None)


def told_of(record: SandboxRecord, drain: str) -> DrainReport | None:
    """What the record says of this operation, be it the last one or an earlier one that failed."""
    reports = record.failed if record.drained is None else (record.drained, *record.failed)
    return next((report for report in reports if report.drain == drain), None)


def releasing(record: SandboxRecord) -> bool:
    """The collector's last word was that all is kept: what is left of the compute may go."""
    report, order = record.drained, record.drain
    named = record.state == "draining" and report is not None and order is not None and report.drain == order.drain
    return named and report is not None and report.state == "running" and report.phase == "releasing"


def _changed(record: SandboxRecord, at: int, **changes: Any) -> Write:
    if "drained" in changes:
        changes["failed"] = _failed(record, changes["drained"])
    return Write(record.model_copy(update={**changes, "updated_at": at}))


def _failed(record: SandboxRecord, now: DrainReport | None) -> tuple[DrainReport, ...]:
    """With the report that is followed by `now`, where it is of another drain and failed."""
    last = record.drained
    if last is None or last.state != "failed" or (now is not None and now.drain == last.drain):
        return record.failed
    executions = tuple(one.model_copy(update={"unheard": ()}) for one in last.executions)
    return (*record.failed, last.model_copy(update={"executions": executions}))[-FAILED_MAX:]


# --- starting ---


def _wanted(record: SandboxRecord | None, event: Wanted) -> Decision:
    if record is None:
        return Write(
            SandboxRecord(
                tenant=event.tenant,
                workspace=event.workspace,
                sandbox=event.sandbox,
                state="provisioning",
                provider=event.provider,
                checkpoint_revision=event.checkpoint_revision,
                wanted_at=event.at,
                updated_at=event.at,
            )
        )
    if record.provider != event.provider:
        return Wait(f"the sandbox belongs to provider {record.provider}")
    match record.state:
        case "provisioning" | "resuming" | "active":
            return Keep()
        case "suspended":
            return _changed(record, event.at, state="resuming", wanted_at=event.at)
        case "draining" | "deleting":
            return Wait(f"the sandbox is {record.state}")
        case _:
            assert_never(record.state)


def _woken(record: SandboxRecord | None, event: Woken) -> Decision:
    if record is None:
        return Refuse(no_sandbox())
    match record.state:
        case "suspended":
            return _changed(record, event.at, state="resuming", wanted_at=event.at)
        case "active":
            # The revision moves on with it: an idle suspend that was decided before loses.
            return _changed(record, event.at, wanted_at=event.at)
        case "provisioning" | "resuming":
            return Keep()
        case "draining" | "deleting":
            return Wait(f"the sandbox is {record.state}")
        case _:
            assert_never(record.state)


def _provisioned(record: SandboxRecord | None, event: Provisioned) -> Decision:
    if record is None:
        return Wait("the sandbox's record is gone")
    facts = dict(event.facts)
    match record.state:
        case "provisioning" | "resuming":
            return _changed(record, event.at, state="active", facts=facts)
        case "active":
            return Keep() if record.facts == facts else _changed(record, event.at, facts=facts)
        case "draining" if event.drains:
            return Keep() if record.facts == facts else _changed(record, record.updated_at, facts=facts)
        case "draining" | "suspended" | "deleting":
            return Wait(f"the sandbox is {record.state}")
        case _:
            assert_never(record.state)


def _wake_failed(record: SandboxRecord | None, event: WakeFailed) -> Decision:
    if record is None or record.state != "resuming":
        return Keep()
    return _changed(record, event.at, state="suspended")


def _forwarded(record: SandboxRecord | None, event: Forwarded) -> Decision:
    if record is None or record.state != "active":
        return Wait("the sandbox is gone" if record is None else f"the sandbox is {record.state}")
    return _changed(record, event.at, starts=record.starts + 1, wanted_at=event.at)


# --- draining ---


def _drain_ordered(record: SandboxRecord | None, event: DrainOrdered) -> Decision:
    if record is None:
        return Refuse(no_sandbox())
    if joins(record, event.order.drain):
        return Keep()
    match record.state:
        case "active":
            order = event.order
            begun = DrainReport(drain=order.drain, state="running", purpose=order.purpose, reason=order.reason or None)
            return _changed(record, event.at, state="draining", drain=event.order, drained=begun)
        case "provisioning" | "resuming":
            detail = f"the sandbox is {record.state}: it can be drained once it is active"
            return Refuse(problem(Code.RUNTIME_UNAVAILABLE, detail, retry_after_s=START_RETRY_S))
        case "suspended" | "draining" | "deleting":
            return Keep()
        case _:
            assert_never(record.state)


def _drain_reported(record: SandboxRecord | None, event: DrainReported) -> Decision:
    report = event.report
    if record is None or record.state != "draining" or record.drain is None or record.drain.drain != report.drain:
        return Keep()
    if releasing(record):
        return Keep()  # of a peer that asked before the end was known
    report = _kept(report, record.drain.purpose).model_copy(update={"reason": record.drain.reason or None})
    if report.state == "failed":
        return _changed(record, event.at, state="active", drain=None, drained=report)
    if report.state == "done":
        report = report.model_copy(update={"state": "running", "phase": "releasing"})
    elif report.phase == "releasing":
        report = report.model_copy(update={"phase": "checkpoint"})  # ours alone to say
    return Keep() if record.drained == report else _changed(record, event.at, drained=report)


def _released(record: SandboxRecord | None, event: Released) -> Decision:
    if record is None or record.state != "draining" or record.drain is None or record.drain.drain != event.drain:
        return Keep()
    report = record.drained
    if report is None or not releasing(record):
        return Wait("the drain is not over")
    revision = report.checkpoint_revision or record.checkpoint_revision
    if record.drain.purpose == "delete":
        return _changed(record, event.at, state="deleting", checkpoint_revision=revision)
    over = report.model_copy(update={"state": "done", "phase": "over"})
    return _changed(record, event.at, state="suspended", drain=None, drained=over, checkpoint_revision=revision)


def _drained_itself(record: SandboxRecord | None, event: DrainedItself) -> Decision:
    if record is None or record.state != "active" or record.facts.get("boot") != event.boot:
        return Keep()
    report = _kept(event.report, "drain")
    revision = report.checkpoint_revision
    return _changed(record, event.at, state="suspended", drained=report, checkpoint_revision=revision)


def _compute_ended(record: SandboxRecord | None, event: ComputeEnded) -> Decision:
    if record is None or record.state != "active":
        return Keep()
    return _changed(record, event.at, state="suspended", drained=_unread(record.drained))


def _unread(report: DrainReport | None) -> DrainReport | None:
    """What is left of an earlier drain: messages that no agent has read yet. Its turns are gone on with already, and
    not a second time."""
    kept = () if report is None else tuple(one for one in report.executions if one.unheard or one.unheard_more)
    if report is None or not kept:
        return None
    executions = tuple(one.model_copy(update={"continuation": "wait"}) for one in kept)
    return report.model_copy(update={"executions": executions})


def _kept(report: DrainReport, purpose: Purpose) -> DrainReport:
    """As the record keeps it: the executions once, not in the reference again."""
    reference, executions = report.checkpoint, report.executions
    if reference is not None:
        executions = executions or reference.executions
        reference = reference.model_copy(update={"executions": ()})
    return report.model_copy(update={"purpose": purpose, "executions": executions, "checkpoint": reference})


def _delete_ordered(record: SandboxRecord | None, event: DeleteOrdered) -> Decision:
    if record is None:
        return Refuse(no_sandbox())
    deleting = _changed(record, event.at, state="deleting", drain=event.order, drained=event.report)
    match record.state:
        case "deleting":
            return Keep()
        case "provisioning" | "resuming" | "suspended":
            return deleting
        case "active" if event.over or not event.checkpoint:
            return deleting
        case "draining" if not event.checkpoint:
            return deleting
        case "active":
            return Wait("the sandbox is active: it is drained first")
        case "draining":
            return Wait("the sandbox is draining")
        case _:
            assert_never(record.state)
