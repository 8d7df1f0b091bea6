"""A drain as the agent service drives it: what to do next, and when to give up. Pure.

    draining ── asked ──running──▶ progress into the record, asked again
        │         ├──── done ────▶ the record says so ──▶ release ── proof ──▶ suspended (or deleting)
        │         ├──── failed ──▶ active, and the report says what was not kept
        │         ├──── refused for good, or a collector that cannot drain ──▶ failed
        │         └──── no word ─▶ its collector is made sure of, asked again
        └── no word for DRAIN_DEADLINE_S beyond the grace ──▶ failed: the record does not stay here for ever

The clock runs from the last word of the collector, as far as the record and this process know it: a service that was
restarted goes on with the time that the record was last written.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.control import ControlReply
from tether.errors import Code, Problem, problem
from tether.limits import DRAIN_DEADLINE_S
from tether.sandbox import DrainOrder, DrainReport, SandboxRecord
from tether_agent.core.sandbox import releasing

UNSAVED = "no checkpoint was made; the volume has what was written to it"


@dataclass(frozen=True, slots=True)
class Ask:
    order: DrainOrder


@dataclass(frozen=True, slots=True)
class Release:
    """The report is done: `boot` may go."""

    drain: str
    boot: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    report: DrainReport


@dataclass(frozen=True, slots=True)
class Over:
    """The record is not draining (any more)."""


Next = Ask | Release | GiveUp | Over


def following(record: SandboxRecord | None, heard_at: int, now_ms: int) -> Next:
    """What a draining sandbox needs now. `heard_at`: the collector's last word, as this process knows it (unix ms)."""
    if record is None or record.state != "draining" or record.drain is None:
        return Over()
    order = record.drain
    if releasing(record):
        return Release(order.drain, boot_of(record))
    since = max(order.began_at + round(order.grace_s * 1000), record.updated_at, heard_at)
    if now_ms - since <= DRAIN_DEADLINE_S * 1000:
        return Ask(order)
    detail = f"the sandbox's collector gave no word for {DRAIN_DEADLINE_S:g} s beyond the grace"
    return GiveUp(failed(record, problem(Code.CHECKPOINT_FAILED, detail)))


def boot_of(record: SandboxRecord) -> str:
    """Of the compute that was drained: as it was last registered, else as the checkpoint names it."""
    report = record.drained
    noted = record.facts.get("boot")
    if isinstance(noted, str) and noted:
        return noted
    return "" if report is None or report.checkpoint is None else report.checkpoint.boot


def failed(record: SandboxRecord, why: Problem) -> DrainReport:
    """The end of a drain that the collector did not tell. What it told before stays."""
    assert record.drain is not None
    known = record.drained.executions if record.drained is not None else ()
    return DrainReport(
        drain=record.drain.drain, state="failed", phase="over", executions=known, problem=why, unsaved=UNSAVED
    )


def cannot_drain() -> Problem:
    return problem(Code.CAPABILITY_MISSING, "the sandbox's collector cannot drain; it is of an older version")


def report_of(record: SandboxRecord, reply: ControlReply) -> DrainReport | None:
    """What a reply says of the drain; None where it says nothing for now. Raises ValueError for a result that is no
    report."""
    assert record.drain is not None
    if reply.result is not None:
        report = DrainReport.model_validate(reply.result)
        return report if report.drain == record.drain.drain else None
    if reply.status == "rejected" and reply.problem is not None and not reply.problem.retryable:
        return failed(record, reply.problem)
    return None
