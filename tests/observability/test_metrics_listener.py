"""`TETHER_METRICS_LISTEN`: what is served, what a taken port costs, what a scraper that hangs may do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tether import metrics
from tether.settings import ConfigurationError, ServiceSettings, load


def settings(listen: str | None) -> ServiceSettings:
    return ServiceSettings(metrics_listen=listen)


@pytest.fixture
def address() -> Iterator[str]:
    with metrics.serving(settings("127.0.0.1:0")) as found:
        assert found is not None
        yield found


def read(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=")
        text: str = answer.read().decode()
        return text


def test_the_figures_are_served_in_prometheus_format(address: str) -> None:
    before = metrics.bus_reconnects._value.get()
    metrics.bus_reconnects.inc()
    families = {family.name: family for family in text_string_to_metric_families(read(address))}
    [sample] = [one for one in families["tether_bus_reconnects"].samples if one.name.endswith("_total")]
    assert sample.value == before + 1
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20
    assert metrics.place() == {"metrics": address}


def test_nothing_but_metrics_is_served(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        read(address, "/")
    assert refused.value.code == 404
    refused.value.close()


def test_without_configuration_nothing_listens() -> None:
    with metrics.serving(settings(None)) as found:
        assert found is None and metrics.place() == {}


def test_a_port_that_is_taken_costs_the_figures_and_not_the_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as lines:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with metrics.serving(settings(where)) as found:
            assert found is None
    [line] = lines
    assert (line["event"], line["address"]) == ("metrics_not_served", where)


def test_an_address_that_is_not_this_machines_costs_the_figures_and_not_the_service() -> None:
    with capture_logs() as lines, metrics.serving(settings("203.0.113.1:9465")) as found:
        assert found is None
    assert [line["event"] for line in lines] == ["metrics_not_served"]


def test_a_scraper_that_hangs_keeps_the_next_one_waiting_for_a_moment_only(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.2)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as hanging:
        hanging.sendall(b"GET /metr")
        assert "tether_bus_reconnects_total" in read(address)


def test_the_listener_is_gone_with_its_service(address: str) -> None:
    with metrics.serving(settings("127.0.0.1:0")) as other:
        assert other is not None and other != address
    host, _, port = other.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


@pytest.mark.parametrize("value", ["9465", "127.0.0.1", "127.0.0.1:", ":9465", "127.0.0.1:70000", "127.0.0.1:x"])
def test_an_address_without_host_or_port_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"TETHER_METRICS_LISTEN: .*HOST:PORT"):
        load(ServiceSettings, {"TETHER_METRICS_LISTEN": value})


def drip(connection: socket.socket, stop: threading.Event) -> None:
    """A byte now and then: no single wait is long."""
    with contextlib.suppress(OSError):
        while not stop.wait(0.05):
            connection.sendall(b"x")


def test_a_scraper_that_drips_has_no_longer_than_one_that_hangs(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SCRAPE_S", 0.5)
    host, _, port = address.rpartition(":")
    stop = threading.Event()
    with socket.create_connection((host, int(port))) as dripping:
        dripping.sendall(b"GET /")
        thread = threading.Thread(target=drip, args=(dripping, stop))
        thread.start()
        try:
            assert "tether_bus_reconnects_total" in read(address)
        finally:
            stop.set()
            thread.join()


def test_a_scraper_that_hangs_does_not_hold_up_the_end_of_the_service() -> None:
    with contextlib.ExitStack() as kept:
        with metrics.serving(settings("127.0.0.1:0")) as found:
            assert found is not None
            read(found)
            host, _, port = found.rpartition(":")
            hanging = kept.enter_context(socket.create_connection((host, int(port))))
            hanging.sendall(b"GET /metr")
            time.sleep(0.1)  # nothing tells when the thread has begun to read
            began_s = time.monotonic()
        assert time.monotonic() - began_s < metrics.SCRAPE_S / 2


def test_a_name_that_is_none_costs_the_figures_and_not_the_service() -> None:
    with capture_logs() as lines, metrics.serving(settings("a..b:9465")) as found:
        assert found is None
    assert [line["event"] for line in lines] == ["metrics_not_served"]


async def test_the_tasks_of_the_event_loop_are_counted_while_they_live(address: str) -> None:
    def counted() -> float:
        [line] = [one for one in read(address).splitlines() if one.startswith("tether_tasks ")]
        return float(line.split()[1])

    metrics.count_tasks_of(asyncio.get_running_loop())
    before = await asyncio.to_thread(counted)
    living = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(3)]
    assert await asyncio.to_thread(counted) == before + 3
    for task in living:
        task.cancel()
    await asyncio.gather(*living, return_exceptions=True)
    del living, task
    assert await asyncio.to_thread(counted) == before
