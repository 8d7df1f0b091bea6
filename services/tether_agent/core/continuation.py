"""What goes on with a turn that a drain has cut. Pure.

One journaled continuation, never the user's words again: a prompt of its own, whose request id follows from checkpoint
and conversation, so that however often it is published it is admitted once. It names the tools that were cut: what
they did is not known, and nobody but the agent can look. Nothing of it for a conversation whose policy is `wait`.

Where a prompt of the user's has the conversation already when the sandbox wakes, that prompt leads: there is no prompt
to put before it, so the same words go before the user's in the one start that goes on from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from tether import ids
from tether.checkpoint import DrainedExecution
from tether.control import StartCommand
from tether.prompt import AgentSpec, Prompt, TextContent
from tether.sandbox import DrainReport, SandboxRecord

AUTHOR = "tether"
_NAMES_MAX = 16  # of interrupted tools that are named


def words(interrupted: tuple[str, ...]) -> str:
    """What the agent is told."""
    named = ", ".join(interrupted[:_NAMES_MAX])
    if len(interrupted) > _NAMES_MAX:
        named += f" and {len(interrupted) - _NAMES_MAX} more"
    tools = (
        f"Interrupted before they finished: {named}. What they did is not known: look before you run any of them again."
        if interrupted
        else "No tool was interrupted."
    )
    return (
        "[tether] Your last turn was cut off when its sandbox was stopped; the sandbox is back, with its files. "
        f"{tools} Go on from where the turn stopped. Do not begin the user's request anew, "
        "and do not repeat what was done."
    )


def cut_turns(report: DrainReport | None) -> Iterator[DrainedExecution]:
    """Of a drain with a checkpoint: the executions whose turn goes on by itself."""
    if report is None or report.state != "done" or report.checkpoint is None:
        return
    for execution in report.executions:
        if execution.cut and execution.continuation == "continue":
            yield execution


def prompt_for(checkpoint: str, execution: DrainedExecution) -> Prompt:
    """The continuation of one conversation. The same whoever makes it."""
    target = execution.target
    spec = execution.spec or (AgentSpec(kind=execution.agent) if execution.agent else AgentSpec())
    return Prompt(
        tenant=target.tenant,
        workspace=target.workspace,
        conversation=target.conversation,
        request_id=ids.continuation_id(checkpoint, target.conversation),
        content=(TextContent(text=words(execution.interrupted)),),
        agent=spec,
        author=AUTHOR,
        continuation="continue",
    )


def led_by(record: SandboxRecord, command: StartCommand) -> StartCommand:
    """The command with the continuation's words before the user's, where it is the first of its conversation after a
    cut turn and is not itself the continuation. The same for each delivery of the command."""
    report = record.drained
    for execution in cut_turns(report):
        target = execution.target
        assert report is not None and report.checkpoint is not None
        if (
            target.conversation == command.target.conversation
            and target.execution_generation + 1 == command.target.execution_generation
            and command.request_id != ids.continuation_id(report.checkpoint.checkpoint, target.conversation)
        ):
            return command.model_copy(
                update={"content": (TextContent(text=words(execution.interrupted)), *command.content)}
            )
    return command
