"""`tether sandbox`: the sandboxes of a set, and replacing a collector under living CLIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output, from_problem

_RESTART_S: Final = 60.0  # the old one's shutdown and the new one's start, each within its own bound


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="List sandboxes; replace a collector while its CLIs go on.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("restart-collector")(restart_collector)
    app.add_typer(group, name="sandbox")


def list_(data: DataOption = None, as_json: JsonOption = False) -> None:
    """List sandboxes with their collectors."""
    from tether_cli import talk

    talk.run(_list(data, Output(as_json)))


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
                "connected" if view.connected else "not connected",
                view.version or "",
                len(view.executions) + view.executions_omitted or "",
            )
            for view in found.sandboxes
        ),
    )


async def _restart(workspace: str, data: Path | None, output: Output) -> None:
    from tether import subjects
    from tether.bus import connect
    from tether.errors import BusError, Code, Problem
    from tether_cli import state

    up = state.require(data)
    request = json.dumps({"tenant": up.tenant, "workspace": workspace}).encode()
    try:
        async with await connect(
            up.nats_url, name="tether-cli", user=up.nats_user, password=up.nats_password, connect_timeout_s=5.0
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
            refused.remedy = "`tether sandbox list` shows the workspaces that have one"
        raise refused
    output.value(found)
    output.say(f"the collector of {workspace} was replaced: {found['before'] or 'none'} → {found['instance']}")
