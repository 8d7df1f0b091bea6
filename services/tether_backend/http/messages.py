"""`POST /v1/conversations/{c}/messages`: a prompt goes to PROMPTS, and its outcome is waited for, at most
ADMISSION_WAIT_S. The router's request record alone says what the outcome is (so a repetition gets the same answer);
the conversation's live events only tell when to look.

The prompt's message id makes publishing idempotent: an undecided publish is sent again with the same bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.responses import Response

from tether import agent_args, subjects, tracing
from tether.api import MessageAccepted, MessageRequest
from tether.cursor import Cursor
from tether.deletion import check_not_deleted
from tether.errors import BusUnavailableError, InvalidError, ProblemError, UndecidedError
from tether.ids import default_workspace
from tether.limits import ADMISSION_WAIT_S
from tether.ports import Bus
from tether.prompt import Prompt, invalid
from tether.quotas import waiting_full
from tether.submission import Admitted, Publish, Refuse, Wait, decide
from tether_backend.config import Principal
from tether_backend.feed import Feed, Mailbox, Turn
from tether_backend.http.parse import ConversationId, Who, With, body_of
from tether_backend.runtime import Deps, Runtime

router = APIRouter()
_log = structlog.get_logger("tether.backend")
_LOOK_MIN_S: Final = 0.005  # between looks at the record, after a sign that something happened
_LOOK_MAX_S: Final = 1.0  # without a sign: what decides a prompt is told in its conversation, which is a sign
_HINT_BYTES_MAX: Final = 64 * 1024  # of live events that only wake us


@router.post(
    "/v1/conversations/{conversation}/messages",
    status_code=202,
    response_model=MessageAccepted,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": MessageRequest.model_json_schema()}},
        }
    },
)
async def post_message(conversation: ConversationId, request: Request, who: Who, deps: With) -> Any:
    return await submit(deps, who, conversation, await body_of(request, MessageRequest))


async def submit(deps: Deps, who: Principal, conversation: str, body: MessageRequest) -> Response:
    """202. Raises ProblemError, BusError."""
    await check_not_deleted(deps.bus, who.tenant, conversation)
    prompt = await _prompt(deps.runtime, who.tenant, who.name, conversation, body)
    feed = deps.feeds[who.tenant]
    before = Cursor.after(feed.position, feed.stored_at_ns) if feed.stored_at_ns else Cursor.beginning()
    mailbox = Mailbox(_HINT_BYTES_MAX, lambda: None)
    feed.attach(conversation, mailbox)
    identity = {"tenant": prompt.tenant, "workspace": prompt.workspace, "conversation": conversation}
    with tracing.scope("submit prompt") as span, tracing.identified(span, request_id=prompt.request_id, **identity):
        try:
            accepted = await _admit(deps, feed, prompt, before, mailbox)
        finally:
            feed.detach(conversation, mailbox)
        _log.info("prompt_submitted", execution=accepted.execution_id, status=accepted.status, attempt=accepted.attempt)
    return JSONResponse(accepted.model_dump(mode="json", exclude_none=True), status_code=202)


async def _prompt(runtime: Runtime, tenant: str, author: str, conversation: str, body: MessageRequest) -> Prompt:
    known = await runtime.workspace(tenant, conversation)
    if known is not None and body.workspace is not None and body.workspace != known:
        raise InvalidError("workspace", "must be the conversation's own: it is fixed by the first message")
    agent_args.check_own(body.agent.kind, body.agent.args)  # what an operator may allow is known to the sandbox alone
    try:
        return Prompt(
            tenant=tenant,
            workspace=body.workspace or known or default_workspace(conversation),
            conversation=conversation,
            request_id=body.request_id,
            content=body.content,
            agent=body.agent,
            mode=body.mode,
            author=author,
            resume=body.resume,
            continuation=body.continuation,
        )
    except ValidationError as error:
        raise invalid(error) from None


async def _check_agent(deps: Deps, prompt: Prompt) -> None:
    """Raises InvalidError for an agent that nobody has, BusError. Where one runs the message joins that one, whatever
    it names."""
    try:
        await deps.agents.check(deps.bus, prompt.agent.kind)
    except InvalidError:
        owner = await deps.runtime.owner(prompt.tenant, prompt.workspace, prompt.conversation)
        if prompt.mode == "takeover" or owner is None or owner.state == "idle":
            raise


async def _admit(deps: Deps, feed: Feed, prompt: Prompt, before: Cursor, mailbox: Mailbox) -> MessageAccepted:
    runtime = deps.runtime
    deadline_s = asyncio.get_running_loop().time() + ADMISSION_WAIT_S
    published = 0
    attempt = 1
    delay_s = _LOOK_MIN_S
    while True:
        match decide(await runtime.request(prompt.tenant, prompt.request_id), prompt, published=published):
            case Refuse(what):
                raise ProblemError(what)
            case Admitted(done, attempt):
                at = Cursor.after(done.cursor_sequence, done.cursor_stored_at_ns) if done.cursor_sequence else before
                return MessageAccepted(
                    request_id=prompt.request_id,
                    status="interjected" if done.status == "interjected" else "admitted",
                    response_id=done.response,
                    execution_id=done.execution,
                    attempt=attempt,
                    cursor=at.encode(prompt.tenant, prompt.conversation),
                )
            case Publish(attempt):
                await _check_agent(deps, prompt)
                async with deps.quotas.turn(prompt.tenant):
                    await deps.quotas.prompt(prompt.tenant, prompt.workspace, prompt.request_id, attempt)
                await _publish(deps.bus, prompt.model_copy(update={"attempt": attempt}), deadline_s)
                published = attempt
            case Wait(attempt):
                pass
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0 or mailbox.turn is Turn.CLOSED:
            return MessageAccepted(
                request_id=prompt.request_id,
                status="pending",
                attempt=attempt,
                cursor=before.encode(prompt.tenant, prompt.conversation),
            )
        woken = await mailbox.wait(min(delay_s, left_s))
        if woken:
            await asyncio.sleep(_LOOK_MIN_S)  # what comes at once is one sign
            mailbox.restart()
        delay_s = _LOOK_MIN_S if woken else min(2 * delay_s, _LOOK_MAX_S)


async def _publish(bus: Bus, prompt: Prompt, deadline_s: float) -> None:
    """Store the prompt. Raises ProblemError (queue full), BusError (away, or still undecided at the deadline)."""
    subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
    data = prompt.encode()
    while True:
        try:
            with tracing.scope("publish prompt", kind="producer"):
                await bus.publish(subject, data, msg_id=prompt.message_id, headers=tracing.outgoing())
            return
        except UndecidedError:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise
        except BusUnavailableError as error:
            full = waiting_full(error)
            if full is not None:
                raise full from None
            raise
