"""The HTTP transport in doubt: what is sent again, with which id, for how long; what is refused. A scripted server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import httpx2
import pytest

from tether.client import Answer, CaughtUp, Client, ExecutionItem
from tether.client.http import HttpTransport, problem_of
from tether.errors import Code, InvalidError, ProblemError, problem

Step = Callable[[httpx2.Request], httpx2.Response]


class Script(httpx2.AsyncBaseTransport):
    """Answers requests with its steps in turn; the last one for all that follow."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step(request)

    @property
    def bodies(self) -> list[dict[str, object]]:
        return [json.loads(request.content) for request in self.requests]


def client(script: Script, *, patience_s: float = 5.0) -> Client:
    return Client(HttpTransport("http://tether.test", "secret-token", patience_s=patience_s, transport=script))


def lost(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ReadError("connection reset", request=request)


def refused(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("connection refused", request=request)


def answering(what: object, status: int = 200) -> Step:
    return lambda _: httpx2.Response(status, json=what)


def failing(code: Code, **context: object) -> Step:
    what = problem(code, "told", **context)  # type: ignore[arg-type]
    return lambda _: httpx2.Response(
        what.status, content=what.model_dump_json(), headers={"Content-Type": "application/problem+json"}
    )


ACCEPTED = {
    "request_id": "req_1",
    "status": "admitted",
    "response_id": "rsp_1",
    "execution_id": "exe_1",
    "cursor": "k1",
}
RECEIPT = {"control_id": "ctl_1", "execution": "exe_1", "verb": "stop", "status": "settled"}


async def test_a_submission_in_doubt_is_sent_again_with_the_same_request_id() -> None:
    script = Script(lost, failing(Code.RUNTIME_UNAVAILABLE), refused, answering(ACCEPTED, 202))
    async with client(script) as made:
        submission = await made.prompt("c", "hello", agent="scripted")
    assert submission.execution == "exe_1"
    assert len(script.requests) == 4
    assert len({json.dumps(body, sort_keys=True) for body in script.bodies}) == 1
    assert str(script.bodies[0]["request_id"]).startswith("req_")


async def test_a_refusal_is_told_at_once_with_its_code_and_when_to_try_again() -> None:
    script = Script(failing(Code.SESSION_BUSY, retry_after_s=2.5))
    async with client(script) as made:
        with pytest.raises(ProblemError) as told:
            await made.prompt("c", "hello")
    assert (told.value.problem.code, told.value.problem.retry_after_s) == (Code.SESSION_BUSY, 2.5)
    assert len(script.requests) == 1


@pytest.mark.parametrize(("field", "value"), [("resume", "maybe"), ("continuation", "perhaps")])
async def test_what_is_not_valid_is_refused_as_over_nats_before_anything_is_sent(field: str, value: str) -> None:
    script = Script(failing(Code.SESSION_BUSY))
    async with client(script) as made:
        with pytest.raises(InvalidError) as told:
            await made.prompt("c", "hello", **{field: value})  # type: ignore[arg-type]
    assert [one.field for one in told.value.problem.fields] == [field]
    assert "pydantic" not in str(told.value) and script.requests == []


async def test_patience_bounds_how_long_a_submission_is_repeated() -> None:
    script = Script(refused)
    async with client(script) as made:
        with pytest.raises(ProblemError) as told:
            await made.prompt("c", "hello", patience_s=0.3)
    assert told.value.problem.code is Code.RUNTIME_UNAVAILABLE
    assert "secret-token" not in str(told.value)
    assert 1 < len(script.requests) < 20


async def test_a_control_in_doubt_is_repeated_under_its_control_id() -> None:
    script = Script(lost, answering(RECEIPT))
    async with client(script) as made:
        await made.stop("exe_1")
    keys = {request.headers["Idempotency-Key"] for request in script.requests}
    assert len(script.requests) == 2 and len(keys) == 1


async def test_a_control_waits_for_its_lease_under_one_control_id_and_then_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(failing(Code.LEASE_NOT_READY, retry_after_s=5.0), failing(Code.LEASE_NOT_READY), answering(RECEIPT))
    async with client(script) as made:
        assert (await made.stop("exe_1")).status == "settled"
    assert len({request.headers["Idempotency-Key"] for request in script.requests}) == 1 and len(script.requests) == 3
    monkeypatch.setattr("tether.client.client.LEASE_PATIENCE_S", 0.2)
    never = Script(failing(Code.LEASE_NOT_READY))
    async with client(never) as made:
        with pytest.raises(ProblemError) as told:
            await made.answer("c", "ask-1", Answer.allow())
    assert told.value.problem.code is Code.LEASE_NOT_READY and len(never.requests) > 1


async def test_the_id_of_an_interaction_is_one_segment_of_the_path_whatever_it_holds() -> None:
    script = Script(answering(RECEIPT))
    async with client(script) as made:
        await made.answer("c", "a/../b?x#y", Answer.allow())
    assert script.requests[0].url.raw_path == b"/v1/conversations/c/interactions/a%2F..%2Fb%3Fx%23y"


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, Code.UNAUTHENTICATED), (403, Code.FORBIDDEN), (404, Code.NOT_FOUND), (500, Code.RUNTIME_UNAVAILABLE)],
)
def test_a_page_of_a_proxy_becomes_a_problem_of_its_status(status: int, code: Code) -> None:
    assert problem_of(status, b"<html>").code is code


async def test_an_answer_that_is_not_the_api_is_said_to_be_none_and_not_repeated() -> None:
    script = Script(lambda _: httpx2.Response(200, text="<html>hello</html>"))
    async with client(script) as made:
        with pytest.raises(ProblemError, match="not the Tether API"):
            await made.conversations()
    assert len(script.requests) == 1


# --- the event stream ---


class Chunks(httpx2.AsyncByteStream):
    """A body that may break."""

    def __init__(self, *chunks: bytes, breaks: bool = False) -> None:
        self._chunks = chunks
        self._breaks = breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self._breaks:
            raise httpx2.ReadError("connection reset")


def stream(*chunks: bytes, breaks: bool = False) -> Step:
    return lambda _: httpx2.Response(
        200, headers={"Content-Type": "text/event-stream"}, stream=Chunks(*chunks, breaks=breaks)
    )


def frame(ordinal: int, *, replay: bool = False) -> bytes:
    value = {"execution": "e1", "ordinal": ordinal, "at": 1, "type": "x", "body": {"t": "☃"}, "replay": replay}
    return f"id: k{ordinal}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


OPEN = b'id: k0\nevent: open\ndata: {"conversation": "c", "cursor": "k0"}\n\n'
LIVE = b'event: live\ndata: {"cursor": "k"}\n\n'
END = b'event: end\ndata: {"until": "response:r", "cursor": "k"}\n\n'


async def test_a_broken_stream_goes_on_from_the_last_id_and_nothing_is_doubled() -> None:
    snow = frame(3).index("☃".encode())
    script = Script(
        stream(OPEN, frame(1, replay=True), LIVE, frame(2), frame(3)[: snow + 1], breaks=True),  # inside a character
        refused,
        failing(Code.RUNTIME_UNAVAILABLE),
        stream(OPEN.replace(b"k0", b"k2"), frame(2, replay=True), frame(3, replay=True), LIVE, breaks=False),
        stream(b"\xff\xff"),
        stream(OPEN.replace(b"k0", b"k3"), b": hb\n\n", LIVE, frame(4), END),
    )
    async with client(script) as made, asyncio.timeout(30):
        items = [item async for item in made.follow("c")]
    events = [item for item in items if isinstance(item, ExecutionItem)]
    assert [event.ordinal for event in events] == [1, 2, 3, 4]
    assert [event.replay for event in events] == [True, False, False, False]
    assert len([item for item in items if isinstance(item, CaughtUp)]) == 1
    assert [request.headers.get("Last-Event-ID") for request in script.requests] == [None, "k2", "k2", "k2", "k3", "k3"]


async def test_204_ends_a_stream_that_is_over() -> None:
    script = Script(stream(OPEN, frame(1), breaks=True), lambda _: httpx2.Response(204))
    async with client(script) as made, asyncio.timeout(30):
        assert len([item async for item in made.follow("c", until_response="r")]) == 1
    assert script.requests[0].url.params["until"] == "response:r"


async def test_a_refused_cursor_is_told_and_not_tried_again() -> None:
    script = Script(failing(Code.INVALID))
    async with client(script) as made:
        with pytest.raises(ProblemError):
            async with aclosing(made.follow("c", "damaged")) as items:
                await anext(items)
    assert len(script.requests) == 1


async def test_patience_bounds_how_long_a_stream_is_sought() -> None:
    async with client(Script(refused)) as made, asyncio.timeout(30):
        with pytest.raises(ProblemError) as told:
            async with aclosing(made.follow("c", patience_s=0.2)) as items:
                await anext(items)
    assert told.value.problem.code is Code.RUNTIME_UNAVAILABLE


async def test_a_durable_reader_needs_nats() -> None:
    async with client(Script(refused)) as made:
        with pytest.raises(ProblemError, match="NATS"):
            async with aclosing(made.follow("c", durable="me")) as items:
                await anext(items)
