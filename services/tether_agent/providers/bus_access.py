"""How a sandbox's collector reaches the bus: its credentials, the authorities of the bus, what it may not ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BusAccess:
    """`credentials`: text of a credentials file, also in the file `path`, which is rewritten when they are renewed;
    None: the settings name what collectors use. `blobs_bytes_max`: the blob store's quota, -1 for none; None: it may
    be asked for."""

    credentials: str | None = field(default=None, repr=False)
    path: Path | None = None
    blobs_bytes_max: int | None = None

    def told(self) -> dict[str, str]:
        """Variables of a collector that hold no secret."""
        if self.blobs_bytes_max is None:
            return {}
        return {"TETHER_COLLECTOR_BLOBS_BYTES_MAX": str(self.blobs_bytes_max)}
