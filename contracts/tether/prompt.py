"""A prompt on its way in, the message on `tether.prompt.{tenant}.{workspace}.{conversation}`; what becomes of it."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tether.errors import InvalidError, MessageTooLargeError, Problem
from tether.ids import Token
from tether.jsonsafe import loads_object
from tether.limits import KIB, PROMPT_BYTES_MAX
from tether.refusals import problems_of

Mode = Literal["auto", "interject", "takeover"]
ResumeChoice = Literal["fresh", "history"]
Continuation = Literal["wait", "continue"]


class TextContent(BaseModel):
    """A part of a user's message. Text only, so far; another type is refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"] = "text"
    text: Annotated[str, StringConstraints(min_length=1)]


class AgentSpec(BaseModel):
    """Which agent answers. `kind` names an adapter (`claude`, `scripted`, …); `args` go to the CLI after Tether's
    own; they are shown to operators and must not hold secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9:._-]{0,63}$")] = "claude"
    model: Annotated[str, StringConstraints(max_length=128)] | None = None
    permission_mode: Literal["default", "acceptEdits", "plan", "dontAsk", "bypassPermissions"] | None = None
    args: Annotated[tuple[Annotated[str, StringConstraints(max_length=4 * KIB)], ...], Field(max_length=64)] = ()


class Prompt(BaseModel):
    """One request of a user. `request_id` is the client's: the same id with the same payload is the same request.

    `attempt` grows when a request whose outcome was retryable is tried again; `author` is who asked, for the log.
    `resume`: what becomes of the conversation's session after RESUME_FAILED: `fresh` forgets it, `history` makes a new
    one from the conversation's history. `continuation`: `continue` lets a turn that a drain cuts go on by itself after
    the resume; without it the next prompt decides.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Literal[1] = 1
    tenant: Token
    workspace: Token
    conversation: Token
    request_id: Token
    attempt: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    content: Annotated[tuple[TextContent, ...], Field(min_length=1, max_length=64)]
    agent: AgentSpec = AgentSpec()
    mode: Mode = "auto"
    author: Annotated[str, StringConstraints(max_length=256)] | None = None
    resume: ResumeChoice | None = None
    continuation: Continuation | None = None

    @property
    def digest(self) -> str:
        """sha-256 of what makes the payload: everything but attempt and author."""
        payload = self.model_dump(mode="json", exclude={"attempt", "author"})
        for name in ("resume", "continuation"):  # younger than the digests of requests that are remembered
            if payload[name] is None:
                del payload[name]
        return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def message_id(self) -> str:
        """`Nats-Msg-Id`: another payload under the same id reaches the router, which answers REQUEST_CONFLICT."""
        return f"{self.tenant}/{self.request_id}/{self.digest}/{self.attempt}"

    def encode(self) -> bytes:
        """The message's bytes. Raises MessageTooLargeError beyond PROMPT_BYTES_MAX."""
        data = self.model_dump_json(exclude_none=True).encode()
        if len(data) > PROMPT_BYTES_MAX - KIB:  # room for the headers
            raise MessageTooLargeError(f"a prompt may have {PROMPT_BYTES_MAX - KIB} bytes, this has {len(data)}")
        return data


def invalid(error: ValidationError, prefix: str = "") -> InvalidError:
    """A pydantic validation as an `InvalidError` that names every field that is refused, with its remedy."""
    first, *more = problems_of(error.errors(include_input=False, include_url=False), prefix)
    return InvalidError(first.field, first.remedy, more=tuple(more))


def decode_prompt(data: bytes) -> Prompt:
    """Parse a prompt's message. Raises `InvalidError` naming the field."""
    value = loads_object(data, "prompt", bytes_max=PROMPT_BYTES_MAX)
    try:
        return Prompt.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


class Done(BaseModel):
    """A final outcome of a request, returned again to whoever repeats it."""

    model_config = ConfigDict(frozen=True)

    status: Literal["admitted", "interjected", "failed"]
    response: str | None = None
    execution: str | None = None
    cursor_sequence: int = 0
    cursor_stored_at_ns: int = 0
    problem: Problem | None = None


class ConversationRecord(BaseModel):
    """`tether_conversations`: the workspace of a conversation, for good."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    workspace: Token


class RequestRecord(BaseModel):
    """`tether_requests`: what is known of a request id. `state` retryable: a higher attempt may be tried.

    `interjected_into`: the execution into which this attempt's prompt was sent, written before it was: from then on
    its text may have reached an agent, and it is a prompt of its own only once the log says that it has not.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    op: str = ""
    digest: str
    workspace: str
    conversation: str
    attempt: int
    prompt_sequence: int
    state: Literal["open", "done", "retryable"]
    done: Done | None = None
    interjected_into: str | None = None
    opened_at: int = 0
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})
