"""Sandboxes as containers, on a real engine. Skipped with the reason where none runs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support_agent import until
from support_docker import SECRET, WORKSPACE, Docker, Place, agent_service, connected, place, services
from tether import events as ev
from tether.bus import NatsBus
from tether.errors import InvalidError
from tether_agent.providers import NotReadyError, ProvisionError, docker_file
from tether_agent.providers.bus_access import BusAccess

pytestmark = pytest.mark.timeout(180)  # the first of them builds the image


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("docker")) as found:
        yield found


@pytest.fixture
def sandboxes(shared: Place, tmp_path: Path) -> Iterator[Docker]:
    made = Docker(shared, tmp_path)
    yield made
    made.clear()


@pytest.fixture
async def bus(shared: Place, tenant: str) -> AsyncIterator[NatsBus]:
    async with connected(shared, tenant) as made:
        yield made


def file_of(sandboxes: Docker, tenant: str) -> docker_file.DockerFile:
    [found] = [one for one in docker_file.read_all(sandboxes.values["agent_state_dir"]) if one.tenant == tenant]
    return found


# --- what a sandbox is ---


async def test_a_sandbox_is_confined_in_every_way_and_no_secret_is_to_be_seen_from_outside(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        compute = await provider.ensure(tenant, WORKSPACE)
        found = sandboxes.container(tenant)
        host = found.attrs["HostConfig"]
        limits = (host["NanoCpus"], host["Memory"], host["MemorySwap"], host["PidsLimit"])
        assert limits == (1_500_000_000, 512 << 20, 512 << 20, 200)
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["CapAdd"]) == (True, ["ALL"], None)
        assert "no-new-privileges:true" in host["SecurityOpt"]
        status = sandboxes.run(tenant, "cat", "/proc/1/status")
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Uid:\t65532"):
            assert line in status
        assert found.exec_run(["touch", "/opt/tether/x"])[0] != 0
        assert found.exec_run(["touch", "/workspace/x", "/tmp/x"])[0] == 0
        assert SECRET not in json.dumps(found.attrs)
        assert SECRET not in found.logs().decode()
        assert SECRET not in json.dumps(dict(compute.facts))
        processes = sandboxes.run(tenant, "sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' '\\n'")
        assert "tether_collector" in processes
        assert SECRET not in processes
        assert SECRET in sandboxes.run(tenant, "cat", "/run/tether/agent-env.json")
        assert sandboxes.run(tenant, "sh", "-c", "ls -l /run/tether/agent-env.json").startswith("-rw-------")


async def test_the_limits_are_the_kernels(bus: NatsBus, sandboxes: Docker, tenant: str) -> None:
    async with (provider := sandboxes.provider(bus, docker_pids=64)).running():
        await provider.ensure(tenant, WORKSPACE)
        forks = "n=0; while [ $n -lt 100 ]; do sleep 3 >/dev/null 2>&1 & n=$((n+1)); done"
        assert "fork" in sandboxes.container(tenant).exec_run(["sh", "-c", forks])[1].decode()
        hungry = "x = bytearray(1 << 30)"
        code, _ = sandboxes.container(tenant).exec_run(["python3", "-c", hungry])
        assert code == 137, "the kernel ends what wants more memory"
        await provider.ensure(tenant, WORKSPACE)


# --- its life ---


async def test_ensure_is_idempotent_and_stop_leaves_the_volume_alone(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        first, again = await asyncio.gather(provider.ensure(tenant, WORKSPACE), provider.ensure(tenant, WORKSPACE))
        assert first == again
        sandboxes.run(tenant, "touch", "/workspace/kept")
        assert await provider.stop(tenant, WORKSPACE) is not None
        assert sandboxes.containers() == []
        assert await provider.stop(tenant, WORKSPACE) is None
        assert "ended with 0" in file_of(sandboxes, tenant).proof
        second = await provider.ensure(tenant, WORKSPACE)
        assert second.boot != first.boot
        assert "kept" in sandboxes.run(tenant, "ls", "/workspace")


async def test_a_service_that_is_started_anew_adopts_what_runs_even_without_its_own_memory(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (first := sandboxes.provider(bus)).running():
        before = await first.ensure(tenant, WORKSPACE)
    async with (second := sandboxes.provider(bus)).running():
        assert [(status.alive, status.boot) for status in second.statuses()] == [(True, before.boot)]
        assert await second.ensure(tenant, WORKSPACE) == before
    elsewhere = sandboxes.values["agent_state_dir"].with_name("state2")
    async with (third := sandboxes.provider(bus, agent_state_dir=elsewhere)).running():
        assert [(status.alive, status.boot) for status in third.statuses()] == [(True, before.boot)]
        assert (await third.ensure(tenant, WORKSPACE)).boot == before.boot
        assert await third.stop(tenant, WORKSPACE) is not None


@pytest.mark.parametrize("step", ["create", "start", "put", "inspect"])
async def test_a_service_that_dies_in_the_middle_of_a_start_is_continued_by_the_next(
    bus: NatsBus, sandboxes: Docker, tenant: str, step: str
) -> None:
    async with (first := sandboxes.provider(bus)).running():
        done = getattr(first._engine, step)

        async def die(*arguments: Any) -> Any:
            if step != "inspect":
                await done(*arguments)
            raise asyncio.CancelledError

        setattr(first._engine, step, die)
        with pytest.raises(asyncio.CancelledError):
            await first.ensure(tenant, WORKSPACE)
    boot = file_of(sandboxes, tenant).boot
    async with (second := sandboxes.provider(bus)).running():
        assert (await second.ensure(tenant, WORKSPACE)).boot == boot
        assert len(sandboxes.containers()) == 1


async def test_a_foreign_container_of_that_name_is_left_alone_and_named(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    client, image = sandboxes.place.client, sandboxes.place.image
    other = client.containers.run(image, ["600"], name=sandboxes.name(tenant), entrypoint=["sleep"], detach=True)
    try:
        async with (provider := sandboxes.provider(bus)).running():
            with pytest.raises(NotReadyError, match="in the way"):
                await provider.ensure(tenant, WORKSPACE)
        other.reload()
        assert other.status == "running"
    finally:
        other.remove(force=True)


async def test_a_missing_image_is_a_final_failure_that_names_it(bus: NatsBus, sandboxes: Docker, tenant: str) -> None:
    async with (provider := sandboxes.provider(bus, docker_image="tether-no-such:image")).running():
        with pytest.raises(ProvisionError, match="tether-no-such:image"):
            await provider.ensure(tenant, WORKSPACE)


async def test_a_collector_that_refuses_its_configuration_is_a_final_failure(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        files = provider._files

        def wrong(file: docker_file.DockerFile, access: BusAccess) -> dict[str, str]:
            found = files(file, access)
            told = json.loads(found["environment.json"])
            return {**found, "environment.json": json.dumps({**told, "TETHER_REPLICAS": "many"})}

        provider._files = wrong  # type: ignore[method-assign]
        with pytest.raises(ProvisionError, match="refuses its configuration"):
            await provider.ensure(tenant, WORKSPACE)
        provider._files = files  # type: ignore[method-assign]
        await provider.ensure(tenant, WORKSPACE)


async def test_a_users_directory_is_used_as_its_owner_and_roots_is_refused(
    bus: NatsBus, sandboxes: Docker, tenant: str, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    async with (provider := sandboxes.provider(bus)).running():
        if os.getuid() == 0:
            with pytest.raises(InvalidError, match="chown"):
                provider.assign(tenant, WORKSPACE, str(project))
            os.chown(project, 1234, 1234)
        assert provider.assign(tenant, WORKSPACE, str(project)) == str(project)
        await provider.ensure(tenant, WORKSPACE)
        sandboxes.run(tenant, "touch", "/workspace/made-inside")
        assert (project / "made-inside").stat().st_uid == project.stat().st_uid
        assert (project / ".tether" / "journal.sqlite3").exists()
        assert sandboxes.place.client.volumes.list(filters={"name": sandboxes.name(tenant)}) == []
        await provider.stop(tenant, WORKSPACE)


async def test_a_container_that_vanishes_is_believed_gone_only_by_the_engines_word(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        before = await provider.ensure(tenant, WORKSPACE)
        sandboxes.container(tenant).remove(force=True)

        async def told() -> bool:
            return file_of(sandboxes, tenant).status == "stopped"

        await until(told, "the recovery's end", 60.0)
        assert (await provider.ensure(tenant, WORKSPACE)).boot != before.boot


async def test_a_container_of_which_the_engine_never_saw_the_end_is_waited_for(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        await provider.ensure(tenant, WORKSPACE)

        async def forgotten(*_: Any) -> None:
            return None

        for word in ("inspect", "died"):
            setattr(provider._engine, word, forgotten)
        provider._sandboxes[tenant, WORKSPACE].seen = False
        with pytest.raises(NotReadyError, match="did not see it end"):
            await provider.ensure(tenant, WORKSPACE)
    assert sandboxes.container(tenant).status == "running"


async def test_a_release_proves_the_end_once_and_leaves_a_later_boot_alone(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        assert await provider.release(tenant, WORKSPACE, "boot_x") is None
        boot = (await provider.ensure(tenant, WORKSPACE)).boot
        other = await provider.release(tenant, WORKSPACE, "boot_x")
        assert other is not None and boot in other.proof
        assert sandboxes.container(tenant).status == "running"
        sandboxes.container(tenant).kill("SIGTERM")
        gone = await provider.release(tenant, WORKSPACE, boot)
        assert gone is not None and "the engine says" in gone.proof
        assert sandboxes.containers() == []
        again = await provider.release(tenant, WORKSPACE, boot)
        assert again is not None and again.proof == gone.proof


async def test_a_manifest_is_read_from_a_volume_that_nothing_uses_and_no_volume_is_made_for_it(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with (provider := sandboxes.provider(bus)).running():
        await provider.ensure(tenant, WORKSPACE)
        write = "mkdir -p /workspace/.tether/checkpoints; printf '{}' >/workspace/.tether/checkpoints/cp_1.json"
        sandboxes.run(tenant, "sh", "-c", write)
        await provider.stop(tenant, WORKSPACE)
        assert await provider.manifest(tenant, WORKSPACE, "cp_1") == b"{}"
        assert await provider.manifest(tenant, WORKSPACE, "cp_2") is None
        assert sandboxes.containers() == []
        sandboxes.place.client.volumes.get(sandboxes.name(tenant)).remove()
        assert await provider.manifest(tenant, WORKSPACE, "cp_1") is None
        assert sandboxes.place.client.volumes.list(filters={"name": sandboxes.name(tenant)}) == []


# --- executions ---


async def test_a_prompt_an_approval_and_a_new_collector_under_the_living_cli(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with services(sandboxes, bus, tenant) as (provider, talk):
        await talk.prompt("!say before\n!ask touch\n!say after")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        restarted = await provider.restart_collector(tenant, WORKSPACE)
        assert restarted is not None
        assert restarted.instance != restarted.before
        await talk.allow(asked)
        ended = (await talk.until(ev.EXECUTION_ENDED)).body
        assert ended["outcome"] == "completed"
        assert ended["proof"]["method"] == "subreaper_sweep", "without capabilities there is no PID namespace for a CLI"
        assert [body["text"] for body in talk.bodies(ev.TEXT_COMPLETED)] == ["before", "after"]
        await talk.prompt("!recall")
        await talk.until(ev.EXECUTION_ENDED)
        assert len(sandboxes.containers()) == 1
        await provider.stop(tenant, WORKSPACE)


async def test_a_container_that_ended_while_no_service_ran_is_told_by_the_next(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with services(sandboxes, bus, tenant) as (_, talk):
        await talk.prompt("!say before\n!hang")
        await talk.until(ev.TEXT_COMPLETED)
    sandboxes.container(tenant).kill()
    async with services(sandboxes, bus, tenant) as (provider, talk):
        await talk.prompt("!say again")
        ended = (await talk.until(ev.EXECUTION_ENDED)).body
        assert (ended["outcome"], ended["proof"]["method"]) == ("lost", "keeper_gone")
        assert "the engine says that container" in ended["proof"]["detail"], "a sweep sees no other container"
        assert (await talk.until(ev.EXECUTION_ENDED)).body["outcome"] == "completed"
        await provider.stop(tenant, WORKSPACE)


async def test_what_ran_is_closed_by_the_engines_word_where_its_volume_is_lost_too(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with services(sandboxes, bus, tenant) as (_, talk):
        await talk.prompt("!say before\n!hang")
        await talk.until(ev.TEXT_COMPLETED)
    sandboxes.container(tenant).remove(force=True)
    sandboxes.place.client.volumes.get(sandboxes.name(tenant)).remove()
    async with services(sandboxes, bus, tenant, agent_volume_wait_s=0.1) as (provider, talk):
        await talk.follow()
        ended = (await talk.until(ev.EXECUTION_ENDED)).body
        assert (ended["outcome"], ended["proof"]["method"]) == ("lost", "provider")
        assert "the engine saw container" in ended["proof"]["detail"]
        assert sandboxes.containers() == []
        await talk.prompt("!say again", resume="fresh")
        assert (await talk.until(ev.EXECUTION_ENDED)).body["outcome"] == "completed"
        await provider.stop(tenant, WORKSPACE)


async def test_a_stop_of_the_sandbox_tells_the_end_of_what_ran(bus: NatsBus, sandboxes: Docker, tenant: str) -> None:
    async with services(sandboxes, bus, tenant) as (provider, talk):
        await talk.prompt("!say before\n!hang")
        await talk.until(ev.TEXT_COMPLETED)
        stopped = await provider.stop(tenant, WORKSPACE)
        assert stopped is not None
        assert (await talk.until(ev.EXECUTION_ENDED)).body["proof"]["method"] == "subreaper_sweep"


async def test_docker_stop_drains_within_its_grace_and_the_next_prompt_goes_on(
    bus: NatsBus, sandboxes: Docker, tenant: str
) -> None:
    async with services(sandboxes, bus, tenant) as (provider, talk):
        await talk.prompt("!say before\n!ask touch")
        await talk.until(ev.INTERACTION_REQUESTED)
        container = sandboxes.container(tenant)
        assert container.attrs["Config"]["StopTimeout"] > provider._settings.agent_drain_grace_s
        await asyncio.to_thread(container.stop)
        ended = (await talk.until(ev.EXECUTION_ENDED)).body
        assert ended["outcome"] == "drained", ended
        await talk.prompt("!recall")
        assert (await talk.until(ev.EXECUTION_ENDED)).body["outcome"] == "completed"
        await provider.stop(tenant, WORKSPACE)
    async with agent_service(sandboxes, bus) as provider:
        assert [status.alive for status in provider.statuses()] == [False]
