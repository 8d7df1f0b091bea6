"""Posting messages: durable once, answered the same every time. A router is played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support_backend import Backend, eventually, running_backend
from tether import ids, subjects
from tether.bus import NatsBus, connect
from tether.errors import Code, problem
from tether.kv import Bucket
from tether.ports import Bus, Job
from tether.prompt import Done, Prompt, RequestRecord, decode_prompt
from tether.submission import Publish, Refuse, Wait, decide
from tether_backend.http import messages as messages_module


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


def body(request: str = "q1", text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"request_id": request, "content": [{"type": "text", "text": text}], **more}


class HandRouter:
    """Takes the tenant's prompts from the queue and settles them with `outcomes`, in turn (the last repeats)."""

    def __init__(self, bus: Bus, tenant: str, *outcomes: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self._outcomes = list(outcomes) or ["admitted"]
        self.prompts: list[Prompt] = []

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[HandRouter]:
        task = asyncio.create_task(self._work(), name="hand-router")
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _work(self) -> None:
        async for job in self._bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE):
            await self._settle(job)

    async def _settle(self, job: Job) -> None:
        prompt = decode_prompt(job.message.data)
        if prompt.tenant != self._tenant:
            await job.ack()
            return
        self.prompts.append(prompt)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        done = None
        if outcome == "retryable":
            done = Done(status="failed", problem=problem(Code.SESSION_BUSY, "busy", retry_after_s=1.0))
        elif outcome == "failed":
            done = Done(status="failed", problem=problem(Code.REQUEST_SUPERSEDED, "superseded"))
        elif outcome in ("admitted", "interjected"):
            done = Done(
                status="admitted" if outcome == "admitted" else "interjected",
                response=ids.response_id(prompt.tenant, prompt.request_id, prompt.attempt),
                execution=ids.execution_id(prompt.tenant, prompt.request_id, prompt.attempt),
                cursor_sequence=7,
                cursor_stored_at_ns=7,
            )
        record = RequestRecord(
            digest=prompt.digest,
            workspace=prompt.workspace,
            conversation=prompt.conversation,
            attempt=prompt.attempt,
            prompt_sequence=job.message.sequence,
            state="open" if outcome == "open" else "retryable" if outcome == "retryable" else "done",
            done=done,
        )
        bucket = Bucket(self._bus, subjects.REQUESTS)
        key = subjects.request_key(prompt.tenant, prompt.request_id)
        entry = await bucket.get(key)
        op = f"op{job.message.sequence}"
        if entry is None:
            await bucket.create(key, record.value(), op=op)
        else:
            await bucket.update(key, record.value(), op=op, revision=entry.revision)
        await job.ack()


async def test_a_message_is_answered_with_its_response_and_again_with_the_same_answer(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    """P1, one after the other."""
    async with HandRouter(bus, tenant).working() as router:
        first = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert first.status_code == 202
        assert first.json()["status"] == "admitted"
        assert first.json()["response_id"] == ids.response_id(tenant, "q1", 1)
        again = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert again.json() == first.json() and again.status_code == 202
        assert len(router.prompts) == 1
        assert router.prompts[0].workspace == ids.default_workspace("c1")
        assert router.prompts[0].author == f"user of {tenant}"


async def test_the_same_request_at_once_on_two_replicas_is_published_once(
    bus: NatsBus, nats_server: Any, tenant: str, tmp_path: Path
) -> None:
    """P1, at once."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with (
        running_backend(bus, [tenant], tmp_path / "one") as one,
        await connect(nats_server.url, name="two") as second,
        running_backend(second, [tenant], tmp_path / "two") as two,
        HandRouter(bus, tenant).working() as router,
    ):
        answers = await asyncio.gather(
            *(replica.client.post("/v1/conversations/c1/messages", json=body()) for replica in (one, two) * 8)
        )
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.text for answer in answers}) == 1
        assert len(router.prompts) == 1


async def test_another_payload_under_a_known_request_id_is_a_conflict_and_publishes_nothing(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    """P2."""
    async with HandRouter(bus, tenant).working() as router:
        await backend.client.post("/v1/conversations/c1/messages", json=body())
        for other in (body(text="other"), body(mode="takeover"), body(agent={"kind": "scripted"})):
            answer = await backend.client.post("/v1/conversations/c1/messages", json=other)
            assert answer.status_code == 409 and answer.json()["code"] == "REQUEST_CONFLICT"
            assert answer.headers["content-type"] == "application/problem+json"
        elsewhere = await backend.client.post("/v1/conversations/c2/messages", json=body())
        assert elsewhere.json()["code"] == "REQUEST_CONFLICT"
        assert len(router.prompts) == 1


async def test_without_a_router_the_message_is_pending_and_asking_again_publishes_nothing(
    backend: Backend, bus: NatsBus, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "ADMISSION_WAIT_S", 0.2)
    for _ in range(2):
        answer = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert answer.status_code == 202 and answer.json()["status"] == "pending"
    waiting = await bus.subjects(subjects.PROMPTS_STREAM, f"tether.prompt.{tenant}.>")
    assert list(waiting.values()) == [1]
    monkeypatch.setattr(messages_module, "ADMISSION_WAIT_S", 5.0)
    async with HandRouter(bus, tenant).working():
        answer = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert answer.json()["status"] == "admitted"


async def test_a_retryable_outcome_is_told_and_the_next_try_is_a_new_attempt(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    async with HandRouter(bus, tenant, "retryable", "admitted").working() as router:
        first = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert first.status_code == 409 and first.json()["code"] == "SESSION_BUSY"
        assert first.json()["retryable"] is True and first.headers["retry-after"] == "1"
        second = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert second.json()["attempt"] == 2 and second.json()["status"] == "admitted"
        assert [prompt.attempt for prompt in router.prompts] == [1, 2]


async def test_a_final_failure_is_told_again_without_a_new_attempt(backend: Backend, bus: NatsBus, tenant: str) -> None:
    async with HandRouter(bus, tenant, "failed").working() as router:
        for _ in range(2):
            answer = await backend.client.post("/v1/conversations/c1/messages", json=body())
            assert answer.status_code == 409 and answer.json()["code"] == "REQUEST_SUPERSEDED"
        assert len(router.prompts) == 1


async def test_a_full_conversation_is_a_retryable_quota_problem(
    backend: Backend, bus: NatsBus, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "ADMISSION_WAIT_S", 0.05)
    for number in range(64):
        answer = await backend.client.post("/v1/conversations/c1/messages", json=body(f"q{number}"))
        assert answer.status_code == 202
    answer = await backend.client.post("/v1/conversations/c1/messages", json=body("q64"))
    assert answer.status_code == 429 and answer.json()["code"] == "QUOTA_EXCEEDED" and answer.json()["retryable"]
    other = await backend.client.post("/v1/conversations/c2/messages", json=body("q65"))
    assert other.status_code == 202
    await bus.purge(subjects.PROMPTS_STREAM, f"tether.prompt.{tenant}.>")


async def test_a_workspace_other_than_the_conversations_own_is_refused_by_name(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    await Bucket(bus, subjects.CONVERSATIONS).create(
        subjects.conversation_key(tenant, "c1"), {"workspace": "w1"}, op="test"
    )
    answer = await backend.client.post("/v1/conversations/c1/messages", json=body(workspace="w2"))
    assert answer.status_code == 422 and answer.json()["fields"][0]["field"] == "workspace"
    async with HandRouter(bus, tenant).working() as router:
        answer = await backend.client.post("/v1/conversations/c1/messages", json=body())
        assert answer.status_code == 202
        assert router.prompts[0].workspace == "w1"


async def test_events_of_a_request_come_after_the_cursor_of_its_pending_answer(
    backend: Backend, bus: NatsBus, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support_backend import Log, text_delta

    monkeypatch.setattr(messages_module, "ADMISSION_WAIT_S", 0.05)
    log = Log(bus, tenant)
    last = await log.frame("e0", [log.started("e0"), text_delta(2, "before")])

    async def seen() -> bool:
        return backend.deps.feeds[tenant].position >= last

    await eventually(seen, "the feed saw it")
    answer = await backend.client.post("/v1/conversations/c1/messages", json=body())
    await log.prompt("q1", "r1", "e1")
    reader = await backend.reader("c1").open(answer.json()["cursor"])
    assert [one.key for one in await reader.events(2)] == ["q1/prompt.admitted", "q1/response.created"]
    await bus.purge(subjects.PROMPTS_STREAM, f"tether.prompt.{tenant}.>")


def test_deciding_over_a_request_record_is_pure_and_covers_every_state() -> None:
    prompt = Prompt(
        tenant="a", workspace="w", conversation="c", request_id="q", content=({"type": "text", "text": "x"},)
    )

    def record(state: str, attempt: int = 1, digest: str = prompt.digest) -> RequestRecord:
        return RequestRecord(
            digest=digest, workspace="w", conversation="c", attempt=attempt, prompt_sequence=1, state=state
        )

    assert decide(None, prompt) == Publish(1)
    assert decide(None, prompt, published=1) == Wait(1)
    assert decide(record("open", 3), prompt) == Wait(3)
    assert decide(record("retryable", 2), prompt) == Publish(3)
    assert decide(record("retryable", 2), prompt, published=3) == Wait(3)
    assert isinstance(decide(record("retryable", 3), prompt, published=3), Refuse)
    conflict = decide(record("done", 1, "other"), prompt)
    assert isinstance(conflict, Refuse) and conflict.problem.code is Code.REQUEST_CONFLICT
