"""What must hold of executions that drains have cut, and of those that they have not.

    log                                        references (`tether_checkpoints`, every one that was written)
    execution.ended{drained, checkpoint} ◀───▶ the execution is in that very checkpoint, and was cut
    response.ended{drained}                    whoever waited is told so
    interaction.resolved, tool.completed       nothing is left open: what waited for a person is expired

A drain that nobody ordered, or an execution that ended `drained` without one, is a fault: only what the round's
operators began, or told a collector by SIGTERM, may cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tether import subjects
from tether.checkpoint import CheckpointReference
from tether.errors import Code
from tether.events import (
    EXECUTION_ENDED,
    INTERACTION_REQUESTED,
    INTERACTION_RESOLVED,
    RESPONSE_ENDED,
    TOOL_COMPLETED,
    TOOL_STARTED,
)
from tether.ports import Bus
from tether_chaos.judge import Fault, Log

CUT = frozenset({"graceful", "forced"})


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may have cut executions of a workspace. `orders`: ids of drains. `by_machine`: a collector was told to go by
    a signal, whose drain has an id of its own. `may_fail`: a disk was full, so a checkpoint may be missing."""

    orders: Collection[str] = ()
    by_machine: bool = False
    may_fail: bool = False


async def references_of(bus: Bus, tenant: str, workspace: str) -> list[CheckpointReference]:
    """Every reference that was written of a workspace, as far as the bucket keeps them. Raises BusError."""
    subject = f"$KV.{subjects.CHECKPOINTS}.{subjects.checkpoint_key(tenant, workspace)}"
    messages = await bus.read(f"KV_{subjects.CHECKPOINTS}", 0, subject)
    return [CheckpointReference.model_validate_json(message.data) for message in messages if message.data]


def drained(log: Log) -> set[str]:
    """Executions that a drain has cut, by their end."""
    return {execution for execution in log.executions if log.outcome(execution) == "drained"}


def drain_faults(log: Log, references: Sequence[CheckpointReference], allowed: Allowed) -> list[str]:
    """See the module; `references` of the log's workspace."""
    faults: list[str] = []
    cut_in = {
        (one.target.execution, reference.checkpoint): reference
        for reference in references
        for one in reference.executions
        if one.cut and one.outcome in CUT
    }
    for execution in sorted(drained(log)):
        end = log.executions[execution][-1]
        if end.type != EXECUTION_ENDED:
            continue
        checkpoint, error = end.body.get("checkpoint"), end.body.get("error") or {}
        reference = cut_in.get((execution, str(checkpoint)))
        if error:
            if not (allowed.may_fail and error.get("code") == Code.CHECKPOINT_FAILED.value):
                faults.append(f"log: {execution} was drained, and nothing was kept: {error}")
        elif reference is None:
            faults.append(f"log: {execution} ended drained with {checkpoint}, and no reference says that it was cut")
        elif reference.drain not in allowed.orders and not allowed.by_machine:
            faults.append(f"log: {execution} was cut by the drain {reference.drain}, which nobody ordered")
        faults += _left_open(log, execution)
    # A later checkpoint may tell of it again, with what its agent had not read; its end names the first.
    for execution, checkpoint in sorted(cut_in):
        if execution in log.executions and log.outcome(execution) != "drained":
            outcome = log.outcome(execution)
            faults.append(f"log: {checkpoint} says that it cut {execution}, which ended {outcome}")
    return faults


def _left_open(log: Log, execution: str) -> list[str]:
    faults = []
    events = log.executions[execution]
    told = [event.body.get("outcome") for event in events if event.type == RESPONSE_ENDED]
    if told != ["drained"]:
        faults.append(f"log: {execution} was drained, and its response ended {told}")
    asked = Counter(str(event.body["interaction"]) for event in events if event.type == INTERACTION_REQUESTED)
    resolved = Counter(str(event.body["interaction"]) for event in events if event.type == INTERACTION_RESOLVED)
    if asked != resolved:
        faults.append(
            Fault(f"log: {execution} was drained; interactions asked {dict(asked)}, resolved {dict(resolved)}")
        )
    began = {str(event.body["tool"]) for event in events if event.type == TOOL_STARTED}
    over = {str(event.body["tool"]) for event in events if event.type == TOOL_COMPLETED}
    if began != over:
        faults.append(f"log: {execution} was drained; tools that are open: {sorted(began - over)}")
    return faults
