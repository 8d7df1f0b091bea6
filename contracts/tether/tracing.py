"""Traces, and the identity that stands in every log line: both are bound where work begins, by `scope`.

    HTTP ─▶ publish prompt ─header─▶ admit prompt ─header─▶ start command ─header─▶ control start
                                                                                      └▶ execution ─env─▶ CLI
                                                                 frames of the log ◀─header─┘

`traceparent` (W3C) travels as a header of HTTP requests and NATS messages, never in a body: digests, message ids and
what a journal remembers of a request are the same with and without it. Whoever is given the message again (a
redelivery, another router) finds the same header, so its spans join the same trace.

Off (no `TETHER_TRACES_ENDPOINT`): OpenTelemetry is not imported, no span is made, a `traceparent` that comes in is
handed on as it is. On: spans leave in batches by a thread of their own, through a bounded queue; a receiver that is
away costs its spans and one line a minute, nothing else.

The identity is bound in structlog's context: `tenant`, `workspace`, `conversation`, `execution`, `request_id`,
`control`, and `trace_id` while tracing is on. Tasks inherit it; one that outlives the work that began it is started in
`detached()`.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal

import structlog

from tether.settings import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

HEADER: Final = "traceparent"
VARIABLE: Final = "TRACEPARENT"
IDENTITY: Final = ("tenant", "workspace", "conversation", "execution", "request_id", "control", "trace_id")
EXPORT_TIMEOUT_S: Final = 5.0  # of one attempt to hand spans over
QUEUE_SPANS_MAX: Final = 4096  # that wait to be handed over; beyond, the oldest are dropped
SHUTDOWN_S: Final = 2.0  # for the last spans
TELL_EVERY_S: Final = 60.0  # about spans that cannot be handed over

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool | None

_passed: ContextVar[str | None] = ContextVar("tether_traceparent", default=None)


class Span:
    """What code says of a piece of work. This one says it to nobody: tracing is off."""

    __slots__ = ()

    def name(self, name: str) -> None:
        """A better name, once it is known."""

    def set(self, **attributes: Value) -> None:
        """Facts; None is left out."""

    def event(self, name: str, **attributes: Value) -> None:
        """Something that happened meanwhile."""

    def failed(self, reason: str) -> None:
        """It came to nothing."""

    def end(self) -> None:
        """It is over, before what it is the parent of."""


class _Recorded(Span):
    __slots__ = ("_span",)

    def __init__(self, span: otel.Span) -> None:
        self._span = span

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_attributes(attributes))

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, _attributes(attributes))

    def failed(self, reason: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, reason))

    def end(self) -> None:
        self._span.end()


_NOBODY: Final = Span()


def _attributes(values: Mapping[str, Value]) -> dict[str, str | int | float | bool]:
    return {f"tether.{name}": value for name, value in values.items() if value is not None}


class _Tracing:
    """A process's spans while tracing is on."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter) -> None:
        from opentelemetry import context, trace

        self.provider = provider
        self.exporter = exporter
        self._context = context
        self._trace = trace
        self._tracer = provider.get_tracer("tether")

    @contextlib.contextmanager
    def span(self, name: str, kind: Kind, parent: str | None, attributes: Mapping[str, Value]) -> Iterator[Span]:
        trace = self._trace
        above = None if parent is None else trace.set_span_in_context(_remote(parent))
        # None: the current span's context.
        span = self._tracer.start_span(
            name, context=above, kind=trace.SpanKind[kind.upper()], attributes=_attributes(attributes)
        )
        token = self._context.attach(trace.set_span_in_context(span))
        bound = structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
        told = _Recorded(span)
        try:
            yield told
        except Exception as error:
            told.failed(type(error).__name__)  # not its text: that may hold anything
            raise
        finally:
            structlog.contextvars.reset_contextvars(**bound)
            self._context.detach(token)
            if span.is_recording():  # it may have been ended by its work
                span.end()

    def current(self) -> str | None:
        found = self._trace.get_current_span().get_span_context()
        if not found.is_valid:
            return None
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"

    def leave(self) -> None:
        """In a context of its own: no current span."""
        self._context.attach(self._context.Context())


def _remote(parent: str) -> otel.Span:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    _, trace_id, span_id, flags = parent.split("-")
    return NonRecordingSpan(
        SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    )


_tracing: _Tracing | None = None


def parse(value: str | None) -> str | None:
    """A `traceparent` if it is one."""
    if value is None or _TRACEPARENT.fullmatch(value) is None or value.startswith("ff"):
        return None
    _, trace_id, span_id, _ = value.split("-")
    return value if int(trace_id, 16) and int(span_id, 16) else None


@contextlib.contextmanager
def scope(
    name: str,
    *,
    kind: Kind = "internal",
    headers: Mapping[str, str] | None = None,
    facts: Mapping[str, Value] | None = None,
    **identity: str | None,
) -> Iterator[Span]:
    """A piece of work: its identity (names of `IDENTITY`) in every log line, and a span where tracing is on.

    `headers`: of the message that asks for the work; their `traceparent` is the parent, else the work around it is.
    `facts` are told of the span alone. Names and kinds are constants: what differs goes into identity and facts.
    """
    parent = None if headers is None else parse(headers.get(HEADER))
    known = {key: value for key, value in identity.items() if value is not None}
    bound = structlog.contextvars.bind_contextvars(**known) if known else {}
    try:
        tracing = _tracing
        if tracing is not None:
            with tracing.span(name, kind, parent, {**identity, **(facts or {})}) as span:
                yield span
        elif parent is not None:
            token = _passed.set(parent)
            try:
                yield _NOBODY
            finally:
                _passed.reset(token)
        else:
            yield _NOBODY
    finally:
        if bound:
            structlog.contextvars.reset_contextvars(**bound)


@contextlib.contextmanager
def identified(span: Span, **identity: str | None) -> Iterator[None]:
    """The identity of a piece of work that has begun, once it is known."""
    span.set(**identity)
    with structlog.contextvars.bound_contextvars(**{key: name for key, name in identity.items() if name is not None}):
        yield


def current() -> str | None:
    """The `traceparent` of the work under way, made here or handed on; None where there is none."""
    return _passed.get() if _tracing is None else _tracing.current()


def outgoing() -> dict[str, str] | None:
    """The headers of a message that goes out of the work under way."""
    parent = current()
    return None if parent is None else {HEADER: parent}


def environment() -> dict[str, str]:
    """What a CLI finds in its environment: `TRACEPARENT` while tracing is on."""
    parent = None if _tracing is None else _tracing.current()
    return {} if parent is None else {VARIABLE: parent}


def is_on() -> bool:
    return _tracing is not None


def detached() -> contextvars.Context:
    """For a task that outlives the work that begins it: without that work's identity and trace."""
    context = contextvars.copy_context()
    context.run(_leave)
    return context


def _leave() -> None:
    structlog.contextvars.unbind_contextvars(*IDENTITY)
    _passed.set(None)
    if _tracing is not None:
        _tracing.leave()


# --- on and off ---


class _Bounded(logging.Handler):
    """OpenTelemetry's own complaints: one line a minute says the last of them and how many there were."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._guard = threading.Lock()
        self._next_s = 0.0
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        with self._guard:
            self._count += 1
            now_s = time.monotonic()
            if now_s < self._next_s:
                return
            count, self._count, self._next_s = self._count, 0, now_s + TELL_EVERY_S
        structlog.get_logger("tether.tracing").warning(
            "traces_not_exported", complaints=count, error=record.getMessage()[:300]
        )


def configure(settings: ServiceSettings, service: str, version: str, **resource: str) -> None:
    """Switch tracing on for this process where an endpoint is configured; once. `resource` says more of the process."""
    global _tracing  # one per process, like its log
    if settings.traces_endpoint is None or _tracing is not None:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [_Bounded()], False
    named = {"service.name": f"tether-{service}", "service.namespace": "tether", "service.version": version}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.traces_sample)),
        resource=Resource.create({**named, **resource}),
        shutdown_on_exit=False,  # `shutdown` is called, and is bounded
    )
    exporter = OTLPSpanExporter(endpoint=settings.traces_endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=settings.traces_delay_ms,
            max_export_batch_size=512,
        )
    )
    _tracing = _Tracing(provider, exporter)


def shutdown() -> None:
    """Hand over what waits, within SHUTDOWN_S, and switch off."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is None:
        return
    last = threading.Thread(target=tracing.provider.shutdown, name="traces-shutdown", daemon=True)
    last.start()
    last.join(SHUTDOWN_S)
    tracing.exporter.shutdown()  # a request that is repeated ends here, what still waits is given up
