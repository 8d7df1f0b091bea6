"""Sandboxes as containers: one per workspace, its first process an init over the collector, the workspace a volume.

    (none) ── ensure ──▶ starting ── created, started, files handed over ──▶ running ──┐ container ends
                            ▲                                                │         └─ engine's word on it ─┐
                            └── ensure ── stopped ◀── stop, release, drained ┘                                 │
                                             ▲                    all is told                                  ▼
                                             └──────────────────────────────────── recovery ◀── (core/container.py)

A collector that crashes is restarted inside, under living CLIs, by that init, which also hands over on SIGHUP
(`restart_collector`), drains on SIGTERM (`docker stop`) and ends on SIGUSR1 (`stop`). A container is never started a
second time: with it everything in it ends, so each has a boot of its own, and what the one before left untold is told
by a collector that starts nothing.

Containers are known by their labels; the engine refuses a second one of a workspace's name. The service adopts what it
finds after a restart, and leaves alone what is not labelled as its own. The race: a crash between creating a container
and writing its id down. Its boot was written down before and stands in its labels. The engine's word on an end is
written down before the container is removed; without that word (core/container.py) nothing is taken for ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from tether import subjects, tracing
from tether.checkpoint import FOLDER
from tether.errors import BusError, Code, problem
from tether.kv import Bucket
from tether.limits import CHECKPOINT_MANIFEST_BYTES_MAX
from tether.ports import Bus
from tether.processes import machine_boot
from tether.sandbox import Registration
from tether_agent import metrics
from tether_agent.agents import AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.core import container as core
from tether_agent.core import lost
from tether_agent.core.container import Container, End
from tether_agent.providers import (
    Compute,
    Gone,
    NotReadyError,
    ProvisionError,
    Restarted,
    Status,
    Stopped,
    docker_file,
    docker_spec,
    drained,
    executions,
    sandbox_file,
    state_dir,
)
from tether_agent.providers import lost as lost_executions
from tether_agent.providers.docker_engine import Engine, EngineError, ImageMissingError
from tether_agent.providers.docker_file import DockerFile
from tether_agent.providers.workspaces import Workspaces

LOOK_S: Final = 0.5  # one request for all sandboxes
RUN_LOOKS: Final = 20  # every so many looks each container is asked whether it is the same run
END_S: Final = 45.0  # of a container that was told to end: hand-over, then the keepers' own escalation
DRAINED_END_S: Final = 10.0  # a drained one ends by itself within
KILLED_S: Final = 10.0
RECOVER_MIN_S: Final = 0.5
RECOVER_MAX_S: Final = 60.0
VOLUME_LOOK_S: Final = 2.0
_POLL_MIN_S: Final = 0.02
_POLL_MAX_S: Final = 0.25
_log = structlog.get_logger("tether_agent")


@dataclass(slots=True)
class _Sandbox:
    """One workspace's sandbox. `lock` is held over start, stop and what follows an end; `chore` is the task of the
    latter. `alive` is what the last look at the engine said."""

    tenant: str
    workspace: str
    lock: asyncio.Lock
    file: DockerFile | None = None
    alive: bool = False
    chore: asyncio.Task[None] | None = None
    recoveries: int = 0  # in a row, that ended without telling everything
    refused: str = ""  # why its container never had a ready collector


class DockerProvider:
    """See the module's docstring. `bus` is asked for registrations, records and references."""

    name = "docker"

    def __init__(self, settings: AgentSettings, agents: AgentsFile, environment: Environment, bus: Bus | None) -> None:
        self._settings = settings
        self._agents = agents
        self._environment = environment
        self._bus = bus
        self._state_dir = settings.agent_state_dir
        self._sandboxes: dict[tuple[str, str], _Sandbox] = {}
        self._workspaces: Workspaces | None = None
        self._group: asyncio.TaskGroup | None = None
        self._engine = Engine(settings.docker_prefix)
        self._engine_away = False

    # --- life ---

    @contextlib.asynccontextmanager
    async def running(self, *, restart: bool = True) -> AsyncIterator[None]:
        """Hold the state directory, adopt, watch. Raises RuntimeError where another agent service holds it, EngineError
        where the engine cannot be asked what runs. Without `restart` what has ended stays so."""
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with await state_dir.hold(self._state_dir), contextlib.closing(self._engine):
            self._workspaces = Workspaces(self._settings.agent_workspaces_dir, self._state_dir)
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._adopt_all()
                watching = group.create_task(self._watch(restart), name="containers", context=tracing.detached())
                try:
                    yield
                finally:
                    self._group = None
                    watching.cancel()
                    for sandbox in self._sandboxes.values():
                        if sandbox.chore is not None:
                            sandbox.chore.cancel()

    async def _adopt_all(self) -> None:
        for file in docker_file.read_all(self._state_dir):
            self._sandbox(file.tenant, file.workspace).file = file
        files = [one.file for one in self._sandboxes.values() if one.file is not None]
        for found in await self._engine.ours([file.container for file in files if file.container]):
            told = docker_spec.of_container(found)
            sandbox = self._sandbox(told.tenant, told.workspace)
            async with sandbox.lock:
                await self._adopt(sandbox, found)

    async def _adopt(self, sandbox: _Sandbox, found: Container) -> None:
        """Take up a container of this workspace, as written down or by its labels. The lock is held."""
        file = sandbox.file
        if file is None or (not file.container and file.boot != found.label(f"{docker_spec.LABEL}boot")):
            if file is not None and file.status in ("starting", "running"):
                return  # another boot's: the name tells who comes first
            file = docker_spec.of_container(found)
        if file.container and file.container != found.id:
            return
        if file.status in ("stopped", "lost"):
            return
        if found.lives and file.status == "running":
            sandbox.alive = not file.started_at or found.started_at == file.started_at
            self._note(sandbox, replace(file, container=found.id, started_at=file.started_at or found.started_at))
        else:
            self._note(sandbox, replace(file, container=found.id))
            if found.status == "created" or found.lives:
                await self._complete(sandbox, found.id)  # whoever created it did not come to its end
        _log.info("sandbox_adopted", **_named(sandbox), alive=sandbox.alive)

    async def _watch(self, restart: bool) -> None:
        """The task that sees containers end, whoever ended them."""
        looks = 0
        while True:
            looks += 1
            try:
                await self._look(restart, runs=looks % RUN_LOOKS == 0)
            except EngineError as error:
                if not self._engine_away:
                    _log.warning("engine_away", reason=str(error))
                self._engine_away = True  # nothing follows from that: what runs runs on
            else:
                self._engine_away = False
            await asyncio.sleep(LOOK_S)

    async def _look(self, restart: bool, *, runs: bool) -> None:
        seen = await self._engine.living()
        for sandbox in list(self._sandboxes.values()):
            file = sandbox.file
            if file is None or sandbox.lock.locked() or file.status == "stopped":
                continue
            alive = file.status == "running" and seen.get(file.container, "") in core.LIVING
            if alive and runs:
                found = await self._engine.inspect(file.container)
                alive = found is not None and found.lives and found.started_at == file.started_at
            if sandbox.lock.locked() or sandbox.file is not file:
                continue
            sandbox.alive = alive
            if not alive and restart and (sandbox.chore is None or sandbox.chore.done()):
                self._begin(sandbox, self._follow)

    def _begin(self, sandbox: _Sandbox, chore: Callable[[_Sandbox], Coroutine[Any, Any, None]]) -> None:
        if self._group is None:
            return
        name = f"sandbox-{sandbox.tenant}.{sandbox.workspace}"
        sandbox.chore = self._group.create_task(chore(sandbox), name=name, context=tracing.detached())

    # --- the end of a container ---

    async def _follow(self, sandbox: _Sandbox) -> None:
        """The task that does what follows a container's end."""
        try:
            async with sandbox.lock:
                file = sandbox.file
                if file is None or file.status == "stopped":
                    return
                if file.status in ("starting", "running"):
                    await self._ended(sandbox)
                file = sandbox.file
                volume = file is not None and await self._volume_there(file)
                recover = file is not None and file.status in ("unfinished", "lost")
            if not recover:
                return
            if volume:
                await asyncio.sleep(min(RECOVER_MAX_S, RECOVER_MIN_S * float(2 ** min(sandbox.recoveries, 10))))
                await self._recover(sandbox)
            else:
                await self._await_volume(sandbox)
        except (EngineError, NotReadyError, ProvisionError) as error:
            _log.warning("sandbox_not_followed", **_named(sandbox), reason=str(error))

    async def _ended(self, sandbox: _Sandbox) -> None:
        """Write down what the end of the container means, and remove it. The lock is held. Raises NotReadyError where
        there is no proof of an end, EngineError."""
        file = sandbox.file
        assert file is not None
        if file.status == "starting" and await self._continued(sandbox, file):
            return
        end = await self._end(file)
        released = await drained.is_over(self._bus, file)
        told = end is not None and end.code == 0 and await drained.drained_itself(self._bus, file)
        follows = core.after(end, used=file.used, recovery=file.recovery, released=released, drained=told)
        match follows:
            case core.Unproven():
                await self._refresh(sandbox)
                raise NotReadyError("the container is not to be found, and the engine did not see it end")
            case core.Failed(reason):
                sandbox.refused = reason
                await self._tell_log(sandbox, reason)
                status: sandbox_file.Status = "stopped"
            case core.Recover():
                status = "unfinished"
                sandbox.recoveries = sandbox.recoveries + 1 if file.recovery else 0
            case core.Stopped():
                status = "stopped"
        assert end is not None
        _log.warning("container_ended", **_named(sandbox), code=end.code, proof=end.proof, then=status)
        metrics.collector_ends.inc()
        await self._close(sandbox, status, end)

    async def _continued(self, sandbox: _Sandbox, file: DockerFile) -> bool:
        """Whether a start that broke off could be brought to its end. The lock is held. Raises EngineError."""
        name = docker_spec.container_name(self._settings.docker_prefix, file.tenant, file.workspace)
        found = await self._engine.inspect(name)
        mine = found is not None and found.label(f"{docker_spec.LABEL}boot") == file.boot
        if found is None or not mine or not (found.lives or found.status == "created"):
            return False
        self._note(sandbox, replace(file, container=found.id))
        await self._complete(sandbox, found.id)
        return True

    async def _refresh(self, sandbox: _Sandbox) -> None:
        """It may live after all. The lock is held."""
        file = sandbox.file
        assert file is not None
        found = await self._engine.inspect(file.container) if file.container else None
        sandbox.alive = found is not None and found.lives

    async def _end(self, file: DockerFile) -> End | None:
        """How it is known that nothing of this boot lives. Raises EngineError."""
        if file.proof:
            return End(file.proof, None)
        name = file.container or docker_spec.container_name(self._settings.docker_prefix, file.tenant, file.workspace)
        seen = await self._engine.inspect(name)
        if not file.container and (seen is None or seen.label(f"{docker_spec.LABEL}boot") != file.boot):
            return End(f"no container of boot {file.boot} was ever created", None)
        id_ = file.container or (seen.id if seen is not None else "")
        died = await self._engine.died(id_, file.created_s) if seen is None else None
        rebooted = docker_spec.local_engine() and file.machine_boot != machine_boot()
        return core.end_of(id_, file.started_at, seen, died, rebooted)

    async def _close(self, sandbox: _Sandbox, status: sandbox_file.Status, end: End) -> None:
        """Its container has ended: that is written down, then it is removed."""
        file = sandbox.file
        assert file is not None
        sandbox.alive = False
        over = status == "stopped"
        noted = replace(file, status=status, proof=end.proof, recovery=False, used=file.used and not over)
        self._note(sandbox, noted)
        if file.container:
            found = await self._engine.inspect(file.container)
            if found is not None and found.lives:  # started anew by somebody: nothing that we know of runs in it
                await self._engine.signal(file.container, "KILL")
                await self._wait_end(file, KILLED_S)
            await self._engine.remove(file.container)

    async def _recover(self, sandbox: _Sandbox) -> None:
        async with sandbox.lock:
            if sandbox.file is not None and sandbox.file.status in ("unfinished", "lost") and self._group is not None:
                await self._start(sandbox, recovery=True)

    async def _await_volume(self, sandbox: _Sandbox) -> None:
        """Until the volume is back, or what ran was closed without it."""
        state, said = lost.Lost(), ""
        while True:
            async with sandbox.lock:
                file = sandbox.file
                if file is None or file.status not in ("unfinished", "lost"):
                    return
                now_s, there = asyncio.get_running_loop().time(), await self._volume_there(file)
                look = lost.Look(now_s, there, file.proof or None, file.status == "lost")
                state, decision = lost.decide(state, look, self._settings.agent_volume_wait_s)
                if isinstance(decision, lost.Tell):
                    return  # the next look begins its recovery
                closing = isinstance(decision, lost.Close)
                if closing and await lost_executions.close_all(self._asked(), file.tenant, file.workspace, file.proof):
                    self._note(sandbox, replace(file, status="lost"))
            if isinstance(decision, lost.Wait) and decision.reason != said:
                said = decision.reason
                _log.warning("volume_awaited", **_named(sandbox), reason=said)
            await asyncio.sleep(VOLUME_LOOK_S)

    # --- the port ---

    async def ensure(self, tenant: str, workspace: str, restore: str | None = None) -> Compute:
        sandbox = self._sandbox(tenant, workspace)
        try:
            async with sandbox.lock:
                await self._ensure(sandbox, restore)
                file = sandbox.file
        except EngineError as error:
            raise NotReadyError(str(error)) from None
        assert file is not None
        if file.recovery:
            raise NotReadyError("what ran in the sandbox before is being told")
        await self._registered(sandbox, file, not_instance=None)
        return Compute(tenant, workspace, file.sandbox, file.boot, self._facts(file))

    async def _ensure(self, sandbox: _Sandbox, restore: str | None) -> None:
        """A container that lives, or is being started. The lock is held."""
        if sandbox.alive:
            return
        sandbox.refused = ""
        file = sandbox.file
        if file is not None and file.status in ("starting", "running"):
            await self._refresh(sandbox)
            if sandbox.alive:
                return
            await self._ended(sandbox)
            file = sandbox.file
        if file is not None and file.status == "unfinished":
            raise NotReadyError("what ran in the sandbox before is not told yet")
        await self._start(sandbox, restore=restore)

    async def stop(self, tenant: str, workspace: str) -> Stopped | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or sandbox.file.status in ("stopped", "lost"):
            return None
        async with sandbox.lock:
            file = sandbox.file
            if file.status in ("starting", "running"):
                if self._bus is not None and sandbox.alive:
                    await executions.stop_all(self._bus, file)
                end = await self._make_end(sandbox, file)
                await self._close(sandbox, "stopped" if end.code == 0 or not file.used else "unfinished", end)
                killed = 0 if end.code == 0 else 1
            else:
                killed = 0
        _log.info("sandbox_stopped", **_named(sandbox), killed=killed)
        return Stopped(tenant, workspace, killed)

    async def _make_end(self, sandbox: _Sandbox, file: DockerFile) -> End:
        """End the container, without a drain. The lock is held. Raises NotReadyError where that cannot be proven."""
        for signal, wait_s in (("USR1", END_S), ("KILL", KILLED_S)):
            if file.container:
                await self._engine.signal(file.container, signal)
            end = await self._wait_end(file, wait_s)
            if end is not None:
                return end
            _log.warning("container_stays", **_named(sandbox), signal=signal)
        raise NotReadyError("the container cannot be ended")

    async def _wait_end(self, file: DockerFile, wait_s: float) -> End | None:
        deadline_s, pause_s = asyncio.get_running_loop().time() + wait_s, _POLL_MIN_S
        while (end := await self._end(file)) is None:
            if asyncio.get_running_loop().time() > deadline_s:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)
        return end

    async def release(self, tenant: str, workspace: str, boot: str) -> Gone | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        try:
            async with sandbox.lock:
                file = sandbox.file
                if file.boot != boot:
                    return Gone(f"boot {boot} was followed by boot {file.boot}")
                if not file.proof:
                    end = await self._wait_end(file, DRAINED_END_S) or await self._make_end(sandbox, file)
                    await self._close(sandbox, "stopped", end)
                    _log.info("sandbox_released", **_named(sandbox), proof=end.proof)
                    return Gone(end.proof, 0 if end.code == 0 else 1)
        except EngineError as error:
            raise NotReadyError(str(error)) from None
        return Gone(file.proof)

    async def manifest(self, tenant: str, workspace: str, checkpoint: str) -> bytes | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        file = sandbox.file
        if file.directory:
            return await asyncio.to_thread(drained.read_manifest, Path(file.directory), checkpoint)
        path = f"{FOLDER}/{checkpoint}.json"
        try:
            if not await self._engine.volume_there(file.volume):
                return None
            image = self._settings.docker_image
            return await self._engine.read_file(image, file.volume, path, CHECKPOINT_MANIFEST_BYTES_MAX + 1)
        except (EngineError, ImageMissingError) as error:
            _log.info("manifest_not_read", **_named(sandbox), reason=str(error))
            return None

    async def restart_collector(self, tenant: str, workspace: str) -> Restarted | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or sandbox.file.status not in ("starting", "running"):
            return None
        before = await self._registration(sandbox.file)
        try:
            async with sandbox.lock:
                await self._ensure(sandbox, None)
                file = sandbox.file
                await self._engine.put(file.container, self._files(file))
                await self._engine.signal(file.container, "HUP")
        except EngineError as error:
            raise NotReadyError(str(error)) from None
        old = None if before is None else before.instance
        now = await self._registered(sandbox, file, not_instance=old)
        _log.info("collector_replaced", **_named(sandbox), before=old, instance=now.instance)
        return Restarted(tenant, workspace, file.boot, old, now.instance, now.version)

    async def stop_all(self) -> Sequence[Stopped]:
        """All of them at once, so that the whole takes as long as the slowest."""
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
        docker_spec.user_of(Path(path) if path.startswith("/") else None)
        return str(self._workspaces.assign(tenant, workspace, path, in_use=in_use))

    # --- starting ---

    async def _start(self, sandbox: _Sandbox, *, recovery: bool = False, restore: str | None = None) -> None:
        """Create and start a container. The lock is held. Raises ProvisionError, NotReadyError, EngineError."""
        assert self._workspaces is not None, "the provider does not run"
        tenant, workspace = sandbox.tenant, sandbox.workspace
        directory = self._workspaces.mapped(tenant, workspace)
        name = docker_spec.container_name(self._settings.docker_prefix, tenant, workspace)
        named = (tenant, workspace, "" if directory is None else str(directory), "" if directory else name)
        before = sandbox.file
        file = docker_file.following(before, *named, restore=restore, now_s=int(time.time()))
        file = replace(file, recovery=recovery)
        self._note(sandbox, file)
        try:
            if file.volume and not await self._engine.volume_there(file.volume):
                await self._engine.make_volume(file.volume, docker_spec.labels(self._settings.docker_prefix, file))
            container = await self._create(file, docker_spec.user_of(directory))
        except ImageMissingError:
            self._note(sandbox, replace(file, status="stopped") if before is None else before)
            detail = f"the container engine has no image {self._settings.docker_image}; build or pull it"
            raise ProvisionError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False)) from None
        self._note(sandbox, replace(file, container=container))
        await self._complete(sandbox, container)
        _log.info("container_started", **_named(sandbox), container=container[:12], recovery=recovery)
        metrics.collector_starts.inc()

    async def _create(self, file: DockerFile, user: str) -> str:
        """The id. One that has ended and stands in the way is removed where it is ours."""
        spec = docker_spec.container(self._settings, file, user)
        for _ in range(2):
            try:
                return await self._engine.create(spec)
            except EngineError as error:
                if not error.conflict:
                    raise
                found = await self._engine.inspect(spec["name"])
                ours = found is not None and found.label(f"{docker_spec.LABEL}prefix") == self._settings.docker_prefix
                if found is None or not ours or found.lives:
                    detail = f"a container named {spec['name']} is in the way; end and remove it"
                    raise NotReadyError(detail) from None
                await self._engine.remove(found.id)
        raise NotReadyError(f"the name {spec['name']} is taken again and again")

    async def _complete(self, sandbox: _Sandbox, container: str) -> None:
        """Start it, hand over its files. Idempotent: a crash in between is continued here. The lock is held."""
        file = sandbox.file
        assert file is not None
        await self._engine.start(container)
        await self._engine.put(container, self._files(file))
        found = await self._engine.inspect(container)
        self._note(sandbox, replace(file, status="running", started_at="" if found is None else found.started_at))
        sandbox.alive = found is not None and found.lives

    def _files(self, file: DockerFile) -> dict[str, str]:
        return docker_spec.files(self._settings, self._agents, file, self._environment, self._facts(file))

    # --- registrations ---

    async def _registration(self, file: DockerFile) -> Registration | None:
        """Raises NotReadyError."""
        key = subjects.registration_key(file.tenant, file.workspace, file.sandbox)
        try:
            return await Bucket(self._asked(), subjects.SANDBOXES).record(key, Registration)
        except BusError as error:
            raise NotReadyError(f"registrations cannot be read: {error}") from None

    async def _registered(self, sandbox: _Sandbox, file: DockerFile, *, not_instance: str | None) -> Registration:
        """Until the collector's registration is there, of another instance than `not_instance`. Raises NotReadyError,
        ProvisionError."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + self._settings.agent_ready_wait_s, _POLL_MIN_S
        while True:
            found = await self._registration(file)
            if found is not None and found.boot == file.boot and found.instance != not_instance and sandbox.alive:
                await self._note_used(sandbox, file)
                return found
            if sandbox.refused:
                raise ProvisionError(problem(Code.RUNTIME_UNAVAILABLE, sandbox.refused, retryable=False))
            current = sandbox.file
            if current is None or current.boot != file.boot or current.status not in ("starting", "running"):
                raise NotReadyError("the container has ended")
            if loop.time() > deadline_s:
                raise NotReadyError("the collector has not registered yet")
            await asyncio.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)

    async def _note_used(self, sandbox: _Sandbox, file: DockerFile) -> None:
        """Before anything is started in it: from now on a missing volume is one that is away."""
        async with sandbox.lock:
            current = sandbox.file
            if current is not None and current.boot == file.boot and not current.used:
                self._note(sandbox, replace(current, used=True))

    async def _tell_log(self, sandbox: _Sandbox, reason: str) -> None:
        """Its container is about to be removed, and with it what it wrote."""
        assert sandbox.file is not None
        try:
            tail = await self._engine.log(sandbox.file.container)
        except EngineError as error:
            tail = str(error)
        _log.error("sandbox_impossible", **_named(sandbox), reason=reason, tail=tail)

    # --- small things ---

    async def _volume_there(self, file: DockerFile) -> bool:
        if file.directory:
            return await asyncio.to_thread(sandbox_file.volume_there, file)
        return not file.used or await self._engine.volume_there(file.volume)

    def _sandbox(self, tenant: str, workspace: str) -> _Sandbox:
        found = self._sandboxes.get((tenant, workspace))
        if found is None:
            found = self._sandboxes[tenant, workspace] = _Sandbox(tenant, workspace, asyncio.Lock())
        return found

    def _asked(self) -> Bus:
        assert self._bus is not None, "a provider without a bus only stops"
        return self._bus

    def _note(self, sandbox: _Sandbox, file: DockerFile) -> None:
        docker_file.write(self._state_dir, file)
        sandbox.file = file

    def _facts(self, file: DockerFile) -> Mapping[str, Any]:
        return docker_spec.facts(file, self._settings.docker_image, self._environment)


def _named(sandbox: _Sandbox) -> dict[str, str]:
    return {"tenant": sandbox.tenant, "workspace": sandbox.workspace}
