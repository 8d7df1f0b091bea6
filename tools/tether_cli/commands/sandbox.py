"""`tether sandbox`: the sandboxes of a set, one of them, deleting one, replacing a collector under living CLIs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tether_cli.commands.drain import DrainIdOption, GraceOption, ReasonOption, WaitOption, WorkspaceArgument
from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output, from_problem

if TYPE_CHECKING:
    from tether.api_sandboxes import SandboxView
    from tether_cli.state import SetState

_RESTART_S: Final = 60.0  # the old one's shutdown and the new one's start, each within its own bound


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="List, show and delete sandboxes; replace a collector.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("show")(show)
    group.command("delete")(delete)
    group.command("restart-collector")(restart_collector)
    app.add_typer(group, name="sandbox")


def list_(data: DataOption = None, as_json: JsonOption = False) -> None:
    """List sandboxes with their collectors."""
    from tether_cli import talk

    talk.run(_list(data, Output(as_json)))


def show(workspace: WorkspaceArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Show a sandbox: its state, what its last drain came to, and the checkpoint that it goes on from."""
    from tether_cli import talk

    talk.run(_show(talk.token(workspace, "WORKSPACE"), data, Output(as_json)))


def delete(
    workspace: WorkspaceArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without being asked.")] = False,
    no_checkpoint: Annotated[
        bool,
        typer.Option(
            "--no-checkpoint",
            help="End it at once, without a drain: no checkpoint is made. Its files stay on the volume.",
        ),
    ] = False,
    grace: GraceOption = None,
    reason: ReasonOption = None,
    drain_id: DrainIdOption = None,
    wait: WaitOption = True,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a sandbox, drained first. Its checkpoint, its conversations and the files on its volume stay."""
    from tether_cli import drains, talk

    name = talk.token(workspace, "WORKSPACE")
    if not yes:
        _consent(name)
    given = drains.DrainOptions(drain_id, grace, reason, wait=wait, checkpoint=not no_checkpoint)
    raise typer.Exit(int(talk.run(drains.begin("delete", name, given, data, Output(as_json)))))


def _consent(workspace: str) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        why = "deleting needs your consent, and there is no terminal to ask"
        raise CliError(why, remedy="say --yes", exit_code=Exit.USAGE)
    sys.stderr.write(f"delete the sandbox of {workspace}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("nothing was deleted", exit_code=Exit.DENIED)


def restart_collector(
    workspace: Annotated[str, typer.Argument(help="The workspace, as `tether sandbox list` shows it.")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace a workspace's collector: running CLIs and what waits for an answer live on and are adopted.

    This is how a collector or an adapter is upgraded: the new one is the code that is installed now.
    """
    from tether_cli import talk

    talk.run(_restart(talk.token(workspace, "workspace"), data, Output(as_json)))


async def _list(data: Path | None, output: Output) -> None:
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        found = await client.sandboxes()
    output.value(found.model_dump(mode="json"))
    output.table(
        ("WORKSPACE", "STATE", "COLLECTOR", "VERSION", "EXECUTIONS"),
        (
            (
                view.workspace,
                view.state,
                "connected" if view.connected else "asleep" if view.state == "suspended" else "not connected",
                view.version or "",
                view.living or "",
            )
            for view in found.sandboxes
        ),
    )


async def _show(workspace: str, data: Path | None, output: Output) -> None:
    from tether.errors import Code, ProblemError
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        try:
            view = await client.sandbox(workspace)
        except ProblemError as error:
            if error.problem.code is not Code.NOT_FOUND:
                raise
            refused = talk.as_cli_error(error)
            refused.remedy = "`tether sandbox list` shows the workspaces that have one"
            raise refused from None
    output.value(view.model_dump(mode="json", exclude_none=True))
    for line in lines_of(view, time.time()):
        output.say(line)


def lines_of(view: SandboxView, now_s: float) -> list[str]:
    """A sandbox for people; `now_s` in unix seconds."""
    from tether_cli.drains import checkpoint_words, execution_words
    from tether_cli.render import duration, one_line

    collector = f"connected, {view.version}" if view.connected else "not connected"
    if view.state == "suspended":
        collector = "none: it sleeps, and a message wakes it"
    lines = [f"{view.workspace}  {view.state}", f"  sandbox     {view.sandbox} ({view.provider})"]
    lines.append(f"  collector   {collector}")
    if view.agents:
        lines.append(f"  agents      {', '.join(view.agents)}")
    if view.idle_since is not None:
        lines.append(f"  idle        for {duration(max(0.0, now_s - view.idle_since / 1000))}")
    elif view.connected:
        lines.append(f"  executions  {view.living}")
    if view.drain is not None:
        why = f": {one_line(view.drain.reason, 200)}" if view.drain.reason else ""
        lines.append(f"  drains      {view.drain.drain} ({view.drain.purpose}, grace {view.drain.grace_s:g} s){why}")
    if view.checkpoint is not None:
        lines.append(f"  checkpoint  {checkpoint_words(view.checkpoint)}")
    if view.drained is not None:
        last = view.drained
        why = f" ({one_line(last.reason, 200)})" if last.reason else ""
        lines.append(f"  last {last.purpose or 'drain':<7}{last.drain}: {last.state}{why}")
        lines += [f"    {one.target.execution}  {execution_words(one)}" for one in view.drained.executions]
        if view.drained.problem is not None:
            problem = view.drained.problem
            lines.append(f"    {problem.code.value}: {one_line(problem.detail, 300)}")
    return lines


async def _without_collector(up: SetState, workspace: str) -> str:
    """What to do about a sandbox that has none."""
    from tether.errors import ProblemError
    from tether_cli import talk

    try:
        async with talk.http_client(up) as client:
            view = await client.sandbox(workspace)
    except ProblemError:
        return "`tether sandbox list` shows the workspaces that have one"
    if view.state == "suspended":
        return f"it sleeps: its next collector is the one that is installed; `tether resume {workspace}` wakes it"
    return f"its collector is not there: `tether resume {workspace}` starts one"


async def _restart(workspace: str, data: Path | None, output: Output) -> None:
    from tether import subjects
    from tether.bus import connect
    from tether.errors import BusError, Code, Problem
    from tether_cli import state

    up = state.require(data)
    request = json.dumps({"tenant": up.tenant, "workspace": workspace}).encode()
    try:
        async with await connect(
            up.nats_url, name="tether-cli", creds_file=up.nats_creds_file, connect_timeout_s=5.0
        ) as bus:
            answer = await bus.request(subjects.agent("restart-collector"), request, timeout_s=_RESTART_S)
    except BusError as error:
        raise CliError(
            f"the agent service did not answer: {error}", remedy="see `tether doctor`", exit_code=Exit.UNREACHABLE
        ) from None
    found: dict[str, Any] = json.loads(answer.data)
    if "problem" in found:
        refused = from_problem(Problem.model_validate(found["problem"]))
        if refused.code == Code.NOT_FOUND and not refused.remedy:
            refused.remedy = await _without_collector(up, workspace)
        raise refused
    output.value(found)
    output.say(f"the collector of {workspace} was replaced: {found['before'] or 'none'} → {found['instance']}")
