"""`tether.Client`: submit prompts, follow conversations, answer, stop, list. Async, typed, over HTTP or NATS alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Literal, Self

import structlog
from pydantic import ValidationError

from tether import events as ev
from tether.api import (
    PAGE_DEFAULT,
    ControlAnswer,
    ConversationHistory,
    ConversationList,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
)
from tether.client.backoff import Backoff
from tether.client.deleting import DeletionCalls
from tether.client.items import CaughtUp, ExecutionItem, Item, SnapshotItem
from tether.client.sandboxes import SandboxCalls
from tether.client.tracking import ResponseTracker
from tether.client.transport import FollowOptions, Transport
from tether.client.types import (
    SUBMIT_PATIENCE_S,
    Answer,
    Interaction,
    Message,
    OnInteraction,
    Response,
    ResponseFailedError,
    Submission,
)
from tether.errors import Code, InvalidError, ProblemError, problem
from tether.events import InteractionRequested
from tether.fold import ExecutionState
from tether.ids import check_token, new_id
from tether.limits import ADMISSION_WAIT_S, CONTROL_LEASE_TTL_S
from tether.ports import Bus
from tether.prompt import AgentSpec, Continuation, Mode, ResumeChoice, TextContent, invalid
from tether.quarantine import QuarantineList
from tether.snapshot import Snapshot

if TYPE_CHECKING:
    from tether.client.nats import NatsCredentials

LEASE_PATIENCE_S: Final = CONTROL_LEASE_TTL_S + ADMISSION_WAIT_S  # a frozen holder's lease has expired by then
_log = structlog.get_logger("tether.client")
Content = str | Sequence[str | TextContent]


class Client(SandboxCalls, DeletionCalls):
    """Made by `http`, `nats`, `from_environment` or `from_state`; `async with` closes it.

    Calls raise `ProblemError`s: `error.problem.code` says what, `retryable` and `retry_after_s` whether to try again.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @classmethod
    def http(cls, url: str, token: str, *, patience_s: float = 10.0) -> Self:
        """Over HTTP. `patience_s`: how long a call in doubt is repeated. Needs the extra `client`."""
        try:
            from tether.client.http import HttpTransport
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error.name} is not installed; a client over HTTP needs the extra: tether[client]", name=error.name
            ) from None

        return cls(HttpTransport(url, token, patience_s=patience_s))

    @classmethod
    def nats(cls, bus: Bus | str, credentials: NatsCredentials | None = None, *, tenant: str = "default") -> Self:
        """Over NATS: a connected bus (which the caller closes), or a URL to connect to at the first call."""
        from tether.client.nats import NatsTransport

        return cls(NatsTransport(bus, tenant, credentials))

    @classmethod
    def from_environment(cls) -> Self:
        """From `TETHER_CLIENT_…` (see `tether.client.environment`). Raises ConfigurationError naming all problems."""
        from tether.client.environment import load

        return cls(load().transport())

    @classmethod
    def from_state(cls, path: str | None = None, *, over: Literal["http", "nats"] = "http") -> Self:
        """The set that `tether up` runs on this machine. Raises ConfigurationError where there is none."""
        from tether.client.environment import local

        return cls(local(path, over).transport())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    # --- prompts ---

    async def prompt(
        self,
        conversation: str,
        content: Content,
        *,
        agent: AgentSpec | str = "claude",
        workspace: str | None = None,
        mode: Mode = "auto",
        resume: ResumeChoice | None = None,
        continuation: Continuation | None = None,
        request_id: str | None = None,
        patience_s: float = SUBMIT_PATIENCE_S,
    ) -> Submission:
        """Submit a prompt. In doubt (no answer, connection lost, 503) it is sent again with the same request id within
        `patience_s`, so it is done once. `request_id`: a new one unless given; the same one asks again.

        `resume`: after RESUME_FAILED, `fresh` forgets the agent's session, `history` makes a new one from the
        conversation's history. `continuation` "continue": a turn that a drain cuts goes on by itself after the resume.
        """
        message = Message(
            conversation=check_token(conversation, "conversation"),
            request_id=check_token(request_id or new_id("req"), "request_id"),
            content=_content(content),
            agent=_agent(agent),
            workspace=None if workspace is None else check_token(workspace, "workspace"),
            mode=mode,
            resume=resume,
            continuation=continuation,
        )
        return await self._transport.submit(message, patience_s)

    async def say(self, conversation: str, content: Content, *, request_id: str | None = None) -> Submission:
        """A message into the running execution. SESSION_STREAM_NOT_ACTIVE where none runs."""
        agent = await self._active_agent(conversation)
        return await self.prompt(conversation, content, agent=agent, mode="interject", request_id=request_id)

    async def _active_agent(self, conversation: str) -> str:
        active = await self.executions(conversation=conversation, active=True, limit=1)
        if not active.executions:
            raise ProblemError(problem(Code.SESSION_STREAM_NOT_ACTIVE, "no execution runs in this conversation"))
        return active.executions[0].agent or "claude"

    async def ask(
        self,
        conversation: str,
        content: Content,
        *,
        agent: AgentSpec | str = "claude",
        workspace: str | None = None,
        mode: Mode = "auto",
        resume: ResumeChoice | None = None,
        continuation: Continuation | None = None,
        request_id: str | None = None,
        on_interaction: OnInteraction | None = None,
        patience_s: float = SUBMIT_PATIENCE_S,
    ) -> Response:
        """Submit and follow until the response has ended. `on_interaction` answers approvals and questions; without it,
        or where it gives None, they wait for somebody else. Raises ResponseFailedError where nothing was run.
        `resume_choices` of the response (or the error) says with what `resume` the same may be asked again."""
        submission = await self.prompt(
            conversation,
            content,
            agent=agent,
            workspace=workspace,
            mode=mode,
            resume=resume,
            continuation=continuation,
            request_id=request_id,
            patience_s=patience_s,
        )
        tracker = ResponseTracker(submission.request_id, submission.response_id, submission.execution)
        await self._join(submission, tracker)
        if tracker.ended:  # joined, and over, before its cursor: nothing of it would come any more
            tracker.cursor = submission.cursor
            return _response(submission, tracker)
        waiting = _Waiting(self, conversation, on_interaction)
        options = FollowOptions(cursor=submission.cursor)
        async with aclosing(self._transport.follow(conversation, options)) as items:
            async for item in items:
                tracker.take(item)
                if tracker.ended or (isinstance(item, CaughtUp) and await self._over(tracker)):
                    break
                await waiting.take(item, tracker)
        return _response(submission, tracker)

    async def _join(self, submission: Submission, tracker: ResponseTracker) -> None:
        """An interjection joins an execution whose beginning lies before the cursor."""
        if submission.status != "interjected" or submission.execution is None:
            return
        try:
            tracker.begin_from(await self.state(submission.execution))
        except ProblemError as error:
            _log.info("join_without_snapshot", execution=submission.execution, code=error.problem.code)

    # --- following ---

    async def follow(
        self,
        conversation: str,
        cursor: str | None = None,
        *,
        until_response: str | None = None,
        durable: str | None = None,
        patience_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        """The conversation's items from a cursor (None: from the beginning), across reconnects, each once.

        `until_response`: end behind this response's end. `durable`: a named consumer of the reader's own keeps the
        position on the server (NATS only); an item is acked when the next one is asked for. `patience_s`: raise
        RUNTIME_UNAVAILABLE after so long without any success; None: never give up.
        Close it (`async with aclosing(client.follow(…)) as items`) when leaving early.
        """
        check_token(conversation, "conversation")
        options = FollowOptions(cursor, until_response, durable, patience_s)
        tracker = ResponseTracker(response=until_response)
        if until_response is not None and cursor is not None:
            tracker.execution = await self._execution_of(conversation, until_response)
        async with aclosing(self._transport.follow(conversation, options)) as items:
            async for item in items:
                yield item
                if until_response is None:
                    continue
                tracker.take(item)
                if tracker.ended or (isinstance(item, CaughtUp) and await self._over(tracker)):
                    return

    async def _execution_of(self, conversation: str, response: str) -> str | None:
        try:
            history = await self.conversation(conversation)
        except ProblemError as error:
            if error.problem.code is Code.NOT_FOUND:
                return None
            raise
        found = [view.execution for view in history.responses if view.response == response]
        active = [view.execution for view in history.executions if view.response == response]
        return next(iter([*found, *active]), None)

    async def _over(self, tracker: ResponseTracker) -> bool:
        """Caught up, and nothing of the response came: it may have ended before the cursor."""
        if tracker.execution is None or tracker.seen:
            return False
        try:
            state = await self.state(tracker.execution)
        except ProblemError:
            return False
        if (state.response_outcome or state.outcome) is not None:
            tracker.begin_from(state)
        return tracker.ended

    # --- controls ---

    async def answer(
        self,
        conversation: str,
        interaction: str,
        answer: Answer,
        *,
        execution: str | None = None,
        control_id: str | None = None,
    ) -> ControlAnswer:
        """Answer what waits for a human. Of two answers one wins; the other is told by INTERACTION_SETTLED. Without
        `control_id` it is derived from the answer: the same answer again is the same control."""
        if control_id is not None:
            check_token(control_id, "control_id")
        check_token(conversation, "conversation")
        return await _with_lease(
            lambda: self._transport.answer(conversation, interaction, answer, execution, control_id)
        )

    async def interrupt(self, execution: str, *, control_id: str | None = None) -> ControlAnswer:
        """End the turn. `status` unknown: no reply in time; `receipt` tells later."""
        return await self._verb(execution, "interrupt", control_id)

    async def stop(self, execution: str, *, control_id: str | None = None) -> ControlAnswer:
        """End the process; its proof is `execution.ended` in the log."""
        return await self._verb(execution, "stop", control_id)

    async def _verb(self, execution: str, verb: Literal["interrupt", "stop"], control_id: str | None) -> ControlAnswer:
        control = check_token(control_id or new_id("ctl"), "control_id")
        check_token(execution, "execution")
        return await _with_lease(lambda: self._transport.control(execution, verb, control))

    async def receipt(self, control_id: str, *, execution: str | None = None) -> ControlAnswer:
        """What became of a control. Over NATS the execution must be named."""
        return await self._transport.receipt(check_token(control_id, "control_id"), execution)

    # --- reading ---

    async def conversations(self, *, limit: int = PAGE_DEFAULT, page: str | None = None) -> ConversationList:
        """Newest first."""
        return await self._transport.conversations(limit, page)

    async def conversation(
        self, conversation: str, *, limit: int = PAGE_DEFAULT, before: int | None = None
    ) -> ConversationHistory:
        """Its newest page (over NATS: the whole log, folded). `cursor` goes on behind it."""
        return await self._transport.conversation(check_token(conversation, "conversation"), limit, before)

    async def quarantine(self, *, limit: int = PAGE_DEFAULT, before: int | None = None) -> QuarantineList:
        """What of the tenant's log was refused, newest first (see `tether.quarantine`); `before`: the `next_page` of
        the answer before. For operators."""
        return await self._transport.quarantine(limit, before)

    async def executions(
        self,
        *,
        conversation: str | None = None,
        active: bool = False,
        limit: int = PAGE_DEFAULT,
        page: str | None = None,
    ) -> ExecutionList:
        """Newest first. `active`: only those that have not ended."""
        if conversation is not None:
            check_token(conversation, "conversation")
        return await self._transport.executions(conversation, active, limit, page)

    async def execution(self, execution: str) -> ExecutionView:
        return await self._transport.execution(check_token(execution, "execution"))

    async def snapshot(self, execution: str) -> ExecutionSnapshot:
        """The folded state of an execution, and a cursor behind it. Reading wakes no sandbox."""
        return await self._transport.snapshot(check_token(execution, "execution"))

    async def state(self, execution: str) -> ExecutionState:
        """The state alone of `snapshot`."""
        answer = await self.snapshot(execution)
        try:
            return Snapshot.model_validate(answer.snapshot).state
        except ValidationError as error:
            raise invalid(error, "snapshot") from None


async def _with_lease(ask: Callable[[], Awaitable[ControlAnswer]]) -> ControlAnswer:
    """Asked again, as the same control, while another process holds the conversation's control lease: it lets go when
    it is idle, and the lease of one that is frozen expires. Raises LEASE_NOT_READY after LEASE_PATIENCE_S."""
    deadline_s = time.monotonic() + LEASE_PATIENCE_S
    backoff = Backoff()
    while True:
        try:
            return await ask()
        except ProblemError as error:
            wait_s = backoff.next_s()
            if error.problem.code is not Code.LEASE_NOT_READY or time.monotonic() + wait_s > deadline_s:
                raise
            _log.info("control_lease_waited_for", detail=error.problem.detail)
        await asyncio.sleep(wait_s)


class _Waiting:
    """What waits for a human while a response is awaited. Nothing replayed is executed: what was asked before the
    reader came is answered once it has caught up, if it still waits then."""

    def __init__(self, client: Client, conversation: str, on_interaction: OnInteraction | None) -> None:
        self._client = client
        self._conversation = conversation
        self._on_interaction = on_interaction
        self._pending: dict[tuple[str, str], Interaction] = {}
        self._asked: set[tuple[str, str]] = set()
        self._caught_up = False

    async def take(self, item: Item, tracker: ResponseTracker) -> None:
        if self._on_interaction is None:
            return
        match item:
            case ExecutionItem(type=ev.INTERACTION_REQUESTED):
                body = InteractionRequested.model_validate(item.event.body)
                found = Interaction.of_event(self._conversation, item.execution, body)
                self._pending[item.execution, found.id] = found
            case ExecutionItem(type=ev.INTERACTION_RESOLVED):
                self._pending.pop((item.execution, str(item.event.body.get("interaction"))), None)
            case ExecutionItem(type=ev.RESPONSE_ENDED | ev.EXECUTION_ENDED):
                self._pending = {key: one for key, one in self._pending.items() if key[0] != item.execution}
            case SnapshotItem():
                for execution, state in item.executions.items():
                    self._know(execution, state)
            case CaughtUp():
                self._caught_up = True
                if tracker.execution is not None:
                    self._know(tracker.execution, tracker.fold.freeze())
            case _:
                return
        if self._caught_up:
            await self._ask()

    def _know(self, execution: str, state: ExecutionState) -> None:
        for pending in state.pending():
            self._pending.setdefault(
                (execution, pending.id), Interaction.of_state(self._conversation, execution, pending)
            )

    async def _ask(self) -> None:
        assert self._on_interaction is not None
        for key, interaction in list(self._pending.items()):
            if key in self._asked or self._pending.get(key) is None:
                continue
            self._asked.add(key)
            answer = await self._on_interaction(interaction)
            if answer is not None:
                await self._answer(interaction, answer)

    async def _answer(self, interaction: Interaction, answer: Answer) -> None:
        """With one control id until the collector has said something: the same answer has one effect."""
        control = new_id("ctl")
        backoff = Backoff(quick=4)
        while True:
            try:
                receipt = await self._client.answer(
                    interaction.conversation,
                    interaction.id,
                    answer,
                    execution=interaction.execution,
                    control_id=control,
                )
            except ProblemError as error:
                if error.problem.code in (Code.INTERACTION_SETTLED, Code.TARGET_STALE, Code.SESSION_STREAM_NOT_ACTIVE):
                    _log.info("interaction_settled_elsewhere", interaction=interaction.id, code=error.problem.code)
                    return
                raise
            if receipt.status != "unknown" or backoff.failures >= backoff.quick:
                return  # still unknown: it is told by the log, and nothing else may be sent
            await asyncio.sleep(backoff.next_s())
            settled = await self._client.receipt(control, execution=interaction.execution)
            if settled.status != "unknown":
                return


def _content(content: Content) -> tuple[TextContent, ...]:
    parts = [content] if isinstance(content, str) else list(content)
    try:
        return tuple(part if isinstance(part, TextContent) else TextContent(text=part) for part in parts)
    except ValidationError as error:
        raise invalid(error, "content") from None


def _agent(agent: AgentSpec | str) -> AgentSpec:
    if isinstance(agent, AgentSpec):
        return agent
    try:
        return AgentSpec(kind=agent)
    except ValidationError as error:
        raise invalid(error, "agent") from None


def _response(submission: Submission, tracker: ResponseTracker) -> Response:
    if tracker.failed or tracker.execution is None or tracker.outcome is None:
        error = tracker.error or {}
        code = str(error.get("code", Code.RUNTIME_UNAVAILABLE))
        known = Code(code) if code in Code.__members__ else Code.RUNTIME_UNAVAILABLE
        what = problem(
            known,
            str(error.get("detail") or "the request came to nothing"),
            retryable=bool(error.get("retryable", False)),
            request_id=submission.request_id,
        )
        if error.get("choices"):
            what = what.model_copy(update={"context": {**what.context, "choices": list(error["choices"])}})
        raise ResponseFailedError(what)
    state = tracker.fold.freeze()
    return Response(
        submission=submission,
        response_id=tracker.response or "",
        execution=tracker.execution,
        outcome=tracker.outcome,
        text=state.text,
        usage=state.usage,
        state=state,
        cursor=tracker.cursor,
        error=tracker.error,
        partial=tracker.partial or state.partial,
    )


__all__ = ["Client", "Content", "InvalidError"]
