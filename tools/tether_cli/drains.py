"""What `tether drain`, `suspend`, `resume` and `tether sandbox delete` share: begin, follow to the end, tell.

Exit codes: 0 it is over (or begun, with --no-wait), 1 it failed, 5 it goes on and was not waited for any longer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, get_args

from tether.api_sandboxes import DrainView, Purpose
from tether.checkpoint import DrainedExecution, Include, Store
from tether.errors import Code, ProblemError
from tether.limits import DRAIN_DEADLINE_S, DRAIN_GRACE_S
from tether_cli import state, talk
from tether_cli.output import CliError, Exit, Output
from tether_cli.render import one_line

if TYPE_CHECKING:
    from tether.api_sandboxes import CheckpointView, SandboxView
    from tether.client import Client

WAKE_S: Final = 60.0
_LOOK_S: Final = 0.2
_PHASES: Final = {
    "turn": "turns under way may finish",
    "leaving": "its agents are asked to leave",
    "killing": "what is left is killed",
    "publishing": "the log gets its last events",
    "checkpoint": "what is needed to go on is kept",
    "releasing": "what it uses is released",
}
_OUTCOMES: Final = {
    "completed": "had ended",
    "graceful": "left in good order",
    "forced": "was killed at the end of the grace",
    "checkpoint_failed": "ended, and could not be kept",
}


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """As typed."""

    drain_id: str | None = None
    grace_s: float | None = None
    reason: str | None = None
    store: str | None = None
    include: str | None = None
    wait: bool = True
    force: bool = False
    checkpoint: bool = True


def _one_of(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise CliError(f"{option} must be one of {', '.join(known)}", exit_code=Exit.USAGE)
    return value


async def begin(verb: Purpose, workspace: str, given: DrainOptions, data: Path | None, output: Output) -> Exit:
    """Begin or join, and follow it unless told otherwise."""
    store = cast("Store | None", _one_of("--store", given.store, get_args(Store)))
    include = cast("Include | None", _one_of("--include", given.include, get_args(Include)))
    drain_id = None if given.drain_id is None else talk.token(given.drain_id, "--drain-id")
    up = state.require(data)
    async with talk.http_client(up) as client:
        try:
            view = await _ask(client, verb, workspace, given, drain_id, store, include)
        except ProblemError as error:
            raise _refused(error, verb, workspace, up.data) from None
        if view.joined and drain_id != view.drain:
            what = view.purpose or "drain"
            output.note(f"it was put to sleep by the {what} {view.drain}" if view.is_final
                        else f"a {what} runs there already: this joins it")  # fmt: skip
        if not given.wait and not view.is_final:
            output.value(view.model_dump(mode="json", exclude_none=True))
            output.say(f"{workspace}: {_words(verb)} as {view.drain}")
            output.say(f"  {_again(verb, workspace, view.drain, up.data)}")
            return Exit.OK
        if not view.is_final:
            output.note(f"{workspace}: {_words(verb)} as {view.drain}; Ctrl-C stops the waiting, not the drain")
            view = await _follow(client, verb, workspace, view, given.grace_s, output, up.data)
    output.value(view.model_dump(mode="json", exclude_none=True))
    _tell(output, view, verb)
    return Exit.OK if view.state == "done" else Exit.FAILED


async def _ask(
    client: Client,
    verb: Purpose,
    workspace: str,
    given: DrainOptions,
    drain_id: str | None,
    store: Store | None,
    include: Include | None,
) -> DrainView:
    grace_s, reason = given.grace_s, given.reason
    match verb:
        case "drain":
            return await client.drain(
                workspace, drain_id=drain_id, grace_s=grace_s, reason=reason, store=store, include=include
            )
        case "suspend":
            return await client.suspend(
                workspace,
                force=given.force,
                drain_id=drain_id,
                grace_s=grace_s,
                reason=reason,
                store=store,
                include=include,
            )
        case "delete":
            return await client.delete(
                workspace,
                checkpoint=given.checkpoint,
                drain_id=drain_id,
                grace_s=grace_s,
                reason=reason,
                store=store,
                include=include,
            )


async def _follow(
    client: Client,
    verb: Purpose,
    workspace: str,
    begun: DrainView,
    grace_s: float | None,
    output: Output,
    data: str,
) -> DrainView:
    told: set[str] = set()

    def progress(view: DrainView) -> None:
        words = _PHASES.get(view.phase)
        if words is not None and not view.is_final and view.phase not in told:
            told.add(view.phase)
            output.note(f"  {words}")

    progress(begun)
    timeout_s = (DRAIN_GRACE_S if grace_s is None else grace_s) + DRAIN_DEADLINE_S
    try:
        return await client.drained(begun, timeout_s=timeout_s, on_progress=progress)
    except ProblemError as error:
        if error.problem.code is not Code.DRAINING:
            raise
        again = _again(verb, workspace, begun.drain, data)
        raise CliError(
            f"{workspace} still drains after {timeout_s:g} s: {error.problem.detail}",
            remedy=again,
            exit_code=Exit.LOST,
            code=error.problem.code,
        ) from None


def _words(verb: Purpose) -> str:
    return {"drain": "draining", "suspend": "suspending", "delete": "deleting"}[verb]


def _again(verb: Purpose, workspace: str, drain: str, data: str) -> str:
    where = state.data_option(data)
    if verb == "delete":
        return f"`tether sandbox show {workspace}{where}` says how it stands until it is gone"
    return f"`tether {verb} {workspace} --drain-id {drain}{where}` waits for its end"


def _refused(error: ProblemError, verb: Purpose, workspace: str, data: str) -> CliError:
    told = talk.as_cli_error(error)
    found = error.problem
    if found.code is Code.SESSION_BUSY:
        told.remedy = f"wait, or `tether {verb} {workspace} --force{state.data_option(data)}`"
    elif found.code is Code.NOT_FOUND:
        told.remedy = "`tether sandbox list` shows the workspaces that have one"
    elif found.code is Code.CAPABILITY_MISSING:
        told.remedy = f"`tether sandbox restart-collector {workspace}` gives it the one that is installed now"
    elif found.code is Code.CHECKPOINT_FAILED and verb == "delete":
        told.remedy = "--no-checkpoint deletes it all the same"
    return told


# --- what it came to ---


def _tell(output: Output, view: DrainView, verb: Purpose) -> None:
    for one in view.executions:
        output.say(f"{one.target.execution}  {execution_words(one)}")
    if view.checkpoint is not None:
        output.say(f"checkpoint {checkpoint_words(view.checkpoint)}")
    if view.unsaved:
        output.say(f"not kept: {one_line(view.unsaved, 400)}")
    if view.problem is not None:
        output.say(f"{view.problem.code.value}: {one_line(view.problem.detail, 400)}")
    ended = {"delete": "deleted"}.get(verb, "suspended")
    if view.state == "failed":
        after = f"; the sandbox is {view.sandbox_state}" if view.sandbox_state else ""
        output.say(f"{view.workspace}: the {verb} failed{after}")
    else:
        output.say(f"{view.workspace}: {view.sandbox_state or ended}")


def execution_words(one: DrainedExecution) -> str:
    """`left in good order; cut: Bash; its turn is not finished`."""
    parts = [_OUTCOMES.get(one.outcome, one.outcome)]
    if one.interrupted:
        parts.append(f"cut: {', '.join(one_line(name, 40) for name in one.interrupted)}")
    if one.cut:
        parts.append("its turn is not finished")
    if unread := len(one.unheard) + one.unheard_more:
        parts.append(f"{unread} message{'' if unread == 1 else 's'} not read")
    if one.detail:
        parts.append(one_line(one.detail, 200))
    return "; ".join(parts)


def checkpoint_words(kept: CheckpointView) -> str:
    """`ckp_… (7 files, 180 KiB, sessions, on the volume)`."""
    where = {"volume": "on the volume", "blobs": "in the blob store", "both": "on the volume and in the blob store"}
    facts = [f"{kept.files} files", f"{kept.size_bytes / 1024:.0f} KiB", kept.include, where[kept.stored]]
    return f"{kept.checkpoint} ({', '.join(facts)}{'' if kept.clean else ', something was killed'})"


# --- resume ---


async def wake(workspace: str, wait: bool, data: Path | None, output: Output) -> Exit:
    """Wake it and, unless told otherwise, wait until its collector is there."""
    up = state.require(data)
    async with talk.http_client(up) as client:
        try:
            woken = await client.resume(workspace)
        except ProblemError as error:
            raise _refused(error, "drain", workspace, up.data) from None
        if wait:
            awake = await _awake(client, workspace)
            woken = woken.model_copy(update={"state": awake.state})
    output.value(woken.model_dump(mode="json", exclude_none=True))
    if not woken.woken:
        output.say(f"{workspace}: {woken.state}; it was awake, or somebody else wakes it")
        return Exit.OK
    kept = woken.checkpoint
    output.say(f"{workspace}: {woken.state}" + (f", from checkpoint {checkpoint_words(kept)}" if kept else ""))
    return Exit.OK


async def _awake(client: Client, workspace: str) -> SandboxView:
    deadline_s = time.monotonic() + WAKE_S
    while True:
        view = await client.sandbox(workspace)
        if view.state == "active" and view.connected:
            return view
        if time.monotonic() > deadline_s or view.state not in ("resuming", "provisioning", "active"):
            raise CliError(
                f"{workspace} has not come back: it is {view.state}",
                remedy="`tether doctor` says what is wrong; `tether sandbox show` how it stands",
                exit_code=Exit.LOST,
            )
        await asyncio.sleep(_LOOK_S)
