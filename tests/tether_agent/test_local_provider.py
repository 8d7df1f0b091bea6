"""The local provider: collectors as processes of their own, adopted by identity, ended exactly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support_agent import provider_for, settings_for, until
from support_nats import NatsServer
from tether.bus import NatsBus
from tether.errors import InvalidError
from tether.processes import ProcessId, identify, is_running, send_signal
from tether_agent.config import AgentSettings
from tether_agent.providers import NotReadyError, ProvisionError, collector_process, leftovers, procfs, sandbox_file
from tether_agent.providers.local import LocalProvider
from tether_agent.providers.sandbox_file import SandboxFile
from tether_collector import keeper_link
from tether_collector.keeper_link import LaunchSpec


def file_of(settings: AgentSettings, tenant: str) -> SandboxFile:
    found = sandbox_file.read(settings.agent_state_dir, tenant, "w1")
    assert found is not None
    return found


def process_of(settings: AgentSettings, tenant: str) -> ProcessId:
    found = file_of(settings, tenant).process
    assert found is not None
    return found


@contextmanager
def bystander(**env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of ours."""
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleeper, env={**os.environ, **env}) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_second_ensure_finds_the_same_collector(bus: NatsBus, settings: AgentSettings, tenant: str) -> None:
    provider = provider_for(settings, bus)
    async with provider.running():
        first = await provider.ensure(tenant, "w1")
        pid = process_of(settings, tenant)
        assert await provider.ensure(tenant, "w1") == first
        assert process_of(settings, tenant) == pid
        [status] = provider.statuses()
        assert (status.alive, status.boot) == (True, first.boot)


async def test_a_collector_runs_in_a_session_of_its_own_and_outlives_the_service(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (provider := provider_for(settings, bus)).running():
        await provider.ensure(tenant, "w1")
        collector = process_of(settings, tenant)
        assert os.getsid(collector.pid) == collector.pid
    assert is_running(collector)


async def test_after_a_restart_the_collector_is_adopted_with_its_boot(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (first := provider_for(settings, bus)).running():
        before = await first.ensure(tenant, "w1")
        collector = process_of(settings, tenant)
    async with (second := provider_for(settings, bus)).running():
        assert (await second.ensure(tenant, "w1")).boot == before.boot
        assert process_of(settings, tenant) == collector


async def test_a_collector_whose_pid_was_never_written_down_is_found_by_its_environment(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (first := provider_for(settings, bus)).running():
        await first.ensure(tenant, "w1")
        collector = process_of(settings, tenant)
    torn = file_of(settings, tenant).with_process(None)
    object.__setattr__(torn, "status", "starting")
    sandbox_file.write(settings.agent_state_dir, torn)
    async with (second := provider_for(settings, bus)).running():
        await second.ensure(tenant, "w1")
        assert process_of(settings, tenant) == collector


async def test_a_reused_pid_is_not_taken_for_the_collector(bus: NatsBus, settings: AgentSettings, tenant: str) -> None:
    async with (first := provider_for(settings, bus)).running():
        await first.ensure(tenant, "w1")
        await first.stop(tenant, "w1")
    with bystander() as other:
        identity = identify(other.pid)
        assert identity is not None
        sandbox_file.write(settings.agent_state_dir, file_of(settings, tenant).with_process(identity))
        async with (second := provider_for(settings, bus)).running(restart=False):
            [status] = second.statuses()
            assert not status.alive
            await second.stop(tenant, "w1")
        assert other.poll() is None, "a process that is not ours was ended"


async def test_a_collector_that_is_killed_comes_back_with_the_same_boot(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (provider := provider_for(settings, bus)).running():
        before = await provider.ensure(tenant, "w1")
        killed = process_of(settings, tenant)
        send_signal(killed, signal.SIGKILL)

        async def another() -> bool:
            found = file_of(settings, tenant).process
            return found is not None and found != killed and is_running(found)

        await until(another, "another collector")
        assert (await provider.ensure(tenant, "w1")).boot == before.boot


async def test_a_collector_that_died_while_no_service_ran_is_started_again_to_tell_what_is_left(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (first := provider_for(settings, bus)).running():
        before = await first.ensure(tenant, "w1")
        killed = process_of(settings, tenant)
    send_signal(killed, signal.SIGKILL)

    async def gone() -> bool:
        procfs.reap(killed.pid)
        return not is_running(killed)

    await until(gone, "the collector's end")
    async with (second := provider_for(settings, bus)).running():
        [status] = second.statuses()
        assert (status.alive, status.boot) == (True, before.boot)
        assert process_of(settings, tenant) != killed


async def test_a_stopped_sandbox_starts_with_a_new_boot_and_not_by_itself(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (first := provider_for(settings, bus)).running():
        before = await first.ensure(tenant, "w1")
        collector = process_of(settings, tenant)
        assert await first.stop(tenant, "w1") is not None
        assert not is_running(collector)
        assert await first.stop(tenant, "w1") is None
    async with (second := provider_for(settings, bus)).running():
        [status] = second.statuses()
        assert not status.alive
        assert (await second.ensure(tenant, "w1")).boot != before.boot


async def test_a_collector_that_refuses_its_configuration_is_a_final_failure_that_names_its_log(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    workspace = settings.agent_workspaces_dir / tenant / "w1"
    workspace.mkdir(parents=True)
    (workspace / "fake.json").write_text('{"exit": 78}')
    async with (provider := provider_for(settings, bus)).running():
        with pytest.raises(ProvisionError, match=r"collector\.log") as failure:
            await provider.ensure(tenant, "w1")
        assert not failure.value.problem.retryable
        (workspace / "fake.json").unlink()
        await provider.ensure(tenant, "w1")


async def test_a_collector_that_keeps_dying_before_it_is_ready_is_given_up(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    workspace = settings.agent_workspaces_dir / tenant / "w1"
    workspace.mkdir(parents=True)
    (workspace / "fake.json").write_text('{"exit": 1}')
    async with (provider := provider_for(settings, bus)).running():
        with pytest.raises(ProvisionError, match="ended 5 times"):
            await provider.ensure(tenant, "w1")


async def test_a_collector_that_only_takes_long_is_never_given_up(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path, tenant: str
) -> None:
    settings = settings_for(nats_server, tmp_path, agent_ready_wait_s=0.01)
    async with (provider := provider_for(settings, bus)).running():
        with pytest.raises(NotReadyError):
            await provider.ensure(tenant, "w1")
        patient = settings_for(nats_server, tmp_path)
        provider._settings = patient
        await provider.ensure(tenant, "w1")
        await provider.stop(tenant, "w1")


async def test_two_services_never_share_a_state_directory(
    bus: NatsBus, settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.providers.state_dir.LOCK_WAIT_S", 0.3)
    async with provider_for(settings, bus).running():
        with pytest.raises(RuntimeError, match="another agent service"):
            async with provider_for(settings, bus).running():
                pass


async def test_agents_keys_are_in_a_closed_file_and_in_no_environment_or_argument(
    bus: NatsBus, settings: AgentSettings, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-do-not-show")
    async with (provider := provider_for(settings, bus)).running():
        compute = await provider.ensure(tenant, "w1")
        collector = process_of(settings, tenant)
        assert not procfs.environ_has(collector.pid, "ANTHROPIC_API_KEY", "sk-do-not-show")
        env_file = sandbox_file.folder_of(settings.agent_state_dir, tenant, "w1") / "agent-env.json"
        assert env_file.stat().st_mode & 0o777 == 0o600
        assert not env_file.is_relative_to(settings.agent_workspaces_dir)
        assert "value" not in str(compute.facts)


async def test_a_workspace_that_has_run_cannot_be_moved_to_another_directory(
    bus: NatsBus, settings: AgentSettings, tenant: str, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    async with (provider := provider_for(settings, bus)).running():
        await provider.ensure(tenant, "w1")
        with pytest.raises(InvalidError, match="another workspace id"):
            provider.assign(tenant, "w1", str(tmp_path / "project"))


# --- what is left when a collector is gone ---


def spec(nonce: str, argv: list[str], isolation: str) -> LaunchSpec:
    return LaunchSpec(
        nonce=nonce,
        execution="exe_1",
        process_generation=1,
        argv=argv,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        isolation=isolation,  # type: ignore[arg-type]
    )


ESCAPING = """
import os, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


@pytest.mark.parametrize("isolation", ["auto", "subreaper"])
@pytest.mark.parametrize("keeper_killed_before", [False, True])
async def test_keepers_and_clis_of_a_workspace_are_ended_and_nobody_elses(
    tmp_path: Path, isolation: str, keeper_killed_before: bool
) -> None:
    mine, other = tmp_path / "mine" / ".tether", tmp_path / "other" / ".tether"
    marks = {}
    for number, root in enumerate((mine, other)):
        folder = root / "executions" / "exe_1"
        folder.mkdir(parents=True)
        told = tmp_path / f"grandchild{number}"
        argv = [sys.executable, "-I", "-S", "-c", ESCAPING, str(told)]
        link = await keeper_link.launch(folder, spec(f"nonce{number}" * 4, argv, isolation))
        link.close()
        marks[root] = told

    async def both_told() -> bool:
        return all(told.exists() and told.read_text() for told in marks.values())

    await until(both_told, "the grandchildren's start")
    with bystander(TETHER_PROCESS_NONCE="somebodyelsesnonce") as stranger:
        try:
            if keeper_killed_before:
                for keeper, _ in leftovers.keepers(mine):
                    send_signal(keeper, signal.SIGKILL)
            await leftovers.end(mine)
            assert leftovers.keepers(mine) == []
            assert procfs.with_environ("TETHER_PROCESS_NONCE", "nonce0" * 4) == []
            assert len(leftovers.keepers(other)) == 1
            assert procfs.with_environ("TETHER_PROCESS_NONCE", "nonce1" * 4)
            assert stranger.poll() is None
        finally:
            await leftovers.end(other)


async def test_a_workspace_without_anything_left_has_nothing_to_end(tmp_path: Path) -> None:
    assert await leftovers.end(tmp_path / ".tether") == 0


async def test_many_sandboxes_are_stopped_at_once(bus: NatsBus, settings: AgentSettings, tenant: str) -> None:
    provider: LocalProvider = provider_for(settings, bus)
    async with provider.running():
        await asyncio.gather(*(provider.ensure(tenant, f"w{number}") for number in range(3)))
        stopped = await provider.stop_all()
    assert {each.workspace for each in stopped} == {"w0", "w1", "w2"}
    assert list(await provider.stop_all()) == []


def test_a_log_that_a_running_collector_appends_to_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_process, "LOG_BYTES_MAX", 10)
    log = tmp_path / "collector.log"
    with log.open("ab", buffering=0) as appending:
        appending.write(b"0123456789")
        collector_process.bound(log)
        assert log.stat().st_size == 10
        appending.write(b"more")
        collector_process.bound(log)
        appending.write(b"later")
    assert (log.read_bytes(), log.with_name("collector.log.1").read_bytes()) == (b"later", b"0123456789more")
    collector_process.bound(tmp_path / "missing")


async def test_what_waited_for_a_sandbox_while_everything_was_stopped_starts_nothing(
    bus: NatsBus, settings: AgentSettings, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (provider := provider_for(settings, bus)).running():
        await provider.ensure(tenant, "w1")
        boot = file_of(settings, tenant).boot
        stopping = asyncio.create_task(provider.stop_all(), name="stop-all")
        await asyncio.sleep(0)  # it holds the sandbox's lock now
        with pytest.raises(NotReadyError, match="stop"):
            async with asyncio.timeout(20):
                while await provider.ensure(tenant, "w1"):  # noqa: ASYNC110 - it lives until it is stopped
                    await asyncio.sleep(0.01)
        await stopping
        with pytest.raises(NotReadyError, match="stop"):
            await provider.ensure(tenant, "w1")
        assert procfs.with_environ("TETHER_BOOT", boot) == []
        assert file_of(settings, tenant).status == "stopped"
        monkeypatch.setattr("tether_agent.providers.hold.HOLD_S", 0.0)
        await provider.stop_all()
        assert (await provider.ensure(tenant, "w1")).boot != boot, "a service that goes on starts again"
