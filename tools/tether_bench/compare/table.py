"""Contenders side by side: one table, and the report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tether_bench.compare.rounds import Results
from tether_bench.stats import median, number


def metrics(results: Mapping[str, Results]) -> list[str]:
    """In the order in which they were first measured."""
    return list(dict.fromkeys(metric for one in results.values() for metric in one.values))


def _cell(results: Results, metric: str) -> str:
    values = results.values.get(metric)
    if not values:
        return "—"
    told = f"{median(values):.0f}" if metric.endswith(("lost", "repeated")) else number(median(values))
    return f"{told}*" if metric in results.notes else told


def table(results: Mapping[str, Results], versions: Mapping[str, str]) -> str:
    """A metric a line, a contender a column; `*` has a note below."""
    head = ["", *(f"{name} {versions.get(name, '')}".strip() for name in results)]
    rows = [head, *([metric, *(_cell(one, metric) for one in results.values())] for metric in metrics(results))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    rows.insert(1, ["─" * width for width in widths])
    lines = ["  ".join(_padded(row, widths)).rstrip() for row in rows]
    lines += [f"* {name}, {metric}: {note}" for name, one in results.items() for metric, note in one.notes.items()]
    return "\n".join(lines)


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def document(
    results: Mapping[str, Results], versions: Mapping[str, str], missing: Sequence[str], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """`contenders`: name → metric → {value, rounds, note}. `missing`: not installed or not measured, and why."""
    return {
        "environment": dict(environment),
        "missing": list(missing),
        "contenders": {
            name: {
                "version": versions.get(name, ""),
                "metrics": {
                    metric: {
                        "value": round(median(values), 3),
                        "rounds": [round(value, 3) for value in values],
                        **({"note": one.notes[metric]} if metric in one.notes else {}),
                    }
                    for metric, values in one.values.items()
                },
            }
            for name, one in results.items()
        },
    }
