"""A message of `PROMPTS` as it comes in: a prompt, or poison that no delivery will ever make one.

Poison is terminated. Where its subject names a conversation, `response.failed` says so there, identified by the
message's sequence: the sender knows that from its publish ack, while a request id in the payload may be anyone's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.errors import Code, InvalidError, Problem, problem
from tether.events import RESPONSE_FAILED, ConversationEvent, ResponseFailed
from tether.limits import EXECUTION_TOKEN_CONVERSATION, KIB
from tether.ports import StoredMessage
from tether.prompt import Prompt, decode_prompt
from tether.subjects import EventAddress, parse_prompt

# What an event or a command adds to the prompt that it carries: addressing, ids, headers.
ENVELOPE_BYTES_MAX = 16 * KIB


@dataclass(frozen=True, slots=True)
class Intake:
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Poison:
    """`address`: the `_` subject of the conversation, if the message's subject names one."""

    problem: Problem
    address: EventAddress | None
    request: str

    def event(self, *, generation: int, at: int) -> ConversationEvent:
        body = ResponseFailed(request=self.request, code=self.problem.code, detail=self.problem.detail)
        return ConversationEvent(
            id=f"{self.request}/{RESPONSE_FAILED}",
            generation=generation,
            at=at,
            type=RESPONSE_FAILED,
            body=body.model_dump(mode="json", exclude_none=True),
        )


def inspect(message: StoredMessage, *, payload_bytes_max: int) -> Intake | Poison:
    """Never raises, whatever the message holds."""
    request = f"prompt-{message.sequence}"
    try:
        tenant, workspace, conversation = parse_prompt(message.subject)
    except InvalidError as error:
        return Poison(error.problem, None, request)
    address = EventAddress(tenant, workspace, conversation, EXECUTION_TOKEN_CONVERSATION)
    try:
        prompt = decode_prompt(message.data)
        for name, said, meant in (
            ("tenant", prompt.tenant, tenant),
            ("workspace", prompt.workspace, workspace),
            ("conversation", prompt.conversation, conversation),
        ):
            if said != meant:
                raise InvalidError(name, f"must be {meant!r}, as in the subject")
    except InvalidError as error:
        return Poison(error.problem, address, request)
    if len(message.data) + ENVELOPE_BYTES_MAX > payload_bytes_max:
        detail = f"the prompt has {len(message.data)} bytes, the bus takes {payload_bytes_max - ENVELOPE_BYTES_MAX}"
        return Poison(problem(Code.INVALID, detail), address, request)
    return Intake(prompt)
