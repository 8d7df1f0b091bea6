"""Every target by its name."""

from __future__ import annotations

from typing import Final

from tether_fuzz.target import Target
from tether_fuzz.targets import adapters, asked, log, places, spool

TARGETS: Final[dict[str, Target]] = {
    target.name: target for target in (*log.TARGETS, *asked.TARGETS, *places.TARGETS, *spool.TARGETS, *adapters.TARGETS)
}
