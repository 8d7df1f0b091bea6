"""What an agent service answers on `tether.agent.*`, hostile input included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support_agent import agent_service
from tether import subjects
from tether.bus import NatsBus
from tether_agent.config import AgentSettings


async def ask(bus: NatsBus, verb: str, request: object) -> dict[str, Any]:
    data = request if isinstance(request, bytes) else json.dumps(request).encode()
    answer = await bus.request(subjects.agent(verb), data, timeout_s=30.0)
    found: dict[str, Any] = json.loads(answer.data)
    return found


async def test_sandboxes_are_listed_and_stopped_by_name(bus: NatsBus, settings: AgentSettings, tenant: str) -> None:
    async with agent_service(settings, bus) as provider:
        compute = await provider.ensure(tenant, "w1")
        [listed] = (await ask(bus, "sandboxes", {"tenant": tenant}))["sandboxes"]
        assert (listed["workspace"], listed["boot"], listed["alive"]) == ("w1", compute.boot, True)
        assert (await ask(bus, "sandboxes", {"tenant": "another"}))["sandboxes"] == []
        stopped = (await ask(bus, "stop", {"tenant": tenant, "workspace": "w1"}))["stopped"]
        assert stopped == [{"tenant": tenant, "workspace": "w1", "killed": 0}]
        assert (await ask(bus, "stop", {"all": True}))["stopped"] == []
        [listed] = (await ask(bus, "sandboxes", {}))["sandboxes"]
        assert not listed["alive"]


async def test_a_directory_given_for_a_workspace_is_where_its_sandbox_works(
    bus: NatsBus, settings: AgentSettings, tenant: str, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    async with agent_service(settings, bus) as provider:
        answer = await ask(bus, "workspace", {"tenant": tenant, "workspace": "w1", "path": str(project)})
        assert answer == {"v": 1, "path": str(project)}
        compute = await provider.ensure(tenant, "w1")
        assert compute.facts["directory"] == str(project)


@pytest.mark.parametrize(
    ("verb", "request_", "field"),
    [
        ("workspace", {"tenant": "t", "workspace": "w", "path": "../etc"}, "path"),
        ("workspace", {"tenant": "t", "workspace": "../w", "path": "/"}, "workspace"),
        ("workspace", {"tenant": "t", "workspace": "w"}, "path"),
        ("workspace", {"tenant": "t", "workspace": "w", "path": ["/"]}, "path"),
        ("workspace", {"tenant": "t", "workspace": "w", "path": "/", "mode": 7}, "mode"),
        ("stop", {"tenant": "t"}, "workspace"),
        ("stop", {"all": True, "tenant": "t"}, "all"),
        ("stop", {"all": "perhaps"}, "all"),
        ("sandboxes", {"tenant": "a.b"}, "tenant"),
        ("sandboxes", b"\xff", "request"),
        ("sandboxes", b"[" * 2000, "request"),
        ("sandboxes", b'{"tenant": NaN}', "request"),
        ("sandboxes", b"x" * 20_000, "request"),
        ("sandboxes", b"[]", "request"),
    ],
)
async def test_wrong_input_is_answered_with_the_field(
    bus: NatsBus, settings: AgentSettings, verb: str, request_: object, field: str
) -> None:
    async with agent_service(settings, bus):
        answer = await ask(bus, verb, request_)
    assert answer["problem"]["code"] == "INVALID"
    assert answer["problem"]["fields"][0]["field"] == field


async def test_a_collector_is_replaced_with_the_same_boot_and_another_instance(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with agent_service(settings, bus) as provider:
        compute = await provider.ensure(tenant, "w1")
        first = await ask(bus, "restart-collector", {"tenant": tenant, "workspace": "w1"})
        assert first["boot"] == compute.boot and first["instance"] not in (None, first["before"])
        again = await ask(bus, "restart-collector", {"tenant": tenant, "workspace": "w1"})
        assert (again["before"], again["boot"]) == (first["instance"], compute.boot)
        missing = await ask(bus, "restart-collector", {"tenant": tenant, "workspace": "w2"})
        assert missing["problem"]["code"] == "NOT_FOUND"
        await ask(bus, "stop", {"tenant": tenant, "workspace": "w1"})
        stopped = await ask(bus, "restart-collector", {"tenant": tenant, "workspace": "w1"})
        assert stopped["problem"]["code"] == "NOT_FOUND", "a stopped sandbox is not started by this"
