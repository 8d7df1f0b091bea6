"""A process's figures, and where Prometheus reads them: `TETHER_METRICS_LISTEN=127.0.0.1:9465`, off by default.

Names follow the convention: `tether_{what}_{unit}`, counters end in `_total`. Labels are of bounded cardinality:
outcomes, states, verbs, never a name that a user chose. What exists is told in docs/metrics.md.

The listener is one thread that answers one scrape at a time, each within SCRAPE_S however slowly it is asked: it shares
nothing with the event loop but the figures themselves, and a scraper that hangs keeps only other scrapers waiting, not
the end of the service. Figures that are looked up
when they are asked for (`Gauge.set_function`) are looked up in that thread: they copy before they iterate. A port that
is taken costs the figures, never the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from tether.settings import ServiceSettings

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

SCRAPE_S: Final = 5.0
# From a round trip on loopback to what a user gives up at.
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_log = structlog.get_logger("tether.metrics")

# What this process counts; a service adds its own (`tether_router.metrics`, …).
REGISTRY: Final = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

bus_reconnects: Final = Counter(
    "tether_bus_reconnects", "Times the connection to NATS was made anew", registry=REGISTRY
)
bus_stalls: Final = Counter(
    "tether_bus_stalls", "Connections that were replaced because no round trip came back", registry=REGISTRY
)
bus_probe_seconds: Final = Histogram(
    "tether_bus_probe_seconds", "Round trip of the watchdog's probe", buckets=SECONDS, registry=REGISTRY
)
tasks: Final = Gauge("tether_tasks", "Tasks of the event loop that have not ended", registry=REGISTRY)


def count_tasks_of(loop: asyncio.AbstractEventLoop) -> None:
    """From now on `tether_tasks` counts this loop's, when it is asked for."""
    tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))


_also: CollectorRegistry | None = None
_address: str | None = None


def serve_also(registry: CollectorRegistry) -> None:
    """A service that keeps its figures in a registry of its own: the listener tells them too."""
    global _also  # one service per process
    _also = registry


def place() -> dict[str, str]:
    """Where this process tells its figures, for those who say where it is: `{"metrics": "127.0.0.1:9465"}`."""
    return {} if _address is None else {"metrics": _address}


def render(also: CollectorRegistry | None = None) -> bytes:
    """The process's figures, and those of a registry beside, in Prometheus' text format."""
    return generate_latest(REGISTRY) + (b"" if also is None else generate_latest(also))


def _answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    if environ.get("PATH_INFO") != "/metrics" or environ.get("REQUEST_METHOD") != "GET":
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"GET /metrics\n"]
    start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
    return [render(_also)]


def hang_up(connection: socket.socket) -> None:
    """Ends a read or write of another thread's."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Server(WSGIServer):
    """Binds as told; no look-up of the machine's name, which may hang."""

    _asking: socket.socket | None = None

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Within SCRAPE_S as a whole: the socket's own timeout begins anew with each byte."""
        self._asking = request
        late = threading.Timer(SCRAPE_S, hang_up, (request,))
        late.daemon = True
        late.start()
        try:
            super().finish_request(request, client_address)
        finally:
            late.cancel()
            self._asking = None

    def stop(self) -> None:
        """Whoever is asking is hung up on: `shutdown` waits for the request that is under way."""
        asking = self._asking
        if asking is not None:
            hang_up(asking)
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that went away: nobody has to know."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Scrapes are no news."""

    def address_string(self) -> str:
        return str(self.client_address[0])


def listen(where: str) -> _Server:
    """A bound server on HOST:PORT that does not answer yet. Raises OSError."""
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    server = (_ServerV6 if ":" in host else _Server)((host, int(port)), _Handler)
    server.set_app(_answer)
    return server


def address_of(server: _Server) -> str:
    host, port = server.socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def serving(settings: ServiceSettings) -> Iterator[str | None]:
    """Answer `GET /metrics` while the context is open, where that is configured; gives the address, or None."""
    global _address
    if settings.metrics_listen is None:
        yield None
        return
    try:
        server = listen(settings.metrics_listen)
    except (OSError, UnicodeError) as error:  # the latter: a name that is none
        why = getattr(error, "strerror", None) or str(error)
        _log.warning("metrics_not_served", address=settings.metrics_listen, error=why)
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.5}, name="metrics", daemon=True)
    thread.start()
    _address = address_of(server)
    _log.info("metrics_served", address=_address)
    try:
        yield _address
    finally:
        _address = None
        server.stop()
