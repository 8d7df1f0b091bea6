"""The figures of a whole set after a few prompts, as Prometheus reads them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support_local_set import Http
from support_set import TetherSet, running_set
from tether import subjects
from tether.bus import connect
from tether.kv import Bucket
from tether.sandbox import Registration

pytestmark = pytest.mark.timeout(180)
LISTEN = "127.0.0.1:0"
DEADLINE_S = 30.0
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set({"TETHER_METRICS_LISTEN": LISTEN, "TETHER_AGENT_COLLECTOR_METRICS_LISTEN": LISTEN}) as started:
        yield started


def scrape(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def address_of(up: TetherSet, service: str) -> str:
    return str(json.loads((up.data / "ready" / f"{service}.json").read_bytes())["metrics"])


async def collector_address(up: TetherSet) -> str:
    """As the collector's registration tells it."""
    state = up.state
    async with await connect(state.nats_url, name="test", creds_file=state.nats_creds_file) as bus:
        [found] = [one async for _, one in Bucket(bus, subjects.SANDBOXES).records(Registration, "default.w1.*")]
    return str(found.facts["metrics"])


async def test_every_service_counts_what_it_did(up: TetherSet) -> None:
    async with Http(up.state) as http:
        told = await http.prompt("c1", "r1", "!lines 20", workspace="w1")
        await http.ended("c1", 1)
        await http.prompt("c2", "r2", "!ask remove", workspace="w1")
        router, agent, backend = (scrape(address_of(up, name)) for name in ("router", "agent", "backend"))
        collector_at = await collector_address(up)
        deadline_s = time.monotonic() + DEADLINE_S
        while (collector := scrape(collector_at)).get(("tether_collector_pending_interactions", ())) != 1:
            assert time.monotonic() < deadline_s, collector
        await http.client.post(f"/v1/executions/{told['execution_id']}/stop", json={"control_id": "s1"})
    assert router["tether_router_prompts_total", (("outcome", "admitted"),)] == 2
    assert router["tether_router_admission_seconds_count", ()] == 2
    assert router["tether_router_superseded_total", ()] == 0
    assert agent["tether_agent_commands_total", (("outcome", "receipt"),)] >= 1
    assert agent["tether_agent_collector_starts_total", ()] == 1
    assert agent["tether_agent_sandboxes", (("state", "alive"),)] == 1
    assert agent["tether_agent_sandboxes", (("state", "down"),)] == 0
    assert collector["tether_collector_executions", (("state", "waiting"),)] == 1
    assert collector["tether_collector_events_total", ()] > 20
    assert 0 < collector["tether_collector_frames_total", ()] <= collector["tether_collector_events_total", ()]
    assert collector["tether_collector_publish_seconds_count", ()] == collector["tether_collector_frames_total", ()]
    assert collector["tether_collector_published_bytes_total", ()] > 1000
    assert collector["tether_collector_inputs_total", ()] > 20
    started = collector["tether_collector_controls_total", (("status", "delivered"), ("verb", "start"))]
    assert (
        started + collector.get(("tether_collector_controls_total", (("status", "settled"), ("verb", "start"))), 0) == 2
    )
    route = ("route", "/v1/conversations/{conversation}/messages")
    assert backend["tether_http_requests_total", (("method", "POST"), route, ("status", "202"))] == 2
    for found in (router, agent, backend, collector):
        assert found["process_resident_memory_bytes", ()] > 1 << 20
        assert found["tether_bus_reconnects_total", ()] == 0


async def test_the_api_tells_the_backends_figures_to_whoever_has_a_token(up: TetherSet) -> None:
    async with Http(up.state) as http:
        text = (await http.client.get("/metrics")).text
        assert "tether_projection_messages_total" in text and "process_open_fds" in text
        del http.client.headers["Authorization"]
        assert (await http.client.get("/metrics")).status_code == 401


async def test_no_figure_carries_the_name_of_a_conversation_or_an_execution(up: TetherSet) -> None:
    for address in (*(address_of(up, name) for name in ("router", "agent", "backend")), await collector_address(up)):
        for _, labels in scrape(address):
            for name, value in labels:
                assert not value.startswith(("c1", "c2", "exe_", "r1", "r2")), (name, value)
