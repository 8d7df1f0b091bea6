"""The bus over NATS: the only package that imports `nats`. `connect` gives a `tether.ports.Bus`."""

from tether.bus.bus import NatsBus, connect
from tether.bus.config import BusConfig

__all__ = ["BusConfig", "NatsBus", "connect"]
