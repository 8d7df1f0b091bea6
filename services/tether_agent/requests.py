"""What the agent service answers on `tether.agent.{verb}`; shown by `nats micro ls`.

    sandboxes  {tenant?}                     → {sandboxes: [{tenant, workspace, sandbox, boot, alive, facts}]}
    workspace  {tenant, workspace, path}     → {path}      a directory of the user's for a workspace (provider local)
    stop       {tenant, workspace} | {all}   → {stopped: [{tenant, workspace, killed}]}
    restart-collector  {tenant, workspace}   → {tenant, workspace, boot, before, instance, version}   CLIs live on

An answer is a JSON object with `v` and either the result's fields or `problem` (RFC 9457 members, naming the field).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tether import subjects
from tether.errors import Code, InvalidError, Problem, ProblemError, problem
from tether.ids import Token
from tether.jsonsafe import loads_object
from tether.limits import KIB
from tether.ports import Bus, Handler, Message
from tether.prompt import invalid
from tether_agent.providers import NotReadyError, Provider, ProvisionError

SERVICE: Final = "tether-agent"
QUEUE: Final = "agent-service"
REQUEST_BYTES_MAX: Final = 16 * KIB


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SandboxesRequest(_Request):
    tenant: Token | None = None


class WorkspaceRequest(_Request):
    tenant: Token
    workspace: Token
    path: str


class RestartRequest(_Request):
    tenant: Token
    workspace: Token


class StopRequest(_Request):
    """One sandbox, or `all` of this service's."""

    tenant: Token | None = None
    workspace: Token | None = None
    all: bool = False


Answer = dict[str, Any]
RequestT = TypeVar("RequestT", bound=_Request)


class Requests:
    """The handlers; the provider is the one who knows."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    @contextlib.asynccontextmanager
    async def serving(self, bus: Bus) -> AsyncIterator[None]:
        """Answer while the context is open."""
        handlers: dict[str, Callable[[bytes], Awaitable[Answer]]] = {
            "sandboxes": self.sandboxes,
            "workspace": self.workspace,
            "stop": self.stop,
            "restart-collector": self.restart_collector,
        }
        async with contextlib.AsyncExitStack() as stack:
            for verb, handler in handlers.items():
                served = bus.serve(subjects.agent(verb), _answering(handler), queue=QUEUE, name=SERVICE)
                await stack.enter_async_context(served)
            yield

    async def sandboxes(self, data: bytes) -> Answer:
        request = _parse(SandboxesRequest, data)
        found = [
            asdict(status)
            for status in self._provider.statuses()
            if request.tenant is None or status.tenant == request.tenant
        ]
        return {"sandboxes": found}

    async def workspace(self, data: bytes) -> Answer:
        request = _parse(WorkspaceRequest, data)
        return {"path": self._provider.assign(request.tenant, request.workspace, request.path)}

    async def restart_collector(self, data: bytes) -> Answer:
        request = _parse(RestartRequest, data)
        try:
            restarted = await self._provider.restart_collector(request.tenant, request.workspace)
        except NotReadyError as error:
            detail = f"the new collector is not ready yet: {error}"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retry_after_s=1.0)) from None
        except ProvisionError as error:
            raise ProblemError(error.problem) from None
        if restarted is None:
            raise ProblemError(problem(Code.NOT_FOUND, "workspace: no sandbox of this service runs for it"))
        return asdict(restarted)

    async def stop(self, data: bytes) -> Answer:
        request = _parse(StopRequest, data)
        if request.all:
            if request.tenant is not None or request.workspace is not None:
                raise InvalidError("all", "must not be given together with tenant or workspace")
            return {"stopped": [asdict(stopped) for stopped in await self._provider.stop_all()]}
        if request.tenant is None or request.workspace is None:
            raise InvalidError("workspace", "give tenant and workspace, or all")
        stopped = await self._provider.stop(request.tenant, request.workspace)
        return {"stopped": [] if stopped is None else [asdict(stopped)]}


def _parse(model: type[RequestT], data: bytes) -> RequestT:
    value = loads_object(data or b"{}", "request", bytes_max=REQUEST_BYTES_MAX)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def _answering(handler: Callable[[bytes], Awaitable[Answer]]) -> Handler:
    async def answer(message: Message) -> bytes:
        try:
            result = {"v": 1, **await handler(message.data)}
        except ProblemError as error:
            result = {"v": 1, "problem": _shown(error.problem)}
        return json.dumps(result).encode()

    return answer


def _shown(found: Problem) -> Answer:
    return found.model_dump(mode="json", exclude_none=True)
