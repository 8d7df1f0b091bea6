"""What a drain is told of an execution, and what it tells it; see `core.draining`.

To leave is a control of the execution, under an id of its own: journaled, noted in its spool, known again after a
crash. What became of the checkpoint is a note in the spool, too: the end that is made of it is the same in any replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tether.checkpoint import UNHEARD_CHARS_MAX, UNHEARD_MAX, DrainedExecution, UnheardMessage
from tether.control import ControlRequest, InterjectPayload
from tether.errors import Problem
from tether.sandbox import ExecutionSummary
from tether_collector.accepted import AcceptedControls
from tether_collector.journal import Start
from tether_collector.pipeline import Pipeline


def leave_control(drain: str, execution: str) -> str:
    """The id of the control that tells this execution to leave: the same after a crash."""
    return "ctl_" + hashlib.sha256(f"drain\x1f{drain}\x1f{execution}".encode()).hexdigest()[:24]


def leave_request(drain: str, execution: str, kill_at: int) -> ControlRequest:
    """`kill_at` in unix milliseconds."""
    payload = {"drain": drain, "kill_at": kill_at}
    return ControlRequest(control=leave_control(drain, execution), verb="drain", payload=payload)


def released(checkpoint: str | None, problem: Problem | None) -> dict[str, Any]:
    """The body of the note that ends a held execution."""
    if problem is not None:
        return {"error": {"code": problem.code.value, "detail": problem.detail}}
    return {"checkpoint": checkpoint}


def what_became(start: Start, pipeline: Pipeline, controls: AcceptedControls) -> DrainedExecution | None:
    """Of a process of which nothing is left; None before."""
    machine, fold = pipeline.machine, pipeline.fold
    departure = machine.departure()
    if departure is None:
        return None
    unheard = controls.interjections(departure.unheard if departure.drained else ())
    state = fold.head()
    command = start.command
    status = machine.status()
    outcome = "completed" if not departure.drained else "forced" if departure.killed else "graceful"
    return DrainedExecution.model_validate(
        {
            "target": machine.target,
            "outcome": outcome,
            "agent": command.agent.kind,
            "spec": command.agent,
            "cli_version": state.cli_version,
            "native_session": status.native_session,
            "resumable": status.resumable,
            "cut": departure.drained,
            "interrupted": departure.interrupted,
            "unheard": _unheard(unheard[:UNHEARD_MAX]),
            "unheard_more": len(unheard[UNHEARD_MAX:]),
            "continuation": command.continuation or "wait",
            "last_ordinal": fold.applied,
            "detail": None if departure.outcome in ("completed", "drained") else departure.outcome,
        }
    )


def _unheard(messages: Sequence[InterjectPayload]) -> tuple[UnheardMessage, ...]:
    texts = [(message.request, "\n\n".join(part.text for part in message.content)) for message in messages]
    return tuple(
        UnheardMessage(request=request, text=text[:UNHEARD_CHARS_MAX], cut=len(text) > UNHEARD_CHARS_MAX)
        for request, text in texts
    )


def ended_before(start: Start, summary: ExecutionSummary) -> DrainedExecution:
    """Of an execution that ended by itself while nobody looked."""
    command = start.command
    return DrainedExecution(
        target=summary.target,
        outcome="completed",
        agent=command.agent.kind,
        spec=command.agent,
        native_session=summary.target.native_session,
        resumable=summary.target.native_session is not None,
        continuation=command.continuation or "wait",
        last_ordinal=summary.last_ordinal,
    )
