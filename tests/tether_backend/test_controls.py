"""Controls over HTTP: whole target, one question, the receipt as it stands. A collector is played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support_backend import Backend, Log, ended, event, running_backend, text_delta
from tether import asking, subjects
from tether import events as ev
from tether.control import ControlReply, ControlRequest, decode_request
from tether.errors import Code, problem
from tether.fold import ExecutionFold
from tether.kv import Bucket
from tether.ports import Message
from tether.sandbox import CAN_SNAPSHOT, Registration, SandboxRecord
from tether.snapshot import Watermark, take
from tether.testing import MemoryBus, MemoryServer

TENANT = "acme"
Answer = Callable[[ControlRequest], ControlReply]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[MemoryBus, Backend, Log]]:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = Log(bus, TENANT)
        await log.prompt("q1", "r1", "e1")
        await log.own("e1")
        asked = {"interaction": "req/1", "kind": "approval", "name": "Bash", "input": {"command": "ls"}}
        await log.frame("e1", [log.started("e1"), event(2, ev.INTERACTION_REQUESTED, asked)])
        await backend.projected("c1", "e1", 2)
        yield bus, backend, log


class HandCollector:
    """Answers controls; the same control id gets the first receipt again."""

    def __init__(self, bus: MemoryBus, log: Log, answer: Answer | None = None) -> None:
        self._bus = bus
        self._log = log
        self._answer = answer or (lambda one: ControlReply(control=one.control, verb=one.verb, status="delivered"))
        self.requests: list[ControlRequest] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[HandCollector]:
        subject = subjects.control_all(TENANT, self._log.workspace)
        async with self._bus.serve(subject, self._handle, name="collector"):
            yield self

    async def _handle(self, message: Message) -> bytes:
        request = decode_request(message.data)
        assert message.subject == subjects.control(TENANT, self._log.workspace, request.verb)
        self.requests.append(request)
        return self._answer(request).encode()


async def test_an_answer_goes_to_the_execution_that_asks_with_its_whole_target(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    bus, backend, log = world
    async with HandCollector(bus, log).serving() as collector:
        history = (await backend.client.get("/v1/conversations/c1")).json()
        assert [(one["interaction"], one["state"]) for one in history["interactions"]] == [("req/1", "pending")]
        for _ in range(2):
            answer = await backend.client.post(
                "/v1/conversations/c1/interactions/req%2F1", json={"decision": "allow", "text": "go"}
            )
            assert answer.status_code == 200 and answer.json()["status"] == "delivered"
        first, second = collector.requests
        assert first.control == second.control  # the same answer is the same control
        assert first.verb == "answer" and first.target == log.target("e1")
        assert first.payload["interaction"] == "req/1" and first.payload["decision"] == "allow"
        other = await backend.client.post("/v1/conversations/c1/interactions/req%2F1", json={"decision": "deny"})
        assert other.json()["control_id"] != first.control


async def test_a_lost_reply_is_unknown_and_nothing_is_sent_again(
    world: tuple[MemoryBus, Backend, Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, backend, log = world
    monkeypatch.setattr(asking, "CONTROL_REPLY_S", 0.1)
    silent: list[Message] = []

    async def nothing(message: Message) -> bytes | None:
        silent.append(message)
        return None

    async with bus.serve(subjects.control_all(TENANT, log.workspace), nothing, name="silent"):
        answer = await backend.client.post("/v1/executions/e1/stop", headers={"Idempotency-Key": "k1"})
    assert answer.status_code == 202
    assert answer.json() == {"control_id": "k1", "execution": "e1", "verb": "stop", "status": "unknown"}
    assert len(silent) == 1
    nobody = await backend.client.post("/v1/executions/e1/interrupt", json={"control_id": "k2"})
    assert nobody.status_code == 202 and nobody.json()["status"] == "unknown"


async def test_what_became_of_a_control_is_told_by_the_collector_and_after_the_end_by_the_log(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    bus, backend, log = world

    def settled(request: ControlRequest) -> ControlReply:
        return ControlReply(control=str(request.payload["control"]), verb="stop", status="settled")

    async with HandCollector(bus, log, settled).serving() as collector:
        answer = await backend.client.get("/v1/controls/k1?execution=e1")
        assert answer.json()["status"] == "settled" and collector.requests[0].verb == "receipt"
    receipt = {"control": "k1", "verb": "stop", "status": "settled"}
    await log.frame("e1", [event(3, ev.CONTROL_RECEIPT, receipt), *ended(4, "stopped")])
    await backend.projected("c1", "e1", 5)
    await log.own(None)
    for path in ("/v1/controls/k1", "/v1/controls/k1?execution=e1"):
        assert (await backend.client.get(path)).json()["status"] == "settled"
    again = await backend.client.post("/v1/executions/e1/stop", headers={"Idempotency-Key": "k1"})
    assert again.status_code == 200 and again.json()["status"] == "settled"
    unknown = await backend.client.get("/v1/controls/k9")
    assert unknown.status_code == 404 and unknown.json()["code"] == "NOT_FOUND"


async def test_an_execution_that_was_replaced_is_stale_and_the_current_target_is_named(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    bus, backend, log = world
    await log.own("e2")
    async with HandCollector(bus, log).serving() as collector:
        answer = await backend.client.post("/v1/executions/e1/stop")
        assert answer.status_code == 409 and answer.json()["code"] == "TARGET_STALE"
        assert answer.json()["context"]["current"]["execution"] == "e2"
        fresh = await backend.client.post("/v1/executions/e2/interrupt")  # no row names it yet
        assert fresh.status_code == 200 and fresh.json()["status"] == "delivered"
        assert [one.target.execution for one in collector.requests if one.target] == ["e2"]
    nothing = await backend.client.post("/v1/executions/e9/stop")
    assert nothing.status_code == 404 and nothing.json()["code"] == "NOT_FOUND"


async def test_a_refusal_of_the_collector_is_its_problem_with_the_control_id(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    bus, backend, log = world

    def refuse(request: ControlRequest) -> ControlReply:
        what = problem(Code.INTERACTION_SETTLED, "answered already", winner="k0")
        return ControlReply(control=request.control, verb=request.verb, status="rejected", problem=what)

    async with HandCollector(bus, log, refuse).serving():
        answer = await backend.client.post(
            "/v1/conversations/c1/interactions/req%2F1", json={"decision": "deny"}, headers={"Idempotency-Key": "k1"}
        )
    assert answer.status_code == 409 and answer.json()["code"] == "INTERACTION_SETTLED"
    assert answer.json()["context"] == {"winner": "k0", "control_id": "k1", "execution": "e1"}


async def test_an_answer_after_the_end_is_refused_by_name_without_asking_anybody(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    """C3."""
    _, backend, log = world
    await log.frame("e1", ended(3))
    await backend.projected("c1", "e1", 4)
    await log.own(None)
    answer = await backend.client.post("/v1/conversations/c1/interactions/req%2F1", json={"decision": "allow"})
    assert answer.status_code == 409 and answer.json()["code"] == "INTERACTION_SETTLED"
    assert answer.json()["context"]["state"] == "expired"
    missing = await backend.client.post("/v1/conversations/c1/interactions/none", json={"decision": "allow"})
    assert missing.status_code == 404


async def _register(bus: MemoryBus, log: Log, capabilities: tuple[str, ...]) -> None:
    bucket = Bucket(bus, subjects.SANDBOXES)
    record = SandboxRecord(
        tenant=TENANT, workspace=log.workspace, sandbox="sbx", state="active", provider="local", updated_at=5
    )
    await bucket.create(subjects.sandbox_key(TENANT, log.workspace), record.value(), op="agent")
    registration = Registration(
        tenant=TENANT,
        workspace=log.workspace,
        sandbox="sbx",
        boot="boot1",
        instance="i1",
        capabilities=capabilities,
        agents=("scripted",),
    )
    key = subjects.registration_key(TENANT, log.workspace, "sbx")
    await bucket.create(key, registration.value(), op="collector", ttl_s=30)


async def test_a_snapshot_is_the_collectors_while_it_lives_then_the_logs_then_the_rows(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    bus, backend, log = world
    fold = ExecutionFold()
    fold.apply(log.started("e1"))

    def snap(request: ControlRequest) -> ControlReply:
        taken = take(log.target("e1"), fold.freeze(), Watermark(ordinal=1, sequence=3, tag=9), captured_at=77)
        result: dict[str, Any] = {"snapshot": taken.model_dump(mode="json", exclude_none=True)}
        return ControlReply(control=request.control, verb="snapshot", status="settled", result=result)

    async with HandCollector(bus, log, snap).serving() as collector:
        unregistered = (await backend.client.get("/v1/executions/e1/snapshot")).json()
        assert unregistered["source"] == "log" and collector.requests == []  # an older peer is not asked
        await _register(bus, log, (CAN_SNAPSHOT,))
        live = (await backend.client.get("/v1/executions/e1/snapshot")).json()
        assert live["source"] == "collector" and live["snapshot"]["captured_at"] == 77
    sandboxes = (await backend.client.get("/v1/sandboxes")).json()["sandboxes"]
    assert [(one["workspace"], one["state"], one["connected"]) for one in sandboxes] == [
        (log.workspace, "active", True)
    ]

    await log.frame("e1", [text_delta(3, "text"), *ended(4)])
    await backend.projected("c1", "e1", 5)
    await log.own(None)
    folded = (await backend.client.get("/v1/executions/e1/snapshot")).json()
    assert folded["source"] == "log" and folded["snapshot"]["terminal"] is True
    assert folded["snapshot"]["watermark"]["ordinal"] == 5
    reader = await backend.reader("c1").open(folded["cursor"])
    frame = await reader.next()
    assert frame is not None and frame.name == "open"

    await bus.purge(subjects.events_stream(TENANT), log.subject("e1"), up_to=4)
    rows = (await backend.client.get("/v1/executions/e1/snapshot")).json()
    assert rows["source"] == "projection"
    assert rows["snapshot"]["state"]["items"] == folded["snapshot"]["state"]["items"]
    assert (await backend.client.get("/v1/executions/none/snapshot")).status_code == 404


async def test_lists_page_through_everything_once(tmp_path: Path) -> None:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        for number in range(7):
            log = Log(bus, TENANT, conversation=f"c{number}")
            for turn in range(3):
                await log.prompt(f"q{number}-{turn}", f"r{number}-{turn}", f"e{number}-{turn}")
                frame = [log.started(f"e{number}-{turn}"), text_delta(2, "x"), *ended(3)]
                await log.frame(f"e{number}-{turn}", frame)
        await backend.projected("c6", "e6-2", 4)
        assert await _pages(backend, "/v1/conversations?limit=2", "conversations", "conversation") == {
            f"c{number}" for number in range(7)
        }
        runs = await _pages(backend, "/v1/executions?limit=4", "executions", "execution")
        assert runs == {f"e{number}-{turn}" for number in range(7) for turn in range(3)}
        assert await _pages(backend, "/v1/executions?limit=4&state=active", "executions", "execution") == set()
        one = await _pages(backend, "/v1/executions?limit=1&conversation=c3", "executions", "execution")
        assert one == {"e3-0", "e3-1", "e3-2"}
        assert await _history_backwards(backend, "c3") == ["q3-0", "q3-1", "q3-2"]
        items = (await backend.client.get("/v1/executions/e3-1/items?limit=1")).json()
        assert items["applied"] == 4 and [item["item"] for item in items["items"]] == ["text/s1"]


async def _pages(backend: Backend, path: str, name: str, key: str) -> set[str]:
    found: list[str] = []
    page = ""
    while True:
        answer = (await backend.client.get(path + page)).json()
        found += [one[key] for one in answer[name]]
        if answer.get("next_page") is None:
            assert len(found) == len(set(found))
            return set(found)
        page = f"&page={answer['next_page']}"


async def _history_backwards(backend: Backend, conversation: str) -> list[str]:
    requests: list[str] = []
    before = ""
    while True:
        page = (await backend.client.get(f"/v1/conversations/{conversation}?limit=2{before}")).json()
        requests = [one["request"] for one in page["messages"]] + requests
        assert len(page["responses"]) == len(page["executions"]) <= 2
        if page.get("before") is None:
            return requests
        before = f"&before={page['before']}"
        await asyncio.sleep(0)
