"""The client over HTTP: requests with bounded retries, and the event stream across reconnects.

A request in doubt (connection lost, no answer, 502/503/504) is sent again within its patience. That is safe for all of
them: reads change nothing, a message carries its request id, a control its control id.

    follow: connect with the last id ─▶ open ─▶ events ─▶ live ─▶ … ─▶ end
               ▲                              │ the connection breaks, is silent beyond heartbeats, is damaged
               └────────── back-off ◀─────────┘

What the server gives again after a reconnect is dropped by identity. A stream is silent when not even heartbeats come.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Final, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from tether.api import (
    EVENT_STREAM_TYPE,
    FRAME_END,
    FRAME_EVENT,
    FRAME_LIVE,
    FRAME_OPEN,
    FRAME_PROBLEM,
    FRAME_SNAPSHOT,
    IDEMPOTENCY_HEADER,
    LAST_EVENT_ID_HEADER,
    AnswerRequest,
    ControlAnswer,
    ConversationHistory,
    ConversationList,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
    MessageAccepted,
    MessageRequest,
)
from tether.api_sandboxes import (
    DeleteRequest,
    DrainRequest,
    DrainView,
    Purpose,
    ResumeView,
    SandboxList,
    SandboxView,
)
from tether.client.backoff import of_connection
from tether.client.items import Item
from tether.client.sse import ServerEvent, SseParser, StreamDamagedError
from tether.client.stream_state import StreamReader
from tether.client.transport import FollowOptions
from tether.client.types import Answer, Message, Submission
from tether.deletion import DeletionView
from tether.errors import Code, InvalidError, Problem, ProblemError, QuotaExceededError, error_of, problem
from tether.export_format import ExportFormat
from tether.limits import ADMISSION_WAIT_S, CONTROL_REPLY_S, MIB, SSE_HEARTBEAT_S
from tether.prompt import invalid
from tether.quarantine import QuarantineList

PATIENCE_S: Final = 10.0  # of a call that is no submission
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = max(ADMISSION_WAIT_S, CONTROL_REPLY_S) + 10.0  # the server's own waits, and what it does around them
_SILENT_S: Final = 3 * SSE_HEARTBEAT_S
_ERROR_BYTES_MAX: Final = MIB
_AGAIN: Final = frozenset({502, 503, 504})
_BY_STATUS: Final = {401: Code.UNAUTHENTICATED, 403: Code.FORBIDDEN, 404: Code.NOT_FOUND, 409: Code.REQUEST_CONFLICT}
ModelT = TypeVar("ModelT", bound=BaseModel)


def problem_of(status: int, body: bytes) -> Problem:
    """A problem document, or one made of the status where the body is none (a proxy's page)."""
    try:
        return Problem.model_validate_json(body)
    except ValidationError:
        code = _BY_STATUS.get(status, Code.RUNTIME_UNAVAILABLE if status >= 500 else Code.INVALID)
        return problem(code, f"the server answered {status} without a problem document").model_copy(
            update={"status": status}
        )


def _unreachable(url: str, error: Exception) -> ProblemError:
    detail = f"{url} does not answer ({type(error).__name__}{f': {error}' if str(error) else ''})"
    return ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail))


class HttpTransport:
    """`token`: the bearer token, never shown. `transport`: another httpx2 transport (tests, proxies)."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience_s: float = PATIENCE_S,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._client = httpx2.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=100, max_keepalive_connections=20),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    # --- requests ---

    async def _ask(
        self,
        model: type[ModelT],
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | None] | None = None,
        body: BaseModel | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float | None = None,
    ) -> ModelT:
        """One question, asked again while it is in doubt and patience lasts."""
        deadline_s = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        backoff = of_connection()
        while True:
            failure, asked_s = await self._once(model, method, path, query, body, headers)
            if not isinstance(failure, ProblemError):
                return failure
            wait_s = backoff.next_s(asked_s)
            # A quota is waited for only where the server said for how long.
            told = isinstance(failure, QuotaExceededError) and asked_s is not None
            again = (failure.problem.status in _AGAIN or told) and failure.problem.retryable
            if not again or time.monotonic() + wait_s > deadline_s:
                raise failure
            await asyncio.sleep(wait_s)

    async def _once(
        self,
        model: type[ModelT],
        method: str,
        path: str,
        query: Mapping[str, str | int | None] | None,
        body: BaseModel | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[ModelT | ProblemError, float | None]:
        content = None if body is None else body.model_dump_json(exclude_none=True).encode()
        sent = {**(headers or {}), **({} if content is None else {"Content-Type": "application/json"})}
        params = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            answer = await self._client.request(method, path, params=params, content=content, headers=sent)
        except httpx2.TransportError as error:
            return _unreachable(self._url, error), None
        except httpx2.InvalidURL as error:
            raise InvalidError("url", f"must be an http:// or https:// URL ({error})") from None
        if answer.status_code >= 400:
            what = problem_of(answer.status_code, answer.content)
            return error_of(what), what.retry_after_s
        try:
            return model.model_validate_json(answer.content), None
        except ValidationError:
            detail = f"{self._url} answered {answer.status_code} with something that is not the Tether API"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False)) from None

    async def submit(self, message: Message, patience_s: float) -> Submission:
        try:
            body = MessageRequest(
                request_id=message.request_id,
                content=message.content,
                agent=message.agent,
                workspace=message.workspace,
                mode=message.mode,
                resume=message.resume,
                continuation=message.continuation,
            )
        except ValidationError as error:
            raise invalid(error) from None
        path = f"/v1/conversations/{message.conversation}/messages"
        accepted = await self._ask(MessageAccepted, "POST", path, body=body, patience_s=patience_s)
        return Submission(
            message.conversation,
            accepted.request_id,
            accepted.status,
            accepted.response_id,
            accepted.execution_id,
            accepted.cursor,
            accepted.attempt,
        )

    async def answer(
        self, conversation: str, interaction: str, answer: Answer, execution: str | None, control: str | None
    ) -> ControlAnswer:
        body = AnswerRequest(
            decision=answer.decision,
            text=answer.text,
            input=answer.input,
            answers={key: tuple(value) for key, value in answer.answers.items()},
            execution=execution,
            control_id=control,
        )
        path = f"/v1/conversations/{conversation}/interactions/{quote(interaction, safe='')}"
        return await self._ask(ControlAnswer, "POST", path, body=body)

    async def control(self, execution: str, verb: Literal["interrupt", "stop"], control: str) -> ControlAnswer:
        return await self._ask(
            ControlAnswer, "POST", f"/v1/executions/{execution}/{verb}", headers={IDEMPOTENCY_HEADER: control}
        )

    async def receipt(self, control: str, execution: str | None) -> ControlAnswer:
        return await self._ask(ControlAnswer, "GET", f"/v1/controls/{control}", query={"execution": execution})

    async def conversations(self, limit: int, page: str | None) -> ConversationList:
        return await self._ask(ConversationList, "GET", "/v1/conversations", query={"limit": limit, "page": page})

    async def conversation(self, conversation: str, limit: int, before: int | None) -> ConversationHistory:
        path = f"/v1/conversations/{conversation}"
        return await self._ask(ConversationHistory, "GET", path, query={"limit": limit, "before": before})

    async def executions(self, conversation: str | None, active: bool, limit: int, page: str | None) -> ExecutionList:
        query = {"conversation": conversation, "state": "active" if active else None, "limit": limit, "page": page}
        return await self._ask(ExecutionList, "GET", "/v1/executions", query=query)

    async def execution(self, execution: str) -> ExecutionView:
        return await self._ask(ExecutionView, "GET", f"/v1/executions/{execution}")

    async def snapshot(self, execution: str) -> ExecutionSnapshot:
        return await self._ask(ExecutionSnapshot, "GET", f"/v1/executions/{execution}/snapshot")

    async def quarantine(self, limit: int, before: int | None) -> QuarantineList:
        return await self._ask(QuarantineList, "GET", "/v1/quarantine", query={"limit": limit, "before": before})

    async def sandboxes(self) -> SandboxList:
        return await self._ask(SandboxList, "GET", "/v1/sandboxes")

    async def sandbox(self, workspace: str) -> SandboxView:
        return await self._ask(SandboxView, "GET", f"/v1/sandboxes/{workspace}")

    async def begin_drain(self, verb: Purpose, workspace: str, drain: str, request: DrainRequest) -> DrainView:
        named = request.model_copy(update={"drain_id": drain})
        path = f"/v1/sandboxes/{workspace}"
        if not isinstance(named, DeleteRequest):
            return await self._ask(DrainView, "POST", f"{path}/{verb}", body=named)
        query = named.model_dump(mode="json", exclude_none=True)
        query["checkpoint"] = "true" if named.checkpoint else "false"
        return await self._ask(DrainView, "DELETE", path, query=query)

    async def drain_status(self, workspace: str, drain: str) -> DrainView:
        return await self._ask(DrainView, "GET", f"/v1/sandboxes/{workspace}/drains/{drain}")

    async def resume(self, workspace: str) -> ResumeView:
        return await self._ask(ResumeView, "POST", f"/v1/sandboxes/{workspace}/resume")

    # --- deletion, export ---

    async def begin_deletion(self, conversation: str, deletion: str, force: bool) -> DeletionView:
        query = {"deletion_id": deletion, "force": "true" if force else "false"}
        return await self._ask(DeletionView, "DELETE", f"/v1/conversations/{conversation}", query=query)

    async def deletion(self, conversation: str) -> DeletionView:
        return await self._ask(DeletionView, "GET", f"/v1/conversations/{conversation}/deletion")

    async def export(self, conversation: str, kind: ExportFormat) -> AsyncGenerator[bytes, None]:
        path = f"/v1/conversations/{conversation}/export"
        try:
            async with self._client.stream("GET", path, params={"format": kind}) as answer:
                if answer.status_code != 200:
                    raise error_of(problem_of(answer.status_code, await _bounded(answer)))
                async for chunk in answer.aiter_bytes():
                    yield chunk
        except httpx2.TransportError as error:
            raise _unreachable(self._url, error) from None

    # --- the event stream ---

    async def follow(self, conversation: str, options: FollowOptions) -> AsyncGenerator[Item, None]:
        if options.durable is not None:
            raise InvalidError("durable", "needs a client over NATS: HTTP readers keep a cursor")
        reader = StreamReader(conversation, options.cursor)
        backoff = of_connection()
        failing_since_s: float | None = None
        while not reader.ended:
            failure: ProblemError | None = None
            events = self._connection(conversation, reader, options.until_response)
            try:
                async for event in events:
                    failing_since_s = None
                    if event.name != FRAME_OPEN:
                        backoff.reset()
                    for item in _take(reader, event):
                        yield item
            except httpx2.TransportError as error:
                failure = _unreachable(self._url, error)
            except StreamDamagedError as error:
                failure = _unreachable(self._url, error)
            except ProblemError as error:
                told = isinstance(error, QuotaExceededError) and error.problem.retry_after_s is not None
                if error.problem.status not in _AGAIN and not told:
                    raise
                failure = error
            finally:
                await events.aclose()
            if reader.ended:
                return
            now_s = time.monotonic()
            failing_since_s = now_s if failing_since_s is None else failing_since_s
            patience_s = options.patience_s
            if failure is not None and patience_s is not None and now_s - failing_since_s >= patience_s:
                raise failure
            await asyncio.sleep(backoff.next_s(None if failure is None else failure.problem.retry_after_s))

    async def _connection(
        self, conversation: str, reader: StreamReader, until_response: str | None
    ) -> AsyncGenerator[ServerEvent, None]:
        """One connection's events. Raises TransportError, StreamDamagedError, ProblemError."""
        headers = {"Accept": EVENT_STREAM_TYPE, "Cache-Control": "no-store"}
        if reader.cursor is not None:
            headers[LAST_EVENT_ID_HEADER] = reader.cursor
        params = {} if until_response is None else {"until": f"response:{until_response}"}
        timeout = httpx2.Timeout(_SILENT_S, connect=_CONNECT_S)
        path = f"/v1/conversations/{conversation}/events"
        async with self._client.stream("GET", path, params=params, headers=headers, timeout=timeout) as answer:
            if answer.status_code == 204:
                reader.ended = True
                return
            if answer.status_code != 200:
                raise error_of(problem_of(answer.status_code, await _bounded(answer)))
            if not answer.headers.get("content-type", "").startswith(EVENT_STREAM_TYPE):
                raise ProblemError(
                    problem(Code.RUNTIME_UNAVAILABLE, f"{self._url} gives no event stream", retryable=False).model_copy(
                        update={"status": 500}
                    )
                )
            parser = SseParser()
            async for chunk in answer.aiter_bytes():
                for event in parser.feed(chunk):
                    yield event


async def _bounded(answer: httpx2.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in answer.aiter_bytes():
        parts.append(chunk)
        size += len(chunk)
        if size > _ERROR_BYTES_MAX:
            break
    return b"".join(parts)[:_ERROR_BYTES_MAX]


def _take(reader: StreamReader, event: ServerEvent) -> list[Item]:
    """Raises StreamDamagedError for a frame that is not what `tether.api` says."""
    try:
        match event.name:
            case name if name == FRAME_OPEN:
                return reader.opened(event.id)
            case name if name == FRAME_EVENT:
                return reader.event(event.data, event.id)
            case name if name == FRAME_LIVE:
                return reader.live(event.id)
            case name if name == FRAME_PROBLEM:
                what = Problem.model_validate_json(event.data)
                if what.code is Code.CONVERSATION_DELETED:
                    raise ProblemError(what)
                return reader.problem(event.data, event.id if event.own_id else None)
            case name if name == FRAME_SNAPSHOT:
                return reader.snapshot(event.data, event.id)
            case name if name == FRAME_END:
                return reader.end(event.id)
            case _:
                return []  # a newer server's frame
    except (ValidationError, json.JSONDecodeError):
        raise StreamDamagedError(f"a frame {event.name!r} that this client cannot read") from None


__all__ = ["HttpTransport", "problem_of"]
