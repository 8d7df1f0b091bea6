"""A receiver of traces: OTLP over HTTP as OpenTelemetry's exporters speak it, in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Ids as hexadecimal text; `parent` empty for a trace's first span. Attributes without their `tether.`."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    failed: bool


@dataclass
class Receiver:
    """`endpoint` is what TETHER_TRACES_ENDPOINT takes."""

    endpoint: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: int = 0

    def of_trace(self, trace: str) -> list[ReceivedSpan]:
        return [span for span in list(self.spans) if span.trace == trace]

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Raises AssertionError naming `what` and what was received."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                got = sorted(f"{span.service}: {span.name}" for span in self.spans)
                raise AssertionError(f"{what} did not happen within {timeout_s:g} s; received {got}")
            time.sleep(0.02)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


def _spans(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        named = {one.key: _value(one.value) for one in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                service=str(named["service.name"]),
                name=span.name,
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                kind=span.kind,
                attributes={one.key.removeprefix("tether."): _value(one.value) for one in span.attributes},
                events=tuple(event.name for event in span.events),
                failed=span.status.code == 2,
            )


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.requests += 1
            found.spans.extend(_spans(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
