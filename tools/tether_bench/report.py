"""The table and `reports/bench.json`. Pure, except for `write`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether_bench.stats import Figure, Losses, number

_HEAD = ("figure", "value", "unit", "rounds", "target", "met", "baseline", "ratio")
_RIGHT = frozenset({1, 7})


def table(figures: Sequence[Figure]) -> str:
    """One table; a further baseline of a figure has a line of its own."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for figure in figures:
        name = figure.name + (f" {figure.key}" if figure.key else "")
        value = figure.value
        if value is None:
            rows.append((name, "—", figure.unit, figure.problem or "not measured", "", "", "", ""))
            continue
        target = "" if figure.target is None else str(figure.target)
        met = {True: "yes", False: "no", None: ""}[figure.met]
        beside = [_beside(figure, base) for base in figure.baselines] or [("", "")]
        rows.append((name, number(value), figure.unit, _spread(figure), target, met, *beside[0]))
        rows.extend(("", "", "", "", "", "", *more) for more in beside[1:])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    rows.insert(1, tuple("─" * width for width in widths))
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def cpu_lines(figures: Sequence[Figure]) -> list[str]:
    """What one event costs each process: steadier than a rate on a machine that others use, too."""
    return [
        f"{figure.name}: CPU µs an event: {', '.join(f'{name} {number(us)}' for name, us in figure.cpu_us.items())}"
        for figure in figures
        if figure.cpu_us
    ]


def _beside(figure: Figure, base: str) -> tuple[str, str]:
    ratio = figure.ratio(base)
    return f"{base} {number(figure.baseline(base))}", "" if ratio is None else f"{number(ratio)}×"


def _spread(figure: Figure) -> str:
    if len(figure.rounds) < 2:
        return "1" if figure.rounds else ""
    return f"{len(figure.rounds)}: {number(min(figure.rounds))} … {number(max(figure.rounds))}"


def verdict(figures: Sequence[Figure], losses: Losses) -> str:
    """`fail` only where something is missing; a missed target fails nothing."""
    whole = figures and all(figure.value is not None for figure in figures)
    return "pass" if whole and not losses.lost and not losses.duplicated else "fail"


def document(
    figures: Sequence[Figure], losses: Losses, environment: Mapping[str, Any], problems: Sequence[str] = ()
) -> dict[str, Any]:
    """`figures`: name → number (null where it was not measured), or → part → number."""
    values: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for figure in figures:
        told = _details(figure)
        rounded = None if figure.value is None else round(figure.value, 3)
        if figure.key:
            values.setdefault(figure.name, {})[figure.key] = rounded
            details.setdefault(figure.name, {})[figure.key] = told
        else:
            values[figure.name] = rounded
            details[figure.name] = told
    values["lost"] = losses.lost
    values["duplicated"] = losses.duplicated
    outcome = verdict(figures, losses) if not problems else "fail"
    return {
        "verdict": outcome,
        "figures": values,
        "environment": dict(environment),
        "details": details,
        "problems": [*problems, *losses.examples],
    }


def _details(figure: Figure) -> dict[str, Any]:
    told: dict[str, Any] = {"unit": figure.unit, "rounds": [round(value, 3) for value in figure.rounds]}
    if figure.baselines:
        told["baselines"] = {
            name: {"rounds": [round(value, 3) for value in rounds], "ratio": figure.ratio(name)}
            for name, rounds in figure.baselines.items()
        }
    if figure.target is not None:
        told["target"] = {"text": str(figure.target), "limit": figure.target.limit, "met": figure.met}
    if figure.cpu_us:
        told["cpu_us_per_event"] = dict(figure.cpu_us)
    for name, text in (("note", figure.note), ("problem", figure.problem)):
        if text:
            told[name] = text
    return told


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
