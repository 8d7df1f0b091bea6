"""What became of a control, and what history has, while the projection is behind the log."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_backend import Backend, Log, ended, event, project_all, running_backend, text_delta
from tether import events as ev
from tether import subjects
from tether.control import ControlReply, decode_request
from tether.errors import Code, problem
from tether.ports import Message
from tether.testing import MemoryBus, MemoryServer
from tether_backend import runtime

TENANT = "acme"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[MemoryBus, Backend, Log]]:
    """A backend whose projection does not run by itself."""
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path, project=False) as backend:
        log = Log(bus, TENANT)
        await log.prompt("q1", "r1", "e1")
        await log.own("e1")
        await log.frame("e1", [log.started("e1")])
        yield bus, backend, log


def receipt(ordinal: int, status: str, control: str = "k1") -> ev.Event:
    return event(ordinal, ev.CONTROL_RECEIPT, {"control": control, "verb": "stop", "status": status})


async def test_a_receipt_that_no_row_has_yet_is_told_from_the_log(world: tuple[MemoryBus, Backend, Log]) -> None:
    _, backend, log = world
    await log.frame("e1", [receipt(2, "delivered"), receipt(3, "settled", "other")])
    await log.frame("e1", [receipt(4, "settled"), *ended(5, "stopped")])
    await log.own(None)
    answer = await backend.client.get("/v1/controls/k1?execution=e1")
    assert answer.status_code == 200 and answer.json()["status"] == "settled"
    again = await backend.client.post("/v1/executions/e1/stop", headers={"Idempotency-Key": "k1"})
    assert again.status_code == 200 and (again.json()["execution"], again.json()["status"]) == ("e1", "settled")
    other = await backend.client.get("/v1/controls/k2?execution=e1")
    assert other.json()["code"] == "TARGET_STALE"


async def test_a_row_that_is_behind_the_log_does_not_hide_the_final_receipt(
    world: tuple[MemoryBus, Backend, Log],
) -> None:
    bus, backend, log = world
    await log.frame("e1", [receipt(2, "delivered")])
    await project_all(backend.deps.projectors[TENANT], bus)
    await log.frame("e1", [receipt(3, "settled"), *ended(4, "stopped")])
    await log.own(None)
    for path in ("/v1/controls/k1?execution=e1", "/v1/controls/k1"):
        answer = await backend.client.get(path)
        assert answer.status_code == 200 and answer.json()["status"] == "settled"


@pytest.mark.parametrize("status", ["delivered", "rejected", "unknown"])
async def test_the_logs_receipt_counts_where_the_collectors_is_not_as_far(
    world: tuple[MemoryBus, Backend, Log], status: str
) -> None:
    """The execution has ended, and its owner record is still being written."""
    bus, backend, log = world
    await log.frame("e1", [receipt(2, "settled"), *ended(3, "stopped")])

    async def answer(message: Message) -> bytes:
        request = decode_request(message.data)
        why = None if status == "delivered" else problem(Code.TARGET_STALE, "the execution is not here")
        return ControlReply.model_validate(
            {"control": request.payload["control"], "verb": "receipt", "status": status, "problem": why}
        ).encode()

    async with bus.serve(subjects.control_all(TENANT, log.workspace), answer, name="collector"):
        found = await backend.client.get("/v1/controls/k1?execution=e1")
    assert found.status_code == 200 and found.json()["status"] == "settled"


async def test_a_receipt_of_the_conversation_itself_is_found_in_the_log(world: tuple[MemoryBus, Backend, Log]) -> None:
    _, backend, log = world
    body = {"control": "k1", "verb": "stop", "status": "settled"}
    await log.note(ev.CONTROL_RECEIPT, "k1/receipt", body)
    await log.own(None)
    assert (await backend.client.get("/v1/controls/k1?execution=e1")).json()["status"] == "settled"


async def test_whoever_was_told_an_event_finds_it_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the projection rests between its commits."""
    monkeypatch.setattr(runtime, "REACH_S", 30.0)
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = Log(bus, TENANT)
        await log.prompt("q1", "r1", "e1")
        await log.frame("e1", [log.started("e1")])
        reader = await backend.reader("c1").open()
        await reader.events(3)
        for ordinal in range(2, 12):
            await log.frame("e1", [text_delta(ordinal, "x", offset=ordinal - 2)])
            await reader.events(1)
            page = (await backend.client.get("/v1/conversations/c1")).json()
            assert page["executions"][0]["applied"] == ordinal


async def test_history_does_not_wait_for_a_projection_that_another_process_does(
    world: tuple[MemoryBus, Backend, Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backend, log = world
    monkeypatch.setattr(runtime, "REACH_S", 3600.0)
    await log.frame("e1", [text_delta(2, "x")])
    with contextlib.suppress(TimeoutError):
        await backend.reader("c1").open()
    backend.deps.projectors[TENANT].bound.set()
    page = (await backend.client.get("/v1/conversations/c1")).json()
    assert page["executions"] == []
