"""What operators do to sandboxes in the middle of a round: drain, suspend, resume, delete, and what machines do.

Each operation is repeated under its own id, as a user of the SDK would, until its final report is told. Of one
workspace one is done at a time; prompts go on meanwhile, into every moment of it. Only where the volume is to be lost
is the workspace's `Door` shut first: what a sandbox that lives has on its volume may not be taken from it.

`settle` suspends every sandbox in the end: that is refused while anything runs or waits, so what a drain has cut is
continued, and over, when it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from tether.api_sandboxes import DrainView
from tether.checkpoint import Include
from tether.errors import BusError, Code, ProblemError
from tether.processes import ProcessId, is_running, send_signal
from tether_chaos.faults import victims
from tether_chaos.load import Clients
from tether_chaos.plan import Operation, Store

T = TypeVar("T")
GONE_S: Final = 60.0  # for a collector that was told to go
QUIET_S: Final = 30.0  # for a sandbox to have nothing to do, behind its door
_PAUSE_S: Final = 0.3
_NO_SANDBOX: Final = frozenset({Code.NOT_FOUND})
_SENT_S: Final = 20.0  # an answer that does not come by then is asked for again


class Door:
    """Prompts into a workspace go through it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """By one request, until it has its answer."""
        await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def emptied(self) -> None:
        await self._empty.wait()


class Operators:
    """Of one round. `orders`: ids of what was begun, by workspace. `terminated`: workspaces whose collector was told to
    go by a signal. `failed`: final reports of drains that kept nothing. `lost`: workspaces whose volume was taken.
    `spans`: (workspace, begin, end) of each operation, unix seconds. `done`: one sentence each."""

    def __init__(self, clients: Clients, data: Path, workspaces: Path) -> None:
        self._clients = clients
        self._data = data
        self._workspaces = workspaces
        self.doors: defaultdict[str, Door] = defaultdict(Door)
        self.orders: defaultdict[str, set[str]] = defaultdict(set)
        self.terminated: set[str] = set()
        self.failed: list[DrainView] = []
        self.lost: list[str] = []
        self.spans: list[tuple[str, float, float]] = []
        self.done: list[str] = []
        self.violations: list[str] = []

    async def run(self, operations: Sequence[Operation]) -> None:
        """All of them, those of one workspace one after the other."""
        by_workspace: defaultdict[str, list[Operation]] = defaultdict(list)
        for operation in operations:
            by_workspace[operation.workspace].append(operation)
        async with asyncio.TaskGroup() as group:
            for workspace, mine in by_workspace.items():
                group.create_task(self._one_after_the_other(mine), name=f"operator-{workspace}")

    async def _one_after_the_other(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            await asyncio.sleep(operation.after_s)
            await self.perform(operation)

    async def perform(self, operation: Operation, *, insist: bool = False) -> DrainView | None:
        """Its final report; None where it came to nothing. `insist`: a sandbox that is busy is asked again."""
        began_s, workspace, report = time.time(), operation.workspace, None
        try:
            match operation.deed:
                case "resume":
                    await self._repeated(lambda: self._clients.http.resume(workspace), _NO_SANDBOX)
                case "terminate":
                    await self._terminate(workspace)
                case "lose_volume":
                    report = await self._lose_volume(operation)
                case _:
                    report = await self._ordered(operation, insist=insist)
        finally:
            self.spans.append((workspace, began_s, time.time()))
            came_to = "nothing" if report is None else report.state
            self.done.append(f"{operation}: {came_to} after {time.time() - began_s:.1f} s")
        return report

    async def settle(self, workspaces: Iterable[str]) -> None:
        """Nothing runs or waits in any of them, and nothing will: each is suspended."""
        async with asyncio.TaskGroup() as group:
            for workspace in sorted(set(workspaces)):
                last = Operation(f"last-{workspace}", workspace, "suspend", 0.0, 10.0, "volume")
                group.create_task(self._settle(last), name=f"settle-{workspace}")

    async def _settle(self, last: Operation) -> None:
        began_s = time.time()
        report = await self._ordered(last, insist=True)
        came_to = "no sandbox" if report is None else report.state
        self.done.append(f"{last}: {came_to} after {time.time() - began_s:.1f} s")

    # --- by the API ---

    async def _ordered(self, operation: Operation, *, insist: bool = False) -> DrainView | None:
        """Begun and waited for. None: there is no sandbox or, unless `insist`, it was busy."""
        self.orders[operation.workspace].add(operation.drain)
        idle_first = operation.deed in ("suspend", "lose_volume")
        ends = _NO_SANDBOX | {Code.SESSION_BUSY} if idle_first and not insist else _NO_SANDBOX
        begun = await self._repeated(lambda: self._begin(operation), ends)
        if begun is None:
            return None
        report, known = begun, begun.drain

        def look() -> Awaitable[DrainView]:
            return self._clients.nats.drain_status(operation.workspace, known)

        while not report.is_final:
            await asyncio.sleep(_PAUSE_S)
            found = await self._repeated(look, _NO_SANDBOX)
            if found is None:  # a delete's record goes with the sandbox
                return report if operation.deed == "delete" else None
            report = found
        if report.state == "failed":
            self.failed.append(report)
        return report

    async def _begin(self, operation: Operation) -> DrainView:
        client, workspace, drain_id = self._clients.http, operation.workspace, operation.drain
        grace_s = operation.grace_s
        store: Store = "both" if operation.deed == "lose_volume" else operation.store
        match operation.deed:
            case "delete":
                return await client.delete(workspace, drain_id=drain_id, grace_s=grace_s, store=store)
            case "drain":
                return await client.drain(workspace, drain_id=drain_id, grace_s=grace_s, store=store)
            case deed:
                force = deed == "force"
                include: Include | None = "workspace" if deed == "lose_volume" else None
                return await client.suspend(
                    workspace, force=force, drain_id=drain_id, grace_s=grace_s, store=store, include=include
                )

    async def _repeated(self, act: Callable[[], Awaitable[T]], ends: frozenset[Code]) -> T | None:
        """Until it is answered; None where the answer is one of `ends`."""
        while True:
            try:
                async with asyncio.timeout(_SENT_S):
                    return await act()
            except ProblemError as error:
                if error.problem.code in ends:
                    return None
                if not error.problem.retryable:
                    self.violations.append(f"an operator was refused: {error.problem.code}: {error.problem.detail}")
                    return None
            except (BusError, TimeoutError):
                pass
            await asyncio.sleep(_PAUSE_S)

    # --- by the machine ---

    async def _terminate(self, workspace: str) -> None:
        self.terminated.add(workspace)
        told = [one.process for one in victims(self._data, "collector") if one.scope == workspace]
        for process in told:
            send_signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                for process in told:
                    await _gone(process)

    async def _lose_volume(self, operation: Operation) -> DrainView | None:
        """None where the sandbox did not come to rest, or its checkpoint is not in the blob store."""
        workspace, door = operation.workspace, self.doors[operation.workspace]
        async with door.shut():
            report = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await door.emptied()
                    # One that is suspended already would be told what an earlier drain kept, and where.
                    await self._repeated(lambda: self._clients.http.resume(workspace), _NO_SANDBOX)
                    report = await self._ordered(operation, insist=True)
            if report is None or report.drain != operation.drain or report.checkpoint is None:
                return None
            view = await self._repeated(lambda: self._clients.nats.sandbox(workspace), _NO_SANDBOX)
            if view is None or view.state != "suspended" or view.checkpoint != report.checkpoint:
                return None  # a continuation has woken it
            for folder in self._workspaces.glob(f"*/{workspace}"):
                await asyncio.to_thread(shutil.rmtree, folder)
            self.lost.append(workspace)
        return report


async def _gone(process: ProcessId) -> None:
    while True:
        if not is_running(process):
            return
        await asyncio.sleep(_PAUSE_S)
