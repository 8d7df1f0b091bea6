"""The client's calls about sandboxes: what they are, drain, suspend, resume, delete, and waiting for a drain's end.

An operation is named by its `drain_id`, made here unless given: a call in doubt is repeated under it and joins what it
began. `drained` asks until the report is final; what it cannot be told for a while it asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from pydantic import ValidationError

from tether.api_sandboxes import (
    DeleteRequest,
    DrainRequest,
    DrainView,
    ResumeView,
    SandboxList,
    SandboxView,
    SuspendRequest,
)
from tether.checkpoint import Include, Store
from tether.client.backoff import Backoff
from tether.client.transport import Transport
from tether.errors import Code, ProblemError, problem
from tether.ids import check_token, new_id
from tether.limits import DRAIN_DEADLINE_S
from tether.prompt import invalid

_LOOK_MAX_S: Final = 1.0  # between looks at a drain that runs


class SandboxCalls:
    """Part of `tether.Client`."""

    _transport: Transport

    async def sandboxes(self) -> SandboxList:
        """All of the tenant's. Reading wakes none."""
        return await self._transport.sandboxes()

    async def sandbox(self, workspace: str) -> SandboxView:
        """One sandbox, with its drain and its checkpoint. Raises NOT_FOUND. Reading does not wake it."""
        return await self._transport.sandbox(check_token(workspace, "workspace"))

    async def drain(
        self,
        workspace: str,
        *,
        drain_id: str | None = None,
        grace_s: float | None = None,
        reason: str | None = None,
        store: Store | None = None,
        include: Include | None = None,
    ) -> DrainView:
        """Begin (or join) a drain: no new starts, executions end within `grace_s`, checkpoint, compute released.
        Answers at once; `drained` waits. `view.drain` is the operation's id, another's where one ran already."""
        request = _request(DrainRequest, grace_s=grace_s, reason=reason, store=store, include=include)
        return await self._transport.begin_drain("drain", _workspace(workspace), _id(drain_id), request)

    async def suspend(
        self,
        workspace: str,
        *,
        force: bool = False,
        drain_id: str | None = None,
        grace_s: float | None = None,
        reason: str | None = None,
        store: Store | None = None,
        include: Include | None = None,
    ) -> DrainView:
        """`drain` of a sandbox in which nothing runs or waits. Raises SESSION_BUSY where something does, unless
        `force`."""
        request = _request(SuspendRequest, force=force, grace_s=grace_s, reason=reason, store=store, include=include)
        return await self._transport.begin_drain("suspend", _workspace(workspace), _id(drain_id), request)

    async def delete(
        self,
        workspace: str,
        *,
        checkpoint: bool = True,
        drain_id: str | None = None,
        grace_s: float | None = None,
        reason: str | None = None,
        store: Store | None = None,
        include: Include | None = None,
    ) -> DrainView:
        """Delete a workspace's sandbox, drained first; its checkpoint stays. `checkpoint` false: without one. The
        conversations stay, and go on in a new sandbox with their next message."""
        request = _request(
            DeleteRequest, checkpoint=checkpoint, grace_s=grace_s, reason=reason, store=store, include=include
        )
        return await self._transport.begin_drain("delete", _workspace(workspace), _id(drain_id), request)

    async def resume(self, workspace: str) -> ResumeView:
        """Wake a suspended sandbox; a prompt does so by itself. Raises DRAINING while it drains."""
        return await self._transport.resume(_workspace(workspace))

    async def drain_status(self, workspace: str, drain_id: str) -> DrainView:
        """How an operation stands. Raises NOT_FOUND, also of a delete that is over: its record went with it."""
        return await self._transport.drain_status(_workspace(workspace), check_token(drain_id, "drain_id"))

    async def drained(
        self,
        begun: DrainView,
        *,
        timeout_s: float = DRAIN_DEADLINE_S,
        on_progress: Callable[[DrainView], None] | None = None,
    ) -> DrainView:
        """The final report, `done` or `failed`, of an operation that `drain`, `suspend`, `delete` or `drain_status`
        told. `on_progress` is called with each report that differs from the one before. Raises DRAINING after
        `timeout_s` (it goes on; ask again), RUNTIME_UNAVAILABLE where nobody could say anything until then."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        backoff = Backoff(quick=5, seldom_s=_LOOK_MAX_S, seldom_max_s=_LOOK_MAX_S)
        last = begun
        while not last.is_final:
            wait_s = backoff.next_s()
            if loop.time() + wait_s > deadline_s:
                raise _still(last)
            await asyncio.sleep(wait_s)
            try:
                view = await self._transport.drain_status(last.workspace, last.drain)
            except ProblemError as error:
                code = error.problem.code
                if code is Code.NOT_FOUND and last.purpose == "delete":
                    return _deleted(last)
                if code is not Code.RUNTIME_UNAVAILABLE or not error.problem.retryable or loop.time() > deadline_s:
                    raise
                continue
            # Of a record that is gone the purpose is not known any more.
            view = view.model_copy(update={"joined": begun.joined, "purpose": begun.purpose or view.purpose})
            if on_progress is not None and view != last:
                on_progress(view)
            last = view
        return last


def _deleted(last: DrainView) -> DrainView:
    """The record went with the sandbox, and with it who knew of the operation."""
    return last.model_copy(update={"state": "done", "phase": "over", "sandbox_state": "deleted"})


def _still(last: DrainView) -> ProblemError:
    detail = f"the {last.purpose or 'drain'} goes on (phase {last.phase}); ask again under the same id"
    return ProblemError(problem(Code.DRAINING, detail, retry_after_s=_LOOK_MAX_S, drain=last.drain))


def _workspace(workspace: str) -> str:
    return check_token(workspace, "workspace")


def _id(drain_id: str | None) -> str:
    return check_token(drain_id or new_id("drn"), "drain_id")


def _request(model: type[DrainRequest], **fields: object) -> DrainRequest:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
