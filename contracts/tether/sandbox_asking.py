"""Sandboxes as their users see them: what the records say, and what agent services are asked to do with one.

    reading   records, registrations and references alone: it wakes nothing and needs no agent service
    asking    tether.agent.{drain,suspend,delete,drain-status,resume}, answered at once by one of the agent services

Nobody there, or no reply in time, is RUNTIME_UNAVAILABLE. Whether the request was taken is then not known, and need
not be: the same `drain_id` again joins what it began, and a resume finds the sandbox awake. A final report in the
sandbox's record is told from there, so that how a drain ended is known while no agent service answers.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tether import subjects, tracing
from tether.api_sandboxes import (
    CheckpointView,
    DeleteRequest,
    DrainRequest,
    DrainView,
    Purpose,
    ResumeView,
    SandboxView,
    views_of,
)
from tether.checkpoint import CheckpointReference
from tether.errors import Code, NoReplyError, Problem, ProblemError, problem
from tether.kv import Bucket
from tether.ports import Bus
from tether.sandbox import DrainReport, Registration, SandboxRecord, SandboxState, no_sandbox

AGENT_REPLY_S: Final = 10.0  # the operations are answered at once; this bounds what stands before the answer
AgentVerb = Literal["drain", "suspend", "delete", "drain-status", "resume"]
AnswerT = TypeVar("AnswerT", bound=BaseModel)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Refusal(_Answer):
    problem: Problem | None = None


class _Operation(_Answer):
    report: DrainReport
    purpose: Purpose
    state: str
    joined: bool = False


class _Resumed(_Answer):
    state: SandboxState
    woken: bool = False
    checkpoint: CheckpointReference | None = None
    checkpoint_revision: int = 0


# --- reading ---


async def list_sandboxes(bus: Bus, tenant: str) -> list[SandboxView]:
    """Every sandbox of the tenant, by workspace. Raises BusError."""
    bucket = Bucket(bus, subjects.SANDBOXES)
    records = [record async for _, record in bucket.records(SandboxRecord, f"{tenant}.*")]
    registered = [one async for _, one in bucket.records(Registration, f"{tenant}.*.*")]
    kept = Bucket(bus, subjects.CHECKPOINTS)
    references = [(one, entry.revision) async for entry, one in kept.records(CheckpointReference, f"{tenant}.*")]
    return views_of(records, registered, references)


async def read_sandbox(bus: Bus, tenant: str, workspace: str) -> SandboxView:
    """One sandbox. Raises ProblemError (NOT_FOUND), BusError."""
    bucket = Bucket(bus, subjects.SANDBOXES)
    record = await bucket.record(subjects.sandbox_key(tenant, workspace), SandboxRecord)
    if record is None:
        raise ProblemError(no_sandbox())
    key = subjects.registration_key(tenant, workspace, record.sandbox)
    registration = await bucket.record(key, Registration)
    kept = Bucket(bus, subjects.CHECKPOINTS)
    entry = await kept.get(subjects.checkpoint_key(tenant, workspace))
    reference = None if entry is None else kept.parse(entry, CheckpointReference)
    checkpoint = None if entry is None or reference is None else CheckpointView.of(reference, entry.revision)
    return SandboxView.of(record, registration, checkpoint)


async def read_drain(bus: Bus, tenant: str, workspace: str, drain: str) -> DrainView:
    """How a drain stands. Raises ProblemError (NOT_FOUND: no such sandbox, or no operation of this id), BusError."""
    key = subjects.sandbox_key(tenant, workspace)
    record = await Bucket(bus, subjects.SANDBOXES).record(key, SandboxRecord)
    reports = () if record is None else (*((record.drained,) if record.drained else ()), *record.failed)
    report = next((one for one in reports if one.drain == drain), None)
    if record is not None and report is not None and report.state != "running":
        return DrainView.of(workspace, report).model_copy(update={"sandbox_state": record.state})
    return await _operation(bus, "drain-status", tenant, workspace, {"drain_id": drain})


# --- asking ---


async def begin_drain(
    bus: Bus, verb: Purpose, tenant: str, workspace: str, drain: str, request: DrainRequest
) -> DrainView:
    """Begin or join a drain, suspend or delete, under the id `drain`; `request` is of the verb's own kind.

    Raises ProblemError: NOT_FOUND, SESSION_BUSY, DRAINING, CAPABILITY_MISSING, CHECKPOINT_FAILED,
    RUNTIME_UNAVAILABLE; BusError.
    """
    fields = {**request.model_dump(mode="json", exclude_none=True, exclude_defaults=True), "drain_id": drain}
    return await _operation(bus, verb, tenant, workspace, fields)


async def resume(bus: Bus, tenant: str, workspace: str) -> ResumeView:
    """Wake a suspended sandbox. Raises ProblemError (NOT_FOUND, DRAINING, RUNTIME_UNAVAILABLE), BusError."""
    answer = await _ask(bus, "resume", tenant, workspace, {}, _Resumed)
    reference = answer.checkpoint
    kept = None if reference is None else CheckpointView.of(reference, answer.checkpoint_revision)
    return ResumeView(workspace=workspace, state=answer.state, woken=answer.woken, checkpoint=kept)


async def _operation(bus: Bus, verb: AgentVerb, tenant: str, workspace: str, fields: dict[str, Any]) -> DrainView:
    answer = await _ask(bus, verb, tenant, workspace, fields, _Operation)
    told = {"purpose": answer.purpose, "sandbox_state": answer.state, "joined": answer.joined}
    return DrainView.of(workspace, answer.report).model_copy(update=told)


async def _ask(
    bus: Bus, verb: AgentVerb, tenant: str, workspace: str, fields: dict[str, Any], model: type[AnswerT]
) -> AnswerT:
    subject = subjects.agent(verb)
    data = json.dumps({"tenant": tenant, "workspace": workspace, **fields}).encode()
    with tracing.scope(f"agent {verb}", kind="client", tenant=tenant, workspace=workspace):
        try:
            message = await bus.request(subject, data, timeout_s=AGENT_REPLY_S, headers=tracing.outgoing())
        except NoReplyError as error:
            why = "no agent service answers for now" if error.no_responders else "the agent service did not answer yet"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, why, retry_after_s=1.0)) from None
    try:
        refused = _Refusal.model_validate_json(message.data).problem
        if refused is None:
            return model.model_validate_json(message.data)
    except ValidationError:
        detail = "the agent service's answer cannot be read; it may be of another version"
        raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=False)) from None
    raise ProblemError(refused)


__all__ = [
    "AGENT_REPLY_S",
    "DeleteRequest",
    "begin_drain",
    "list_sandboxes",
    "read_drain",
    "read_sandbox",
    "resume",
]
