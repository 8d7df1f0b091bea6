"""The figures of every service as data, and the tables of docs/metrics.md that are made of them.

CI fails when the document, the dashboard or the alert rules name a figure that the code does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics import MetricWrapperBase

import tether.metrics
import tether_agent.metrics
import tether_collector.metrics
import tether_router.metrics
from tether_backend.metrics import Metrics

BEGIN: Final = "<!-- figures: begin -->"
END: Final = "<!-- figures: end -->"
# What a name in an expression may end in, by the figure's type.
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
_NAME: Final = re.compile(r"\b(?:tether|process)_[a-z0-9_]+")
# Of the process, from prometheus_client's own collector.
_PROCESS: Final = (
    ("process_resident_memory_bytes", "gauge", "Resident memory"),
    ("process_virtual_memory_bytes", "gauge", "Virtual memory"),
    ("process_cpu_seconds", "counter", "CPU time, user and system"),
    ("process_open_fds", "gauge", "Open file descriptors"),
    ("process_max_fds", "gauge", "File descriptors that may be open"),
    ("process_start_time_seconds", "gauge", "Start, seconds since 1970"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """`name` without the suffix of its samples."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return self.name + ("_total" if self.type == "counter" else "")

    @property
    def samples(self) -> tuple[str, ...]:
        """Names that an expression may use."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.type])


def _figures(values: Mapping[str, object]) -> list[Figure]:
    found = []
    for value in values.values():
        if isinstance(value, MetricWrapperBase):
            family = next(iter(value.describe()))
            found.append(Figure(family.name, family.type, family.documentation, tuple(value._labelnames)))
    return found


def figures() -> dict[str, list[Figure]]:
    """By service, in the order of the code."""
    return {
        "every service": [*_figures(vars(tether.metrics)), *(Figure(*one) for one in _PROCESS)],
        "router": _figures(vars(tether_router.metrics)),
        "agent service": _figures(vars(tether_agent.metrics)),
        "collector": _figures(vars(tether_collector.metrics)),
        "backend": _figures(vars(Metrics())),
    }


def tables() -> str:
    """The generated part of the document."""
    parts = []
    for service, found in figures().items():
        parts += [f"### {service[0].upper()}{service[1:]}", "", "| figure | type | labels | what it says |"]
        parts.append("|---|---|---|---|")
        for one in found:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            parts.append(f"| `{one.shown}` | {one.type} | {labels} | {one.help} |")
        parts.append("")
    return "\n".join(parts)


def with_tables(document: str) -> str:
    """The document with its generated part made anew. Raises ValueError where the marks are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def unknown_names(text: str) -> list[str]:
    """Figures that a text (a dashboard, rules) uses and that no service has."""
    known = {name for found in figures().values() for one in found for name in one.samples}
    return sorted(set(_NAME.findall(text)) - known)
