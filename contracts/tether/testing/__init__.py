"""For tests of whoever builds on Tether: a memory bus with JetStream's semantics, faults, virtual time, conformance."""

from tether.testing.clock import VirtualClock
from tether.testing.faults import Fault, FaultKind, Faults, Fired
from tether.testing.memory_bus import MemoryBus
from tether.testing.memory_server import MemoryServer
from tether.testing.virtual_loop import DeadlockError, VirtualTimeLoop

ASSERTING_MODULES = tuple(
    f"tether.testing.{name}" for name in ("conformance_base", "conformance_log", "conformance_work")
)

__all__ = [
    "ASSERTING_MODULES",
    "DeadlockError",
    "Fault",
    "FaultKind",
    "Faults",
    "Fired",
    "MemoryBus",
    "MemoryServer",
    "VirtualClock",
    "VirtualTimeLoop",
]
