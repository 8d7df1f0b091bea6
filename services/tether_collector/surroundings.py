"""What every execution of a collector shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tether.ports import Bus
from tether_collector.blobs import BlobStore
from tether_collector.config import CollectorSettings
from tether_collector.finals import FinalSnapshots
from tether_collector.journal import Journal
from tether_collector.material import Material
from tether_collector.pace import Pace


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`changed`: something that the registration shows has changed. `instance`: this collector's id.
    `step` is called with the name of each step that is on disk or stored; tests crash there."""

    settings: CollectorSettings
    bus: Bus
    journal: Journal
    blobs: BlobStore
    finals: FinalSnapshots
    material: Material
    instance: str
    changed: Callable[[], None]
    pace: Pace = field(default_factory=lambda: Pace(0, 0))
    step: Callable[[str], None] = field(default=lambda _name: None)


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
