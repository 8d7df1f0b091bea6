"""Quotas at the edge: what is refused, by which name, and that nothing is charged or admitted twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support_backend import Reader, eventually, running_backend, token_of
from tether import Client, subjects, topology
from tether.errors import Code, ProblemError, QuotaExceededError
from tether.kv import Bucket
from tether.ports import Bus
from tether.quotas import AllowanceRecord, Limits, Quotas
from tether.testing import MemoryBus, MemoryServer
from tether_backend.core.quotas import MINUTE_MS, Refused, Taken, give_back, take, used_of
from tether_backend.metrics import Metrics
from tether_backend.quotas import EdgeQuotas

TENANT = "acme"


class Time:
    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


@contextlib.asynccontextmanager
async def a_bus(*tenants: str) -> AsyncIterator[Bus]:
    bus = MemoryBus(MemoryServer())
    await bus.ensure(topology.base())
    for tenant in tenants or (TENANT,):
        await bus.ensure(topology.tenant(tenant))
    try:
        yield bus
    finally:
        await bus.close()


def edge(bus: Bus, limits: Limits, clock: Time | None = None, **more: Any) -> EdgeQuotas:
    return EdgeQuotas(bus, Quotas(limits), Metrics(), clock=clock or Time(), **more)


async def refused(
    quotas: EdgeQuotas, request: str, *, tenant: str = TENANT, workspace: str = "w"
) -> QuotaExceededError:
    with pytest.raises(QuotaExceededError) as found:
        await quotas.prompt(tenant, workspace, request, 1)
    return found.value


# --- the arithmetic ---


@given(
    st.integers(1, 200),
    st.lists(st.integers(0, 5000), min_size=1, max_size=60),
)
def test_no_minute_gives_more_than_the_burst_and_what_refilled(per_minute: int, gaps: Sequence[int]) -> None:
    now, whole, taken = 1_000_000, 0, []
    for gap in gaps:
        now += gap
        match take(whole, now, per_minute):
            case Taken(whole_at_ms, used):
                whole = whole_at_ms
                taken.append(now)
                assert 1 <= used <= per_minute
            case Refused(after_ms, _):
                assert 0 < after_ms <= MINUTE_MS
                assert isinstance(take(whole, now + after_ms, per_minute), Taken), "told when, and then it is let in"
    for first in range(len(taken)):
        span_ms = [at - taken[first] for at in taken[first:]]
        for count, passed_ms in enumerate(span_ms, start=1):
            assert count <= per_minute + passed_ms * per_minute / MINUTE_MS + 1e-6


def test_a_clock_that_was_put_back_costs_at_most_one_allowance() -> None:
    far = 10_000_000
    found = take(far, 1000, 6)
    assert isinstance(found, Refused) and found.retry_after_ms == 10_000
    assert used_of(far, 1000, 6) == 6
    assert give_back(1000 + 10_000, 1000, 6) == 1000


# --- prompts a minute ---


async def test_the_allowance_is_used_up_named_and_refills_with_time() -> None:
    clock = Time()
    async with a_bus() as bus:
        quotas = edge(bus, Limits(prompts_per_minute=3), clock)
        for number in range(3):
            await quotas.prompt(TENANT, "w", f"r{number}", 1)
        error = await refused(quotas, "r3")
        assert (error.limit, error.value, error.scope) == ("prompts_per_minute", 3, "tenant")
        assert error.problem.retry_after_s == pytest.approx(20.0)
        assert error.reset_at_ms == clock.ms + MINUTE_MS
        clock.ms += 20_000
        await quotas.prompt(TENANT, "w", "r3", 1)
        await refused(quotas, "r4")


async def test_a_restarted_backend_and_a_second_one_share_the_same_allowance() -> None:
    clock = Time()
    async with a_bus() as bus:
        first, second = edge(bus, Limits(prompts_per_minute=4), clock), edge(bus, Limits(prompts_per_minute=4), clock)
        for number in range(4):
            await (first, second)[number % 2].prompt(TENANT, "w", f"r{number}", 1)
        restarted = edge(bus, Limits(prompts_per_minute=4), clock)
        for number, one in enumerate((first, second, restarted)):
            await refused(one, f"more{number}")


async def test_many_at_once_over_several_backends_get_exactly_the_allowance() -> None:
    async with a_bus() as bus:
        backends = [edge(bus, Limits(prompts_per_minute=10)) for _ in range(3)]

        async def one(number: int) -> bool:
            try:
                await backends[number % 3].prompt(TENANT, "w", f"r{number}", 1)
            except QuotaExceededError:
                return False
            return True

        assert sum(await asyncio.gather(*(one(number) for number in range(40)))) == 10


async def test_a_request_is_charged_once_however_often_it_is_repeated_and_anew_for_its_next_attempt() -> None:
    async with a_bus() as bus:
        quotas = edge(bus, Limits(prompts_per_minute=2))
        for _ in range(5):
            await quotas.prompt(TENANT, "w", "same", 1)
        await quotas.prompt(TENANT, "w", "same", 2)
        await refused(quotas, "other")


async def test_a_workspace_that_is_used_up_costs_the_tenant_nothing_and_leaves_its_others_alone() -> None:
    async with a_bus() as bus:
        quotas = edge(bus, Limits(prompts_per_minute=3, workspace_prompts_per_minute=1))
        await quotas.prompt(TENANT, "w1", "r1", 1)
        for number in range(5):
            error = await refused(quotas, f"no{number}", workspace="w1")
            assert (error.scope, error.value) == ("workspace", 1)
        await quotas.prompt(TENANT, "w2", "r2", 1)
        await quotas.prompt(TENANT, "w3", "r3", 1)
        assert (await refused(quotas, "r4", workspace="w4")).scope == "tenant"


async def test_one_tenants_use_is_none_of_anothers() -> None:
    async with a_bus("a", "b") as bus:
        quotas = edge(bus, Limits(prompts_per_minute=1))
        await quotas.prompt("a", "w", "r", 1)
        await refused(quotas, "r2", tenant="a")
        await quotas.prompt("b", "w", "r", 1)


async def test_without_a_limit_nothing_is_asked_of_the_bus() -> None:
    bus = MemoryBus(MemoryServer())  # without any stream: a question would fail
    quotas = edge(bus, Limits(readers=5))
    await quotas.prompt(TENANT, "w", "r", 1)
    await bus.close()


async def test_an_allowance_that_another_version_wrote_strangely_is_no_free_pass() -> None:
    async with a_bus() as bus:
        bucket = Bucket(bus, subjects.QUOTAS)
        await bucket.create(subjects.prompt_rate_key(TENANT), {"v": 1, "whole_at": 10**18, "new": True}, op="x")
        quotas = edge(bus, Limits(prompts_per_minute=5))
        await refused(quotas, "r")
        record = await bucket.record(subjects.prompt_rate_key(TENANT), AllowanceRecord)
        assert record is not None and record.whole_at == 10**18, "a refusal writes nothing"


# --- what waits, what is stored ---


async def queue(bus: Bus, tenant: str, workspace: str, count: int, conversation: str = "c") -> None:
    for number in range(count):
        await bus.publish(subjects.prompt(tenant, workspace, f"{conversation}{number}"), b"{}")


async def test_prompts_that_wait_are_counted_by_tenant_and_by_workspace() -> None:
    async with a_bus("a", "b") as bus:
        await queue(bus, "a", "w1", 2)
        await queue(bus, "b", "w1", 30)
        quotas = edge(bus, Limits(waiting_prompts=4, workspace_waiting_prompts=3))
        await quotas.prompt("a", "w1", "r1", 1)  # as the third of its workspace
        error = await refused(quotas, "r2", tenant="a", workspace="w1")
        assert (error.limit, error.scope, error.value) == ("waiting_prompts", "workspace", 3)
        await quotas.prompt("a", "w2", "r3", 1)
        error = await refused(quotas, "r4", tenant="a", workspace="w3")
        assert (error.scope, error.value) == ("tenant", 4) and error.problem.retry_after_s is not None


async def test_a_tenant_that_stores_too_much_is_refused_without_a_time() -> None:
    async with a_bus() as bus:
        await bus.publish(subjects.event(TENANT, "w", "c", "e1"), b"x" * 4000)
        await bus.publish(subjects.blob(TENANT, "w", "artifact", "d1", 0), b"y" * 4000)
        error = await refused(edge(bus, Limits(stored_bytes=8000)), "r1")
        assert (error.limit, error.value, error.problem.retry_after_s) == ("stored_bytes", 8000, None)
        await edge(bus, Limits(stored_bytes=20_000)).prompt(TENANT, "w", "r2", 1)


# --- readers ---


async def test_places_of_readers_are_per_tenant_and_in_all_and_come_back_once() -> None:
    async with a_bus("a", "b") as bus:
        quotas = edge(bus, Limits(readers=2), readers_max=3)
        places = [quotas.reader("a"), quotas.reader("a")]
        with pytest.raises(QuotaExceededError) as found:
            quotas.reader("a")
        assert (found.value.limit, found.value.scope, found.value.value) == ("readers", "tenant", 2)
        places.append(quotas.reader("b"))
        with pytest.raises(QuotaExceededError) as found:
            quotas.reader("b")
        assert (found.value.scope, found.value.value) == ("service", 3)
        places[0].leave()
        places[0].leave()
        with places[1]:
            pass
        quotas.judge_reader("b")
        again = [quotas.reader("a"), quotas.reader("a")]
        with pytest.raises(QuotaExceededError):
            quotas.reader("a")
        del again, places

        async def free() -> bool:
            with contextlib.suppress(QuotaExceededError):
                quotas.judge_reader("a")
                return True
            return False

        await eventually(free, "a stream that was never begun to give its place back")


# --- over HTTP ---


def message(request: str) -> dict[str, Any]:
    return {
        "request_id": request,
        "content": [{"type": "text", "text": "hello"}],
        "agent": {"kind": "scripted"},
    }


async def test_http_refuses_with_the_limits_name_the_reset_and_retry_after_and_stores_nothing(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    async with running_backend(bus, [tenant], tmp_path, backend_quota_prompts_per_minute=1) as backend:
        first = await backend.client.post("/v1/conversations/c1/messages", json=message("r1"))
        assert first.status_code == 202
        answer = await backend.client.post("/v1/conversations/c2/messages", json=message("r2"))
        told = answer.json()
        assert (answer.status_code, told["code"], told["retryable"]) == (429, Code.QUOTA_EXCEEDED, True)
        assert told["context"] | {"reset_at": 0} == {
            "limit": "prompts_per_minute",
            "value": 1,
            "scope": "tenant",
            "reset_at": 0,
        }
        assert 0 < told["retry_after_s"] <= 60 and 1 <= int(answer.headers["Retry-After"]) <= 60
        assert await bus.next_after(subjects.PROMPTS_STREAM, 0, f"tether.prompt.{tenant}.*.c2") is None
        again = await backend.client.post("/v1/conversations/c1/messages", json=message("r1"))
        assert again.status_code == 202, "who asks again for what waits is charged nothing"
        figures = (await backend.client.get("/metrics")).text
        assert f'tether_quota_refusals_total{{limit="prompts_per_minute",tenant="{tenant}"}} 1.0' in figures


async def test_readers_beyond_the_limit_are_refused_and_let_in_once_another_has_gone(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    async with running_backend(bus, [tenant], tmp_path, backend_quota_readers=2) as backend:
        port = int(backend.url.rpartition(":")[2])
        readers = [await Reader(port, tenant, "c1").open() for _ in range(2)]
        assert [one.status for one in readers] == [200, 200]
        third = await Reader(port, tenant, "c1").open()
        assert third.status == 429 and b'"limit":"readers"' in third.body and third.headers["retry-after"] == "5"
        await readers[0].close()

        async def let_in() -> bool:
            return (await third.open()).status == 200

        await eventually(let_in, "a place for the third reader")
        for one in (*readers, third):
            await one.close()


async def test_the_sdk_raises_the_quota_by_type_and_waits_only_where_it_was_told_for_how_long(
    bus: Bus, tenant: str, tmp_path: Path
) -> None:
    quotas = tmp_path / "quotas.toml"
    quotas.write_text(f"[tenants.{tenant}]\nprompts_per_minute = 120\nstored_bytes = 1000000\n")
    async with running_backend(bus, [tenant], tmp_path, quotas_file=quotas) as backend:
        await bus.publish(subjects.event(tenant, "w", "c", "e1"), b"x" * 400_000)
        client = Client.http(backend.url, token_of(tenant))
        try:
            for number in range(120):
                await backend.deps.quotas.prompt(tenant, "w", f"used{number}", 1)
            waited = await client.prompt("c1", "hello", agent="scripted", patience_s=7.0)
            assert waited.status == "pending", "half a second later there was an allowance for it"
            for _ in range(3):
                await bus.publish(subjects.event(tenant, "w", "c", "e2"), b"x" * 400_000)
            backend.deps.quotas._seen.clear()
            with pytest.raises(QuotaExceededError) as found:
                await client.prompt("c2", "hello", agent="scripted", patience_s=600.0)
            assert (found.value.limit, found.value.value, found.value.scope) == ("stored_bytes", 1_000_000, "tenant")
            assert isinstance(found.value, ProblemError) and found.value.problem.retry_after_s is None
        finally:
            await client.close()
