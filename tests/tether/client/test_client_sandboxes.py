"""Drain, suspend, resume, delete by the SDK: over NATS by asking the agent service, over HTTP by the API; waiting."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import pytest

from support_sandboxes import HandAgent, register, report_of, write_record, write_reference
from tether import topology
from tether.api_sandboxes import DrainView
from tether.client import Client, Response, ResponseFailedError, Submission, resume_choices
from tether.client.http import HttpTransport
from tether.errors import Code, InvalidError, ProblemError, problem
from tether.fold import ExecutionState, UsageTotal
from tether.sandbox import DrainReport
from tether.testing import MemoryBus, MemoryServer

RUNNING = DrainReport(drain="d1", state="running", phase="turn")
CHECKPOINT = RUNNING.model_copy(update={"phase": "checkpoint"})


@pytest.fixture
async def bus(tenant: str) -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryServer()) as made:
        await made.ensure(topology.base())
        await made.ensure(topology.tenant(tenant))
        yield made


# --- over NATS ---


@pytest.mark.virtual_time
async def test_a_drain_is_followed_to_its_report_and_each_change_is_told_once(bus: MemoryBus, tenant: str) -> None:
    told: list[str] = []
    done = report_of(tenant, "w1", "d1")
    hand = HandAgent(bus, [RUNNING, RUNNING, RUNNING, CHECKPOINT, done])
    async with hand.serving() as agent, Client.nats(bus, tenant=tenant) as client:
        begun = await client.drain("w1", grace_s=3, reason="new kernel", store="both", include="workspace")
        assert (begun.state, begun.phase, begun.joined) == ("running", "turn", False)
        over = await client.drained(begun, on_progress=lambda view: told.append(view.phase))
    assert over.is_final and over.state == "done" and over.executions[0].outcome == "forced"
    assert over.checkpoint is not None and over.checkpoint.files == 7 and not over.checkpoint.clean
    assert told == ["checkpoint", "over"], "what was told at first is not told again"
    verb, request = agent.asked[0]
    drain = request.pop("drain_id")
    assert begun.drain == drain and drain.startswith("drn_")
    said = {"grace_s": 3, "reason": "new kernel", "store": "both", "include": "workspace"}
    assert (verb, request) == ("drain", {"tenant": tenant, "workspace": "w1", **said})


@pytest.mark.virtual_time
async def test_what_goes_on_longer_than_it_is_waited_for_is_told_as_draining(bus: MemoryBus, tenant: str) -> None:
    async with HandAgent(bus, [RUNNING]).serving() as agent, Client.nats(bus, tenant=tenant) as client:
        begun = await client.suspend("w1", drain_id="d1", force=True)
        with pytest.raises(ProblemError) as told:
            await client.drained(begun, timeout_s=20)
        questions = len([verb for verb, _ in agent.asked if verb == "drain-status"])
    assert told.value.problem.code is Code.DRAINING and "phase turn" in told.value.problem.detail
    assert told.value.problem.retryable and 10 < questions < 60


@pytest.mark.virtual_time
async def test_a_delete_is_over_once_nobody_knows_of_its_sandbox(bus: MemoryBus, tenant: str) -> None:
    hand = HandAgent(bus, [RUNNING])
    async with hand.serving(), Client.nats(bus, tenant=tenant) as client:
        begun = await client.delete("w1", drain_id="d1", checkpoint=False)
        hand.refuse = problem(Code.NOT_FOUND, "workspace: there is no sandbox of it")
        gone = await client.drained(begun)
        with pytest.raises(ProblemError):  # of a drain it would be a surprise
            await client.drained(begun.model_copy(update={"purpose": "drain"}))
    assert (gone.state, gone.sandbox_state, gone.drain) == ("done", "deleted", "d1")


@pytest.mark.virtual_time
async def test_an_agent_service_that_comes_back_is_asked_again_under_the_same_id(bus: MemoryBus, tenant: str) -> None:
    agent = HandAgent(bus, [report_of(tenant, "w1", "d1")])
    async with Client.nats(bus, tenant=tenant) as client:
        with pytest.raises(ProblemError) as away:
            await client.drain("w1", drain_id="d1")
        assert away.value.problem.code is Code.RUNTIME_UNAVAILABLE
        async with agent.serving():
            assert (await client.drain("w1", drain_id="d1")).state == "done"
    assert [request["drain_id"] for _, request in agent.asked] == ["d1"]


@pytest.mark.virtual_time
async def test_a_report_in_the_record_needs_no_agent_service(bus: MemoryBus, tenant: str) -> None:
    await write_record(bus, tenant, "w1", "suspended", drained=report_of(tenant, "w1", "d1"))
    revision = await write_reference(bus, tenant, "w1")
    async with Client.nats(bus, tenant=tenant) as client:
        over = await client.drained(await client.drain_status("w1", "d1"))
        view = await client.sandbox("w1")
        listed = await client.sandboxes()
        with pytest.raises(ProblemError) as missing:
            await client.sandbox("w2")
    assert over.state == "done" and over.sandbox_state == "suspended"
    assert view.checkpoint is not None and view.checkpoint.revision == revision
    assert view.drained is not None and view.drained.drain == "d1" and not view.connected
    assert listed.sandboxes == [view]
    assert missing.value.problem.code is Code.NOT_FOUND


@pytest.mark.virtual_time
async def test_resume_says_whether_it_was_this_one_that_woke_it(bus: MemoryBus, tenant: str) -> None:
    async with HandAgent(bus, woken=False, state="active").serving(), Client.nats(bus, tenant=tenant) as client:
        woken = await client.resume("w1")
    assert (woken.state, woken.woken) == ("active", False)
    assert woken.checkpoint is not None and woken.checkpoint.revision == 3


@pytest.mark.virtual_time
async def test_what_the_agent_service_refuses_is_raised_with_what_it_said(bus: MemoryBus, tenant: str) -> None:
    who = [{"conversation": "c1", "execution": "e1", "state": "waiting"}]
    refusal = problem(Code.SESSION_BUSY, "the sandbox is not idle", executions=who)
    async with HandAgent(bus, refuse=refusal).serving(), Client.nats(bus, tenant=tenant) as client:
        with pytest.raises(ProblemError) as told:
            await client.suspend("w1")
    assert told.value.problem.code is Code.SESSION_BUSY and told.value.problem.context["executions"] == who


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.drain("no workspace"), "workspace"),
        (lambda client: client.drain("w1", drain_id="no id"), "drain_id"),
        (lambda client: client.drain("w1", grace_s=-1), "grace_s"),
        (lambda client: client.suspend("w1", store="tape"), "store"),
        (lambda client: client.delete("w1", reason="x" * 300), "reason"),
        (lambda client: client.drain_status("w1", "no id"), "drain_id"),
    ],
)
async def test_bad_input_names_its_field_before_anything_is_sent(
    bus: MemoryBus, tenant: str, call: Callable[[Client], Awaitable[object]], field: str
) -> None:
    async with HandAgent(bus, [RUNNING]).serving() as agent, Client.nats(bus, tenant=tenant) as client:
        with pytest.raises(InvalidError) as told:
            await call(client)
    assert told.value.field == field and agent.asked == []


@pytest.mark.virtual_time
async def test_an_idle_sandbox_says_since_when(bus: MemoryBus, tenant: str) -> None:
    await write_record(bus, tenant, "w1")
    await register(bus, tenant, "w1", idle_since=77)
    async with Client.nats(bus, tenant=tenant) as client:
        view = await client.sandbox("w1")
    assert view.idle_since == 77 and view.checkpoint is None and view.drain is None


# --- over HTTP ---


class Server(httpx2.AsyncBaseTransport):
    """The first request breaks off; every other gets the operation as it stands."""

    def __init__(self) -> None:
        self.requests: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        if len(self.requests) == 1:
            raise httpx2.ReadError("connection reset", request=request)
        view = DrainView(workspace="w1", drain="d1", state="done", phase="over")
        return httpx2.Response(202, content=view.model_dump_json())


async def test_over_http_a_drain_in_doubt_is_repeated_under_its_id() -> None:
    server = Server()
    async with Client(HttpTransport("http://tether.test", "secret-token", transport=server)) as client:
        await client.drain("w1", reason="new kernel")
    bodies = [json.loads(request.content) for request in server.requests]
    assert len(bodies) == 2 and bodies[0] == bodies[1]
    assert bodies[0]["drain_id"].startswith("drn_") and bodies[0]["reason"] == "new kernel"
    assert server.requests[0].url.path == "/v1/sandboxes/w1/drain"


async def test_over_http_a_delete_says_all_in_its_query_and_keeps_its_id() -> None:
    server = Server()
    async with Client(HttpTransport("http://tether.test", "secret-token", transport=server)) as client:
        await client.delete("w1", checkpoint=False, grace_s=0)
    first, again = server.requests
    assert (first.method, first.url.path) == ("DELETE", "/v1/sandboxes/w1") and first.url == again.url
    assert first.url.params["checkpoint"] == "false" and first.url.params["grace_s"] in ("0", "0.0")
    assert first.url.params["drain_id"].startswith("drn_") and first.content == b""


# --- a session that could not be resumed ---


def response(error: dict[str, object] | None) -> Response:
    submission = Submission("c1", "q1", "admitted", "r1", "e1", "k1")
    return Response(submission, "r1", "e1", "failed", "", UsageTotal(), ExecutionState(), "k1", error=error)


def test_a_lost_session_leaves_choices_and_every_other_failure_none() -> None:
    lost = {"code": "RESUME_FAILED", "detail": "there is no session of this id"}
    assert response({**lost, "choices": ["history"]}).resume_choices == ("history",)
    assert response({**lost, "choices": None}).resume_choices == ("fresh", "history"), "a writer that names none"
    assert response({"code": "model_error", "choices": ["fresh"]}).resume_choices == ()
    assert response(None).resume_choices == () and resume_choices(None) == ()
    failed = ResponseFailedError(problem(Code.RESUME_FAILED, "lost", choices=["fresh", "of tomorrow"]))
    assert failed.resume_choices == ("fresh",)
