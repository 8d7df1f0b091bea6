"""Sandboxes as processes of this machine: a collector per workspace, in its own session.

    (none) ── ensure ──▶ starting ── spawned ──▶ running ──┐ collector ends
                            ▲                        │     └──▶ back-off ──▶ starting, with the same boot id:
                            └── ensure ── stopped ◀──┘ stop      keepers and CLIs may live, and are adopted
    its volume is away ──▶ wait (providers/base.py) ── back ──▶ recovery ── all is told ──▶ stopped
           ▲
           └── collector ended, service started

A collector that was drained ends by itself and stays down (providers/drained.py); `release` then proves that nothing of
it is left. Whoever replaces a collector, or only wants it to end, hands over by HAND_OVER: keepers and CLIs live on.

A recovery collector starts nothing: it tells what an earlier boot of the machine, a stop that had to kill, or a volume
that was away left untold, and ends.

The boot id is drawn when a sandbox starts and kept over every restart of its collector, for as long as something of
it may live: until it was stopped, or the machine was rebooted. The service adopts what it finds by identity after a
restart; what it cannot identify it leaves alone. Leaving `running()` ends no collector.

The race: a crash between spawning a collector and writing its pid down. The boot id was written down before, and it
stands in that process's environment, so the next agent service finds it instead of starting a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from tether import failpoints
from tether.deletion import ForgetPayload, Forgotten
from tether.errors import BusError, Problem
from tether.ports import Bus
from tether.processes import machine_boot
from tether.sandbox import Registration
from tether_agent import metrics
from tether_agent.agents import AgentsFile, Environment, write_environment
from tether_agent.config import AgentSettings
from tether_agent.providers import (
    Gone,
    NotReadyError,
    ProvisionError,
    collector_process,
    drained,
    executions,
    leftovers,
    procfs,
    sandbox_file,
    state_dir,
)
from tether_agent.providers import lost as lost_executions
from tether_agent.providers.base import BaseProvider, Sandbox, hopeless, refusal
from tether_agent.providers.collector_environment import collector_environment, environment_file
from tether_agent.providers.collector_process import CollectorProcess
from tether_agent.providers.forgetting import forget_on_volume
from tether_agent.providers.sandbox_file import SandboxFile

COLLECTOR: Final = (sys.executable, "-P", "-m", "tether_collector")
RESTART_MIN_S: Final = 0.2
REGISTRATION_READ_S: Final = 1.0  # of a collector that has ended: was it ready?
RESTART_MAX_S: Final = 30.0
STABLE_S: Final = 30.0  # a collector that lived so long starts the back-off afresh
HAND_OVER: Final = signal.SIGHUP  # a collector leaves, its keepers and CLIs stay; SIGTERM would drain it
COLLECTOR_END_S: Final = 20.0  # its own shutdown budget fits in
DRAINED_END_S: Final = 10.0  # a drained collector ends by itself within
EX_CONFIG: Final = 78  # of a collector that refuses its configuration: another start changes nothing
EARLY_EXITS_MAX: Final = 5  # ends without ever registering, in a row, while the bus was there
_log = structlog.get_logger("tether_agent")


@dataclass(slots=True)
class _Sandbox(Sandbox[SandboxFile]):
    """Its task watches the collector, and owns restarts."""

    process: CollectorProcess | None = None
    early_exits: int = 0
    epoch: int = -1  # of the bus, when the first of these exits was counted
    instance: str | None = None  # of the last collector that is known to have been ready

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive


class LocalProvider(BaseProvider[SandboxFile, _Sandbox]):
    """See the module's docstring."""

    name = "local"
    poll_max_s = 0.05

    def __init__(
        self,
        settings: AgentSettings,
        agents: AgentsFile,
        environment: Environment,
        bus: Bus | None,
        *,
        command: Sequence[str] = COLLECTOR,
    ) -> None:
        super().__init__(settings, agents, environment, bus)
        self._command = command

    # --- life ---

    @contextlib.asynccontextmanager
    async def running(self, *, restart: bool = True) -> AsyncIterator[None]:
        async with super().running(restart=restart):
            yield
        for sandbox in self._sandboxes.values():
            if sandbox.process is not None:
                sandbox.process.close()

    async def _attend(self, group: asyncio.TaskGroup, *, restart: bool) -> Sequence[asyncio.Task[None]]:
        logs = group.create_task(state_dir.bound_logs(self._state_dir), name="collector-logs")
        await self._adopt_all(restart)
        return (logs,)

    async def _adopt_all(self, restart: bool) -> None:
        for file in sandbox_file.read_all(self._state_dir):
            sandbox = self._sandbox(file.tenant, file.workspace)
            sandbox.file = file
            if file.status == "stopped":
                continue
            async with sandbox.lock:
                if self._adopt(sandbox):
                    failpoints.failpoint("agent.sandbox.adopted")
                    _log.info("sandbox_adopted", **sandbox.named)
                    continue
                if not restart:
                    continue
                if file.status == "lost" or not sandbox_file.volume_there(file):
                    self._miss_volume(sandbox)
                    continue
                if await drained.is_over(self._bus, file):
                    continue
                gone = file.status == "unfinished" or file.recovery or file.machine_boot != machine_boot()
                try:
                    # Whatever its keepers hold, or left behind, has to be told by a collector.
                    await self._start(sandbox, recovery=gone)
                except (ProvisionError, NotReadyError) as error:
                    _log.error("sandbox_not_restarted", **sandbox.named, reason=str(error))

    def _adopt(self, sandbox: _Sandbox) -> bool:
        file = sandbox.file
        assert file is not None
        if file.machine_boot != machine_boot():
            return False
        recorded = file.process if file.status != "starting" else None
        process = collector_process.adopt(recorded, file.boot)
        if process is None:
            return False
        sandbox.process = process
        self._note(sandbox, file.with_process(process.identity))
        self._follow_by(sandbox, self._keep)
        return True

    # --- the port ---

    async def _bring_up(self, sandbox: _Sandbox, restore: str | None) -> None:
        if sandbox.refused:
            # A start that failed for its configuration is tried again for a new command: it may be put right.
            sandbox.refused = None
            sandbox.early_exits = 0
            if sandbox.alive:
                await self._end_collector(sandbox)
        if not sandbox.alive:
            self._hold.check()
            self._check_volume(sandbox)
            self._forget(sandbox)
            await self._start(sandbox, restore=restore, anew=True)

    async def _end(self, sandbox: _Sandbox) -> int:
        file = sandbox.file
        assert file is not None
        if sandbox.process is not None:
            if self._bus is not None and sandbox.alive:
                await executions.stop_all(self._bus, file)
            await self._end_collector(sandbox)
        return await self._end_rest(sandbox, file)

    async def _end_rest(self, sandbox: _Sandbox, file: SandboxFile) -> int:
        """Its collector has ended: nothing else of it stays. The lock is held. Returns how many had to be killed."""
        self._forget(sandbox)
        killed = await leftovers.end(Path(file.directory) / ".tether")
        # What had to be killed has not told its end: the next agent service starts a collector for it.
        away = not sandbox_file.volume_there(file)
        unfinished = killed > 0 or away or file.status == "unfinished"
        self._note(sandbox, replace(file.with_process(None), status="unfinished" if unfinished else "stopped"))
        environment_file(self._state_dir, file).unlink(
            missing_ok=True
        )  # no key outlives its sandbox; a start writes it anew
        if away and self._bus is not None:
            self._miss_volume(sandbox)
        return killed

    async def _release(self, sandbox: _Sandbox) -> Gone | None:
        file, killed = sandbox.file, 0
        assert file is not None
        if file.status in ("starting", "running"):
            if sandbox.alive and not await self._ends_by_itself(sandbox):
                await self._end_collector(sandbox)
            killed = await self._end_rest(sandbox, file)
        proof = await asyncio.to_thread(leftovers.proof_of_end, file, ())
        return None if proof is None else Gone(proof, killed)

    async def manifest(self, tenant: str, workspace: str, checkpoint: str) -> bytes | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        return await asyncio.to_thread(drained.read_manifest, Path(sandbox.file.directory), checkpoint)

    async def forget(self, tenant: str, workspace: str, payload: ForgetPayload) -> Forgotten:
        assert self._workspaces is not None, "the provider does not run"
        sandbox = self._sandbox(tenant, workspace)
        async with sandbox.lock:  # nothing is started over the volume meanwhile
            if sandbox.alive:
                return Forgotten(clean=False, pending_on="its collector holds it, and does not answer yet")
            if sandbox.file is not None and not sandbox_file.volume_there(sandbox.file):
                return Forgotten(clean=False, pending_on="the volume is away")
            try:
                directory = self._workspaces.existing(tenant, workspace)
            except ProvisionError as error:
                return Forgotten(clean=False, pending_on=error.problem.detail)
            if directory is None:
                return Forgotten(clean=True)
            return await forget_on_volume(directory, payload)

    async def _replace(self, sandbox: _Sandbox) -> None:
        sandbox.refused = None
        sandbox.early_exits = 0
        if sandbox.alive:
            await self._end_collector(sandbox)
        self._check_volume(sandbox)
        self._forget(sandbox)
        await self._start(sandbox)  # with the same boot id

    # --- starting and watching ---

    async def _start(
        self, sandbox: _Sandbox, *, recovery: bool = False, restore: str | None = None, anew: bool = False
    ) -> None:
        """Spawn a collector; `restore` counts where a boot begins. The lock is held. Raises ProvisionError,
        NotReadyError."""
        assert self._workspaces is not None, "the provider does not run"
        directory = self._workspaces.directory(sandbox.tenant, sandbox.workspace)
        named = (sandbox.tenant, sandbox.workspace, str(directory))
        self._note(
            sandbox,
            replace(sandbox_file.following(sandbox.file, *named, restore=restore, anew=anew), recovery=recovery),
        )
        file = sandbox.file
        assert file is not None
        access = await self._admit(file)
        folder = sandbox_file.folder_of(self._state_dir, sandbox.tenant, sandbox.workspace)
        try:
            keys = Environment({}, {}, {}) if recovery else self._environment
            write_environment(environment_file(self._state_dir, file), keys)
            environment = collector_environment(self._settings, self._agents, file, self._facts(file), access)
            process = collector_process.spawn(self._command, environment, folder / "collector.log")
            failpoints.failpoint("agent.sandbox.spawned")
        except OSError as error:
            raise ProvisionError(refusal(f"the collector cannot be started: {error.strerror}")) from None
        sandbox.process = process
        self._note(sandbox, file.with_process(process.identity))
        failpoints.failpoint("agent.sandbox.noted")
        _log.info("collector_started", **sandbox.named, collector=process.identity.pid)
        metrics.collector_starts.inc()
        self._follow_by(sandbox, self._keep)

    def _check_volume(self, sandbox: _Sandbox) -> None:
        """Raises NotReadyError where the sandbox's volume is away: nothing is started over it before what it ran has
        come to its end. The lock is held."""
        file = sandbox.file
        if file is None or file.status in ("stopped", "lost") or sandbox_file.volume_there(file):
            return
        if sandbox.task is None or sandbox.task.done():
            self._miss_volume(sandbox)
        raise NotReadyError("the volume of the workspace is away")

    def _miss_volume(self, sandbox: _Sandbox) -> None:
        """From now on its task waits for its volume. The lock is held."""
        self._forget(sandbox)
        self._follow_by(sandbox, self._await_volume)

    async def _volume_there(self, file: SandboxFile) -> bool:
        return sandbox_file.volume_there(file)

    async def _proof_of_end(self, file: SandboxFile) -> str | None:
        try:
            found = await lost_executions.open_executions(self._asked(), file.tenant, file.workspace)
        except BusError:
            return None
        names = [target.execution for target in found]
        return await asyncio.to_thread(leftovers.proof_of_end, file, names)

    async def _volume_back(self, sandbox: _Sandbox) -> str | None:
        try:
            self._hold.check()
            await self._start(sandbox, recovery=True)
        except ProvisionError as error:
            return error.problem.detail
        except NotReadyError as error:
            return str(error)
        return None

    async def _keep(self, sandbox: _Sandbox) -> None:
        """Restart the collector whenever it ends; ends itself when the next one is watched by its own task."""
        loop = asyncio.get_running_loop()
        process = sandbox.process
        assert process is not None
        started_s = loop.time()
        code = await process.wait()
        if sandbox.process is not process:
            return  # who let go of it starts the next one
        process.close()
        sandbox.process = None
        if loop.time() - started_s > STABLE_S:
            sandbox.early_exits = 0
        if await self._had_registered(sandbox):
            sandbox.early_exits = 0
        self._count_exit(sandbox)
        _log.warning("collector_ended", **sandbox.named, exit=code, in_a_row=sandbox.early_exits)
        metrics.collector_ends.inc()
        file = sandbox.file
        assert file is not None
        if await self._stays_down(sandbox, file, code):
            return
        if code == EX_CONFIG:
            sandbox.refused = self._refusal(sandbox, "the collector refuses its configuration")
            if file.recovery or not file.used:
                return
        while True:
            await asyncio.sleep(min(RESTART_MAX_S, RESTART_MIN_S * float(2 ** min(sandbox.early_exits - 1, 10))))
            async with sandbox.lock:
                if sandbox.task is not asyncio.current_task():
                    return
                if not sandbox_file.volume_there(file):
                    self._miss_volume(sandbox)
                    return
                try:
                    await self._start(sandbox, recovery=file.recovery or bool(sandbox.refused))
                except (ProvisionError, NotReadyError) as error:
                    sandbox.early_exits += 1
                    _log.error("sandbox_not_restarted", **sandbox.named, reason=str(error))
                else:
                    return

    async def _stays_down(self, sandbox: _Sandbox, file: SandboxFile, code: int | None) -> bool:
        """Its collector ended because it was done: a recovery that told everything, or a drain."""
        if file.recovery and code == 0:
            async with sandbox.lock:
                if sandbox.task is asyncio.current_task():
                    _log.info("sandbox_told", **sandbox.named)
                    self._note(sandbox, replace(file.with_process(None), status="stopped", recovery=False))
            return True
        if await drained.is_over(self._bus, file):
            return True  # who drains it, or deletes it, asks for the rest
        if code != 0 or not await drained.drained_itself(self._bus, file):
            return False
        async with sandbox.lock:
            if sandbox.task is asyncio.current_task():
                sandbox.task = None  # this task: it is not to be cancelled by what it begins
                killed = await self._end_rest(sandbox, file)
                _log.info("sandbox_drained_itself", **sandbox.named, killed=killed)
        return True

    async def _had_registered(self, sandbox: _Sandbox) -> bool:
        """Whether the collector that ended was ready: its registration is another one than that of its predecessor."""
        file = sandbox.file
        if file is None or self._bus is None or not self._bus.connected:
            return False
        try:
            async with asyncio.timeout(REGISTRATION_READ_S):
                found = await self._registration(file)
        except (NotReadyError, TimeoutError):
            return False
        instance = None if found is None else found.instance
        known, sandbox.instance = sandbox.instance, instance
        return instance is not None and instance != known

    def _count_exit(self, sandbox: _Sandbox) -> None:
        """Only ends that the bus cannot have caused count towards giving up."""
        epoch = self._bus.epoch if self._bus is not None and self._bus.connected else -1
        if epoch < 0 or epoch != sandbox.epoch:
            sandbox.early_exits = 0
            sandbox.epoch = epoch
        sandbox.early_exits += 1

    async def _registered(self, sandbox: _Sandbox, file: SandboxFile, *, not_instance: str | None) -> Registration:
        found = await super()._registered(sandbox, file, not_instance=not_instance)
        sandbox.early_exits = 0
        return found

    async def _check_hope(self, sandbox: _Sandbox, file: SandboxFile) -> None:
        if not sandbox.refused and sandbox.early_exits < EARLY_EXITS_MAX:
            return
        reason = f"the collector ended {sandbox.early_exits} times before it was ready"
        why = sandbox.refused or self._refusal(sandbox, reason)
        log = self._log_of(sandbox)
        _log.error("sandbox_impossible", **sandbox.named, reason=why.detail, tail=collector_process.tail_of(log))
        raise hopeless(drained.restore_failure(Path(file.directory), file.boot) or why)

    def _refusal(self, sandbox: _Sandbox, reason: str) -> Problem:
        return refusal(f"{reason}; its log is {self._log_of(sandbox)}")

    def _log_of(self, sandbox: _Sandbox) -> Path:
        return sandbox_file.folder_of(self._state_dir, sandbox.tenant, sandbox.workspace) / "collector.log"

    async def _ends_by_itself(self, sandbox: _Sandbox) -> bool:
        """Whether a drained collector has ended within DRAINED_END_S."""
        process = sandbox.process
        assert process is not None
        sandbox.drop_task()  # there is one waiter at a time, and no restart
        try:
            async with asyncio.timeout(DRAINED_END_S):
                await process.wait()
        except TimeoutError:
            _log.warning("drained_collector_stays", collector=process.identity.pid)
            return False
        return True

    async def _end_collector(self, sandbox: _Sandbox) -> None:
        process = sandbox.process
        assert process is not None
        sandbox.drop_task()  # there is one waiter at a time, and no restart
        process.signal(HAND_OVER)
        try:
            async with asyncio.timeout(COLLECTOR_END_S):
                await process.wait()
        except TimeoutError:
            _log.warning("collector_killed", collector=process.identity.pid)
            process.signal(signal.SIGKILL)
            await process.wait()

    # --- small things ---

    def _new(self, tenant: str, workspace: str) -> _Sandbox:
        return _Sandbox(tenant, workspace)

    def _forget(self, sandbox: _Sandbox) -> None:
        """Let go of a collector that has ended, whether its watcher has noticed or not."""
        sandbox.drop_task()
        process, sandbox.process = sandbox.process, None
        if process is not None:
            procfs.reap(process.identity.pid)
            process.close()

    def _note(self, sandbox: _Sandbox, file: SandboxFile) -> None:
        sandbox_file.write(self._state_dir, file)
        sandbox.file = file
        self._noted(file)

    def _facts(self, file: SandboxFile) -> Mapping[str, Any]:
        """What identifies the sandbox, and where its agents' keys came from. Without pids: those change with every
        restart of the collector, and the record is written when a start is forwarded."""
        return {
            "provider": self.name,
            "machine_boot": file.machine_boot,
            "boot": file.boot,
            "directory": file.directory,
            "key_sources": dict(self._environment.sources),
        }
