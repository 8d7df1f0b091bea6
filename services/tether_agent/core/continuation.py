"""What goes on with a turn that a drain has cut. Pure.

One journaled continuation, never the user's words again: a prompt of its own, whose request id follows from checkpoint
and conversation, so that however often it is published it is admitted once. It names the tools that were cut: what
they did is not known, and nobody but the agent can look. Nothing of it for a conversation whose policy is `wait`.

Where a prompt of the user's has the conversation already when the sandbox wakes, that prompt leads: there is no prompt
to put before it, so the same words go before the user's in the one start that goes on from the checkpoint.

Messages that had joined the turn and that the agent had not read are told with it, word for word as far as the report
has them: their senders were told that they had arrived. That is so for a policy of `wait` as well, and after a drain
that failed: whichever prompt comes next leads with them, once.
"""

from __future__ import annotations

from collections.abc import Iterator

from tether import ids
from tether.checkpoint import CheckpointReference, DrainedExecution
from tether.control import StartCommand
from tether.prompt import AgentSpec, Prompt, TextContent
from tether.sandbox import DrainReport, SandboxRecord

AUTHOR = "tether"
_NAMES_MAX = 16  # of interrupted tools that are named


def words(interrupted: tuple[str, ...], unread: str = "") -> str:
    """What the agent is told. `unread`: see `unread_of`."""
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
        f"and do not repeat what was done.{unread}"
    )


def unread_of(execution: DrainedExecution) -> str:
    """The messages that were not read, each marked as what it is; empty where there was none."""
    if not execution.unheard and not execution.unheard_more:
        return ""
    told = [
        f"{number}. [{message.request}]{' (its beginning)' if message.cut else ''}\n{message.text}"
        for number, message in enumerate(execution.unheard, 1)
    ]
    if execution.unheard_more:
        told.append(f"And {execution.unheard_more} more, which are not kept here.")
    return (
        " These messages had been sent to you during that turn, and you have not read them; they count as sent before "
        "anything below:\n\n" + "\n\n".join(told) + "\n\n[tether] End of the messages that were not read."
    )


def _lead_of(report: DrainReport, execution: DrainedExecution) -> str | None:
    """What goes before the user's prompt that is the first of its conversation since."""
    if execution in cut_turns(report):
        return words(execution.interrupted, unread_of(execution))
    if execution.cut and report.state != "running" and (unread := unread_of(execution)):
        return f"[tether] Your last turn was cut off when its sandbox was stopped.{unread}"
    return None


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
        content=(TextContent(text=words(execution.interrupted, unread_of(execution))),),
        agent=spec,
        author=AUTHOR,
        continuation="continue",
    )


def as_kept(record: SandboxRecord, reference: CheckpointReference | None) -> SandboxRecord:
    """The record with what the last drain came to. A record that was deleted, or whose collector was drained by the
    machine and went on, does not know: the reference, which stays, does."""
    report = record.drained
    if reference is None or (report is not None and (report.state == "failed" or report.drain == reference.drain)):
        return record
    kept = DrainReport(
        drain=reference.drain, state="done", phase="over", executions=reference.executions, checkpoint=reference
    )
    return record.model_copy(update={"drained": kept})


def led_by(record: SandboxRecord, command: StartCommand) -> StartCommand:
    """The command with the continuation's words before the user's, where it is the first of its conversation after a
    cut turn and is not itself the continuation. The same for each delivery of the command."""
    report = record.drained
    for execution in () if report is None else report.executions:
        target = execution.target
        assert report is not None
        checkpoint = None if report.checkpoint is None else report.checkpoint.checkpoint
        if (
            target.conversation == command.target.conversation
            and target.execution_generation + 1 == command.target.execution_generation
            and (checkpoint is None or command.request_id != ids.continuation_id(checkpoint, target.conversation))
            and (lead := _lead_of(report, execution)) is not None
        ):
            return command.model_copy(update={"content": (TextContent(text=lead), *command.content)})
    return command
