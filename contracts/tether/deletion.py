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
from tether.errors import Code, Problem, problem
from tether.ids import Token
from tether.kv import Bucket
from tether.limits import NOTIFICATION_MEMORY_S, REQUEST_MEMORY_S
from tether.ports import Bus

FREE_AFTER_S: Final = REQUEST_MEMORY_S  # as long as a request of it may be repeated
REMEMBERED_S: Final = NOTIFICATION_MEMORY_S  # longer than a log can bring the conversation again
SESSIONS_MAX: Final = 256  # of the agents' own sessions that a deletion names
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


async def deletion_of(bus: Bus, tenant: str, conversation: str) -> DeletionRecord | None:
    """The conversation's deletion as the leader has it. Raises BusError."""
    key = subjects.deletion_key(tenant, conversation)
    return await Bucket(bus, subjects.DELETIONS).record(key, DeletionRecord)


def deleted_problem(record: DeletionRecord) -> Problem:
    """What whoever asks for the conversation is told."""
    being = "is being deleted" if record.state == "running" else "was deleted"
    context: dict[str, Any] = {"deletion": record.deletion}
    if record.free_at:
        context["free_at"] = record.free_at
    detail = f"conversation: it {being}; use another id"
    return problem(Code.CONVERSATION_DELETED, detail, **context)
