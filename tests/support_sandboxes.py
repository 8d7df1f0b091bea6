"""Sandboxes in a test: their records, and an agent service played by hand on the bus.

It answers as `tether_agent.requests` says, from what the test puts into it; what it was asked it keeps.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tether import subjects
from tether.checkpoint import CheckpointReference, DrainedExecution
from tether.errors import Code, Problem, problem
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.ports import Bus, Message
from tether.sandbox import DrainOrder, DrainReport, Registration, SandboxRecord, SandboxState

Json = dict[str, Any]
VERBS = ("drain", "suspend", "delete", "drain-status", "resume")
AT = 1_800_000_000_000


def target_of(tenant: str, workspace: str, execution: str = "e1") -> ExecutionTarget:
    return ExecutionTarget(
        tenant=tenant,
        workspace=workspace,
        conversation="c1",
        response="r1",
        response_generation=1,
        execution=execution,
        execution_generation=1,
        sandbox=f"sbx-{workspace}",
        boot="boot1",
        process_generation=1,
    )


def reference_of(tenant: str, workspace: str, drain: str = "d1") -> CheckpointReference:
    return CheckpointReference(
        checkpoint="ckp1",
        drain=drain,
        tenant=tenant,
        workspace=workspace,
        sandbox=f"sbx-{workspace}",
        boot="boot1",
        manifest="0" * 64,
        manifest_bytes=512,
        stored="both",
        include="sessions",
        clean=False,
        files=7,
        size_bytes=184_320,
        executions=(left(tenant, workspace),),
        created_at=AT,
    )


def left(tenant: str, workspace: str) -> DrainedExecution:
    """An execution that was killed in the middle of a tool."""
    return DrainedExecution(
        target=target_of(tenant, workspace),
        outcome="forced",
        agent="scripted",
        cut=True,
        interrupted=("Bash",),
        last_ordinal=9,
    )


def report_of(tenant: str, workspace: str, drain: str, *, revision: int = 0) -> DrainReport:
    """A drain that is over."""
    return DrainReport(
        drain=drain,
        state="done",
        phase="over",
        purpose="drain",
        executions=(left(tenant, workspace),),
        checkpoint=reference_of(tenant, workspace, drain),
        checkpoint_revision=revision,
    )


async def write_record(
    bus: Bus,
    tenant: str,
    workspace: str,
    state: SandboxState = "active",
    *,
    drain: DrainOrder | None = None,
    drained: DrainReport | None = None,
) -> None:
    """The life-cycle record, as the agent service writes it."""
    record = SandboxRecord(
        tenant=tenant,
        workspace=workspace,
        sandbox=f"sbx-{workspace}",
        state=state,
        provider="local",
        drain=drain,
        drained=drained,
        updated_at=AT,
    )
    bucket, key = Bucket(bus, subjects.SANDBOXES), subjects.sandbox_key(tenant, workspace)
    entry = await bucket.get(key)
    if entry is None:
        await bucket.create(key, record.value(), op="test")
    else:
        await bucket.update(key, record.value(), op=f"test{entry.revision}", revision=entry.revision)


async def register(bus: Bus, tenant: str, workspace: str, *, idle_since: int | None = None) -> None:
    registration = Registration(
        tenant=tenant,
        workspace=workspace,
        sandbox=f"sbx-{workspace}",
        boot="boot1",
        instance="i1",
        version="0.1.0",
        idle_since=idle_since,
    )
    key = subjects.registration_key(tenant, workspace, registration.sandbox)
    await Bucket(bus, subjects.SANDBOXES).create(key, registration.value(), op="test")


async def write_reference(bus: Bus, tenant: str, workspace: str) -> int:
    """The checkpoint's reference; its revision."""
    key = subjects.checkpoint_key(tenant, workspace)
    value = reference_of(tenant, workspace).value()
    return (await Bucket(bus, subjects.CHECKPOINTS).create(key, value, op="test")).revision


@dataclass
class HandAgent:
    """An agent service. `reports`: what a drain comes to with each further question, the last one for good; `refuse`:
    the problem instead of any answer; `asked`: (verb, request) in order."""

    bus: Bus
    reports: list[DrainReport] = field(default_factory=list)
    refuse: Problem | None = None
    woken: bool = True
    state: SandboxState = "resuming"
    asked: list[tuple[str, Json]] = field(default_factory=list)
    purpose: Literal["drain", "suspend", "delete"] = "drain"
    running: str | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[HandAgent]:
        async with contextlib.AsyncExitStack() as stack:
            for verb in VERBS:
                await stack.enter_async_context(self.bus.serve(subjects.agent(verb), self._handle, name="agent"))
            yield self

    async def _handle(self, message: Message) -> bytes:
        verb, request = message.subject.rpartition(".")[2], json.loads(message.data)
        self.asked.append((verb, request))
        return json.dumps({"v": 1, **self._answer(verb, request)}).encode()

    def _answer(self, verb: str, request: Json) -> Json:
        if self.refuse is not None:
            return {"problem": self.refuse.model_dump(mode="json", exclude_none=True)}
        if verb == "resume":
            kept = reference_of(request["tenant"], request["workspace"]).value()
            return {"state": self.state, "woken": self.woken, "checkpoint": kept, "checkpoint_revision": 3}
        joined = self.running is not None
        if verb != "drain-status":
            if self.running is None:
                self.running = request["drain_id"]
                self.purpose = {"drain": "drain", "suspend": "suspend", "delete": "delete"}[verb]  # type: ignore[assignment]
        elif request.get("drain_id") != self.running:
            missing = problem(Code.NOT_FOUND, "drain_id: the sandbox has no operation of this id")
            return {"problem": missing.model_dump(mode="json", exclude_none=True)}
        assert self.running is not None
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0] if self.reports else None
        report = report or DrainReport(drain=self.running, state="running")
        told = report.model_copy(update={"drain": self.running}).model_dump(mode="json", exclude_none=True)
        state = "draining" if report.state == "running" else "suspended"
        return {"report": told, "purpose": self.purpose, "state": state, "joined": joined}
