"""What a round does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final, Literal

Over = Literal["http", "nats"]
Fate = Literal["run", "interrupt", "stop"]
Mode = Literal["auto", "interject", "takeover"]
How = Literal["kill", "freeze", "stall", "cut", "disk"]
ReaderKind = Literal["sse", "ws", "http", "nats", "durable"]
Deed = Literal["drain", "suspend", "force", "resume", "delete", "terminate", "lose_volume"]
Store = Literal["volume", "both"]
SERVICES: Final = ("router", "agent", "backend", "collector", "nats")
READER_KINDS: Final[tuple[ReaderKind, ...]] = ("sse", "ws", "http", "nats", "durable")
ALL: Final = "everything"  # all that may be hit, at once
READERS_OF_ONE: Final = 3  # readers of a conversation; kinds go round
_FREEZE_LONG_S: Final = 16.5  # longer than each lease lives
_LONG_SHARE: Final = 0.06
_ALL_SHARE: Final = 0.06
_RACE_SHARE: Final = 0.35
_TWICE_SHARE: Final = 0.3
_CUT_SHARE: Final = 0.12
_FAIL_SHARE: Final = 0.08
_JOIN_SHARE: Final = 0.25  # of turns that an interjection or a takeover follows
_KILL_SHARE: Final = 0.72
_AT_EVENT_SHARE: Final = 0.3  # of kills that wait for the next stored event: right after an ack
_TURNS_A_SECOND: Final = 0.3
_BURST: Final = (1, 4)
_CONTINUE_SHARE: Final = 0.3  # of prompts whose turn goes on by itself where a drain cuts it
_OPERATIONS_A_SECOND: Final = 0.25
_RESUME_SHARE: Final = 0.4  # of operations that follow one which may have ended in a sandbox at rest
OPERATIONS_MAX: Final = 6  # of one workspace: with the last suspend still fewer than the references that are kept
_DEEDS: Final[tuple[Deed, ...]] = (
    *("drain", "drain", "suspend", "force", "force", "delete", "terminate", "lose_volume"),
)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """`marker` stands in the text, so that the agent's record tells which prompts reached it. `again`: the same request
    is sent by the other transport as well, so many seconds later. `fate`: what a user does to it after `fate_after_s`.
    `next_at_once`: what is said next does not wait for the end of this turn. `after_s`: sent so much later than its
    turn's first. `fails`: its model fails. `goes_on`: where a drain cuts its turn, it goes on by itself.
    `from_history`: the session was lost, and its user chose to go on from the history."""

    request: str
    marker: str
    text: str
    over: Over
    again_after_s: float | None
    fate: Fate
    fate_after_s: float
    next_at_once: bool
    mode: Mode = "auto"
    after_s: float = 0.0
    fails: bool = False
    agent: str = "scripted"
    goes_on: bool = False
    from_history: bool = False


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """`turns` come one after the other; the prompts of one turn race. `readers`: who follows it."""

    name: str
    workspace: str
    turns: tuple[tuple[PromptPlan, ...], ...]
    readers: tuple[ReaderKind, ...] = READER_KINDS[:READERS_OF_ONE]


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that an operator does to a workspace's sandbox, `after_s` after the one before it was over.

    `force` is a suspend of a sandbox that may be busy, `terminate` the machine's SIGTERM to the collector,
    `lose_volume` a suspend with a checkpoint in the blob store, after which the volume is gone. `drain` is the
    operation's id."""

    drain: str
    workspace: str
    deed: Deed
    after_s: float
    grace_s: float
    store: Store

    def __str__(self) -> str:
        return f"{self.workspace}: {self.deed} within {self.grace_s:.1f} s to {self.store} ({self.drain})"


@dataclass(frozen=True, slots=True)
class Fault:
    """After a pause of `after_s`. `for_s`: how long a freeze, a stall, a full disk lasts. `pick` chooses among several;
    `service` may be ALL. `at_event`: right after the next event is stored."""

    after_s: float
    service: str
    how: How
    for_s: float
    pick: float
    at_event: bool = False

    def __str__(self) -> str:
        match self.how:
            case "kill":
                return f"{self.service} killed{' right after an ack' if self.at_event else ''}"
            case "freeze":
                return f"{self.service} frozen for {self.for_s:.1f} s"
            case "stall":
                return f"network of {self.service} stalled for {self.for_s:.1f} s"
            case "cut":
                return f"network of {self.service} cut"
            case "disk":
                return f"disk of the workspaces full for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """One round. `nodes`: nats-servers."""

    seed: int
    conversations: tuple[ConversationPlan, ...]
    faults: tuple[Fault, ...]
    services: tuple[str, ...]
    nodes: int = 1
    operations: tuple[Operation, ...] = ()


def draw(
    seed: int,
    *,
    conversations: int,
    workspaces: int,
    seconds: float,
    services: tuple[str, ...],
    rate: float = 1.0,
    nodes: int = 1,
) -> Plan:
    """The same arguments draw the same plan. `rate`: faults a second, on average."""
    rng = random.Random(seed)
    drawn = [_conversation(rng, number, number % workspaces, seconds) for number in range(conversations)]
    faults = tuple(_faults(rng, seconds, services, rate, nodes))
    own = random.Random(f"{seed} operations")  # of its own: a seed's load and faults stay what they were
    drawn = [_going_on(own, one) for one in drawn]
    used = min(conversations, workspaces)
    return Plan(seed, tuple(drawn), faults, services, nodes, tuple(_operations(own, used, seconds)))


def _going_on(rng: random.Random, plan: ConversationPlan) -> ConversationPlan:
    """Some of its prompts are continued where they are cut."""
    turns = tuple(
        tuple(replace(prompt, goes_on=prompt.mode != "interject" and rng.random() < _CONTINUE_SHARE) for prompt in turn)
        for turn in plan.turns
    )
    return replace(plan, turns=turns)


def _operations(rng: random.Random, workspaces: int, seconds: float) -> list[Operation]:
    """A few for each workspace: over the round its sandbox is drained and resumed again and again."""
    each = min(OPERATIONS_MAX, max(2, round(seconds * _OPERATIONS_A_SECOND / workspaces)))
    operations = []
    for workspace in range(workspaces):
        deed: Deed = "resume"
        for number in range(each):
            deed = "resume" if deed != "resume" and rng.random() < _RESUME_SHARE else rng.choice(_DEEDS)
            operations.append(
                Operation(
                    drain=f"op-w{workspace}-{number}",
                    workspace=f"w{workspace}",
                    deed=deed,
                    after_s=rng.uniform(0.2, 1.4) * seconds / (each + 1),
                    grace_s=rng.choice((0.0, 1.0, 2.0, 5.0)),
                    store=rng.choice(("volume", "both")),
                )
            )
    return operations


def _conversation(rng: random.Random, number: int, workspace: int, seconds: float) -> ConversationPlan:
    name = f"c{number}"
    turns: list[tuple[PromptPlan, ...]] = []
    for turn in range(max(2, int(seconds * _TURNS_A_SECOND))):
        racers = rng.randint(2, 4) if rng.random() < _RACE_SHARE else 1
        prompts = [_prompt(rng, f"{name}-{turn}-{racer}") for racer in range(racers)]
        if rng.random() < _JOIN_SHARE:
            mode: Mode = rng.choice(("interject", "interject", "takeover"))
            prompts.append(_prompt(rng, f"{name}-{turn}-{mode}", mode=mode, after_s=rng.uniform(0.2, 2.5)))
        turns.append(tuple(prompts))
    first = number * READERS_OF_ONE
    kinds = tuple(READER_KINDS[(first + reader) % len(READER_KINDS)] for reader in range(READERS_OF_ONE))
    return ConversationPlan(name, f"w{workspace}", tuple(turns), kinds)


def _prompt(rng: random.Random, name: str, *, mode: Mode = "auto", after_s: float = 0.0) -> PromptPlan:
    fate: Fate = rng.choice(("interrupt", "stop")) if mode == "auto" and rng.random() < _CUT_SHARE else "run"
    fails = rng.random() < _FAIL_SHARE
    text = script(rng, f"<{name}>")
    return PromptPlan(
        request=name,
        marker=f"<{name}>",
        text=f"{text}\n!fail overloaded" if fails else text,
        over=rng.choice(("http", "nats")),
        again_after_s=rng.choice((0.0, 0.0, 0.5, 3.0)) if rng.random() < _TWICE_SHARE else None,
        fate=fate,
        fate_after_s=rng.uniform(0.0, 2.5),
        next_at_once=rng.random() < 0.3,
        mode=mode,
        after_s=after_s,
        fails=fails,
    )


def script(rng: random.Random, marker: str) -> str:
    """A few steps of all kinds that a reader should see, with side effects between them."""
    steps: list[str] = []
    for _ in range(rng.randint(1, 5)):
        steps.append(
            rng.choice(
                (
                    f"!deltas {rng.randint(5, 120)} {rng.randint(1, 10)}",
                    f"!lines {rng.randint(5, 80)} {rng.randint(1, 15)}",
                    f"!flood {rng.randint(200, 1500)}",
                    f"!tool work {rng.randint(0, 400)} {rng.choice((10, 2_000, 300_000))}",
                    "!ask deploy",
                    "!ask first second",
                    "!question colour? | red | blue",
                    "!reasoning a thought",
                    "!retry 2",
                    f"!sleep {rng.uniform(0.1, 1.5):.1f}",
                    "!background 1",
                    "!garbage unknown_type",
                    "!garbage invalid_json",
                    "!repeat 3\n!say pass {i}\n!tool loop\n!end",
                )
            )
        )
    return "\n".join([f"!say {marker}", "!tool first", *steps, f"!usage {rng.randint(1, 999)} {rng.randint(1, 999)}"])


def _faults(rng: random.Random, seconds: float, services: tuple[str, ...], rate: float, nodes: int) -> list[Fault]:
    """Bursts with rests between them: what is just recovering is hit again, and at times work goes on."""
    faults: list[Fault] = []
    at = 0.0
    mean_s = (_BURST[0] + _BURST[1]) / 2 / rate
    while services:
        for number in range(rng.randint(*_BURST)):
            pause = rng.uniform(0.4, 1.6) * mean_s if number == 0 else rng.uniform(0.02, 0.4)
            at += pause
            if at > seconds:
                return faults
            faults.append(_fault(rng, pause, services, nodes))
    return faults


def _fault(rng: random.Random, pause: float, services: tuple[str, ...], nodes: int) -> Fault:
    service = ALL if rng.random() < _ALL_SHARE and nodes == 1 else rng.choice(services)
    pick = rng.random()
    if rng.random() < _KILL_SHARE or service == ALL:
        return Fault(pause, service, "kill", 0.0, pick, at_event=rng.random() < _AT_EVENT_SHARE)
    how: How = rng.choice(("freeze", "freeze", "stall", "cut", "disk"))
    if service == "nats" or (nodes > 1 and how != "disk"):
        how = "freeze"  # nobody's proxy: all of them, or none
    long = rng.random() < _LONG_SHARE
    for_s = _FREEZE_LONG_S if long else rng.uniform(0.3, 4.0)
    return Fault(pause, service, how, for_s, pick)
