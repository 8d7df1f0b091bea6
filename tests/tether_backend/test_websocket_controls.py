"""Requests over a conversation's WebSocket: each is the HTTP request's own function, with a reply beside the stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support_backend import Backend, Log, Sse, ended, event, eventually, running_backend, text_delta
from support_websocket import SocketReader
from tether import events as ev
from tether import ids, subjects
from tether.api import WsClose, WsReply
from tether.bus import NatsBus
from tether.control import ControlReply, ControlRequest, decode_request
from tether.errors import Code, problem
from tether.kv import Bucket
from tether.limits import PROMPT_BYTES_MAX, WS_ASKS_MAX
from tether.ports import Message
from tether.prompt import Done, Prompt, RequestRecord, decode_prompt
from tether_backend.feed import Mailbox
from tether_backend.http import asks

MESSAGE = {"request_id": "q9", "content": [{"type": "text", "text": "hello"}]}
Answer = Callable[[ControlRequest], ControlReply]


def delivered(request: ControlRequest) -> ControlReply:
    return ControlReply(control=request.control, verb=request.verb, status="delivered")


class Collector:
    """Answers controls once `open`; each control id has one effect, as a collector's journal sees to it."""

    def __init__(self, bus: NatsBus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self.answer: Answer = delivered
        self.open = asyncio.Event()
        self.open.set()
        self.requests: list[ControlRequest] = []
        self.answered = 0

    @property
    def effects(self) -> Counter[str]:
        return Counter(one.control for one in {one.control: one for one in self.requests}.values())

    @contextlib.asynccontextmanager
    async def serving(self, *logs: Log) -> AsyncIterator[Collector]:
        async with contextlib.AsyncExitStack() as stack:
            for log in logs:
                subject = subjects.control_all(self._tenant, log.workspace)
                await stack.enter_async_context(self._bus.serve(subject, self._handle, name="collector"))
            yield self

    async def _handle(self, message: Message) -> bytes:
        request = decode_request(message.data)
        self.requests.append(request)
        await self.open.wait()
        self.answered += 1
        return self.answer(request).encode()


@dataclass
class World:
    backend: Backend
    bus: NatsBus
    tenant: str
    log: Log
    collector: Collector
    reader: SocketReader

    async def asked(self, op: str, body: dict[str, Any], ask: str = "a1", reader: SocketReader | None = None) -> Any:
        reader = reader or self.reader
        await say(reader, ask, op, body)
        return await reply(reader, ask)


async def say(reader: SocketReader, ask: str, op: str, body: dict[str, Any]) -> None:
    await reader.connection.send(json.dumps({"ask": ask, "op": op, "body": body}))


async def reply(reader: SocketReader, ask: str | None = None) -> WsReply:
    """The next reply; events before it are passed over."""
    [*_, frame] = await reader.until("reply")
    assert frame.id is None
    found = WsReply.model_validate(frame.data)
    assert set(frame.data) == {"ask", "status", "body"} and ask in (None, found.ask)
    return found


async def waiting(log: Log, execution: str, request: str, response: str) -> None:
    """An execution that owns its conversation and asks for an approval."""
    await log.prompt(request, response, execution)
    await log.own(execution)
    asked = {"interaction": "req/1", "kind": "approval", "name": "Bash", "input": {"command": "ls"}}
    await log.frame(execution, [log.started(execution), event(2, ev.INTERACTION_REQUESTED, asked)])


@pytest.fixture
async def world(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[World]:
    async with running_backend(bus, [tenant], tmp_path) as backend:
        log, other = Log(bus, tenant), Log(bus, tenant, conversation="c2")
        await waiting(log, "e1", "q1", "r1")
        await waiting(other, "e2", "q2", "r2")
        await backend.projected("c1", "e1", 2)
        await backend.projected("c2", "e2", 2)
        reader = SocketReader(backend.port, tenant)
        async with Collector(bus, tenant).serving(log, other) as collector:
            await reader.open()
            await reader.until("live")
            yield World(backend, bus, tenant, log, collector, reader)
            collector.open.set()
            await reader.close()


# --- each request ---


async def test_an_answer_an_interrupt_and_a_stop_reach_the_collector_as_over_http(world: World) -> None:
    answer = {"interaction": "req/1", "decision": "allow", "text": "go"}
    told = await world.asked("answer", answer)
    [request] = world.collector.requests
    assert request.verb == "answer" and request.target == world.log.target("e1")
    assert request.payload == {"interaction": "req/1", "decision": "allow", "text": "go", "answers": {}}
    over_http = await world.backend.client.post(
        "/v1/conversations/c1/interactions/req%2F1", json={"decision": "allow", "text": "go"}
    )
    assert (told.status, told.body) == (over_http.status_code, over_http.json())  # the derived control id, too
    for verb in ("interrupt", "stop"):
        told = await world.asked(verb, {"execution": "e1", "control_id": f"k-{verb}"})
        over_http = await world.backend.client.post(f"/v1/executions/e1/{verb}", json={"control_id": f"k-{verb}"})
        assert (told.status, told.body) == (over_http.status_code, over_http.json())
        assert told.body == {"control_id": f"k-{verb}", "execution": "e1", "verb": verb, "status": "delivered"}
        unnamed = [await world.asked(verb, {"execution": "e1"}) for _ in range(2)]
        assert len({one.body["control_id"] for one in unnamed}) == 2  # each is one of its own


async def test_what_became_of_a_control_is_asked_over_either(world: World) -> None:
    def settled(request: ControlRequest) -> ControlReply:
        return ControlReply(control=str(request.payload["control"]), verb="stop", status="settled")

    world.collector.answer = settled
    told = await world.asked("control", {"control_id": "k1", "execution": "e1"})
    over_http = await world.backend.client.get("/v1/controls/k1?execution=e1")
    assert (told.status, told.body) == (200, over_http.json()) and told.body["status"] == "settled"
    receipt = {"control": "k1", "verb": "stop", "status": "settled"}
    await world.log.frame("e1", [event(3, ev.CONTROL_RECEIPT, receipt), *ended(4, "stopped")])
    await world.backend.projected("c1", "e1", 5)
    await world.log.own(None)
    assert (await world.asked("control", {"control_id": "k1", "execution": "e1"})).body["status"] == "settled"
    assert (await world.asked("stop", {"control_id": "k1", "execution": "e1"})).body["status"] == "settled"


@contextlib.asynccontextmanager
async def router(bus: NatsBus, tenant: str, prompts: list[Prompt]) -> AsyncIterator[None]:
    """Admits every prompt of the tenant."""

    async def work() -> None:
        async for job in bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE):
            prompt = decode_prompt(job.message.data)
            if prompt.tenant == tenant:
                prompts.append(prompt)
                record = RequestRecord(
                    digest=prompt.digest,
                    workspace=prompt.workspace,
                    conversation=prompt.conversation,
                    attempt=prompt.attempt,
                    prompt_sequence=job.message.sequence,
                    state="done",
                    done=Done(
                        status="admitted",
                        response=ids.response_id(tenant, prompt.request_id, 1),
                        execution=ids.execution_id(tenant, prompt.request_id, 1),
                        cursor_sequence=7,
                        cursor_stored_at_ns=7,
                    ),
                )
                key = subjects.request_key(tenant, prompt.request_id)
                await Bucket(bus, subjects.REQUESTS).create(key, record.value(), op="test")
            await job.ack()

    task = asyncio.create_task(work(), name="router")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_message_is_admitted_once_whichever_way_it_is_sent_again(world: World) -> None:
    prompts: list[Prompt] = []
    async with router(world.bus, world.tenant, prompts):
        first = await world.asked("send", MESSAGE)
        await world.reader.open()
        again = await world.asked("send", MESSAGE)
        over_http = await world.backend.client.post("/v1/conversations/c1/messages", json=MESSAGE)
        assert first.status == over_http.status_code == 202
        assert first.body == again.body == over_http.json()
        assert first.body["status"] == "admitted" and first.body["request_id"] == "q9"
        [prompt] = prompts
        assert prompt.author == f"user of {world.tenant}" and prompt.conversation == "c1"
        long = "x" * (PROMPT_BYTES_MAX - 4096)
        big = await world.asked("send", {"request_id": "q10", "content": [{"type": "text", "text": long}]})
        assert big.status == 202 and prompts[-1].content[0].text == long
    conflict = await world.asked("send", {**MESSAGE, "content": [{"type": "text", "text": "other"}]})
    assert conflict.status == 409 and conflict.body["code"] == "REQUEST_CONFLICT"


async def test_a_control_has_one_effect_over_reconnects_and_over_http(world: World) -> None:
    body = {"execution": "e1", "control_id": "k1"}
    told = [await world.asked("stop", body)]
    await world.reader.open()
    told.append(await world.asked("stop", body))
    over_http = await world.backend.client.post("/v1/executions/e1/stop", headers={"Idempotency-Key": "k1"})
    assert told[0].body == told[1].body == over_http.json()
    assert world.collector.effects == {"k1": 1}
    answers = [await world.asked("answer", {"interaction": "req/1", "decision": "deny"}) for _ in range(2)]
    assert answers[0].body["control_id"] == answers[1].body["control_id"]


async def test_a_ticket_may_ask_what_its_token_may(world: World) -> None:
    ticket = (await world.backend.client.post("/v1/conversations/c1/tickets")).json()["ticket"]
    reader = await SocketReader(world.backend.port, world.tenant).open(headers={}, ticket=ticket)
    told = await world.asked("stop", {"execution": "e1", "control_id": "k1"}, reader=reader)
    assert told.status == 200 and world.collector.requests[0].target == world.log.target("e1")
    assert (await world.asked("stop", {"execution": "e2"}, reader=reader)).status == 404
    await reader.close()


# --- refusals ---


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"op": "stop"}, "body"),
        ({"body": {}}, "op"),
        ({"op": "drain", "body": {}}, "op"),
        ({"op": ["stop"], "body": {}}, "op"),
        ({"op": "stop", "body": []}, "body"),
        ({"op": "stop", "body": {"execution": "e1"}, "id": 1}, "id"),
        ({"op": "stop", "body": {}}, "execution"),
        ({"op": "stop", "body": {"execution": "e.1"}}, "execution"),
        ({"op": "interrupt", "body": {"execution": "e1", "control_id": "*"}}, "control_id"),
        ({"op": "stop", "body": {"execution": "e1", "force": True}}, "force"),
        ({"op": "answer", "body": {"decision": "allow"}}, "interaction"),
        ({"op": "answer", "body": {"interaction": "", "decision": "allow"}}, "interaction"),
        ({"op": "answer", "body": {"interaction": "x" * 257, "decision": "allow"}}, "interaction"),
        ({"op": "answer", "body": {"interaction": "req/1", "decision": "perhaps"}}, "decision"),
        ({"op": "control", "body": {"execution": "e1"}}, "control_id"),
        ({"op": "control", "body": {"control_id": "k1"}}, "execution"),
        ({"op": "send", "body": {"request_id": "q9"}}, "content"),
        ({"op": "send", "body": {"request_id": "q9", "content": [{"type": "image"}]}}, "content.0.type"),
        ({"op": "send", "body": {**MESSAGE, "workspace": "w2"}}, "workspace"),
    ],
)
async def test_what_is_not_valid_is_refused_by_its_field_and_the_connection_stays(
    world: World, message: dict[str, Any], field: str
) -> None:
    await world.reader.connection.send(json.dumps({"ask": "bad", **message}))
    told = await reply(world.reader, "bad")
    assert (told.status, told.body["code"]) == (422, "INVALID")
    assert told.body["fields"][0]["field"] == field and told.body["type"] == "urn:tether:problem:invalid"
    assert world.collector.requests == []
    assert (await world.asked("stop", {"execution": "e1"})).status == 200


async def test_a_refusal_is_the_problem_document_of_http(world: World) -> None:
    def refuse(request: ControlRequest) -> ControlReply:
        what = problem(Code.INTERACTION_SETTLED, "answered already", winner="k0")
        return ControlReply(control=request.control, verb=request.verb, status="rejected", problem=what)

    world.collector.answer = refuse
    client = world.backend.client
    pairs = [
        (
            await world.asked("answer", {"interaction": "req/1", "decision": "deny", "control_id": "k1"}),
            await client.post(
                "/v1/conversations/c1/interactions/req%2F1", json={"decision": "deny", "control_id": "k1"}
            ),
        ),
        (
            await world.asked("answer", {"interaction": "req/1", "decision": "deny", "text": 7}),
            await client.post("/v1/conversations/c1/interactions/req%2F1", json={"decision": "deny", "text": 7}),
        ),
        (await world.asked("stop", {"execution": "e9"}), await client.post("/v1/executions/e9/stop")),
        (
            await world.asked("send", {"request_id": "q9", "content": []}),
            await client.post("/v1/conversations/c1/messages", json={"request_id": "q9", "content": []}),
        ),
    ]
    await world.log.own("e3")
    pairs.append((await world.asked("stop", {"execution": "e1"}), await client.post("/v1/executions/e1/stop")))
    for told, over_http in pairs:
        assert (told.status, told.body) == (over_http.status_code, over_http.json())
    assert [one.body["code"] for one, _ in pairs] == [
        "INTERACTION_SETTLED",
        "INVALID",
        "NOT_FOUND",
        "INVALID",
        "TARGET_STALE",
    ]


async def test_an_execution_of_another_conversation_is_as_one_that_is_not_there(world: World) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("interrupt", {}),
        ("stop", {}),
        ("control", {"control_id": "k1"}),
        ("answer", {"interaction": "req/1", "decision": "allow"}),
    ]
    for op, body in bodies:
        foreign = await world.asked(op, {"execution": "e2", **body})
        missing = await world.asked(op, {"execution": "e9", **body})
        assert foreign == missing and (foreign.status, foreign.body["code"]) == (404, "NOT_FOUND"), op
    unnamed = await world.asked("control", {"execution": "_", "control_id": "k1"})
    assert unnamed.status == 404
    over_http = await world.backend.client.post(
        "/v1/conversations/c1/interactions/req%2F1", json={"decision": "allow", "execution": "e2"}
    )
    assert over_http.status_code == 404 and world.collector.requests == []
    fresh = Log(world.bus, world.tenant, conversation="c3")
    await fresh.own("e4")  # no row and no event names it yet
    assert (await world.asked("stop", {"execution": "e4"})).status == 404
    assert (await world.asked("answer", {"interaction": "req/1", "decision": "allow"})).status == 200


async def test_a_failure_that_nobody_foresaw_is_a_reply_and_the_connection_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(asks, "end", broken)
        told = await world.asked("stop", {"execution": "e1"})
    assert (told.status, told.body["code"], told.body["retryable"]) == (500, "RUNTIME_UNAVAILABLE", True)
    assert "secret" not in json.dumps(told.body)
    assert (await world.asked("stop", {"execution": "e1"})).status == 200


# --- bounds, and the stream beside it ---


async def test_more_asks_than_may_be_under_way_are_refused_at_once_and_the_others_get_their_replies(
    world: World,
) -> None:
    world.collector.open.clear()
    for number in range(WS_ASKS_MAX + 3):
        await say(world.reader, f"a{number}", "interrupt", {"execution": "e1", "control_id": f"k{number}"})
    refused = [await reply(world.reader) for _ in range(3)]
    assert {one.ask for one in refused} == {f"a{WS_ASKS_MAX + number}" for number in range(3)}
    for one in refused:
        assert (one.status, one.body["code"], one.body["retryable"]) == (429, "QUOTA_EXCEEDED", True)
    # The stream is not held up by what waits.
    await world.log.frame("e1", [text_delta(3, "while they wait")])
    assert [one.key for one in await world.reader.events(1)] == [("e1", 3)]
    world.collector.open.set()
    replies = [await reply(world.reader) for _ in range(WS_ASKS_MAX)]
    assert {one.ask for one in replies} == {f"a{number}" for number in range(WS_ASKS_MAX)}
    assert {one.status for one in replies} == {200}
    assert world.collector.effects == {f"k{number}": 1 for number in range(WS_ASKS_MAX)}
    assert (await world.asked("stop", {"execution": "e1"})).status == 200
    text = (await world.backend.client.get("/metrics")).text
    assert 'route="/v1/conversations/{conversation}/ws#interrupt",status="429"} 3.0' in text


async def test_replies_among_many_events_neither_move_the_cursor_nor_reorder_them(world: World) -> None:
    total = 302

    async def write() -> None:
        for first in range(3, total + 1, 3):
            await world.log.frame("e1", [text_delta(n, "x", offset=n - 3) for n in range(first, first + 3)])

    writer = asyncio.create_task(write(), name="writer")
    seen: list[int] = []
    replies: list[str] = []
    sent = 0
    while len(seen) < total - 2 or len(replies) < sent:
        if sent < 40 and sent == len(replies):
            await say(world.reader, f"a{sent}", "stop", {"execution": "e1", "control_id": f"k{sent}"})
            sent += 1
        before = world.reader.cursor
        one = await world.reader.next()
        assert one is not None
        if one.name == "reply":
            replies.append(one.data["ask"])
            assert world.reader.cursor == before
        else:
            seen.append(one.data["ordinal"])
    await writer
    assert seen == list(range(3, total + 1))
    assert replies == [f"a{number}" for number in range(sent)]


async def test_replies_that_are_not_taken_count_to_a_slow_readers_bound_and_what_was_asked_is_done(
    world: World,
) -> None:
    def wordy(request: ControlRequest) -> ControlReply:
        what = problem(Code.INTERACTION_SETTLED, "answered already", pad="x" * 300_000)
        return ControlReply(control=request.control, verb=request.verb, status="rejected", problem=what)

    stalled = await SocketReader(world.backend.port, world.tenant).open(small=True)
    await stalled.until("live")
    world.collector.answer = wordy
    cut = world.backend.deps.metrics.cut._value
    number = 0
    while cut.get() == 0:
        done = world.collector.answered
        await say(stalled, f"a{number}", "stop", {"execution": "e1", "control_id": f"k{number}"})
        number += 1

        async def next_or_cut(done: int = done) -> bool:
            return world.collector.answered > done or cut.get() > 0

        await eventually(next_or_cut, "the ask was answered", timeout_s=10)
        assert number < 60, "sockets, transport and bound hold less than that"
    assert set(world.collector.effects) == {f"k{index}" for index in range(number)}
    while await stalled.next() is not None:
        pass
    assert stalled.close_code in (WsClose.SLOW, 1006)
    world.collector.answer = delivered
    assert (await world.asked("stop", {"execution": "e1"})).status == 200  # another reader is not touched
    await stalled.open()
    again = await world.asked("stop", {"execution": "e1", "control_id": "k0"}, reader=stalled)
    assert again.status == 200
    await stalled.close()


async def test_what_is_held_for_a_reader_counts_with_its_messages() -> None:
    cuts: list[int] = []
    box = Mailbox(100, lambda: cuts.append(1))
    box.live = True
    box.hold(500)  # alone it may be larger: a reader that takes it is not slow
    assert not box.overflowed
    box.release(500)
    box.hold(60)
    box.hold(60)
    assert box.overflowed and cuts == [1]
    box.hold(60)
    assert cuts == [1], "once"
    replaying = Mailbox(100, lambda: cuts.append(2))
    replaying.hold(60)
    replaying.hold(60)
    assert cuts == [1, 2], "it could not go round it"


async def test_a_client_that_asks_without_end_and_takes_nothing_is_read_no_further(world: World) -> None:
    stalled = await SocketReader(world.backend.port, world.tenant).open(small=True)
    await stalled.until("live")
    stalled.connection.transport.pause_reading()
    message = json.dumps({"ask": "a1", "op": "nothing", "body": {"pad": "x" * 4000}})
    sent_bytes = 0
    with pytest.raises(TimeoutError):
        while sent_bytes < 256 << 20:
            async with asyncio.timeout(1.0):  # far more than one message takes that is read
                await stalled.connection.send(message)
            sent_bytes += len(message)
    assert (await world.asked("stop", {"execution": "e1"})).status == 200  # another is not touched
    await stalled.close()


# --- ends ---


async def test_who_leaves_while_an_ask_is_under_way_does_not_take_it_back(world: World) -> None:
    world.collector.open.clear()
    await say(world.reader, "a1", "stop", {"execution": "e1", "control_id": "k1"})

    async def arrived() -> bool:
        return len(world.collector.requests) == 1

    await eventually(arrived, "the control is with the collector")
    await world.reader.close()
    readers = world.backend.deps.metrics.readers._value

    async def gone() -> bool:
        return bool(readers.get() == 0)

    await eventually(gone, "the reader is gone")
    assert any(task.get_name() == "websocket-ask" for task in asyncio.all_tasks())
    world.collector.open.set()

    async def over() -> bool:
        return not any(task.get_name() == "websocket-ask" for task in asyncio.all_tasks())

    await eventually(over, "the ask is over")
    await world.reader.open()
    told = await world.asked("stop", {"execution": "e1", "control_id": "k1"})
    assert told.status == 200 and world.collector.effects == {"k1": 1}


async def test_garbage_closes_the_connection_and_what_was_asked_before_it_is_done(world: World) -> None:
    world.collector.open.clear()
    await say(world.reader, "a1", "stop", {"execution": "e1", "control_id": "k1"})
    await world.reader.connection.send("garbage")
    assert await world.reader.next() is None and world.reader.close_code == WsClose.NOT_AN_ASK
    world.collector.open.set()

    async def done() -> bool:
        return world.collector.answered == 1

    await eventually(done, "the control was answered")


async def test_an_end_that_comes_while_an_ask_is_under_way_waits_for_its_reply(world: World) -> None:
    reader = await SocketReader(world.backend.port, world.tenant).open(until="response:r1")
    await reader.until("live")
    world.collector.open.clear()
    await say(reader, "a1", "stop", {"execution": "e1", "control_id": "k1"})

    async def arrived() -> bool:
        return len(world.collector.requests) == 1

    await eventually(arrived, "the control is with the collector")
    await world.log.frame("e1", ended(3, "stopped"))
    await reader.until("end")
    world.collector.open.set()
    assert (await reply(reader, "a1")).status == 200
    assert await reader.next() is None and reader.close_code == WsClose.END


@pytest.mark.parametrize("answers", [True, False])
async def test_a_service_that_stops_gives_the_asks_under_way_their_time_and_then_closes(
    bus: NatsBus, tenant: str, tmp_path: Path, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_backend.http.server._REPLIES_S", 10.0 if answers else 0.2)
    log = Log(bus, tenant)
    async with Collector(bus, tenant).serving(log) as collector:
        async with running_backend(bus, [tenant], tmp_path) as backend:
            await waiting(log, "e1", "q1", "r1")
            await backend.projected("c1", "e1", 2)
            reader = await SocketReader(backend.port, tenant).open()
            await reader.until("live")
            collector.open.clear()
            await say(reader, "a1", "stop", {"execution": "e1", "control_id": "k1"})

            async def arrived() -> bool:
                return len(collector.requests) == 1

            await eventually(arrived, "the control is with the collector")
            watching = asyncio.create_task(_last_frames(reader), name="watching")
            release = asyncio.get_running_loop().call_later(0.5, collector.open.set)
        frames = await watching
        release.cancel()
    assert [one.data["ask"] for one in frames if one.name == "reply"] == (["a1"] if answers else [])
    assert reader.close_code == WsClose.STOPPED
    await reader.close()


async def _last_frames(reader: SocketReader) -> list[Sse]:
    found: list[Sse] = []
    while (one := await reader.next()) is not None:
        found.append(one)
    return found


async def test_a_message_in_fragments_is_one_ask(world: World) -> None:
    text = json.dumps({"ask": "a1", "op": "stop", "body": {"execution": "e1"}})
    for _ in range(2):
        await world.reader.connection.send([text[:3], text[3:20], "", text[20:]])
        assert (await reply(world.reader, "a1")).status == 200
