"""What a round does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

Over = Literal["http", "nats"]
Fate = Literal["run", "interrupt", "stop"]
SERVICES: Final = ("router", "agent", "backend", "collector", "nats")
ALL: Final = "everything"  # all that may be hit, at once
_FREEZE_LONG_S: Final = 16.0  # longer than each lease lives
_LONG_SHARE: Final = 0.08
_ALL_SHARE: Final = 0.08
_RACE_SHARE: Final = 0.35
_TWICE_SHARE: Final = 0.3
_CUT_SHARE: Final = 0.12


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """`marker` stands in the text, so that the agent's record tells which prompts reached it. `again`: the same request
    is sent by the other transport as well, so many seconds later. `fate`: what a user does to it after `fate_after_s`.
    `next_at_once`: what is said next does not wait for the end of this turn."""

    request: str
    marker: str
    text: str
    over: Over
    again_after_s: float | None
    fate: Fate
    fate_after_s: float
    next_at_once: bool


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """`turns` come one after the other; the prompts of one turn race."""

    name: str
    workspace: str
    turns: tuple[tuple[PromptPlan, ...], ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """After a pause of `after_s`. `freeze_s` None: SIGKILL; else SIGSTOP for so long. `pick` chooses among several;
    `service` may be ALL."""

    after_s: float
    service: str
    freeze_s: float | None
    pick: float

    def __str__(self) -> str:
        how = "killed" if self.freeze_s is None else f"frozen for {self.freeze_s:.1f} s"
        return f"{self.service} {how}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One round."""

    seed: int
    conversations: tuple[ConversationPlan, ...]
    faults: tuple[Fault, ...]
    services: tuple[str, ...]


def draw(seed: int, *, conversations: int, workspaces: int, seconds: float, services: tuple[str, ...]) -> Plan:
    """The same arguments draw the same plan."""
    rng = random.Random(seed)
    drawn = [_conversation(rng, number, number % workspaces, seconds) for number in range(conversations)]
    return Plan(seed, tuple(drawn), tuple(_faults(rng, seconds, services)), services)


def _conversation(rng: random.Random, number: int, workspace: int, seconds: float) -> ConversationPlan:
    name = f"c{number}"
    turns: list[tuple[PromptPlan, ...]] = []
    for turn in range(max(2, int(seconds / 2))):
        racers = rng.randint(2, 4) if rng.random() < _RACE_SHARE else 1
        turns.append(tuple(_prompt(rng, f"{name}-{turn}-{racer}") for racer in range(racers)))
    return ConversationPlan(name, f"w{workspace}", tuple(turns))


def _prompt(rng: random.Random, name: str) -> PromptPlan:
    fate: Fate = rng.choice(("interrupt", "stop")) if rng.random() < _CUT_SHARE else "run"
    return PromptPlan(
        request=name,
        marker=f"<{name}>",
        text=script(rng, f"<{name}>"),
        over=rng.choice(("http", "nats")),
        again_after_s=rng.choice((0.0, 0.0, 0.5, 3.0)) if rng.random() < _TWICE_SHARE else None,
        fate=fate,
        fate_after_s=rng.uniform(0.0, 2.5),
        next_at_once=rng.random() < 0.3,
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


def _faults(rng: random.Random, seconds: float, services: tuple[str, ...]) -> list[Fault]:
    faults: list[Fault] = []
    at = 0.0
    while services:
        pause = rng.uniform(0.05, 2.0)
        at += pause
        if at > seconds:
            break
        freeze: float | None = None
        if rng.random() < 0.35:
            freeze = _FREEZE_LONG_S if rng.random() < _LONG_SHARE else rng.uniform(0.3, 4.0)
        service = ALL if rng.random() < _ALL_SHARE else rng.choice(services)
        faults.append(Fault(pause, service, freeze, rng.random()))
    return faults
