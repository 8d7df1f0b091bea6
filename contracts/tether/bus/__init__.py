"""The bus over NATS: the only package that imports `nats`. `connect` gives a `tether.ports.Bus`."""

from tether.bus.bus import NatsBus, connect
from tether.bus.config import BusConfig
from tether.bus.waiting import connect_service, wait_for_streams

__all__ = ["BusConfig", "NatsBus", "connect", "connect_service", "wait_for_streams"]
