"""Any interleaving of two agent services, prompts, drains, wakes and crashes over one sandbox record.

Every actor is a generator that yields wherever another may come in between: before a read, between a read and its
compare-and-set, before a message to the collector. The schedule is drawn; a crash drops an actor where it stands, and
its successor begins at the top, as a redelivery or the next look does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tether.checkpoint import CheckpointReference
from tether.sandbox import DrainOrder, DrainReport, SandboxRecord
from tether_agent.core import draining
from tether_agent.core.sandbox import (
    Decision,
    Deleted,
    DrainOrdered,
    DrainReported,
    Forwarded,
    Keep,
    Provisioned,
    Refuse,
    Released,
    Remove,
    SandboxInput,
    Wait,
    Wanted,
    Woken,
    Write,
    decide,
)

Actor = Generator[None, None, None]
DIAGRAM = {
    (None, "provisioning"),
    ("provisioning", "active"),
    ("active", "active"),
    ("active", "draining"),
    ("draining", "draining"),
    ("draining", "active"),
    ("draining", "suspended"),
    ("draining", "deleting"),
    ("suspended", "resuming"),
    ("resuming", "active"),
    ("deleting", None),
}


@dataclass
class World:
    """The record with its revision, and a collector that is there while its compute is."""

    record: SandboxRecord | None = None
    revision: int = 0
    history: list[tuple[str | None, str | None]] = field(default_factory=list)
    collector: bool = False
    draining: str | None = None  # as the collector sees it
    told: dict[str, DrainReport] = field(default_factory=dict)  # its journal: a drain ends once
    accepted: dict[str, int] = field(default_factory=dict)
    wakes: int = 0
    sleeps: int = 0
    forwarded_at: list[int] = field(default_factory=list)
    ordered: list[tuple[int, int]] = field(default_factory=list)  # revision looked at, revision written

    def store(self, decision: Write | Remove, seen: int) -> bool:
        """The server's compare-and-set."""
        if self.revision != seen:
            return False
        before = None if self.record is None else self.record.state
        self.record = decision.record if isinstance(decision, Write) else None
        after = None if self.record is None else self.record.state
        self.history.append((before, after))
        self.revision += 1
        self.wakes += (before, after) == ("suspended", "resuming")
        self.sleeps += after == "suspended"
        return True


def apply(world: World, event: SandboxInput, done: list[Decision], expect: int | None = None) -> Actor:
    """What `SandboxRecords.apply` does, cut between read and write."""
    while True:
        record, seen = world.record, world.revision
        yield
        if expect is not None and seen != expect:
            done.append(Wait("moved"))
            return
        decision = decide(record, event)
        if isinstance(decision, Keep | Wait | Refuse) or world.store(decision, seen):
            done.append(decision)
            return
        yield


def start(world: World, name: str) -> Actor:
    """A command, redelivered until the collector has taken it."""
    while name not in world.accepted:
        done: list[Decision] = []
        yield from apply(world, Wanted("t", "w", "s", "p", at=1), done)
        if isinstance(done[-1], Wait):
            yield
            continue
        world.collector = True
        yield
        yield from apply(world, Provisioned({"boot": "b"}, at=2), done)
        if isinstance(done[-1], Wait):
            yield
            continue
        yield from apply(world, Forwarded(at=3), done)
        if not isinstance(done[-1], Write):
            yield
            continue
        assert done[-1].record.state == "active"
        world.forwarded_at.append(world.revision)
        yield
        if world.collector and world.draining is None:
            world.accepted[name] = world.accepted.get(name, 0) + 1
        yield


def idle_suspend(world: World, name: str) -> Actor:
    record, seen = world.record, world.revision
    yield
    if record is None or record.state != "active":
        return
    yield  # the look at executions
    done: list[Decision] = []
    yield from apply(world, DrainOrdered(DrainOrder(drain=name, purpose="suspend"), at=4), done, expect=seen)
    if isinstance(done[-1], Write):
        world.ordered.append((seen, world.revision))


def drain(world: World, order: DrainOrder) -> Actor:
    yield from apply(world, DrainOrdered(order, at=4), [])


def wake(world: World) -> Actor:
    yield from apply(world, Woken(at=5), [])


def reference(drain: str) -> CheckpointReference:
    return CheckpointReference(
        checkpoint=f"chk_{drain}",
        drain=drain,
        tenant="t",
        workspace="w",
        sandbox="s",
        boot="b",
        manifest="0" * 64,
        manifest_bytes=1,
        stored="volume",
        include="sessions",
        clean=True,
    )


def carrier(world: World, fails: bool) -> Actor:
    """What the lifecycle of one agent service does, look after look."""
    for _ in range(40):
        record = world.record
        yield
        match None if record is None else record.state:
            case "draining":
                assert record is not None
                match draining.following(record, 0, 0):
                    case draining.Ask(order):
                        if order.drain not in world.told:
                            world.draining = order.drain
                        yield
                        if order.drain not in world.told:
                            bad = fails and order.purpose != "delete"
                            kept = None if bad else reference(order.drain)
                            world.told[order.drain] = DrainReport(
                                drain=order.drain, state="failed" if bad else "done", checkpoint=kept
                            )
                            world.draining = None if bad else order.drain
                        yield from apply(world, DrainReported(world.told[order.drain], at=6), [])
                    case draining.Release(drain=name):
                        current = world.record
                        if current is not None and current.drain is not None and current.drain.drain == name:
                            world.collector, world.draining = False, None
                        yield
                        yield from apply(world, Released(name, at=7), [])
                    case _:
                        pass
            case "deleting":
                world.collector, world.draining = False, None
                yield from apply(world, Deleted(at=8), [])
            case "resuming":
                world.collector = True
                yield
                yield from apply(world, Provisioned({"boot": "b"}, at=9), [])
            case _:
                yield


MAKERS: dict[str, Callable[[World], Actor]] = {
    "start-1": lambda world: start(world, "r1"),
    "start-1-again": lambda world: start(world, "r1"),  # the same command at another service
    "start-2": lambda world: start(world, "r2"),
    "idle-a": lambda world: idle_suspend(world, "d1"),
    "idle-b": lambda world: idle_suspend(world, "d2"),
    "drain": lambda world: drain(world, DrainOrder(drain="d3")),
    "drain-again": lambda world: drain(world, DrainOrder(drain="d3")),
    "delete": lambda world: drain(world, DrainOrder(drain="d4", purpose="delete")),
    "wake-a": lambda world: wake(world),
    "wake-b": lambda world: wake(world),
    "carrier-a": lambda world: carrier(world, fails=False),
    "carrier-b": lambda world: carrier(world, fails=True),
}
NAMES = list(MAKERS)


def run(world: World, schedule: list[tuple[int, bool]]) -> None:
    actors: dict[str, Actor] = {}
    for choice, crashes in schedule:
        name = NAMES[choice % len(NAMES)]
        if crashes:
            actors.pop(name, None)  # SIGKILL: the next turn begins at the top
            continue
        actor = actors.setdefault(name, MAKERS[name](world))
        if next(actor, "over") == "over":
            actors.pop(name)
    # Nothing more is asked for: every start has to come through, whatever state the record was left in.
    rest = [start(world, "r1"), start(world, "r2"), carrier(world, fails=False)]
    for _ in range(2_000):
        if {"r1", "r2"} <= world.accepted.keys():
            return
        for index, actor in enumerate(rest):
            if next(actor, "over") == "over" and index == 2:
                rest[2] = carrier(world, fails=False)
    raise AssertionError(f"a start never came through: {world.record}")


@settings(max_examples=1_500, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 400), st.sampled_from([0.0, 0.02, 0.2]))
def test_no_interleaving_breaks_the_life_cycle(seed: int, length: int, crash: float) -> None:
    drawn, world = random.Random(seed), World()
    run(world, [(drawn.randrange(len(NAMES)), drawn.random() < crash) for _ in range(length)])
    assert set(world.history) <= DIAGRAM
    for looked, written in world.ordered:
        between = [at for at in world.forwarded_at if looked < at < written]
        assert not between, "a drain won over a start that was forwarded after its look"
    # Each sleep is woken at most once, however many ask.
    assert world.wakes <= world.sleeps


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=80))
def test_however_many_ask_a_suspended_sandbox_is_woken_once(schedule: list[int]) -> None:
    record = SandboxRecord(tenant="t", workspace="w", sandbox="s", state="suspended", provider="p")
    world = World(record=record, revision=3)
    actors = [wake(world), wake(world), start(world, "r1"), start(world, "r1"), start(world, "r2"), wake(world)]
    for choice in [*schedule, *range(6), *list(range(6)) * 20]:
        next(actors[choice], None)
    assert world.wakes == 1
    assert world.record is not None and world.record.state == "active"
