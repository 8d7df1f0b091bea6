"""Sandboxes over HTTP: what is read from the records, and what the agent service is asked. It is played by hand."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support_backend import Backend, running_backend
from support_sandboxes import (
    AT,
    HandAgent,
    register,
    report_of,
    write_record,
    write_reference,
)
from tether import sandbox_asking, subjects
from tether.errors import Code, problem
from tether.ids import TOKEN_PATTERN
from tether.ports import Message
from tether.sandbox import DrainOrder, DrainReport
from tether.testing import MemoryBus, MemoryServer
from tether_backend.http import messages

TENANT, OTHER = "acme", "rival"
RUNNING = DrainReport(drain="d1", state="running", phase="turn")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[MemoryBus, Backend]]:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT, OTHER], tmp_path, project=False) as backend:
        yield bus, backend


async def test_a_sandbox_is_told_with_its_drain_its_checkpoint_and_since_when_it_is_idle(
    world: tuple[MemoryBus, Backend],
) -> None:
    bus, backend = world
    order = DrainOrder(drain="d1", purpose="suspend", reason="idle", grace_s=5, began_at=AT)
    await write_record(bus, TENANT, "w1", "draining", drain=order)
    await register(bus, TENANT, "w1", idle_since=AT)
    found = (await backend.client.get("/v1/sandboxes/w1")).json()
    assert (found["state"], found["connected"], found["idle_since"]) == ("draining", True, AT)
    assert found["drain"]["drain"] == "d1" and found["drain"]["reason"] == "idle" and "checkpoint" not in found
    revision = await write_reference(bus, TENANT, "w1")
    await write_record(bus, TENANT, "w1", "suspended", drain=order, drained=report_of(TENANT, "w1", "d1"))
    found = (await backend.client.get("/v1/sandboxes/w1")).json()
    assert found["state"] == "suspended" and "drain" not in found
    assert found["checkpoint"] == {
        "checkpoint": "ckp1",
        "created_at": AT,
        "clean": False,
        "include": "sessions",
        "stored": "both",
        "size_bytes": 184_320,
        "files": 7,
        "revision": revision,
    }
    (ended,) = found["drained"]["executions"]
    assert (ended["outcome"], ended["cut"], ended["interrupted"]) == ("forced", True, ["Bash"])
    (listed,) = (await backend.client.get("/v1/sandboxes")).json()["sandboxes"]
    assert listed["checkpoint"] == found["checkpoint"] and listed["state"] == "suspended"


async def test_a_drain_is_answered_at_once_and_the_same_id_joins_it(world: tuple[MemoryBus, Backend]) -> None:
    bus, backend = world
    async with HandAgent(bus, [RUNNING]).serving() as agent:
        body = {"drain_id": "d1", "grace_s": 2.5, "reason": "new kernel", "store": "both", "include": "workspace"}
        first = await backend.client.post("/v1/sandboxes/w1/drain", json=body)
        again = await backend.client.post("/v1/sandboxes/w1/drain", json={"drain_id": "d1"})
        other = await backend.client.post("/v1/sandboxes/w1/drain")
    assert [one.status_code for one in (first, again, other)] == [202, 202, 202]
    assert (first.json()["state"], first.json()["phase"], first.json()["joined"]) == ("running", "turn", False)
    assert again.json()["joined"] and other.json()["drain"] == "d1", "another id joins the running one"
    assert agent.asked[0] == ("drain", {"tenant": TENANT, "workspace": "w1", **body})
    made = agent.asked[2][1].pop("drain_id")
    assert made.startswith("drn_") and re.fullmatch(TOKEN_PATTERN, made)
    assert agent.asked[2][1] == {"tenant": TENANT, "workspace": "w1"}


async def test_how_a_drain_stands_is_asked_while_it_runs_and_read_once_it_is_over(
    world: tuple[MemoryBus, Backend],
) -> None:
    bus, backend = world
    async with HandAgent(bus, [RUNNING, RUNNING.model_copy(update={"phase": "checkpoint"})]).serving() as agent:
        await backend.client.post("/v1/sandboxes/w1/drain", json={"drain_id": "d1"})
        standing = (await backend.client.get("/v1/sandboxes/w1/drains/d1")).json()
        assert (standing["state"], standing["phase"], standing["sandbox_state"]) == (
            "running",
            "checkpoint",
            "draining",
        )
        unknown = await backend.client.get("/v1/sandboxes/w1/drains/d9")
        assert unknown.status_code == 404 and unknown.json()["code"] == "NOT_FOUND"
        assert [verb for verb, _ in agent.asked] == ["drain", "drain-status", "drain-status"]
    away = await backend.client.get("/v1/sandboxes/w1/drains/d1")
    assert away.status_code == 503, "nobody says how it stands"
    await write_record(bus, TENANT, "w1", "suspended", drained=report_of(TENANT, "w1", "d1", revision=4))
    over = (await backend.client.get("/v1/sandboxes/w1/drains/d1")).json()
    assert (over["state"], over["sandbox_state"], over["purpose"]) == ("done", "suspended", "drain")
    assert over["checkpoint"]["revision"] == 4 and "executions" not in over["checkpoint"]


async def test_suspend_resume_and_delete_are_handed_on_with_what_was_said(world: tuple[MemoryBus, Backend]) -> None:
    bus, backend = world
    async with HandAgent(bus, [RUNNING]).serving() as agent:
        await backend.client.post("/v1/sandboxes/w1/suspend", json={"drain_id": "s1", "force": True})
        woken = await backend.client.post("/v1/sandboxes/w1/resume")
        query = {"drain_id": "x1", "grace_s": "0", "checkpoint": "false", "reason": "over"}
        gone = await backend.client.delete("/v1/sandboxes/w1", params=query)
    where = {"tenant": TENANT, "workspace": "w1"}
    assert agent.asked == [
        ("suspend", {**where, "drain_id": "s1", "force": True}),
        ("resume", where),
        ("delete", {**where, "drain_id": "x1", "grace_s": 0, "checkpoint": False, "reason": "over"}),
    ]
    assert woken.status_code == 202
    assert woken.json()["state"] == "resuming" and woken.json()["woken"] and woken.json()["checkpoint"]["revision"] == 3
    assert gone.status_code == 202 and gone.json()["joined"]


async def test_a_delete_with_a_word_that_is_not_known_deletes_nothing(world: tuple[MemoryBus, Backend]) -> None:
    bus, backend = world
    async with HandAgent(bus, [RUNNING]).serving() as agent:
        refused = await backend.client.delete("/v1/sandboxes/w1", params={"no_checkpoint": "true"})
    assert refused.status_code == 422 and refused.json()["fields"][0]["field"] == "query.no_checkpoint"
    assert agent.asked == []


@pytest.mark.parametrize(
    ("method", "path", "sent", "field"),
    [
        ("POST", "drain", {"json": {"grace_s": -1}}, "grace_s"),
        ("POST", "drain", {"json": {"grace_s": 7200}}, "grace_s"),
        ("POST", "drain", {"json": {"store": "tape"}}, "store"),
        ("POST", "drain", {"json": {"include": "all"}}, "include"),
        ("POST", "drain", {"json": {"drain_id": "not a token"}}, "drain_id"),
        ("POST", "drain", {"json": {"reason": "x" * 257}}, "reason"),
        ("POST", "drain", {"json": {"force": True}}, "force"),
        ("POST", "suspend", {"json": {"force": "yes, please"}}, "force"),
        ("POST", "resume", {"json": {"drain_id": "d1"}}, "drain_id"),
        ("DELETE", "", {"params": {"grace_s": "soon"}}, "query.grace_s"),
        ("DELETE", "", {"params": {"store": "tape"}}, "query.store"),
        ("GET", "drains/no token", {}, "path.drain_id"),
    ],
)
async def test_bad_input_is_refused_by_name_before_anybody_is_asked(
    world: tuple[MemoryBus, Backend], method: str, path: str, sent: dict[str, Any], field: str
) -> None:
    bus, backend = world
    async with HandAgent(bus, [RUNNING]).serving() as agent:
        answer = await backend.client.request(method, f"/v1/sandboxes/w1/{path}".rstrip("/"), **sent)
    assert answer.status_code == 422 and [one["field"] for one in answer.json()["fields"]] == [field]
    assert agent.asked == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.NOT_FOUND, 404),
        (Code.SESSION_BUSY, 409),
        (Code.DRAINING, 503),
        (Code.CAPABILITY_MISSING, 501),
        (Code.RUNTIME_UNAVAILABLE, 503),
    ],
)
async def test_what_the_agent_service_refuses_is_told_as_it_said_it(
    world: tuple[MemoryBus, Backend], code: Code, status: int
) -> None:
    bus, backend = world
    refusal = problem(code, "said by the agent service", executions=[{"conversation": "c1"}])
    async with HandAgent(bus, refuse=refusal).serving():
        answer = await backend.client.post("/v1/sandboxes/w1/suspend")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.json()["detail"] == "said by the agent service"
    assert answer.json()["context"]["executions"] == [{"conversation": "c1"}]


async def test_without_an_agent_service_reading_goes_on_and_asking_says_when_to_come_back(
    world: tuple[MemoryBus, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, backend = world
    await write_record(bus, TENANT, "w1")
    assert (await backend.client.get("/v1/sandboxes/w1")).status_code == 200
    for method, path in (("POST", "/drain"), ("POST", "/suspend"), ("POST", "/resume"), ("DELETE", "")):
        away = await backend.client.request(method, f"/v1/sandboxes/w1{path}")
        assert away.status_code == 503 and away.json()["code"] == "RUNTIME_UNAVAILABLE"
        assert away.json()["retryable"] and away.headers["Retry-After"] == "1"
    monkeypatch.setattr(sandbox_asking, "AGENT_REPLY_S", 0.05)

    async def silent(_: Message) -> bytes | None:
        return None

    async with bus.serve(subjects.agent("drain"), silent, name="silent"):
        late = await backend.client.post("/v1/sandboxes/w1/drain")
    assert late.status_code == 503 and "did not answer" in late.json()["detail"]

    async def foreign(_: Message) -> bytes | None:
        return b'{"v": 7, "of": "another version"}'

    async with bus.serve(subjects.agent("drain"), foreign, name="foreign"):
        odd = await backend.client.post("/v1/sandboxes/w1/drain")
    assert odd.status_code == 503 and not odd.json()["retryable"]


async def test_a_tenant_reads_and_drains_its_own_sandboxes_alone(world: tuple[MemoryBus, Backend]) -> None:
    bus, backend = world
    await write_record(bus, TENANT, "w1", "suspended", drained=report_of(TENANT, "w1", "d1"))
    await write_reference(bus, TENANT, "w1")
    rival = backend.headers(OTHER)
    missing = await backend.client.get("/v1/sandboxes/w1", headers=rival)
    assert missing.status_code == 404 and missing.json()["code"] == "NOT_FOUND"
    assert (await backend.client.get("/v1/sandboxes", headers=rival)).json() == {"sandboxes": []}
    async with HandAgent(bus, [RUNNING]).serving() as agent:
        unknown = await backend.client.get("/v1/sandboxes/w1/drains/d1", headers=rival)
        assert unknown.status_code == 404
        await backend.client.post("/v1/sandboxes/w1/drain", headers=rival)
    assert {request["tenant"] for _, request in agent.asked} == {OTHER}


async def test_a_message_says_what_becomes_of_a_session_that_is_lost_and_of_a_turn_that_is_cut(
    world: tuple[MemoryBus, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, backend = world
    monkeypatch.setattr(messages, "ADMISSION_WAIT_S", 0.05)
    body = {"request_id": "q1", "content": [{"type": "text", "text": "go on"}]}
    odd = await backend.client.post("/v1/conversations/c1/messages", json={**body, "resume": "again"})
    assert odd.status_code == 422 and odd.json()["detail"] == "resume: must be one of fresh or history"
    said = {**body, "resume": "history", "continuation": "continue"}
    accepted = await backend.client.post("/v1/conversations/c1/messages", json=said)
    assert accepted.status_code == 202
    stored = await bus.next_after(subjects.PROMPTS_STREAM, 0, subjects.PROMPTS_ALL)
    assert stored is not None
    assert b'"resume":"history"' in stored.data and b'"continuation":"continue"' in stored.data
