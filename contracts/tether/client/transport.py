"""What a transport does for the client: HTTP (`tether.client.http`) and NATS (`tether.client.nats`) both do it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from tether.api import (
    ControlAnswer,
    ConversationHistory,
    ConversationList,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
)
from tether.api_sandboxes import DrainRequest, DrainView, Purpose, ResumeView, SandboxList, SandboxView
from tether.client.items import Item
from tether.client.types import Answer, Message, Submission
from tether.deletion import DeletionView
from tether.export_format import ExportFormat
from tether.quarantine import QuarantineList


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """`until_response`: the transport may end the stream at this response's end (the client ends it anyway).
    `durable`: a named consumer of the reader's own. `patience_s`: how long in a row nothing may work; None: always."""

    cursor: str | None = None
    until_response: str | None = None
    durable: str | None = None
    patience_s: float | None = None


class Transport(Protocol):
    """Every call is bounded and raises ProblemErrors; what could not be reached in time is RUNTIME_UNAVAILABLE."""

    async def submit(self, message: Message, patience_s: float) -> Submission: ...

    def follow(self, conversation: str, options: FollowOptions) -> AsyncGenerator[Item, None]: ...

    async def answer(
        self, conversation: str, interaction: str, answer: Answer, execution: str | None, control: str | None
    ) -> ControlAnswer: ...

    async def control(self, execution: str, verb: Literal["interrupt", "stop"], control: str) -> ControlAnswer: ...

    async def receipt(self, control: str, execution: str | None) -> ControlAnswer: ...

    async def conversations(self, limit: int, page: str | None) -> ConversationList: ...

    async def conversation(self, conversation: str, limit: int, before: int | None) -> ConversationHistory: ...

    async def executions(
        self, conversation: str | None, active: bool, limit: int, page: str | None
    ) -> ExecutionList: ...

    async def execution(self, execution: str) -> ExecutionView: ...

    async def snapshot(self, execution: str) -> ExecutionSnapshot: ...

    async def quarantine(self, limit: int, before: int | None) -> QuarantineList: ...

    async def sandboxes(self) -> SandboxList: ...

    async def sandbox(self, workspace: str) -> SandboxView: ...

    async def begin_drain(self, verb: Purpose, workspace: str, drain: str, request: DrainRequest) -> DrainView: ...

    async def drain_status(self, workspace: str, drain: str) -> DrainView: ...

    async def resume(self, workspace: str) -> ResumeView: ...

    async def begin_deletion(self, conversation: str, deletion: str, force: bool) -> DeletionView: ...

    async def deletion(self, conversation: str) -> DeletionView: ...

    def export(self, conversation: str, kind: ExportFormat) -> AsyncGenerator[bytes, None]: ...

    async def close(self) -> None: ...
