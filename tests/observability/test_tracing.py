"""`tether.tracing`: off, on, with a receiver that is away; and a trace over the death of a router."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from support_otlp import Receiver, receiving
from support_router import FaultyBus, a_prompt, routing, virtual, world
from tether import subjects, tracing
from tether.settings import ConfigurationError, ServiceSettings, load
from tether.testing import MemoryBus, MemoryServer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def configure(endpoint: str, **changes: object) -> None:
    settings = ServiceSettings.model_validate({"traces_endpoint": endpoint, "traces_delay_ms": 20, **changes})
    tracing.configure(settings, "router", "1")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """What a test leaves to the exporter ends with it: `shutdown` is bounded, as a process ends behind it, and an
    exporter that still repeats its request draws its jitter in the midst of other tests."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 3 * tracing.EXPORT_TIMEOUT_S
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), thread.name


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """With tracing on in this process."""
    with receiving() as found:
        configure(found.endpoint)
        try:
            yield found
        finally:
            tracing.shutdown()


# --- off ---


@pytest.mark.parametrize(
    ("service", "imported"),
    [
        ("router", "opentelemetry"),
        ("agent", "opentelemetry"),
        ("collector", "opentelemetry"),
        ("backend", "opentelemetry.sdk"),  # FastAPI looks for the API by itself
    ],
)
def test_off_nothing_is_imported_and_no_span_is_made(service: str, imported: str) -> None:
    code = f"""
import sys
import tether_{service}.service
from tether import tracing
with tracing.scope("work", execution="e1") as span:
    assert type(span) is tracing.Span
    assert tracing.outgoing() is None and not tracing.environment() and not tracing.is_on()
print([name for name in sys.modules if name.startswith("{imported}")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_off_a_traceparent_is_handed_on_as_it_came_and_goes_to_no_cli() -> None:
    with tracing.scope("work", headers={"traceparent": PARENT}):
        assert tracing.outgoing() == {"traceparent": PARENT}
        assert tracing.environment() == {}
        with tracing.scope("a part of it"):
            assert tracing.outgoing() == {"traceparent": PARENT}
    assert tracing.outgoing() is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "01",
        PARENT + "-x",
        PARENT.upper(),
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}\r\nNats-Msg-Id: x",
    ],
)
def test_what_is_no_traceparent_is_not_handed_on(value: str) -> None:
    with tracing.scope("work", headers={"traceparent": value}):
        assert tracing.outgoing() is None


def test_the_identity_is_in_the_log_lines_of_the_work_and_of_no_other() -> None:
    def bound() -> dict[str, object]:
        return structlog.contextvars.get_contextvars()

    before = bound()
    with tracing.scope("work", execution="e1", conversation=None) as span:
        with tracing.identified(span, request_id="r1"):
            assert bound() == {**before, "execution": "e1", "request_id": "r1"}
        assert bound() == {**before, "execution": "e1"}
    assert bound() == before


async def test_a_task_that_outlives_the_work_has_neither_its_identity_nor_its_trace(receiver: Receiver) -> None:
    async def later() -> tuple[dict[str, object], str | None]:
        return structlog.contextvars.get_contextvars(), tracing.current()

    with structlog.contextvars.bound_contextvars(service="agent"), tracing.scope("work", execution="e1"):
        inherited = await asyncio.create_task(later())
        apart = await asyncio.create_task(later(), context=tracing.detached())
    assert inherited[0]["execution"] == "e1" and inherited[1] is not None
    assert apart == ({"service": "agent"}, None)


# --- on ---


def test_spans_are_nested_linked_to_their_caller_and_carry_their_identity(receiver: Receiver) -> None:
    with tracing.scope("outer", kind="server", headers={"traceparent": PARENT}, tenant="acme") as span:
        span.set(status=202)
        headers = tracing.outgoing()
        with pytest.raises(ValueError, match="secret"), tracing.scope("inner", facts={"agent": "scripted"}):
            raise ValueError("a secret")
        span.event("seen", outcome="completed")
    receiver.until(lambda: len(receiver.spans) == 2, "two spans")
    outer, inner = sorted(receiver.spans, key=lambda span: span.name, reverse=True)
    assert (outer.trace, outer.parent) == (TRACE, "b7ad6b7169203331")
    assert (inner.trace, inner.parent, inner.failed) == (TRACE, outer.id, True)
    assert headers == {"traceparent": f"00-{TRACE}-{outer.id}-01"}
    assert outer.attributes == {"tenant": "acme", "status": 202} and outer.events == ("seen",)
    assert inner.attributes == {"agent": "scripted"} and "secret" not in str(inner)


def test_what_its_caller_does_not_sample_is_not_sampled() -> None:
    with receiving() as found:
        configure(found.endpoint)
        with tracing.scope("not kept", headers={"traceparent": PARENT[:-2] + "00"}):
            headers = tracing.outgoing()
        with tracing.scope("kept", headers={"traceparent": PARENT}):
            pass
        tracing.shutdown()
        assert [span.name for span in found.spans] == ["kept"]
        assert headers is not None and headers["traceparent"].endswith("-00") and TRACE in headers["traceparent"]


def test_a_share_of_nothing_keeps_no_new_trace() -> None:
    with receiving() as found:
        configure(found.endpoint, traces_sample=0)
        for _ in range(50):
            with tracing.scope("not kept"):
                pass
        tracing.shutdown()
        assert found.spans == []


def test_a_receiver_that_is_away_costs_its_spans_and_a_line_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with capture_logs() as lines:
        configure(f"http://127.0.0.1:{port}/v1/traces", traces_delay_ms=10)
        until_s = time.monotonic() + 1.5
        made = 0
        while made <= tracing.QUEUE_SPANS_MAX or time.monotonic() < until_s:
            with tracing.scope("work"):
                made += 1
            if made % 500 == 0:
                time.sleep(0.01)
        began_s = time.monotonic()
        tracing.shutdown()
        took_s = time.monotonic() - began_s
    assert took_s < tracing.SHUTDOWN_S + 1.0
    assert made > tracing.QUEUE_SPANS_MAX
    assert len(lines) <= 2 and {line["event"] for line in lines} <= {"traces_not_exported"}
    assert lines, "somebody should be told"


# --- configuration ---


@pytest.mark.parametrize("value", ["127.0.0.1:4318", "ftp://host/", "http://", "http://[::1/"])
def test_an_endpoint_that_is_no_url_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"TETHER_TRACES_ENDPOINT: .*must be a URL"):
        load(ServiceSettings, {"TETHER_TRACES_ENDPOINT": value})


@pytest.mark.parametrize("value", ["-0.1", "1.1", "many"])
def test_a_share_beyond_all_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match="TETHER_TRACES_SAMPLE"):
        load(ServiceSettings, {"TETHER_TRACES_SAMPLE": value})


def test_an_endpoint_without_the_extra_is_a_configuration_error_that_names_the_extra() -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter"] = None  # as where the extra is not installed
from tether_router.__main__ import main
sys.exit(main())
"""
    env = {"TETHER_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 78
    assert "TETHER_TRACES_ENDPOINT" in done.stderr and "tether[otel]" in done.stderr
    assert "Traceback" not in done.stderr


# --- over the death of a router ---


async def admitted_over_a_crash(at: int) -> list[dict[str, str]]:
    """The headers of the commands, after a router died at a write and another went on."""
    outside = MemoryBus(MemoryServer())
    stage = await world(outside)
    faulty = FaultyBus(MemoryBus(outside.server), crash_at=at, after=True)
    prompt = a_prompt()
    subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
    await outside.publish(subject, prompt.encode(), msg_id=prompt.message_id, headers={"traceparent": PARENT})
    async with routing(faulty):  # type: ignore[arg-type]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while len(faulty.writes) < at:  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.1)
    async with routing(MemoryBus(outside.server)):
        await stage.settled()
    commands = await stage.stored(subjects.COMMANDS_STREAM, subjects.COMMANDS_ALL)
    return [dict(command.headers) for command in commands]


@pytest.mark.parametrize("at", [2, 4, 6])
def test_another_router_hands_on_the_trace_of_a_prompt_whose_router_died(at: int) -> None:
    @virtual
    async def run() -> None:
        [headers] = await admitted_over_a_crash(at)
        assert headers["traceparent"] == PARENT

    run()


def test_both_routers_spans_are_in_the_trace_of_the_prompt(receiver: Receiver) -> None:
    @virtual
    async def run() -> None:
        [headers] = await admitted_over_a_crash(3)
        assert headers["traceparent"].split("-")[1] == TRACE

    run()
    receiver.until(lambda: len(receiver.of_trace(TRACE)) >= 3, "the spans of both deliveries")
    spans = receiver.of_trace(TRACE)
    admissions = [span for span in spans if span.name == "admit prompt"]
    assert [span.parent for span in admissions] == ["b7ad6b7169203331"] * 2
    assert sorted(span.attributes["deliveries"] for span in admissions) == [1, 2]
    [command] = [span for span in spans if span.name == "publish command"]
    assert command.parent in {span.id for span in admissions}


def test_the_identity_of_a_prompt_does_not_know_of_its_trace() -> None:
    """The same request in another trace is the same request: nothing of the header is in what identifies it."""

    @virtual
    async def run() -> None:
        outside = MemoryBus(MemoryServer())
        await world(outside)
        prompt = a_prompt()
        subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
        acks = [
            await outside.publish(subject, prompt.encode(), msg_id=prompt.message_id, headers=headers)
            for headers in (None, {"traceparent": PARENT}, {"traceparent": PARENT[:-1] + "0"})
        ]
        assert [ack.duplicate for ack in acks] == [False, True, True]
        assert len({ack.sequence for ack in acks}) == 1

    run()
