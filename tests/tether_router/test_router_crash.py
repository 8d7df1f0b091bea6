"""Faults at every write of a delivery: the router dies there, repeats it, races another, or freezes and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from support_router import (
    Crash,
    FaultyBus,
    Sandbox,
    World,
    a_prompt,
    admitter,
    derived,
    routing,
    until,
    virtual,
    world,
)
from tether import ids, subjects
from tether.control import decode_command
from tether.errors import Code, Problem, problem
from tether.prompt import Prompt
from tether.testing import FaultKind, MemoryBus, MemoryServer
from tether_router.core.steps import Ack

WRITES_MAX = 24  # more than any of these deliveries makes


@dataclass(frozen=True)
class Path:
    """A way through admission: what stands before, the prompt, the outcome, and the `_` events of its request."""

    name: str
    prompt: Prompt
    outcome: str
    events: tuple[str, ...]
    running: bool = False  # another request's execution is running
    starting: bool = False  # or its command waits
    refuse: Problem | None = None  # what interjections get
    refuse_stop: Problem | None = None  # and stops
    executions: int = 1
    cut: bool = False  # the other's response is superseded


BUSY = problem(Code.CAPABILITY_MISSING, "this agent takes no messages in mid-turn")
NOT_ACTIVE = problem(Code.SESSION_STREAM_NOT_ACTIVE, "stdin is closed", ended=False)
STALE = problem(Code.TARGET_STALE, "another process generation")
ADMITTED = ("r2/prompt.admitted", "r2/response.created")
FAILED = ("r2/response.failed",)
PATHS = (
    Path("admit", a_prompt("r2"), "admitted", ADMITTED),
    Path("interject", a_prompt("r2"), "interjected", ("r2/prompt.admitted",), running=True),
    Path("busy", a_prompt("r2"), "failed", FAILED, running=True, refuse=BUSY),
    Path("takeover", a_prompt("r2", mode="takeover"), "admitted", ADMITTED, running=True, executions=2, cut=True),
    Path(
        "auto-takeover", a_prompt("r2"), "admitted", ADMITTED, running=True, refuse=NOT_ACTIVE, executions=2, cut=True
    ),
    Path("not-begun", a_prompt("r2", mode="takeover"), "admitted", ADMITTED, starting=True, executions=2, cut=True),
    Path("refused-stop", a_prompt("r2", mode="takeover"), "failed", FAILED, running=True, refuse_stop=STALE),
    Path("not-active", a_prompt("r2", mode="interject"), "failed", FAILED, executions=0),
)


async def prepare(path: Path, outside: MemoryBus) -> tuple[World, Sandbox]:
    stage = await world(outside)
    sandbox = Sandbox(outside, refuse=path.refuse, refuse_stop=path.refuse_stop)
    if path.running:
        async with routing(MemoryBus(outside.server)), sandbox.running():
            await stage.send(a_prompt("r1"))
            await sandbox.claims(1)
            await stage.state_is("running")
            await stage.settled()
    if path.starting:
        async with routing(MemoryBus(outside.server)):
            await stage.send(a_prompt("r1"))
            await stage.settled()
        # The command is given back while the takeover is on its way, as by an agent service that restarts.
        sandbox.await_state = "stopping"
    return stage, sandbox


def settles(path: Path) -> int:
    return 2 if path.running or path.starting else 1


def claims_of(path: Path) -> int:
    return path.executions - (1 if path.starting else 0)


async def check(path: Path, stage: World, sandbox: Sandbox) -> None:
    """One outcome, one command identity, one of each event, one stop, one process at a time, nothing left."""
    record = await stage.request("r2")
    assert record is not None and record.done is not None
    assert record.done.status == path.outcome
    told = [event.id for event in await stage.told()]
    assert [one for one in told if one.startswith("r2/")] == list(path.events)
    assert told.count("r1/response.superseded") == (1 if path.cut else 0)
    expected = [derived("r1")[1]] if path.running else []
    expected += [derived("r2")[1]] if path.outcome == "admitted" else []
    assert sandbox.claimed == expected
    assert sandbox.stopped == ([derived("r1")[1]] if path.cut and path.running else [])
    assert sandbox.most_active <= 1
    stops = {control for verb, control in sandbox.asked if verb == "stop"}
    assert stops <= {ids.control_id("acme", "r2", "stop", 1)}
    assert sandbox.interjected == (["hello"] if path.outcome == "interjected" else [])
    owner = await stage.owner()
    assert owner.generation == path.executions
    assert owner.pending_request is None and owner.stop_control is None
    if path.executions:
        assert owner.state == "running"
    assert await stage.waiting() == 0


async def until_dead(task: asyncio.Task[None]) -> bool:
    """Wait for the crash of a router's process; False where its delivery has fewer writes."""
    try:
        await task
    except BaseExceptionGroup as group:
        assert group.split(Crash)[0] is not None
        return True
    return False


@virtual
async def test_the_writes_of_an_admission_are_in_the_order_of_the_protocol() -> None:
    outside = MemoryBus(MemoryServer())
    stage = await world(outside)
    watched = FaultyBus(MemoryBus(outside.server))
    async with routing(watched):  # type: ignore[arg-type]
        await stage.send(a_prompt())
        await stage.settled()
    assert watched.writes == [
        "$KV.tether_conversations.acme.c1",
        "$KV.tether_requests.acme.r1",
        "$KV.tether_owners.acme.w1.c1",
        "tether.event.acme.w1.c1._",
        "tether.event.acme.w1.c1._",
        "tether.command.acme.w1",
        "$KV.tether_requests.acme.r1",
        "ack",
    ]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_p4_a_router_killed_at_any_write_leaves_one_outcome_to_the_next(path: Path, after: bool) -> None:
    crashed = 0
    for number in range(1, WRITES_MAX):

        @virtual
        async def run(number: int = number) -> None:
            nonlocal crashed
            outside = MemoryBus(MemoryServer())
            stage, sandbox = await prepare(path, outside)
            faulty = FaultyBus(MemoryBus(outside.server), crash_at=number, after=after)
            async with sandbox.running():
                await stage.send(path.prompt)
                async with crashing(faulty) as died:
                    crashed += await died(stage)
                async with routing(MemoryBus(outside.server)):
                    await stage.settled(2 if path.running else 1)
                    await sandbox.claims(claims_of(path))
                    await asyncio.sleep(40)  # everything unsettled would come again
                    await check(path, stage, sandbox)

        run()
    assert crashed >= 4, "the enumeration reached the writes of the delivery"
    assert crashed < WRITES_MAX - 1, "and went past the last"


class crashing:  # noqa: N801 - used as a verb
    """A router that is going to die, or to settle everything."""

    def __init__(self, bus: FaultyBus) -> None:
        self._bus = bus
        self._context = routing(bus)  # type: ignore[arg-type]

    async def __aenter__(self) -> Callable[[World], Awaitable[bool]]:
        await self._context.__aenter__()
        return self._died

    async def _died(self, stage: World) -> bool:
        task = next(task for task in asyncio.all_tasks() if task.get_name() == "router-under-test")

        async def over() -> bool:
            return task.done() or await stage.waiting() == 0

        await until(over, "the crash or the outcome", timeout_s=100)
        await asyncio.sleep(1)  # a crash after the last ack
        return await until_dead(task) if task.done() else False

    async def __aexit__(self, *_: object) -> None:
        await self._context.__aexit__(None, None, None)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_every_write_sent_twice_has_one_effect(path: Path) -> None:
    @virtual
    async def run() -> None:
        outside = MemoryBus(MemoryServer())
        stage, sandbox = await prepare(path, outside)
        twice = FaultyBus(MemoryBus(outside.server), twice=True)
        async with sandbox.running(), routing(twice):  # type: ignore[arg-type]
            await stage.send(path.prompt)
            await stage.settled(settles(path))
            await sandbox.claims(claims_of(path))
            await stage.state_is("running" if path.executions else "idle")
            await check(path, stage, sandbox)
        assert len(twice.writes) >= 4

    run()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_two_routers_with_the_same_prompt_in_hand_agree_at_every_interleaving_tried(path: Path) -> None:
    for seed in range(25):

        @virtual
        async def run(seed: int = seed) -> None:
            outside = MemoryBus(MemoryServer())
            stage, sandbox = await prepare(path, outside)
            async with sandbox.running():
                ack = await stage.send(path.prompt)
                stored = await outside.at(subjects.PROMPTS_STREAM, ack.sequence)
                assert stored is not None
                slow = []
                for number in range(2):
                    bus = MemoryBus(outside.server)
                    rates = {call: {FaultKind.DELAY: 0.5} for call in ("publish", "last", "read", "request")}
                    bus.faults.random(seed * 2 + number, rates, delay_max_s=1.0)
                    slow.append(admitter(bus))
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(
                            one.admit(
                                path.prompt, sequence=ack.sequence, stored_at_ns=stored.stored_at_ns, actor=f"a{n}"
                            )
                        )
                        for n, one in enumerate(slow)
                    ]
                # A takeover that waits for its proof, or whose other delivery wrote in between, is looked at again.
                assert path.cut or any(isinstance(task.result().end, Ack) for task in tasks)
                async with routing(MemoryBus(outside.server)):
                    await stage.settled(2 if path.running else 1)
                    await sandbox.claims(claims_of(path))
                    await check(path, stage, sandbox)

        run()


@pytest.mark.parametrize("path", [PATHS[0], PATHS[3], PATHS[5]], ids=lambda path: path.name)
def test_p8_a_router_frozen_at_any_write_wakes_when_all_is_over_and_nothing_runs_again(path: Path) -> None:
    frozen = 0
    for number in range(1, WRITES_MAX):

        @virtual
        async def run(number: int = number) -> None:
            nonlocal frozen
            outside = MemoryBus(MemoryServer())
            stage, sandbox = await prepare(path, outside)
            before = await stage.told()
            faulty = FaultyBus(MemoryBus(outside.server), freeze_at=number)
            async with sandbox.running(), routing(faulty) as _:  # type: ignore[arg-type]
                await stage.send(path.prompt)
                await asyncio.sleep(5)
                if not faulty.frozen.is_set():
                    return
                frozen += 1
                async with routing(MemoryBus(outside.server)) as _:
                    await sandbox.claims(claims_of(path), timeout_s=200)
                    await stage.settled(settles(path))
                    await sandbox.finish(sandbox.claimed[-1])
                    await stage.state_is("idle")
                    await stage.send(a_prompt("r3"))
                    await sandbox.claims(claims_of(path) + 1)
                    await sandbox.finish(sandbox.claimed[-1])
                    await asyncio.sleep(300)  # beyond the duplicate window: a late command is stored again
                    faulty.thawed.set()
                    await asyncio.sleep(120)
                    first = [derived("r1")[1]] if path.running else []
                    assert sandbox.claimed == [*first, derived("r2")[1], derived("r3")[1]]
                    assert sandbox.stopped == first
                    record = await stage.owner()
                    assert (record.state, record.generation) == ("idle", path.executions + 1)
                    told = [event.id for event in await stage.told()][len(before) :]
                    cut = ["r1/response.superseded"] if path.cut else []
                    assert told == [*cut, *ADMITTED, "r3/prompt.admitted", "r3/response.created"]
                    commands = await outside.state(subjects.COMMANDS_STREAM)
                    assert commands is not None and commands.messages == 0

        run()
    assert frozen >= 6


@virtual
async def test_a_redelivered_prompt_names_the_same_command_after_the_duplicate_window() -> None:
    outside = MemoryBus(MemoryServer())
    stage = await world(outside)
    ack = await stage.send(a_prompt())
    stored = await outside.at(subjects.PROMPTS_STREAM, ack.sequence)
    assert stored is not None
    names = []
    for number in range(2):
        faulty = FaultyBus(MemoryBus(outside.server), crash_at=7 if number == 0 else 0)
        try:
            await admitter(faulty).admit(  # type: ignore[arg-type]
                a_prompt(), sequence=ack.sequence, stored_at_ns=stored.stored_at_ns, actor=f"a{number}"
            )
        except Crash:
            assert faulty.writes[-2].startswith("tether.command.")
        await asyncio.sleep(300)
        names += [decode_command(m.data) for m in await stage.stored(subjects.COMMANDS_STREAM, "tether.command.>")]
    assert len(names) == 3, "the second admission stored the command again, since its first copy had been forgotten"
    assert len({command.encode() for command in names}) == 1
