"""Sandboxes as pods: one AgentTask per workspace, whose compute is asked for here and made by the operator.

    (none) ── ensure ──▶ starting ── Secret, then annotations ──▶ running ──┐ status.ended of this boot
                            ▲                                       │       └─ the kubelet's word on it ─┐
                            └── ensure ── stopped ◀── stop, release ┘                                    │
                                             ▲                    all is told                            ▼
                                             └────────────────────────────── recovery ◀── (core/container.py)

It is the life of the provider `docker` with the operator between: a pod is never started a second time, so each has a
boot of its own, and what the one before left untold is told by a collector that starts nothing.

What is known of an end is what the operator wrote into `status.ended` (the kubelet's report, or an out-of-service taint
of the node). A task that is gone, a pod that is gone, an API that does not answer: none of these ends anything. The
race: a task that is deleted by its user. The operator drains it first, over the same requests as everybody, and lets it
go after; the sandbox's record says by then that it is deleted.

The boot is written down before it is asked for, and stands in the task's annotations: who comes after a crash finds
either, and asks again for the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from tether import kube, tracing
from tether.errors import InvalidError
from tether.kube import AgentTaskSpec, WorkspaceSpec
from tether.ports import Bus
from tether_agent import metrics
from tether_agent.agents import AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.core import container as core
from tether_agent.core.container import End
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
from tether_agent.providers.docker_file import DockerFile
from tether_agent.providers.kube_engine import Kube, KubeError, Task

LOOK_S: Final = 1.0  # one list for all sandboxes
END_S: Final = 90.0  # of a pod that was asked to end: its grace, then the kubelet's report
RECOVER_MIN_S: Final = 0.5
RECOVER_MAX_S: Final = 60.0
_POLL_MIN_S: Final = 0.1
_POLL_MAX_S: Final = 1.0
_log = structlog.get_logger("tether_agent")


@dataclass(slots=True)
class _Sandbox(Sandbox[DockerFile]):
    """`seen`: its task asks for this boot, and nobody says that it is over."""

    seen: bool = False
    recoveries: int = 0

    @property
    def alive(self) -> bool:
        return self.seen


class KubernetesProvider(BaseProvider[DockerFile, _Sandbox]):
    """See the module's docstring. `DockerFile.container` is the task's name, `volume` its claim."""

    name = "kubernetes"
    poll_max_s = 0.5

    def __init__(self, settings: AgentSettings, agents: AgentsFile, environment: Environment, bus: Bus | None) -> None:
        super().__init__(settings, agents, environment, bus)
        self._kube = Kube(settings.kubernetes_namespace, settings.kubernetes_kubeconfig)
        self._tasks: dict[tuple[str, str], Task] = {}
        self._away = False

    # --- life ---

    @contextlib.asynccontextmanager
    async def running(self, *, restart: bool = True) -> AsyncIterator[None]:
        """Raises KubeError, too, where the API cannot be asked what there is."""
        async with self._kube.connected(), super().running(restart=restart):
            yield

    async def _attend(self, group: asyncio.TaskGroup, *, restart: bool) -> Sequence[asyncio.Task[None]]:
        for file in docker_file.read_all(self._state_dir):
            self._sandbox(file.tenant, file.workspace).file = file
        await self._list()
        for key, task in self._tasks.items():
            sandbox = self._sandbox(*key)
            if sandbox.file is None and task.boot and task.asked:
                self._note(sandbox, self._of_task(task))  # what was written down is lost: the task says it, too
            self._see(sandbox)
        return (group.create_task(self._watch(restart), name="agent-tasks", context=tracing.detached()),)

    def _of_task(self, task: Task) -> DockerFile:
        made = self._following(None, task, restore=task.annotations.get(kube.RESTORE))
        recovery = task.annotations.get(kube.RECOVERY) == "true"
        return replace(made, boot=task.boot, status="running", used=True, recovery=recovery)

    async def _list(self) -> None:
        """Where two tasks name one workspace, one is it, that with a boot first; the other stays pending."""
        found: dict[tuple[str, str], Task] = {}
        for task in sorted(await self._kube.tasks(), key=lambda one: (not one.boot, one.name)):
            found.setdefault((task.tenant, task.workspace), task)
        self._tasks = found

    async def _watch(self, restart: bool) -> None:
        while True:
            try:
                await self._list()
            except KubeError as error:
                if not self._away:
                    _log.warning("kubernetes_away", reason=str(error))
                self._away = True  # nothing follows from that: what runs runs on
            else:
                self._away = False
                for sandbox in list(self._sandboxes.values()):
                    self._attend_to(sandbox, restart)
            await asyncio.sleep(LOOK_S)

    def _attend_to(self, sandbox: _Sandbox, restart: bool) -> None:
        file = sandbox.file
        if file is None or sandbox.lock.locked() or file.status == "stopped":
            return
        self._see(sandbox)
        if not sandbox.alive and restart and self._group is not None and (sandbox.task is None or sandbox.task.done()):
            self._follow_by(sandbox, self._follow)

    def _see(self, sandbox: _Sandbox) -> None:
        file, task = sandbox.file, self._tasks.get((sandbox.tenant, sandbox.workspace))
        sandbox.seen = (
            file is not None
            and file.status == "running"
            and task is not None
            and task.boot == file.boot
            and task.proof(file.boot) is None
        )

    # --- the end of a pod ---

    async def _follow(self, sandbox: _Sandbox) -> None:
        try:
            async with sandbox.lock:
                file = sandbox.file
                if file is None or file.status == "stopped":
                    return
                if file.status == "starting":
                    await self._ask(sandbox)  # who wrote it down did not come to ask for it
                    return
                if file.status == "running":
                    await self._ended(sandbox)
                recover = sandbox.file is not None and sandbox.file.status in ("unfinished", "lost")
            if recover:
                await asyncio.sleep(min(RECOVER_MAX_S, RECOVER_MIN_S * float(2 ** min(sandbox.recoveries, 10))))
                async with sandbox.lock:
                    if sandbox.file is not None and sandbox.file.status in ("unfinished", "lost"):
                        self._hold.check()
                        await self._start(sandbox, recovery=True)
        except (NotReadyError, ProvisionError) as error:
            _log.warning("sandbox_not_followed", **sandbox.named, reason=str(error))

    async def _ended(self, sandbox: _Sandbox) -> None:
        """Write down what the end of the pod means. The lock is held. Raises NotReadyError where there is no proof."""
        file = sandbox.file
        assert file is not None
        end = await self._end_of(file)
        released = await drained.is_over(self._bus, file)
        told = end is not None and end.code == 0 and await drained.drained_itself(self._bus, file)
        follows = core.after(end, used=file.used, recovery=file.recovery, released=released, drained=told)
        status: sandbox_file.Status = "stopped"
        match follows:
            case core.Unproven():
                raise NotReadyError(f"nobody has proven the end of boot {file.boot}")
            case core.Failed(reason):
                sandbox.refused = refusal(reason)
            case core.Recover():
                status = "unfinished"
                sandbox.recoveries = sandbox.recoveries + 1 if file.recovery else 0
            case core.Stopped():
                pass
        assert end is not None
        _log.warning("pod_ended", **sandbox.named, code=end.code, proof=end.proof, then=status)
        metrics.collector_ends.inc()
        await self._close(sandbox, status, end)

    async def _end_of(self, file: DockerFile) -> End | None:
        """How it is known that nothing of this boot lives. Raises KubeError."""
        if file.proof:
            return End(file.proof, None)
        task = await self._kube.task(file.container)
        if task is None:
            return None  # that it is gone proves nothing
        if task.boot != file.boot:
            return End(f"boot {file.boot} was never asked for", None) if file.status == "starting" else None
        found = task.proof(file.boot)
        return None if found is None else End(*found)

    async def _close(self, sandbox: _Sandbox, status: sandbox_file.Status, end: End) -> None:
        file = sandbox.file
        assert file is not None
        sandbox.seen = False
        over = status == "stopped"
        self._note(sandbox, replace(file, status=status, proof=end.proof, recovery=False, used=file.used and not over))
        with contextlib.suppress(KubeError):  # it goes with its task at the latest
            await self._kube.drop_secret(file.container, file.boot)

    async def _volume_there(self, file: DockerFile) -> bool:
        return True  # a pod whose volume is away does not start, and that is seen

    def _is_awaited(self, file: DockerFile) -> bool:
        return file.status in ("unfinished", "lost")

    async def _proof_of_end(self, file: DockerFile) -> str | None:
        return file.proof or None

    async def _volume_back(self, sandbox: _Sandbox) -> str | None:
        return None

    # --- the port ---

    async def _bring_up(self, sandbox: _Sandbox, restore: str | None) -> None:
        await self._list()
        self._see(sandbox)
        if sandbox.alive:
            return
        sandbox.refused = None
        file = sandbox.file
        if file is not None and file.status == "starting":
            await self._ask(sandbox)
            return
        if file is not None and file.status == "running":
            await self._ended(sandbox)
            file = sandbox.file
        if file is not None and file.status == "unfinished":
            raise NotReadyError("what ran in the sandbox before is not told yet")
        self._hold.check()
        await self._start(sandbox, restore=restore)

    async def _start(self, sandbox: _Sandbox, *, recovery: bool = False, restore: str | None = None) -> None:
        """A new boot. The lock is held. Raises NotReadyError."""
        key = (sandbox.tenant, sandbox.workspace)
        task = self._tasks.get(key) or await self._make(*key)
        if task.deleting:
            raise NotReadyError(f"AgentTask {task.name} is being deleted")
        file = replace(self._following(sandbox.file, task, restore=restore), recovery=recovery)
        self._note(sandbox, file)
        await self._ask(sandbox)

    async def _make(self, tenant: str, workspace: str) -> Task:
        spec = AgentTaskSpec(
            tenant=tenant,
            workspace=WorkspaceSpec(name=workspace, size=self._settings.kubernetes_workspace_size),
        )
        return await self._kube.make_task(kube.task_name(tenant, workspace), spec)

    def _following(self, before: DockerFile | None, task: Task, *, restore: str | None) -> DockerFile:
        named = (task.tenant, task.workspace, "", task.spec.workspace.claim or kube.claim_name(task.name))
        file = docker_file.following(before, *named, restore=restore or None, now_s=int(time.time()))
        return replace(file, container=task.name)

    async def _ask(self, sandbox: _Sandbox) -> None:
        """For the pod of the boot that is written down: its Secret first, so that the pod finds it. Idempotent. The
        lock is held."""
        file = sandbox.file
        assert file is not None
        task = await self._kube.task(file.container)
        if task is None:
            raise NotReadyError(f"AgentTask {file.container} is gone")
        await self._kube.put_secret(task, file.boot, await self._files(task, file))
        wanted = {
            kube.BOOT: file.boot,
            kube.COMPUTE: "run",
            kube.RESTORE: file.restore or None,
            kube.RECOVERY: "true" if file.recovery else None,
        }
        await self._kube.annotate(task.name, wanted)
        self._note(sandbox, replace(file, status="running"))
        sandbox.seen = True
        metrics.collector_starts.inc()
        _log.info("pod_asked", **sandbox.named, task=task.name, boot=file.boot, recovery=file.recovery)

    async def _files(self, task: Task, file: DockerFile) -> dict[str, str]:
        """What the collector is told, with the keys of the task's own Secret for its agent. Raises NotReadyError."""
        access: BusAccess = await self._admit(file)
        files = docker_spec.files(self._settings, self._agents, file, self._environment, self._facts(file), access)
        named = task.spec.agent.model_secret
        if named is not None and not file.recovery:
            keys = await self._kube.secret(named)
            if keys is None:
                raise NotReadyError(f"Secret {named}, spec.agent.modelSecret of {task.name}, is not there")
            variables: dict[str, dict[str, str]] = json.loads(files["agent-env.json"])
            kinds = set(self._agents.agents) | {task.spec.agent.kind}
            told = {kind: {**variables.get(kind, {}), **keys} for kind in kinds}
            files["agent-env.json"] = json.dumps(variables | told)
        return files

    async def _end(self, sandbox: _Sandbox) -> int:
        file = sandbox.file
        assert file is not None
        if file.status not in ("starting", "running"):
            return 0
        if self._bus is not None and sandbox.alive:
            await executions.stop_all(self._bus, file)
        end = await self._make_end(file)
        await self._close(sandbox, "stopped" if end.code == 0 or not file.used else "unfinished", end)
        return 0 if end.code == 0 else 1

    async def _make_end(self, file: DockerFile) -> End:
        """Ask that nothing runs, and wait for the kubelet's word. Raises NotReadyError."""
        with contextlib.suppress(KubeError):
            await self._kube.annotate(file.container, {kube.COMPUTE: "stop"})
        deadline_s, pause_s = asyncio.get_running_loop().time() + END_S, _POLL_MIN_S
        while (end := await self._end_of(file)) is None:
            if asyncio.get_running_loop().time() > deadline_s:
                raise NotReadyError(f"the pod of boot {file.boot} has not ended, or nobody has proven it")
            await asyncio.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)
        return end

    async def _release(self, sandbox: _Sandbox) -> Gone | None:
        file = sandbox.file
        assert file is not None
        if file.proof:
            return Gone(file.proof)
        end = await self._make_end(file)
        await self._close(sandbox, "stopped", end)
        return Gone(end.proof, 0 if end.code == 0 else 1)

    async def manifest(self, tenant: str, workspace: str, checkpoint: str) -> bytes | None:
        return None  # the volume is not to be reached from here; the blobs are

    async def _replace(self, sandbox: _Sandbox) -> None:
        """The pod's entry process replaces its collector on SIGHUP, which the API cannot send."""
        raise ProvisionError(refusal("a collector in a pod is replaced by suspending and resuming its sandbox"))

    def assign(self, tenant: str, workspace: str, path: str) -> str:
        raise InvalidError("path", "is not for Kubernetes: name a claim in spec.workspace.claim of an AgentTask")

    async def _hand_over(self, tenant: str, workspace: str, credentials: str) -> None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or not sandbox.alive:
            return
        try:
            async with sandbox.lock:
                task = await self._kube.task(sandbox.file.container)
                if task is not None:
                    await self._kube.put_secret(task, sandbox.file.boot, await self._files(task, sandbox.file))
        except NotReadyError as error:
            _log.warning("credentials_not_handed_over", **sandbox.named, reason=str(error))

    async def _check_hope(self, sandbox: _Sandbox, file: DockerFile) -> None:
        if sandbox.refused is not None:
            raise hopeless(sandbox.refused)
        current = sandbox.file
        if current is None or current.boot != file.boot or current.status not in ("starting", "running"):
            raise NotReadyError("the pod has ended")

    # --- small things ---

    def _new(self, tenant: str, workspace: str) -> _Sandbox:
        return _Sandbox(tenant, workspace)

    def _note(self, sandbox: _Sandbox, file: DockerFile) -> None:
        docker_file.write(self._state_dir, file)
        sandbox.file = file
        self._noted(file)

    def _facts(self, file: DockerFile) -> Mapping[str, Any]:
        found = {
            "provider": "kubernetes",
            "boot": file.boot,
            "task": f"{self._settings.kubernetes_namespace}/{file.container}",
            "directory": f"claim {file.volume}",
            "key_sources": dict(self._environment.sources),
        }
        return {**found, "before": file.before} if file.before else found
