"""Controls: questions and orders to a collector on `tether.control.{tenant}.{workspace}.{verb}`, and commands.

A request carries a control id: the same id with the same payload gets the original receipt and has no second effect;
another payload is a conflict. A lost reply reads as `unknown`; `receipt` tells later. Status moves only forward:

    accepted → delivered → settled
        └─────────┴──────→ rejected(problem) | unknown
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tether.errors import Problem
from tether.events import ReceiptStatus
from tether.ids import ExecutionTarget, Token
from tether.jsonsafe import loads_object
from tether.limits import CONTROL_PAYLOAD_BYTES_MAX, KIB
from tether.prompt import AgentSpec, TextContent, invalid

Verb = Literal[
    "start", "answer", "interject", "interrupt", "stop", "drain", "receipt", "snapshot", "discover", "forget"
]
VERBS: Final[tuple[Verb, ...]] = (
    "start",
    "answer",
    "interject",
    "interrupt",
    "stop",
    "drain",
    "receipt",
    "snapshot",
    "discover",
    "forget",
)


_LEARNED: Final = ("boot", "process_generation", "native_session")


class Authority(BaseModel):
    """Why the collector may act: a control lease (users), the owner record (router), the sandbox record (agent
    service). `token` is the lease's token or the record's revision."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["lease", "owner", "sandbox", "none"] = "none"
    holder: str = ""
    token: int = 0


class ControlRequest(BaseModel):
    """One control. `target` is required for every verb but start, drain, receipt, discover and forget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    control: Token
    verb: Verb
    target: ExecutionTarget | None = None
    authority: Authority = Authority()
    payload: dict[str, Any] = Field(default_factory=dict)

    @property
    def digest(self) -> str:
        """sha-256 of verb, target and payload: what makes two requests with one id the same.

        Without what is learned of a target while it starts: who asks again may know more of it than at first.
        """
        parts = self.model_dump(mode="json", include={"verb", "target", "payload"})
        for name in _LEARNED if self.target is not None else ():
            del parts["target"][name]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ControlReply(BaseModel):
    """The receipt as it stands. `result` is the verb's own (snapshot, discover, start); `target` the current one
    where the request's was stale."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    control: str
    verb: str
    status: ReceiptStatus
    problem: Problem | None = None
    target: ExecutionTarget | None = None
    result: dict[str, Any] | None = None

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()


class AnswerPayload(BaseModel):
    """`input`: the changed tool input of an approval. `answers`: question id → chosen labels or free text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interaction: Annotated[str, Field(min_length=1, max_length=256)]
    decision: Literal["allow", "deny"]
    text: Annotated[str, Field(max_length=64 * KIB)] | None = None
    input: dict[str, Any] | None = None
    answers: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class InterjectPayload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    request: Token
    content: Annotated[tuple[TextContent, ...], Field(min_length=1, max_length=64)]


class StartCommand(BaseModel):
    """On COMMANDS and as the payload of `start`: run this prompt as this execution, once.

    `target` is as the router issued it (no boot id, no process generation yet). `owner_revision` is the revision of
    the owner record that named it in `starting`. `resume_session` is the conversation's last native session, which the
    CLI is to resume, or the execution fails with RESUME_FAILED, unless `fallback` allows one fall back to the history.
    `resume`: the user's choice after such a failure, which begins another session, without or with the history. With
    `fallback` it was nobody's choice: the turn before was cut before its session could be resumed, and the history
    stands in for it (true), or may not, and the execution fails with RESUME_FAILED (false).
    `history_cut`: the log's last sequence that the history may show, fixed at admission. `checkpoint_revision`: of the
    reference that this generation goes on from. `continuation`: whether a turn of this execution that a drain cuts is
    gone on with by itself. What is None is left out: a command that was encoded by an older router has the same digest.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    kind: Literal["start"] = "start"
    control: Token
    target: ExecutionTarget
    owner_revision: int
    request_id: Token
    attempt: int
    content: tuple[TextContent, ...]
    agent: AgentSpec
    resume_session: str | None = None
    resume: Literal["fresh", "history"] | None = None
    fallback: bool | None = None
    history_cut: int | None = None
    checkpoint_revision: int | None = None
    continuation: Literal["wait", "continue"] | None = None

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()


def decode_request(data: bytes) -> ControlRequest:
    """Raises `InvalidError` naming the field."""
    value = loads_object(data, "control", bytes_max=CONTROL_PAYLOAD_BYTES_MAX + 64 * KIB)
    try:
        return ControlRequest.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def decode_command(data: bytes) -> StartCommand:
    """Raises `InvalidError` naming the field."""
    value = loads_object(data, "command", bytes_max=CONTROL_PAYLOAD_BYTES_MAX + 64 * KIB)
    try:
        return StartCommand.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None
