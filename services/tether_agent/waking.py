"""From a record to a sandbox that runs: for a start command, and for who wakes one without a prompt.

    1  the record to `provisioning` or `resuming` (one of however many ask writes it)
    2  the checkpoint's reference; the provider's compute, which goes on from it where it begins
    3  of a sandbox that was suspended: a continuation for each turn that was cut (core/continuation.py), published
       under an id of its own, so again after a crash changes nothing
    4  the record to `active`

A crash after any of them is gone on with by the next delivery of the command, or by the lifecycle's look at the record.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import structlog

from tether import subjects, tracing
from tether.checkpoint import CheckpointReference
from tether.errors import WrongLastSequenceError
from tether.failpoints import failpoint
from tether.ids import sandbox_id
from tether.ports import Bus
from tether.prompt import Prompt
from tether.sandbox import SandboxRecord
from tether_agent import metrics
from tether_agent.core import continuation
from tether_agent.core.sandbox import Provisioned, SandboxInput, Wanted, Woken
from tether_agent.providers import Provider
from tether_agent.records import Applied, OwnerRecords, References, SandboxRecords

_log = structlog.get_logger("tether_agent")
Cause = Literal["prompt", "request"]  # of a wake: a start needs the sandbox, or somebody asks for it


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Kept:
    """The reference of a workspace and its revision, 0 where there is none."""

    reference: CheckpointReference | None
    revision: int


class Waker:
    """See the module's docstring."""

    def __init__(self, bus: Bus, provider: Provider) -> None:
        self._bus = bus
        self._provider = provider
        self._sandboxes = SandboxRecords(bus)
        self._owners = OwnerRecords(bus)
        self._references = References(bus)

    async def kept(self, tenant: str, workspace: str) -> Kept:
        """Raises BusError."""
        return Kept(*await self._references.read(tenant, workspace))

    async def kept_by(self, tenant: str, workspace: str, drain: str) -> Kept | None:
        """The reference that this drain made, also where a later one has taken its place. Raises BusError."""
        found = await self._references.of_drain(tenant, workspace, drain)
        return None if found is None else Kept(*found)

    async def wanted(self, tenant: str, workspace: str, *, bare: bool = False) -> Applied:
        """A start needs the sandbox: it runs when this returns. `bare`: without what is kept. Raises NotReadyError,
        ProvisionError, BusError."""
        kept = await self.kept(tenant, workspace)
        name, at = self._provider.name, now_ms()
        event = Wanted(tenant, workspace, sandbox_id(tenant, workspace), name, at, kept.revision)
        applied = await self._counted(tenant, workspace, event, "prompt")
        assert applied.record is not None
        return await self.bring(applied.record, kept, bare=bare)

    async def woken(self, tenant: str, workspace: str) -> Applied:
        """Somebody asks for it: the record says so. Raises NotReadyError, ProblemError, BusError."""
        return await self._counted(tenant, workspace, Woken(now_ms()), "request")

    async def _counted(self, tenant: str, workspace: str, event: SandboxInput, cause: Cause) -> Applied:
        applied = await self._sandboxes.apply(tenant, workspace, event)
        if applied.wrote and applied.record is not None and applied.record.state == "resuming":
            failpoint("agent.resume.ordered")
            metrics.resumes.labels(cause).inc()
            _log.info("sandbox_woken", tenant=tenant, workspace=workspace, cause=cause)
        return applied

    async def bring(self, record: SandboxRecord, kept: Kept, *, bare: bool = False) -> Applied:
        """From `provisioning`, `resuming` or `active` to `active` with compute. Raises NotReadyError, ProvisionError,
        BusError."""
        tenant, workspace = record.tenant, record.workspace
        with tracing.scope("ensure sandbox"):
            compute = await self._provider.ensure(tenant, workspace, None if bare else _restore(record, kept.reference))
        failpoint("agent.resume.ensured")
        if record.state == "resuming":
            await self._go_on(record)
            failpoint("agent.resume.continued")
        applied = await self._sandboxes.apply(tenant, workspace, Provisioned(compute.facts, now_ms()))
        if applied.wrote and record.state == "resuming":
            failpoint("agent.resume.active")
            metrics.resume_seconds.observe(max(0.0, (now_ms() - record.wanted_at) / 1000))
        return applied

    async def _go_on(self, record: SandboxRecord) -> None:
        """The continuations of what the last drain cut. Raises BusError."""
        report = record.drained
        for execution in continuation.cut_turns(report):
            assert report is not None and report.checkpoint is not None
            prompt = continuation.prompt_for(report.checkpoint.checkpoint, execution)
            owner, _ = await self._owners.read(prompt.tenant, prompt.workspace, prompt.conversation)
            if owner is not None and owner.state != "idle":
                continue  # a prompt of the user's leads, or this very continuation runs already
            await self._publish(prompt)

    async def _publish(self, prompt: Prompt) -> None:
        subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
        try:
            # Only where nobody's prompt waits: that one leads.
            ack = await self._bus.publish(subject, prompt.encode(), msg_id=prompt.message_id, expect_last=0)
        except WrongLastSequenceError:
            return
        if not ack.duplicate:
            metrics.continuations.inc()
            _log.info("turn_continued", conversation=prompt.conversation, request_id=prompt.request_id)


def _restore(record: SandboxRecord, reference: CheckpointReference | None) -> str | None:
    """The checkpoint that a boot which begins now goes on from. One that is on its volume only counts for the sandbox
    that was suspended with it: any other finds it there, or never had it."""
    if reference is None or (record.state != "resuming" and reference.stored == "volume"):
        return None
    return reference.checkpoint
