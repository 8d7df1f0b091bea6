"""A sandbox whose volume is away: wait for it, or close what it ran. Pure.

    volume there ──────────────────────────────────────────▶ Tell    a recovery collector tells tail and end
    volume away, something of the sandbox may live ─────────▶ Wait    there is no proof: no time ends this wait
    volume away, proven gone ─▶ Wait, up to the limit ──────▶ Close   the agent service appends the end itself
    closed ─▶ Wait, for ever ── volume there ───────────────▶ Tell    whose tail goes to the artifacts

The proof is needed always; the limit only bounds the wait for the volume, from the moment of the proof on. A proof that
is lost again (something of the sandbox showed up after all) begins the wait anew.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """What is to be seen at `at_s`. `proof`: how it is known that nothing of the sandbox lives, None where it is not.
    `closed`: its executions were closed before."""

    at_s: float
    volume: bool
    proof: str | None
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    proof: str


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


Decision = Tell | Close | Wait


@dataclass(frozen=True, slots=True)
class Lost:
    """`proven_at_s`: since when the proof stands."""

    proven_at_s: float | None = None


def decide(state: Lost, look: Look, wait_s: float) -> tuple[Lost, Decision]:
    """The next state, and what to do now."""
    if look.volume:
        return Lost(), Tell()
    if look.closed:
        return Lost(), Wait("its executions are closed, and its volume is away")
    if look.proof is None:
        return Lost(), Wait("its volume is away, and something of it may live")
    since_s = look.at_s if state.proven_at_s is None else state.proven_at_s
    if look.at_s - since_s < wait_s:
        return Lost(since_s), Wait("it is proven gone, and its volume is waited for")
    return Lost(since_s), Close(look.proof)
