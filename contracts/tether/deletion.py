"""Deleting a conversation: the operation's record, and what a collector and an agent service are asked for it.

    DELETE /v1/conversations/{c}  ─▶  `tether_deletions/{tenant}.{conversation}`, running
                                             │  a router carries it on, whichever; each step may be done twice
                                             ▼
                                      done ──FREE_AFTER_S──▶ freed: the conversation's id may be used again

The record is written before anything is done and outlives what it deletes: a message of the conversation that is found
later (a late frame, an older copy of the log) is nobody's because of it. It holds ids and numbers, no content.
`tether_router.core.deletion` says which step follows which, and why in that order.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tether import subjects
from tether.errors import Code, Problem, ProblemError, problem
from tether.ids import Token, new_id
from tether.kv import Bucket, Conflict
from tether.limits import NOTIFICATION_MEMORY_S, REQUEST_MEMORY_S
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import ConversationRecord

FREE_AFTER_S: Final = REQUEST_MEMORY_S  # as long as a request of it may be repeated
REMEMBERED_S: Final = NOTIFICATION_MEMORY_S  # longer than a log can bring the conversation again
SESSIONS_MAX: Final = 256  # of the agents' own sessions that a deletion names
_RACES_MAX: Final = 8
SessionName = Annotated[str, StringConstraints(min_length=1, max_length=256)]

Step = Literal["marking", "prompts", "sandbox", "checkpoints", "blobs", "log", "records", "projections", "volume"]
STEPS: Final[tuple[Step, ...]] = (
    "marking",
    "prompts",
    "sandbox",
    "checkpoints",
    "blobs",
    "log",
    "records",
    "projections",
    "volume",
)


class DeletionRecord(BaseModel):
    """`tether_deletions/{tenant}.{conversation}`: created by a backend, carried on by routers, by compare-and-set.

    `step`: what is being done while it runs. `pending_on`: what it waits for, in words. `erased`: how many of what.
    `sessions`: the agents' own sessions of the conversation. `log_sequence`: of `conversation.deleted`, 0 before.
    `volume_clean`: nothing of it is left on the workspace's volume. Times in unix milliseconds; `free_at`: from when on
    the id may be used again, 0 while that is not known.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    op: str = ""
    deletion: Token
    tenant: Token
    conversation: Token
    workspace: Token
    force: bool = False
    by: Annotated[str, Field(max_length=256)] = ""
    state: Literal["running", "done", "failed", "freed"] = "running"
    step: Step = "marking"
    pending_on: tuple[str, ...] = ()
    erased: dict[str, int] = Field(default_factory=dict)
    sessions: Annotated[tuple[SessionName, ...], Field(max_length=SESSIONS_MAX)] = ()
    log_sequence: int = 0
    volume_clean: bool = False
    problem: Problem | None = None
    began_at: int = 0
    updated_at: int = 0
    ended_at: int = 0
    free_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})

    @property
    def bars(self) -> bool:
        """The conversation is deleted, or about to be: nothing of it is shown, and nothing is taken for it."""
        return self.state in ("running", "done")


class ForgetPayload(BaseModel):
    """Of the verb `forget`, and of `tether.agent.forget`: delete what the volume has of this conversation. `sessions`:
    the agents' own sessions of it, beyond those that the collector's journal names."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    deletion: Token
    conversation: Token
    sessions: Annotated[tuple[SessionName, ...], Field(max_length=SESSIONS_MAX)] = ()


class Forgotten(BaseModel):
    """The answer. `clean`: nothing is left. `pending_on`: else, what has to happen first."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    clean: bool
    pending_on: str = ""
    executions: int = 0
    files: int = 0


class DeletionView(BaseModel):
    """A deletion as callers see it. `state`: `running`, `done`, `failed` (`problem` says why, nothing was changed), or
    `freed`: the id may be used again. `pending_on` says what a running one waits for, and what a done one could not
    wait for (a database that is away: it forgets the conversation when it is back). Times in unix milliseconds."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    conversation: str
    workspace: str
    deletion: str
    state: Literal["running", "done", "failed", "freed"]
    step: Step
    force: bool = False
    pending_on: tuple[str, ...] = ()
    erased: dict[str, int] = Field(default_factory=dict)
    problem: Problem | None = None
    began_at: int = 0
    ended_at: int = 0
    free_at: int = 0

    @property
    def is_final(self) -> bool:
        return self.state != "running"

    @staticmethod
    def of(record: DeletionRecord) -> DeletionView:
        return DeletionView.model_validate(record.model_dump(mode="json"))


async def deletion_of(bus: Bus, tenant: str, conversation: str) -> DeletionRecord | None:
    """The conversation's deletion as the leader has it. Raises BusError."""
    key = subjects.deletion_key(tenant, conversation)
    return await Bucket(bus, subjects.DELETIONS).record(key, DeletionRecord)


async def check_not_deleted(bus: Bus, tenant: str, conversation: str) -> None:
    """Raises ProblemError (CONVERSATION_DELETED), BusError."""
    record = await deletion_of(bus, tenant, conversation)
    if record is not None and record.bars:
        raise ProblemError(deleted_problem(record))


async def begin_deletion(
    bus: Bus, tenant: str, conversation: str, *, deletion: str, force: bool, by: str, now_ms: int
) -> DeletionRecord:
    """Order it, once: one that runs, or is done, is joined, whatever id it has; `force` is added to it. Raises
    ProblemError (NOT_FOUND, SESSION_BUSY), BusError."""
    bucket, key = Bucket(bus, subjects.DELETIONS), subjects.deletion_key(tenant, conversation)
    for _ in range(_RACES_MAX):
        entry = await bucket.get(key)
        known = None if entry is None else bucket.parse(entry, DeletionRecord)
        if known is not None and known.bars:
            if not force or known.force or known.state != "running":
                return known
            record = known.model_copy(update={"force": True, "by": by, "updated_at": now_ms})
        else:
            workspace = await _deletable(bus, tenant, conversation, force=force)
            record = DeletionRecord(
                deletion=deletion,
                tenant=tenant,
                conversation=conversation,
                workspace=workspace,
                force=force,
                by=by[:256],
                began_at=now_ms,
                updated_at=now_ms,
            )
        try:
            if entry is None:
                await bucket.create(key, record.value(), op=deletion)
            else:
                await bucket.update(key, record.value(), op=new_id("op"), revision=entry.revision)
        except Conflict:
            continue
        return record
    raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, "the deletion's record changes too fast", retry_after_s=1.0))


async def _deletable(bus: Bus, tenant: str, conversation: str, *, force: bool) -> str:
    """The conversation's workspace. Raises ProblemError, BusError."""
    where = await Bucket(bus, subjects.CONVERSATIONS).record(
        subjects.conversation_key(tenant, conversation), ConversationRecord
    )
    if where is None:
        raise ProblemError(problem(Code.NOT_FOUND, "conversation: there is none of this id"))
    key = subjects.owner_key(tenant, where.workspace, conversation)
    owner = await Bucket(bus, subjects.OWNERS).record(key, OwnerRecord)
    if owner is not None and owner.state != "idle" and owner.target is not None and not force:
        execution = owner.target.execution
        detail = "an execution is active; wait for its end, or delete with force"
        raise ProblemError(problem(Code.SESSION_BUSY, detail, execution=execution, state=owner.state))
    return where.workspace


def deleted_problem(record: DeletionRecord) -> Problem:
    """What whoever asks for the conversation is told."""
    being = "is being deleted" if record.state == "running" else "was deleted"
    context: dict[str, Any] = {"deletion": record.deletion}
    if record.free_at:
        context["free_at"] = record.free_at
    detail = f"conversation: it {being}; use another id"
    return problem(Code.CONVERSATION_DELETED, detail, **context)
