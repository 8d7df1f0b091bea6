"""How long readers wait after what was broken is there again, counted from outside.

A reader's stream needs several processes (its chain): over HTTP the backend, nats-server, the workspace's collector.
While any of them is down, frozen or cut off, the stream is out; overlapping outages are one. From the end of it to the
first new event at the reader is the re-attach time, or less where the agent had printed nothing yet:

    sample = received - max(end of the outage, the event's own time)

It belongs to the tier that was the last to be up again. A chain that breaks once more before the event came begins
another outage: nothing is counted for the first. Router and agent service carry no stream: their chain is that of a
prompt, from its sending (or the end of what it waited behind) to the first event of its execution.

A cluster goes on while one of its servers is away, so that its return says nothing: what a reader waits there is the
failover, the longest time that an event took to it from the outage's begin until one came after its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

STREAM_TIERS: Final = ("backend", "collector", "nats")


class Outage(NamedTuple):
    """`scope`: the workspace of a collector, else empty. Times in unix seconds; `end_s` None: not up again."""

    tier: str
    scope: str
    begin_s: float
    end_s: float | None


class Receipt(NamedTuple):
    """An event as it came to a reader: when, and when the agent said it (unix seconds)."""

    received_s: float
    at_s: float


class Wait(NamedTuple):
    """`receipt`: the first event after the outage."""

    outage: Outage
    receipt: Receipt
    seconds: float


@dataclass(slots=True)
class Chain:
    """`tiers`: what it needs. `scope`: the workspace, for its collector."""

    tiers: frozenset[str]
    scope: str
    receipts: list[Receipt] = field(default_factory=list)


def merged(outages: Iterable[Outage], chain: Chain) -> list[Outage]:
    """Those of the chain, overlapping ones as one that ends with the last; the tier is that of the last end."""
    mine = sorted(
        (one for one in outages if one.tier in chain.tiers and one.scope in ("", chain.scope)),
        key=lambda one: one.begin_s,
    )
    found: list[Outage] = []
    for one in mine:
        if one.end_s is None:
            return found  # never up again within the round: nothing after it can be counted
        last = found[-1] if found else None
        if last is None or last.end_s is None or one.begin_s > last.end_s:
            found.append(one)
        elif one.end_s > last.end_s:
            found[-1] = one._replace(begin_s=last.begin_s)
    return found


def waits(outages: Sequence[Outage], chain: Chain) -> list[Wait]:
    """One for each outage after which an event came before the next outage."""
    found = []
    periods = merged(outages, chain)
    times = [receipt.received_s for receipt in chain.receipts]
    for number, period in enumerate(periods):
        assert period.end_s is not None
        following = periods[number + 1].begin_s if number + 1 < len(periods) else float("inf")
        at = bisect_right(times, period.end_s)
        before = bisect_right(times, period.begin_s)
        if at == len(times) or times[at] >= following or before == 0:
            continue  # before == 0: there was no stream yet that could have been affected
        receipt = chain.receipts[at]
        found.append(Wait(period, receipt, max(0.0, receipt.received_s - max(period.end_s, receipt.at_s))))
    return found


def stream_samples(outages: Sequence[Outage], chain: Chain) -> dict[str, list[float]]:
    """Re-attach seconds by tier."""
    samples: dict[str, list[float]] = defaultdict(list)
    for wait in waits(outages, chain):
        samples[wait.outage.tier].append(wait.seconds)
    return samples


def failover_samples(outages: Sequence[Outage], chain: Chain) -> list[float]:
    """Of a cluster: for each outage of a nats-server the longest that an event was on its way to this reader meanwhile,
    counted from the outage's begin at the earliest; nothing where no event came."""
    found = []
    for outage in outages:
        if outage.tier != "nats" or outage.end_s is None:
            continue
        times = [receipt.received_s for receipt in chain.receipts]
        first, last = bisect_right(times, outage.begin_s), bisect_right(times, outage.end_s)
        during = chain.receipts[first : last + 1]
        if first and during:  # first == 0: there was no stream yet
            found.append(max(max(0.0, one.received_s - max(outage.begin_s, one.at_s)) for one in during))
    return found


def start_sample(outages: Sequence[Outage], chain: Chain, due_s: float, began_s: float) -> tuple[str, float] | None:
    """Of one prompt: due since `due_s`, its first event received at `began_s`. None where nothing was out meanwhile, or
    where something is out again when it begins."""
    periods = [one for one in merged(outages, chain) if one.begin_s < began_s]
    last = periods[-1] if periods else None
    if last is None or last.end_s is None or not due_s < last.end_s < began_s:
        return None
    return last.tier, began_s - last.end_s


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest rank; 0 where there is no sample."""
    if not samples:
        return 0.0
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
