"""What every provider does alike, whatever its sandboxes run in.

    ensure ──▶ lock ▶ hold ▶ bring up ──▶ registered, of this boot ──▶ compute
    its volume is away ──▶ wait ── proven gone, beyond the limit ──▶ lost    (core/lost.py)
           ▲                └── back ──▶ the provider's recovery

Who decides what: core/lost.py decides when what ran is closed without its volume; providers/drained.py whether what has
ended stays down; providers/hold.py whether anything is started now. Here stand the order of those steps, the wait for a
registration (it alone means `ready`) and what is said of a start that failed. The provider itself knows how compute is
made and ended, what proves that nothing of it lives, and where a failed restore left its reason.

The race: whoever waited for a sandbox's lock finds it as another left it. So everything that was read before is looked
at again with the lock held, and a task that follows a sandbox leaves as soon as it is not that sandbox's task any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

import structlog

from tether import subjects, tracing
from tether.deletion import ForgetPayload, Forgotten
from tether.errors import BusError, Code, Problem, problem
from tether.kv import Bucket
from tether.ports import Bus
from tether.sandbox import Registration
from tether_agent.agents import AgentsFile, Environment
from tether_agent.authority import Authority, AuthorityAwayError
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
    state_dir,
)
from tether_agent.providers import lost as lost_executions
from tether_agent.providers.bus_access import BusAccess
from tether_agent.providers.hold import Hold
from tether_agent.providers.sandbox_file import SandboxFile
from tether_agent.providers.workspaces import Workspaces

VOLUME_LOOK_S: Final = 2.0
_POLL_MIN_S: Final = 0.02
_log = structlog.get_logger("tether_agent")

F = TypeVar("F", bound=SandboxFile)


@dataclass(slots=True)
class Sandbox(ABC, Generic[F]):
    """One workspace's sandbox. `lock` is held over start, stop and what follows an end; `task` is the one that does the
    latter. `refused`: why no collector of it gets ready, as long as nothing is started anew."""

    tenant: str
    workspace: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    file: F | None = None
    task: asyncio.Task[None] | None = None
    refused: Problem | None = None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Its collector, or what that runs in, was seen just now."""

    @property
    def ended(self) -> bool:
        """There is nothing of it to end."""
        return self.file is None or self.file.status in ("stopped", "lost")

    @property
    def named(self) -> dict[str, str]:
        return {"tenant": self.tenant, "workspace": self.workspace}

    def drop_task(self) -> None:
        """What followed it does so no more."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


S = TypeVar("S", bound=Sandbox[Any])


class BaseProvider(ABC, Generic[F, S]):
    """See the module's docstring. `bus` is asked for registrations, records and references; without one a provider only
    stops."""

    poll_max_s: float  # between two looks for a registration: whoever wakes a sandbox waits for it

    def __init__(self, settings: AgentSettings, agents: AgentsFile, environment: Environment, bus: Bus | None) -> None:
        self._settings = settings
        self._agents = agents
        self._environment = environment
        self._bus = bus
        self._state_dir = settings.agent_state_dir
        self._sandboxes: dict[tuple[str, str], S] = {}
        self._hold = Hold()
        self._workspaces: Workspaces | None = None
        self._group: asyncio.TaskGroup | None = None
        self._authority: Authority | None = None

    def admit_by(self, authority: Authority | None) -> None:
        """Before it runs: who gives sandboxes their credentials on the bus. Without one they have those that the
        settings name."""
        self._authority = authority

    # --- what a provider has of its own ---

    @abstractmethod
    def _new(self, tenant: str, workspace: str) -> S: ...

    @abstractmethod
    def _note(self, sandbox: S, file: F) -> None:
        """Written down first, then known."""

    @abstractmethod
    def _facts(self, file: F) -> Mapping[str, Any]:
        """What identifies the sandbox, and where its agents' keys came from."""

    @abstractmethod
    async def _attend(self, group: asyncio.TaskGroup, *, restart: bool) -> Sequence[asyncio.Task[None]]:
        """Adopt what runs, begin to watch: tasks that end with the provider."""

    @abstractmethod
    async def _bring_up(self, sandbox: S, restore: str | None) -> None:
        """A collector that lives, or is being started. The lock is held. Raises NotReadyError, ProvisionError."""

    @abstractmethod
    async def _replace(self, sandbox: S) -> None:
        """Let the collector hand over to a new one. The lock is held. Raises NotReadyError, ProvisionError."""

    @abstractmethod
    async def _end(self, sandbox: S) -> int:
        """End all of it; how much had to be killed. The lock is held. Raises NotReadyError."""

    @abstractmethod
    async def _release(self, sandbox: S) -> Gone | None:
        """End what is left of a boot that was drained; None where that cannot be proven yet. The lock is held. Raises
        NotReadyError."""

    @abstractmethod
    async def _volume_there(self, file: F) -> bool: ...

    @abstractmethod
    async def _proof_of_end(self, file: F) -> str | None:
        """How it is known that nothing of it lives, where its volume is away."""

    @abstractmethod
    async def _volume_back(self, sandbox: S) -> str | None:
        """A recovery is begun, or will be by who looks next; else why it cannot be yet. The lock is held."""

    @abstractmethod
    async def _check_hope(self, sandbox: S, file: F) -> None:
        """Of a collector that has not registered yet. Raises ProvisionError where none will, NotReadyError where only
        another start can end otherwise."""

    # --- life ---

    @contextlib.asynccontextmanager
    async def running(self, *, restart: bool = True) -> AsyncIterator[None]:
        """Hold the state directory, adopt, watch. Raises RuntimeError where another agent service holds it. Without
        `restart` what has ended stays so: for who comes only to stop."""
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with await state_dir.hold(self._state_dir):
            self._workspaces = Workspaces(
                self._settings.agent_workspaces_dir, self._state_dir, self._settings.agent_cli_user
            )
            async with asyncio.TaskGroup() as group:
                self._group = group
                tasks: Sequence[asyncio.Task[None]] = ()
                try:
                    async with contextlib.AsyncExitStack() as stack:
                        if self._authority is not None:
                            await stack.enter_async_context(self._authority.running(self._hand_over))
                        tasks = await self._attend(group, restart=restart)
                        if self._authority is not None:
                            living = [key for key, sandbox in self._sandboxes.items() if not sandbox.ended]
                            self._authority.revoke_all_but(living)
                        yield
                finally:
                    self._group = None
                    for task in tasks:
                        task.cancel()
                    for sandbox in self._sandboxes.values():
                        if sandbox.task is not None:
                            sandbox.task.cancel()

    def _follow_by(self, sandbox: S, work: Callable[[S], Coroutine[Any, Any, None]]) -> None:
        """The sandbox's task is this one from now on; who had it cancels it before, or is it."""
        assert self._group is not None, "the provider does not run"
        name = f"sandbox-{sandbox.tenant}.{sandbox.workspace}"
        sandbox.task = self._group.create_task(work(sandbox), name=name, context=tracing.detached())

    # --- the port ---

    async def ensure(self, tenant: str, workspace: str, restore: str | None = None) -> Compute:
        sandbox = self._sandbox(tenant, workspace)
        async with sandbox.lock:
            await self._bring_up(sandbox, restore)
            file: F | None = sandbox.file
        assert file is not None
        if file.recovery:
            raise NotReadyError("what ran in the sandbox before is being told")
        await self._registered(sandbox, file, not_instance=None)
        return Compute(tenant, workspace, file.sandbox, file.boot, self._facts(file))

    async def stop(self, tenant: str, workspace: str) -> Stopped | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.ended:
            return None
        async with sandbox.lock:
            if sandbox.ended:
                return None  # by who held the lock
            killed = await self._end(sandbox)
        _log.info("sandbox_stopped", **sandbox.named, killed=killed)
        return Stopped(tenant, workspace, killed)

    async def release(self, tenant: str, workspace: str, boot: str) -> Gone | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None:
            return None
        async with sandbox.lock:
            file: F = sandbox.file
            if file.boot != boot:
                return Gone(f"boot {boot} was followed by boot {file.boot}")
            gone = await self._release(sandbox)
        if gone is None:
            raise NotReadyError("something of the drained sandbox still lives")
        _log.info("sandbox_released", **sandbox.named, killed=gone.killed, proof=gone.proof)
        return gone

    async def restart_collector(self, tenant: str, workspace: str) -> Restarted | None:
        sandbox = self._sandboxes.get((tenant, workspace))
        if sandbox is None or sandbox.file is None or sandbox.file.status not in ("starting", "running"):
            return None
        before = await self._registration(sandbox.file)
        async with sandbox.lock:
            if sandbox.file.status not in ("starting", "running"):
                return None  # it was ended by who held the lock
            self._hold.check()
            await self._replace(sandbox)
            file: F = sandbox.file
        old = None if before is None else before.instance
        now = await self._registered(sandbox, file, not_instance=old)
        _log.info("collector_replaced", **sandbox.named, before=old, instance=now.instance)
        return Restarted(tenant, workspace, file.boot, old, now.instance, now.version)

    async def stop_all(self) -> Sequence[Stopped]:
        """All of them at once, so that the whole takes as long as the slowest. One that cannot be ended now is told of
        in the log, and keeps no other."""
        with self._hold.stopping():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._stopped(*key), name=f"stop-{'.'.join(key)}")
                    for key in list(self._sandboxes)
                ]
        return [stopped for stopped in (task.result() for task in tasks) if stopped is not None]

    async def _stopped(self, tenant: str, workspace: str) -> Stopped | None:
        try:
            return await self.stop(tenant, workspace)
        except NotReadyError as error:
            _log.error("sandbox_not_stopped", tenant=tenant, workspace=workspace, reason=str(error))
            return None

    async def forget(self, tenant: str, workspace: str, payload: ForgetPayload) -> Forgotten:
        """The volume is not to be reached without a sandbox over it."""
        return Forgotten(clean=False, pending_on="it is deleted when the workspace's sandbox runs next")

    def statuses(self) -> Sequence[Status]:
        found = []
        for sandbox in list(self._sandboxes.values()):  # a scrape asks from its own thread
            file: F | None = sandbox.file
            if file is not None:
                named, stands = (file.tenant, file.workspace, file.sandbox, file.boot, sandbox.alive), file.status
                found.append(Status(*named, self._facts(file), stands in ("stopped", "lost"), stands == "lost"))
        return found

    def assign(self, tenant: str, workspace: str, path: str) -> str:
        assert self._workspaces is not None, "the provider does not run"
        known = self._sandboxes.get((tenant, workspace))
        in_use = known is not None and known.file is not None
        return str(self._workspaces.assign(tenant, workspace, path, in_use=in_use))

    # --- a volume that is away ---

    async def _await_volume(self, sandbox: S) -> None:
        """The sandbox's task while its volume is away, until it is back or what ran was closed without it."""
        state, said = lost.Lost(), ""
        while True:
            async with sandbox.lock:
                file: F | None = sandbox.file
                if sandbox.task is not asyncio.current_task() or file is None or not self._is_awaited(file):
                    return
                state, decision = lost.decide(state, await self._look_at(file), self._settings.agent_volume_wait_s)
                match decision:
                    case lost.Tell():
                        reason = await self._volume_back(sandbox)
                        if reason is None:
                            return
                        decision = lost.Wait(reason)
                    case lost.Close(proof):
                        if await lost_executions.close_all(self._asked(), file.tenant, file.workspace, proof):
                            self._note(sandbox, replace(file, status="lost", pid=0, start_ticks=0))
                    case lost.Wait():
                        pass
            if isinstance(decision, lost.Wait) and decision.reason != said:
                said = decision.reason
                _log.warning("volume_awaited", **sandbox.named, reason=said)
            await asyncio.sleep(VOLUME_LOOK_S)

    def _is_awaited(self, file: F) -> bool:
        """Whether there is anything to wait for."""
        return file.status != "stopped"

    async def _look_at(self, file: F) -> lost.Look:
        now_s, closed, there = asyncio.get_running_loop().time(), file.status == "lost", await self._volume_there(file)
        proof = None if there or closed else await self._proof_of_end(file)
        return lost.Look(now_s, there, proof, closed)

    # --- credentials on the bus ---

    async def _admit(self, file: F) -> BusAccess:
        """What the collectors of this boot are told of the bus. Raises NotReadyError."""
        if self._authority is None:
            return BusAccess()
        try:
            text = await self._authority.admit(file.tenant, file.workspace, file.sandbox, boot=file.boot)
            blobs = await self._asked().state(subjects.blobs_stream(file.tenant))
        except AuthorityAwayError as error:
            raise NotReadyError(str(error)) from None
        except BusError as error:
            raise NotReadyError(f"the blob store cannot be asked for its quota: {error.detail}") from None
        path = self._authority.file(file.tenant, file.workspace)
        return BusAccess(text, path, None if blobs is None else blobs.bytes_max)

    def _noted(self, file: F) -> None:
        """After each `_note`: the credentials of what has ended count no more."""
        if self._authority is not None and file.status in ("stopped", "unfinished", "lost"):
            self._authority.revoke(file.tenant, file.workspace)

    async def _hand_over(self, tenant: str, workspace: str, credentials: str) -> None:
        """Renewed ones, where the collector does not read the agent service's own file."""

    # --- registrations ---

    async def _registration(self, file: F) -> Registration | None:
        """Raises NotReadyError."""
        key = subjects.registration_key(file.tenant, file.workspace, file.sandbox)
        try:
            return await Bucket(self._asked(), subjects.SANDBOXES).record(key, Registration)
        except BusError as error:
            raise NotReadyError(f"registrations cannot be read: {error}") from None

    async def _registered(self, sandbox: S, file: F, *, not_instance: str | None) -> Registration:
        """Until the collector's registration is there, of another instance than `not_instance`. Raises NotReadyError,
        ProvisionError."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + self._settings.agent_ready_wait_s, _POLL_MIN_S
        while True:
            found = await self._registration(file)
            if found is not None and found.boot == file.boot and found.instance != not_instance and sandbox.alive:
                await self._note_used(sandbox, file)
                return found
            await self._check_hope(sandbox, file)
            if loop.time() > deadline_s:
                raise NotReadyError("the collector has not registered yet")
            await asyncio.sleep(pause_s)
            pause_s = min(self.poll_max_s, pause_s * 1.5)

    async def _note_used(self, sandbox: S, file: F) -> None:
        """Before anything is started in it: from now on an empty volume, or none, is one that is away."""
        async with sandbox.lock:
            current: F | None = sandbox.file
            if current is not None and current.boot == file.boot and not current.used:
                self._note(sandbox, replace(current, used=True))

    # --- small things ---

    def _sandbox(self, tenant: str, workspace: str) -> S:
        found = self._sandboxes.get((tenant, workspace))
        if found is None:
            found = self._sandboxes[tenant, workspace] = self._new(tenant, workspace)
        return found

    def _asked(self) -> Bus:
        assert self._bus is not None, "a provider without a bus only stops"
        return self._bus


def hopeless(failure: Problem) -> ProvisionError | NotReadyError:
    """What is raised for a start that failed: whoever resumes is told why as it is, or comes again."""
    return NotReadyError(failure.detail) if failure.retryable else ProvisionError(failure)


def refusal(detail: str) -> Problem:
    """Of a sandbox whose collector never gets ready: another start changes nothing."""
    return problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False)
