"""Routers on a real nats-server: P1, P2, P3, P8, and the process."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support_nats import NatsServer, running_server
from support_router import FaultyBus, Sandbox, World, a_prompt, admitter, derived, until, world
from tether import subjects
from tether.bus import NatsBus, connect
from tether.errors import Code, problem
from tether.limits import PROMPT_ACK_WAIT_S
from tether.settings import ConfigurationError, load
from tether_router.config import RouterSettings
from tether_router.core.steps import Ack
from tether_router.service import now_ms, route

TENANT = "acme"
ENDED = problem(Code.SESSION_STREAM_NOT_ACTIVE, "ended", ended=True)


@asynccontextmanager
async def routing(server: NatsServer, *, freeze_at: int = 0) -> AsyncIterator[FaultyBus]:
    """A router with a connection of its own."""
    stop = asyncio.Event()
    async with await connect(server.url, name="router") as bus:
        faulty = FaultyBus(bus, freeze_at=freeze_at)
        settings = RouterSettings(tenants=TENANT)
        task = asyncio.create_task(route(faulty, settings, stop, clock=now_ms))  # type: ignore[arg-type]
        try:
            yield faulty
        finally:
            stop.set()
            faulty.thawed.set()
            await asyncio.wait_for(task, 20)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """Each test has its own: routers share one durable consumer."""
    with running_server() as started:
        yield started


@pytest.fixture
async def outside(server: NatsServer) -> AsyncIterator[NatsBus]:
    async with await connect(server.url, name="outside") as connected:
        yield connected


async def drained(stage: World) -> None:
    async def done() -> bool:
        return await stage.waiting() == 0

    await until(done, "no prompt is left")


async def test_p1_p2_the_same_request_on_two_routers_is_one_execution_and_another_payload_a_conflict(
    server: NatsServer, outside: NatsBus
) -> None:
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(server), routing(server), sandbox.running():
        await asyncio.gather(*(stage.send(a_prompt(), again=f"/{number}") for number in range(5)))
        await stage.settled(timeout_s=20)
        await sandbox.claims(1, timeout_s=20)
        first = await stage.request()
        await sandbox.finish(sandbox.claimed[0])
        await stage.state_is("idle", timeout_s=20)
        await stage.send(a_prompt(), again="/an-hour-later")
        other = a_prompt(text="another")
        await stage.send(other)
        await drained(stage)
        assert await stage.request() == first
    assert sandbox.claimed == [derived()[1]]
    assert [event.id for event in await stage.told()] == [
        "r1/prompt.admitted",
        "r1/response.created",
        f"r1/{other.digest[:8]}/response.failed",
    ]


async def test_p3_prompts_run_in_stream_order_with_one_cli_at_any_time(server: NatsServer, outside: NatsBus) -> None:
    stage = await world(outside)
    sandbox = Sandbox(outside, refuse=ENDED)
    names = [f"r{number}" for number in range(5)]
    async with routing(server), routing(server), sandbox.running():
        acks = await asyncio.gather(*(stage.send(a_prompt(name)) for name in names))
        await stage.send(a_prompt("other", conversation="c2"))
        for count in range(len(names)):
            await until(functools.partial(_claimed, sandbox, "c1", count + 1), "the next claim")
            await sandbox.finish(_of(sandbox, "c1")[-1])
        await drained(stage)
    order = [name for _, name in sorted(zip([ack.sequence for ack in acks], names, strict=True))]
    assert _of(sandbox, "c1") == [derived(name)[1] for name in order]
    assert sandbox.most_active <= 2, "one of each conversation"


def _of(sandbox: Sandbox, conversation: str) -> list[str]:
    return [one for one in sandbox.claimed if sandbox._frames[one][0].conversation == conversation]


async def _claimed(sandbox: Sandbox, conversation: str, count: int) -> bool:
    return len(_of(sandbox, conversation)) >= count


async def test_the_prompts_that_a_killed_router_had_in_hand_are_its_successors_within_three_seconds(
    server: NatsServer, outside: NatsBus
) -> None:
    stage = await world(outside)
    sandbox = Sandbox(outside)
    for number in range(3):
        await stage.send(a_prompt(f"r{number}", conversation=f"c{number}"))
    killed = await connect(server.url, name="killed")
    jobs = killed.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
    in_hand = [await anext(jobs) for _ in range(3)]
    await killed.close()  # nothing was settled, and nobody says in_progress any more
    await jobs.aclose()
    loop = asyncio.get_running_loop()
    died_s = loop.time()
    async with routing(server), sandbox.running():
        await sandbox.claims(3, timeout_s=20)
        assert loop.time() - died_s < PROMPT_ACK_WAIT_S + 3.0
        await drained(stage)
    assert len(in_hand) == 3 and PROMPT_ACK_WAIT_S < 3.0


@pytest.mark.parametrize("freeze_at", [4, 6, 7, 8])
async def test_p8_a_router_that_was_frozen_in_mid_admission_starts_nothing_when_it_wakes(
    server: NatsServer, outside: NatsBus, freeze_at: int
) -> None:
    """The ack wait is not waited for: the same prompt comes to the second router as a copy of it."""
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(server, freeze_at=freeze_at) as frozen, sandbox.running():
        await stage.send(a_prompt())
        await asyncio.wait_for(frozen.frozen.wait(), 20)
        stored = await stage.stored(subjects.PROMPTS_STREAM, "tether.prompt.>")
        async with await connect(server.url, name="second") as bus:
            verdict = await admitter(bus).admit(
                a_prompt(), sequence=stored[0].sequence, stored_at_ns=stored[0].stored_at_ns, actor="second"
            )
        assert verdict.state.failure is None
        await sandbox.claims(1, timeout_s=20)
        await sandbox.finish(sandbox.claimed[0])
        async with routing(server):
            await stage.state_is("idle", timeout_s=20)
            frozen.thawed.set()
            await drained(stage)
            await stage.send(a_prompt("r2"))
            await sandbox.claims(2, timeout_s=20)
    assert sandbox.claimed == [derived("r1")[1], derived("r2")[1]]
    assert [event.id for event in await stage.told()] == [
        "r1/prompt.admitted",
        "r1/response.created",
        "r2/prompt.admitted",
        "r2/response.created",
    ]


async def test_an_interjection_over_the_real_bus_joins_the_response(server: NatsServer, outside: NatsBus) -> None:
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(server), sandbox.running():
        await stage.send(a_prompt())
        await sandbox.claims(1, timeout_s=20)
        await stage.state_is("running", timeout_s=20)
        await stage.send(a_prompt("r2", "and this"))
        await stage.settled(2, timeout_s=20)
    assert sandbox.interjected == ["and this"]
    assert (await stage.told())[-1].body["into"] == derived()[0]


async def running_first(stage: World, sandbox: Sandbox) -> None:
    await stage.send(a_prompt("r1"))
    await sandbox.claims(1, timeout_s=20)
    await stage.state_is("running", timeout_s=20)


SUPERSEDED_THEN_NEW = [
    "r1/prompt.admitted",
    "r1/response.created",
    "r1/response.superseded",
    "r2/prompt.admitted",
    "r2/response.created",
]


async def test_a_takeover_with_two_routers_stops_once_and_starts_once(server: NatsServer, outside: NatsBus) -> None:
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(server), routing(server), sandbox.running():
        await running_first(stage, sandbox)
        await stage.send(a_prompt("r2", "instead", mode="takeover"))
        await stage.send(a_prompt("r3", "and this"))
        await stage.settled(3, timeout_s=20)
    assert sandbox.claimed == [derived("r1")[1], derived("r2")[1]]
    assert (sandbox.stopped, sandbox.most_active) == ([derived("r1")[1]], 1)
    assert len([verb for verb, _ in sandbox.asked if verb == "stop"]) == 1
    assert sandbox.interjected == ["and this"]
    assert [event.id for event in await stage.told()][:5] == SUPERSEDED_THEN_NEW


@pytest.mark.parametrize("freeze_at", [2, 3, 4, 6, 9])
async def test_p8_a_router_that_was_frozen_in_mid_takeover_stops_and_starts_nothing_when_it_wakes(
    server: NatsServer, outside: NatsBus, freeze_at: int
) -> None:
    """The same prompt comes to a second router as a copy of it: looked at until it is through."""
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with sandbox.running():
        async with routing(server):
            await running_first(stage, sandbox)
            await drained(stage)
        async with routing(server, freeze_at=freeze_at) as frozen:
            await stage.send(a_prompt("r2", mode="takeover"))
            await asyncio.wait_for(frozen.frozen.wait(), 20)
            stored = await stage.stored(subjects.PROMPTS_STREAM, "tether.prompt.>")
            async with await connect(server.url, name="second") as bus:

                async def through() -> bool:
                    verdict = await admitter(bus).admit(
                        a_prompt("r2", mode="takeover"),
                        sequence=stored[0].sequence,
                        stored_at_ns=stored[0].stored_at_ns,
                        actor=f"second-{len(sandbox.asked)}-{asyncio.get_running_loop().time()}",
                    )
                    assert verdict.state.failure is None
                    return isinstance(verdict.end, Ack)

                await until(through, "the second router's takeover")
            await sandbox.claims(2, timeout_s=20)
            await sandbox.finish(sandbox.claimed[1])
            frozen.thawed.set()
            await drained(stage)
            await stage.state_is("idle", timeout_s=20)
            await stage.send(a_prompt("r3"))
            await sandbox.claims(3, timeout_s=20)
    assert sandbox.claimed == [derived(name)[1] for name in ("r1", "r2", "r3")]
    assert (sandbox.stopped, sandbox.most_active) == ([derived("r1")[1]], 1)
    assert [event.id for event in await stage.told()][:5] == SUPERSEDED_THEN_NEW


async def test_the_server_is_killed_under_routers_and_every_prompt_is_answered_once(
    server: NatsServer, outside: NatsBus
) -> None:
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(server), routing(server), sandbox.running():
        for number in range(3):
            await stage.send(a_prompt(f"r{number}", conversation=f"c{number}"))
        await asyncio.to_thread(server.restart)
        for number in range(3, 6):
            await stage.send(a_prompt(f"r{number}", conversation=f"c{number}"))
        await stage.settled(6, timeout_s=60)
        await sandbox.claims(6, timeout_s=60)
    assert sorted(sandbox.claimed) == sorted(derived(f"r{number}")[1] for number in range(6))


async def test_the_process_makes_its_streams_announces_itself_admits_and_ends_with_zero(
    server: NatsServer, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    environ = {
        **os.environ,
        "TETHER_NATS_URL": server.url,
        "TETHER_TENANTS": "acme, other",
        "TETHER_READY_FILE": str(ready_file),
        "TETHER_EVENTS_MAX_BYTES": str(64 << 20),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tether_router", env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:

        async def ready() -> bool:
            return ready_file.exists()

        await until(ready, "the ready file", timeout_s=30)
        facts = json.loads(ready_file.read_text())
        assert (facts["pid"], facts["tenants"]) == (process.pid, ["acme", "other"])
        async with await connect(server.url, name="outside") as bus:
            stage = World(bus)
            await stage.send(a_prompt())
            await stage.settled(timeout_s=20)
            assert await bus.state(subjects.events_stream("other")) is not None
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, errors.decode()
        names = [json.loads(line)["event"] for line in errors.decode().splitlines()]
        assert names[-1] == "router_stopped"
        assert "prompt_settled" in names
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_configuration_names_every_problem_at_once() -> None:
    environ = {"TETHER_TENANTS": "a.b", "TETHER_ROUTER_SWEEP_S": "600", "TETHER_ROUTER_SWEP_S": "5"}
    with pytest.raises(ConfigurationError) as caught:
        load(RouterSettings, environ)
    problems = "\n".join(caught.value.problems)
    assert "TETHER_ROUTER_SWEEP_S" in problems
    assert "TETHER_TENANTS" in problems
    assert "did you mean TETHER_ROUTER_SWEEP_S" in problems
    assert load(RouterSettings, {"TETHER_TENANTS": "a, b"}).tenant_names == ("a", "b")
