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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from tether import tracing
from tether.checkpoint import FOLDER, RESTORE_FAILED
from tether.errors import Problem
from tether.limits import CHECKPOINT_MANIFEST_BYTES_MAX
from tether.ports import Bus
from tether.processes import machine_boot
from tether_agent import metrics
from tether_agent.agents import AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.core import container as core
from tether_agent.core.container import Container, End
from tether_agent.providers import (
    Gone,
    NotReadyError,
    ProvisionError,
    docker_file,
    docker_spec,
    drained,
    executions,
    sandbox_file,
)
from tether_agent.providers.base import BaseProvider, Sandbox, hopeless, refusal
from tether_agent.providers.bus_access import BusAccess
from tether_agent.providers.docker_engine import Engine, EngineError, ImageMissingError
from tether_agent.providers.docker_file import DockerFile

LOOK_S: Final = 0.5  # one request for all sandboxes
RUN_LOOKS: Final = 20  # every so many looks each container is asked whether it is the same run
END_S: Final = 45.0  # of a container that was told to end: hand-over, then the keepers' own escalation
DRAINED_END_S: Final = 10.0  # a drained one ends by itself within
KILLED_S: Final = 10.0
RECOVER_MIN_S: Final = 0.5
RECOVER_MAX_S: Final = 60.0
_POLL_MIN_S: Final = 0.02
_POLL_MAX_S: Final = 0.25
_log = structlog.get_logger("tether_agent")


@dataclass(slots=True)
class _Sandbox(Sandbox[DockerFile]):
    """Its task does what follows the end of a container. `seen`: the last look at the engine saw it live."""

    seen: bool = False
    recoveries: int = 0  # in a row, that ended without telling everything

    @property
    def alive(self) -> bool:
        return self.seen


class DockerProvider(BaseProvider[DockerFile, _Sandbox]):
    """See the module's docstring."""

    name = "docker"
    poll_max_s = 0.25

    def __init__(self, settings: AgentSettings, agents: AgentsFile, environment: Environment, bus: Bus | None) -> None:
        super().__init__(settings, agents, environment, bus)
        self._engine = Engine(settings.docker_prefix)
        self._engine_away = False

    # --- life ---

    @contextlib.asynccontextmanager
    async def running(self, *, restart: bool = True) -> AsyncIterator[None]:
        """Raises EngineError, too, where the engine cannot be asked what runs."""
        with contextlib.closing(self._engine):
            async with super().running(restart=restart):
                yield

    async def _attend(self, group: asyncio.TaskGroup, *, restart: bool) -> Sequence[asyncio.Task[None]]:
        await self._adopt_all()
        return (group.create_task(self._watch(restart), name="containers", context=tracing.detached()),)

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
            sandbox.seen = not file.started_at or found.started_at == file.started_at
            self._note(sandbox, replace(file, container=found.id, started_at=file.started_at or found.started_at))
        else:
            self._note(sandbox, replace(file, container=found.id))
            if found.status == "created" or found.lives:
                await self._complete(sandbox, found.id)  # whoever created it did not come to its end
        _log.info("sandbox_adopted", **sandbox.named, alive=sandbox.alive)

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
            sandbox.seen = alive
            if not alive and restart and self._group is not None and (sandbox.task is None or sandbox.task.done()):
                self._follow_by(sandbox, self._follow)

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
        except (NotReadyError, ProvisionError) as error:
            _log.warning("sandbox_not_followed", **sandbox.named, reason=str(error))

    async def _ended(self, sandbox: _Sandbox) -> None:
        """Write down what the end of the container means, and remove it. The lock is held. Raises NotReadyError where
        there is no proof of an end."""
        file = sandbox.file
        assert file is not None
        if file.status == "starting" and await self._continued(sandbox, file):
            return
        end = await self._end_of(file)
        released = await drained.is_over(self._bus, file)
        told = end is not None and end.code == 0 and await drained.drained_itself(self._bus, file)
        follows = core.after(end, used=file.used, recovery=file.recovery, released=released, drained=told)
        match follows:
            case core.Unproven():
                await self._refresh(sandbox)
                raise NotReadyError("the container is not to be found, and the engine did not see it end")
            case core.Failed(reason):
                await self._tell_log(sandbox, reason)
                sandbox.refused = await self._restore_failure(file) or refusal(reason)
                status: sandbox_file.Status = "stopped"
            case core.Recover():
                status = "unfinished"
                sandbox.recoveries = sandbox.recoveries + 1 if file.recovery else 0
            case core.Stopped():
                status = "stopped"
        assert end is not None
        _log.warning("container_ended", **sandbox.named, code=end.code, proof=end.proof, then=status)
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
        sandbox.seen = found is not None and found.lives

    async def _end_of(self, file: DockerFile) -> End | None:
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
        sandbox.seen = False
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
                self._hold.check()
                await self._start(sandbox, recovery=True)

    async def _tell_log(self, sandbox: _Sandbox, reason: str) -> None:
        """Its container is about to be removed, and with it what it wrote."""
        assert sandbox.file is not None
        try:
            tail = await self._engine.log(sandbox.file.container)
        except EngineError as error:
            tail = str(error)
        _log.error("sandbox_impossible", **sandbox.named, reason=reason, tail=tail)

    async def _restore_failure(self, file: DockerFile) -> Problem | None:
        """Why the collector of this boot could not go on from its checkpoint, where that is why it ended."""
        if file.directory:
            return await asyncio.to_thread(drained.restore_failure, Path(file.directory), file.boot)
        data = await self._read(file, RESTORE_FAILED, drained.RESTORE_FAILED_BYTES_MAX)
        return None if data is None else drained.decode_restore_failure(data, file.boot)

    async def _read(self, file: DockerFile, path: str, bytes_max: int) -> bytes | None:
        """A file of the workspace's volume; None where there is none, or the engine cannot say."""
        try:
            if not await self._engine.volume_there(file.volume):
                return None
            return await self._engine.read_file(self._settings.docker_image, file.volume, path, bytes_max)
        except (EngineError, ImageMissingError) as error:
            _log.info("volume_not_read", tenant=file.tenant, workspace=file.workspace, path=path, reason=str(error))
            return None

    async def _volume_there(self, file: DockerFile) -> bool:
        if file.directory:
            return await asyncio.to_thread(sandbox_file.volume_there, file)
        return not file.used or await self._engine.volume_there(file.volume)

    def _is_awaited(self, file: DockerFile) -> bool:
        return file.status in ("unfinished", "lost")

    async def _proof_of_end(self, file: DockerFile) -> str | None:
        return file.proof or None

    async def _volume_back(self, sandbox: _Sandbox) -> str | None:
        return None  # the next look begins its recovery

    # --- the port ---

    async def _bring_up(self, sandbox: _Sandbox, restore: str | None) -> None:
        if sandbox.alive:
            return
        sandbox.refused = None
        file = sandbox.file
        if file is not None and file.status in ("starting", "running"):
            await self._refresh(sandbox)
            if sandbox.alive:
                return
            await self._ended(sandbox)
            file = sandbox.file
        if file is not None and file.status == "unfinished":
            raise NotReadyError("what ran in the sandbox before is not told yet")
        self._hold.check()
        await self._start(sandbox, restore=restore)

    async def _end(self, sandbox: _Sandbox) -> int:
        file = sandbox.file
        assert file is not None
        if file.status not in ("starting", "running"):
            return 0
        if self._bus is not None and sandbox.alive:
            await executions.stop_all(self._bus, file)
        end = await self._make_end(sandbox, file)
        await self._close(sandbox, "stopped" if end.code == 0 or not file.used else "unfinished", end)
        return 0 if end.code == 0 else 1

    async def _make_end(self, sandbox: _Sandbox, file: DockerFile) -> End:
        """End the container, without a drain. The lock is held. Raises NotReadyError where that cannot be proven."""
        for signal, wait_s in (("USR1", END_S), ("KILL", KILLED_S)):
            if file.container:
                await self._engine.signal(file.container, signal)
            end = await self._wait_end(file, wait_s)
            if end is not None:
                return end
            _log.warning("container_stays", **sandbox.named, signal=signal)
        raise NotReadyError("the container cannot be ended")

    async def _wait_end(self, file: DockerFile, wait_s: float) -> End | None:
        deadline_s, pause_s = asyncio.get_running_loop().time() + wait_s, _POLL_MIN_S
        while (end := await self._end_of(file)) is None:
            if asyncio.get_running_loop().time() > deadline_s:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)
        return end

    async def _release(self, sandbox: _Sandbox) -> Gone | None:
        file = sandbox.file
        assert file is not None
        if file.proof:
            return Gone(file.proof)
        end = await self._wait_end(file, DRAINED_END_S) or await self._make_end(sandbox, file)
        await self._close(sandbox, "stopped", end)
        return Gone(end.proof, 0 if end.code == 0 else 1)

    async def manifest(self, tenant: str, workspace: str, checkpoint: str) -> bytes | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        file = sandbox.file
        if file.directory:
            return await asyncio.to_thread(drained.read_manifest, Path(file.directory), checkpoint)
        return await self._read(file, f"{FOLDER}/{checkpoint}.json", CHECKPOINT_MANIFEST_BYTES_MAX + 1)

    async def _replace(self, sandbox: _Sandbox) -> None:
        await self._bring_up(sandbox, None)
        file = sandbox.file
        assert file is not None
        await self._engine.put(file.container, self._files(file, await self._admit(file)))
        await self._engine.signal(file.container, "HUP")

    def assign(self, tenant: str, workspace: str, path: str) -> str:
        docker_spec.user_of(Path(path) if path.startswith("/") else None)
        return super().assign(tenant, workspace, path)

    # --- starting ---

    async def _start(self, sandbox: _Sandbox, *, recovery: bool = False, restore: str | None = None) -> None:
        """Create and start a container. The lock is held. Raises ProvisionError, NotReadyError."""
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
            raise ProvisionError(refusal(detail)) from None
        self._note(sandbox, replace(file, container=container))
        await self._complete(sandbox, container)
        _log.info("container_started", **sandbox.named, container=container[:12], recovery=recovery)
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
        access = await self._admit(file)
        await self._engine.start(container)
        await self._engine.put(container, self._files(file, access))
        found = await self._engine.inspect(container)
        self._note(sandbox, replace(file, status="running", started_at="" if found is None else found.started_at))
        sandbox.seen = found is not None and found.lives

    def _files(self, file: DockerFile, access: BusAccess) -> dict[str, str]:
        return docker_spec.files(self._settings, self._agents, file, self._environment, self._facts(file), access)

    async def _hand_over(self, tenant: str, workspace: str, credentials: str) -> None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or not sandbox.alive:
            return
        try:
            await self._engine.put(sandbox.file.container, {docker_spec.CREDENTIALS: credentials})
        except EngineError as error:
            # The half of their life that is left passes; a collector that is replaced is handed them again.
            _log.warning("credentials_not_handed_over", **sandbox.named, reason=str(error))

    async def _check_hope(self, sandbox: _Sandbox, file: DockerFile) -> None:
        if sandbox.refused is not None:
            raise hopeless(sandbox.refused)
        current = sandbox.file
        if current is None or current.boot != file.boot or current.status not in ("starting", "running"):
            raise NotReadyError("the container has ended")

    # --- small things ---

    def _new(self, tenant: str, workspace: str) -> _Sandbox:
        return _Sandbox(tenant, workspace)

    def _note(self, sandbox: _Sandbox, file: DockerFile) -> None:
        docker_file.write(self._state_dir, file)
        sandbox.file = file
        self._noted(file)

    def _facts(self, file: DockerFile) -> Mapping[str, Any]:
        return docker_spec.facts(file, self._settings.docker_image, self._environment)
