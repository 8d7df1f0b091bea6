"""What every bus must do: one suite for `tether.bus` against real servers (R1, R3) and for the memory bus.

Subclass `BusConformance` in a test module and give it a fixture `harness` (an implementation of `Harness`); needs
pytest and pytest-asyncio. Everything made on the bus carries the harness's own tenant, so one server serves all tests.
For readable failures: `pytest.register_assert_rewrite(*tether.testing.ASSERTING_MODULES)` before the import.
"""

from __future__ import annotations

from tether.testing.conformance_base import Harness, eventually, take
from tether.testing.conformance_log import LogConformance
from tether.testing.conformance_work import WorkConformance

__all__ = ["BusConformance", "Harness", "eventually", "take"]


class BusConformance(LogConformance, WorkConformance):
    """The whole suite."""
