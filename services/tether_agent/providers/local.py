"""Sandboxes as processes of this machine: a collector per workspace, in its own session.

    (none) ── ensure ──▶ starting ── spawned ──▶ running ──┐ collector ends
                            ▲                        │     └──▶ back-off ──▶ starting, with the same boot id:
                            └── ensure ── stopped ◀──┘ stop      keepers and CLIs may live, and are adopted
    its volume is away ──▶ wait ── proven gone, beyond the limit ──▶ lost    (core/lost.py)
           ▲                └── back ──▶ recovery ── all is told ──▶ stopped
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

from tether import failpoints, subjects, tracing
from tether.errors import BusError, Code, problem
from tether.kv import Bucket
from tether.ports import Bus
from tether.processes import machine_boot
from tether.sandbox import Registration
from tether_agent import metrics
from tether_agent.agents import AgentsFile, Environment, write_environment
from tether_agent.config import AgentSettings
from tether_agent.core import lost
from tether_agent.providers import (
    Compute,
    Gone,
    NotReadyError,
    ProvisionError,
    Restarted,
    Status,
    Stopped,
    collector_process,
    drained,
    executions,
    leftovers,
    procfs,
    sandbox_file,
    state_dir,
)
from tether_agent.providers import lost as lost_executions
from tether_agent.providers.collector_environment import collector_environment, environment_file
from tether_agent.providers.collector_process import CollectorProcess
from tether_agent.providers.hold import Hold
from tether_agent.providers.sandbox_file import SandboxFile
from tether_agent.providers.workspaces import Workspaces

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
VOLUME_LOOK_S: Final = 2.0
_POLL_MIN_S: Final = 0.02
_POLL_MAX_S: Final = 0.05  # whoever wakes a sandbox waits for the registration
_log = structlog.get_logger("tether_agent")


@dataclass(slots=True)
class _Sandbox:
    """One workspace's sandbox. `lock` is held over start and stop; the watcher owns restarts."""

    tenant: str
    workspace: str
    lock: asyncio.Lock
    file: SandboxFile | None = None
    process: CollectorProcess | None = None
    watcher: asyncio.Task[None] | None = None
    early_exits: int = 0
    epoch: int = -1  # of the bus, when the first of these exits was counted
    refused: str = ""  # why the collector refuses to start
    instance: str | None = None  # of the last collector that is known to have been ready

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive


class LocalProvider:
    """See the module's docstring. `bus` is asked for registrations only."""

    name = "local"

    def __init__(
        self,
        settings: AgentSettings,
        agents: AgentsFile,
        environment: Environment,
        bus: Bus | None,
        *,
        command: Sequence[str] = COLLECTOR,
    ) -> None:
        self._settings = settings
        self._agents = agents
        self._environment = environment
        self._bus = bus
        self._command = command
        self._state_dir = settings.agent_state_dir
        self._sandboxes: dict[tuple[str, str], _Sandbox] = {}
        self._hold = Hold()
        self._workspaces: Workspaces | None = None
        self._group: asyncio.TaskGroup | None = None

    # --- life ---

    @contextlib.asynccontextmanager
    async def running(self, *, restart: bool = True) -> AsyncIterator[None]:
        """Hold the state directory, adopt, watch. Raises RuntimeError where another agent service holds it.
        Without `restart` collectors that have died stay dead: for who comes only to stop."""
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with await state_dir.hold(self._state_dir):
            self._workspaces = Workspaces(self._settings.agent_workspaces_dir, self._state_dir)
            async with asyncio.TaskGroup() as group:
                self._group = group
                logs = group.create_task(state_dir.bound_logs(self._state_dir), name="collector-logs")
                try:
                    await self._adopt_all(restart)
                    yield
                finally:
                    self._group = None
                    logs.cancel()
                    for sandbox in self._sandboxes.values():
                        if sandbox.watcher is not None:
                            sandbox.watcher.cancel()
        for sandbox in self._sandboxes.values():
            if sandbox.process is not None:
                sandbox.process.close()

    async def _adopt_all(self, restart: bool) -> None:
        for file in sandbox_file.read_all(self._state_dir):
            sandbox = self._sandbox(file.tenant, file.workspace)
            sandbox.file = file
            if file.status == "stopped":
                continue
            async with sandbox.lock:
                if self._adopt(sandbox):
                    failpoints.failpoint("agent.sandbox.adopted")
                    _log.info("sandbox_adopted", **self._named(sandbox))
                    continue
                if not restart:
                    continue
                if file.status == "lost" or not sandbox_file.volume_there(file):
                    self._await_volume(sandbox)
                    continue
                if await drained.is_over(self._bus, file):
                    continue
                gone = file.status == "unfinished" or file.recovery or file.machine_boot != machine_boot()
                try:
                    # Whatever its keepers hold, or left behind, has to be told by a collector.
                    self._start(sandbox, recovery=gone)
                except ProvisionError as error:
                    _log.error("sandbox_not_restarted", **self._named(sandbox), reason=error.problem.detail)

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
        self._watch(sandbox)
        return True

    # --- the port ---

    async def ensure(self, tenant: str, workspace: str, restore: str | None = None) -> Compute:
        sandbox = self._sandbox(tenant, workspace)
        async with sandbox.lock:
            if sandbox.refused:
                # A start that failed for its configuration is tried again for a new command: it may be put right.
                sandbox.refused = ""
                sandbox.early_exits = 0
                if sandbox.alive:
                    await self._end_collector(sandbox)
            if not sandbox.alive:
                self._hold.check()
                self._check_volume(sandbox)
                self._forget(sandbox)
                self._start(sandbox, restore=restore)
            file = sandbox.file
        assert file is not None
        if file.recovery:
            raise NotReadyError("what ran in the sandbox before is being told")
        await self._registered(sandbox, file, not_instance=None)
        return Compute(tenant, workspace, file.sandbox, file.boot, self._facts(file))

    async def stop(self, tenant: str, workspace: str) -> Stopped | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or sandbox.file.status in ("stopped", "lost"):
            return None
        async with sandbox.lock:
            file = sandbox.file
            if sandbox.process is not None:
                if self._bus is not None and sandbox.alive:
                    await executions.stop_all(self._bus, file)
                await self._end_collector(sandbox)
            killed = await self._end_rest(sandbox, file)
        _log.info("sandbox_stopped", **self._named(sandbox), killed=killed)
        return Stopped(tenant, workspace, killed)

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
            self._await_volume(sandbox)
        return killed

    async def release(self, tenant: str, workspace: str, boot: str) -> Gone | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        async with sandbox.lock:
            file, killed = sandbox.file, 0
            if file.boot != boot:
                return Gone(f"boot {boot} was followed by boot {file.boot}")
            if file.status in ("starting", "running"):
                if sandbox.alive and not await self._ends_by_itself(sandbox):
                    await self._end_collector(sandbox)
                killed = await self._end_rest(sandbox, file)
            proof = await asyncio.to_thread(leftovers.proof_of_end, file, ())
        if proof is None:
            raise NotReadyError("something of the drained sandbox still lives")
        _log.info("sandbox_released", **self._named(sandbox), killed=killed, proof=proof)
        return Gone(proof, killed)

    async def manifest(self, tenant: str, workspace: str, checkpoint: str) -> bytes | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        return await asyncio.to_thread(drained.read_manifest, Path(sandbox.file.directory), checkpoint)

    async def restart_collector(self, tenant: str, workspace: str) -> Restarted | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or sandbox.file.status not in ("starting", "running"):
            return None
        before = await self._registration(sandbox.file)
        async with sandbox.lock:
            sandbox.refused = ""
            sandbox.early_exits = 0
            if sandbox.alive:
                await self._end_collector(sandbox)
            self._check_volume(sandbox)
            self._forget(sandbox)
            self._start(sandbox)  # with the same boot id
            file = sandbox.file
        assert file is not None
        old = None if before is None else before.instance
        now = await self._registered(sandbox, file, not_instance=old)
        _log.info("collector_replaced", **self._named(sandbox), before=old, instance=now.instance)
        return Restarted(tenant, workspace, file.boot, old, now.instance, now.version)

    async def stop_all(self) -> Sequence[Stopped]:
        """All of them at once, so that the whole takes as long as the slowest."""
        with self._hold.stopping():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.stop(tenant, workspace), name=f"stop-{tenant}.{workspace}")
                    for tenant, workspace in list(self._sandboxes)
                ]
        return [stopped for stopped in (task.result() for task in tasks) if stopped is not None]

    def statuses(self) -> Sequence[Status]:
        found = []
        for sandbox in list(self._sandboxes.values()):  # a scrape asks from its own thread
            file = sandbox.file
            if file is not None:
                named, stands = (file.tenant, file.workspace, file.sandbox, file.boot, sandbox.alive), file.status
                found.append(Status(*named, self._facts(file), stands in ("stopped", "lost"), stands == "lost"))
        return found

    def assign(self, tenant: str, workspace: str, path: str) -> str:
        assert self._workspaces is not None, "the provider does not run"
        known = self._sandboxes.get((tenant, workspace))
        in_use = known is not None and known.file is not None
        return str(self._workspaces.assign(tenant, workspace, path, in_use=in_use))

    # --- starting and watching ---

    def _start(self, sandbox: _Sandbox, *, recovery: bool = False, restore: str | None = None) -> None:
        """Spawn a collector; `restore` counts where a boot begins. The lock is held. Raises ProvisionError."""
        assert self._workspaces is not None, "the provider does not run"
        directory = self._workspaces.directory(sandbox.tenant, sandbox.workspace)
        named = (sandbox.tenant, sandbox.workspace, str(directory))
        self._note(sandbox, replace(sandbox_file.following(sandbox.file, *named, restore=restore), recovery=recovery))
        file = sandbox.file
        assert file is not None
        folder = sandbox_file.folder_of(self._state_dir, sandbox.tenant, sandbox.workspace)
        try:
            keys = Environment({}, {}, {}) if recovery else self._environment
            write_environment(environment_file(self._state_dir, file), keys)
            environment = collector_environment(self._settings, self._agents, file, self._facts(file))
            process = collector_process.spawn(self._command, environment, folder / "collector.log")
            failpoints.failpoint("agent.sandbox.spawned")
        except OSError as error:
            detail = f"the collector cannot be started: {error.strerror}"
            raise ProvisionError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False)) from None
        sandbox.process = process
        self._note(sandbox, file.with_process(process.identity))
        failpoints.failpoint("agent.sandbox.noted")
        _log.info("collector_started", **self._named(sandbox), collector=process.identity.pid)
        metrics.collector_starts.inc()
        self._watch(sandbox)

    def _check_volume(self, sandbox: _Sandbox) -> None:
        """Raises NotReadyError where the sandbox's volume is away: nothing is started over it before what it ran has
        come to its end. The lock is held."""
        file = sandbox.file
        if file is None or file.status in ("stopped", "lost") or sandbox_file.volume_there(file):
            return
        if sandbox.watcher is None or sandbox.watcher.done():
            self._await_volume(sandbox)
        raise NotReadyError("the volume of the workspace is away")

    def _await_volume(self, sandbox: _Sandbox) -> None:
        assert self._group is not None, "the provider does not run"
        self._forget(sandbox)
        name = f"volume-{sandbox.tenant}.{sandbox.workspace}"
        sandbox.watcher = self._group.create_task(self._look_for_volume(sandbox), name=name, context=tracing.detached())

    async def _look_for_volume(self, sandbox: _Sandbox) -> None:
        """The task of a sandbox whose volume is away, until it is back or something else was begun."""
        state, said = lost.Lost(), ""
        while True:
            async with sandbox.lock:
                if sandbox.watcher is not asyncio.current_task() or sandbox.file is None:
                    return
                state, decision = lost.decide(state, await self._look(sandbox.file), self._settings.agent_volume_wait_s)
                match decision:
                    case lost.Tell():
                        try:
                            self._start(sandbox, recovery=True)
                        except ProvisionError as error:
                            decision = lost.Wait(error.problem.detail)
                        else:
                            return
                    case lost.Close(proof):
                        if await lost_executions.close_all(self._bus_of(), sandbox.tenant, sandbox.workspace, proof):
                            self._note(sandbox, replace(sandbox.file.with_process(None), status="lost"))
                    case lost.Wait():
                        pass
            if isinstance(decision, lost.Wait) and decision.reason != said:
                said = decision.reason
                _log.warning("volume_awaited", **self._named(sandbox), reason=said)
            await asyncio.sleep(VOLUME_LOOK_S)

    async def _look(self, file: SandboxFile) -> lost.Look:
        now_s, closed = asyncio.get_running_loop().time(), file.status == "lost"
        if closed or sandbox_file.volume_there(file):
            return lost.Look(now_s, sandbox_file.volume_there(file), None, closed)
        try:
            found = await lost_executions.open_executions(self._bus_of(), file.tenant, file.workspace)
        except BusError:
            return lost.Look(now_s, False, None)
        names = [target.execution for target in found]
        return lost.Look(now_s, False, await asyncio.to_thread(leftovers.proof_of_end, file, names))

    def _bus_of(self) -> Bus:
        assert self._bus is not None, "a provider without a bus only stops"
        return self._bus

    def _watch(self, sandbox: _Sandbox) -> None:
        assert self._group is not None, "the provider does not run"
        name = f"sandbox-{sandbox.tenant}.{sandbox.workspace}"
        sandbox.watcher = self._group.create_task(self._keep(sandbox), name=name, context=tracing.detached())

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
        _log.warning("collector_ended", **self._named(sandbox), exit=code, in_a_row=sandbox.early_exits)
        metrics.collector_ends.inc()
        file = sandbox.file
        assert file is not None
        if await self._stays_down(sandbox, file, code):
            return
        if code == EX_CONFIG:
            sandbox.refused = "the collector refuses its configuration"
            if file.recovery or not file.used:
                return
        while True:
            await asyncio.sleep(min(RESTART_MAX_S, RESTART_MIN_S * float(2 ** min(sandbox.early_exits - 1, 10))))
            async with sandbox.lock:
                if sandbox.watcher is not asyncio.current_task():
                    return
                if not sandbox_file.volume_there(file):
                    self._await_volume(sandbox)
                    return
                try:
                    self._start(sandbox, recovery=file.recovery or bool(sandbox.refused))
                except ProvisionError as error:
                    sandbox.early_exits += 1
                    _log.error("sandbox_not_restarted", **self._named(sandbox), reason=error.problem.detail)
                else:
                    return

    async def _stays_down(self, sandbox: _Sandbox, file: SandboxFile, code: int | None) -> bool:
        """Its collector ended because it was done: a recovery that told everything, or a drain."""
        if file.recovery and code == 0:
            async with sandbox.lock:
                if sandbox.watcher is asyncio.current_task():
                    _log.info("sandbox_told", **self._named(sandbox))
                    self._note(sandbox, replace(file.with_process(None), status="stopped", recovery=False))
            return True
        if await drained.is_over(self._bus, file):
            return True  # who drains it, or deletes it, asks for the rest
        if code != 0 or not await drained.drained_itself(self._bus, file):
            return False
        async with sandbox.lock:
            if sandbox.watcher is asyncio.current_task():
                sandbox.watcher = None  # this task: it is not to be cancelled by what it begins
                killed = await self._end_rest(sandbox, file)
                _log.info("sandbox_drained_itself", **self._named(sandbox), killed=killed)
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

    async def _registration(self, file: SandboxFile) -> Registration | None:
        """Raises NotReadyError."""
        assert self._bus is not None, "a provider without a bus only stops"
        key = subjects.registration_key(file.tenant, file.workspace, file.sandbox)
        try:
            return await Bucket(self._bus, subjects.SANDBOXES).record(key, Registration)
        except BusError as error:
            raise NotReadyError(f"registrations cannot be read: {error}") from None

    async def _registered(self, sandbox: _Sandbox, file: SandboxFile, *, not_instance: str | None) -> Registration:
        """Until the collector's registration is there, of another instance than `not_instance`. Raises NotReadyError,
        ProvisionError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.agent_ready_wait_s
        pause_s = _POLL_MIN_S
        while True:
            found = await self._registration(file)
            if found is not None and found.boot == file.boot and found.instance != not_instance and sandbox.alive:
                sandbox.early_exits = 0
                await self._note_used(sandbox, file)
                return found
            self._check_hope(sandbox)
            if loop.time() > deadline_s:
                raise NotReadyError("the collector has not registered yet")
            await asyncio.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)

    async def _note_used(self, sandbox: _Sandbox, file: SandboxFile) -> None:
        """Before anything is started in it: from now on an empty directory is a volume that is away."""
        async with sandbox.lock:
            current = sandbox.file
            if current is not None and current.boot == file.boot and not current.used:
                self._note(sandbox, replace(current, used=True))

    def _check_hope(self, sandbox: _Sandbox) -> None:
        """Raises ProvisionError, or NotReadyError where another start may end otherwise."""
        if not sandbox.refused and sandbox.early_exits < EARLY_EXITS_MAX:
            return
        log = sandbox_file.folder_of(self._state_dir, sandbox.tenant, sandbox.workspace) / "collector.log"
        reason = sandbox.refused or f"the collector ended {sandbox.early_exits} times before it was ready"
        _log.error("sandbox_impossible", **self._named(sandbox), reason=reason, tail=collector_process.tail_of(log))
        file = sandbox.file
        failure = None if file is None else drained.restore_failure(Path(file.directory), file.boot)
        if failure is not None and failure.retryable:
            raise NotReadyError(failure.detail)
        detail = f"{reason}; its log is {log}"
        raise ProvisionError(failure or problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False))

    async def _ends_by_itself(self, sandbox: _Sandbox) -> bool:
        """Whether a drained collector has ended within DRAINED_END_S."""
        process = sandbox.process
        assert process is not None
        self._cancel_watcher(sandbox)  # there is one waiter at a time, and no restart
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
        self._cancel_watcher(sandbox)  # there is one waiter at a time, and no restart
        process.signal(HAND_OVER)
        try:
            async with asyncio.timeout(COLLECTOR_END_S):
                await process.wait()
        except TimeoutError:
            _log.warning("collector_killed", collector=process.identity.pid)
            process.signal(signal.SIGKILL)
            await process.wait()

    # --- small things ---

    def _sandbox(self, tenant: str, workspace: str) -> _Sandbox:
        found = self._sandboxes.get((tenant, workspace))
        if found is None:
            found = self._sandboxes[tenant, workspace] = _Sandbox(tenant, workspace, asyncio.Lock())
        return found

    def _forget(self, sandbox: _Sandbox) -> None:
        """Let go of a collector that has ended, whether its watcher has noticed or not."""
        self._cancel_watcher(sandbox)
        process, sandbox.process = sandbox.process, None
        if process is not None:
            procfs.reap(process.identity.pid)
            process.close()

    def _cancel_watcher(self, sandbox: _Sandbox) -> None:
        watcher, sandbox.watcher = sandbox.watcher, None
        if watcher is not None:
            watcher.cancel()

    def _note(self, sandbox: _Sandbox, file: SandboxFile) -> None:
        sandbox_file.write(self._state_dir, file)
        sandbox.file = file

    @staticmethod
    def _named(sandbox: _Sandbox) -> dict[str, str]:
        return {"tenant": sandbox.tenant, "workspace": sandbox.workspace}

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
