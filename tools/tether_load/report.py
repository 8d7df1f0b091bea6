"""Findings, their verdict, the table, and how much of the machine was others'."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tether_bench.stats import number

Verdict = Literal["pass", "fail", "inconclusive"]
FOREIGN_SHARE_MAX: Final = 0.15  # of all cores, used by others while the set is idle: comparisons say nothing then
STEAL_SHARE_MAX: Final = 0.02
_FAULTS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Row:
    """`good` None: told, not judged."""

    name: str
    value: float
    unit: str
    limit: str = ""
    good: bool | None = None


@dataclass(slots=True)
class Finding:
    """Of one load. `faults`: sentences, each of which fails it. `compared`: its limits are of time, so that a machine
    which others use makes a miss inconclusive."""

    name: str
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)

    def row(self, name: str, value: float, unit: str, limit: str = "", good: bool | None = None) -> None:
        self.rows.append(Row(name, value, unit, limit, good))

    @property
    def verdict(self) -> Verdict:
        if self.faults:
            return "fail"
        if all(row.good is not False for row in self.rows):
            return "pass"
        return "inconclusive" if any(share.stolen for share in self.shares) else "fail"

    def document(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "figures": {row.name: round(row.value, 3) for row in self.rows},
            "missed": [
                f"{row.name} {number(row.value)} {row.unit}, {row.limit}" for row in self.rows if row.good is False
            ],
            "faults": self.faults[:_FAULTS_MAX],
            "foreign_share": [round(share.busy, 3) for share in self.shares],
            "steal_share": [round(share.steal, 4) for share in self.shares],
        }


@dataclass(frozen=True, slots=True)
class Share:
    """Of all cores over a moment in which the set did nothing: used at all, and stolen by the hypervisor."""

    busy: float
    steal: float

    @property
    def stolen(self) -> bool:
        return self.busy > FOREIGN_SHARE_MAX or self.steal > STEAL_SHARE_MAX


async def others_share(look_s: float) -> Share:
    before = _ticks()
    await asyncio.sleep(look_s)
    after = _ticks()
    spent = [late - early for late, early in zip(after, before, strict=True)]
    total = max(1, sum(spent))
    idle = spent[3] + spent[4]
    return Share((total - idle) / total, spent[7] / total)


def _ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]


def table(findings: Sequence[Finding]) -> str:
    rows = [("load", "figure", "value", "unit", "limit", "met")]
    for finding in findings:
        for index, row in enumerate(finding.rows):
            met = {True: "yes", False: "no", None: ""}[row.good]
            rows.append((finding.name if index == 0 else "", row.name, number(row.value), row.unit, row.limit, met))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    rows.insert(1, tuple("─" * width for width in widths))  # type: ignore[arg-type]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for finding in findings:
        lines.append(f"{finding.name}: {finding.verdict}")
        lines += [f"  ! {fault}" for fault in finding.faults[:_FAULTS_MAX]]
        if len(finding.faults) > _FAULTS_MAX:
            lines.append(f"  ! and {len(finding.faults) - _FAULTS_MAX} more")
        if any(share.stolen for share in finding.shares):
            used = ", ".join(f"{share.busy:.0%}" for share in finding.shares)
            lines.append(f"  others used {used} of the machine while the set was idle")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "load_1m_before": round(os.getloadavg()[0], 2),
    }
