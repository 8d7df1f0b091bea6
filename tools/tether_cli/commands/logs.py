"""`tether logs`: the events of one execution, as the log has them."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import Output

if TYPE_CHECKING:
    from tether.client.items import Item


def register(app: typer.Typer) -> None:
    app.command("logs")(logs)


def logs(
    execution: Annotated[str, typer.Argument(metavar="EXECUTION")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the execution has ended.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print an execution's events, one per line."""
    from tether_cli import talk

    talk.run(_logs(talk.token(execution, "EXECUTION"), follow, data, Output(as_json)))


async def _logs(execution: str, follow: bool, data: Path | None, output: Output) -> None:
    from tether import events as ev
    from tether.client.items import CaughtUp, ExecutionItem, GapItem, PositionChanged, SnapshotItem
    from tether_cli import state, talk
    from tether_cli.render import item_value

    async with talk.http_client(state.require(data)) as client:
        view = await talk.execution(client, execution, "no execution")
        async with aclosing(client.follow(view.conversation, patience_s=talk.PATIENCE_S)) as items:
            async for item in items:
                match item:
                    case ExecutionItem(execution=name) if name == execution:
                        output.value(item_value(item))
                        output.say(_line(item))
                        if item.type == ev.EXECUTION_ENDED:
                            return
                    case GapItem(execution=name) if name in (None, execution):
                        output.value(item_value(item))
                        output.say(f"gap {item.first}..{item.last} {item.reason}")
                    case SnapshotItem() | PositionChanged():
                        output.value(item_value(item))
                        output.note("the log is not whole: a snapshot stands for what is gone (`tether show`)")
                    case CaughtUp() if not follow:
                        return
                    case _:
                        pass


def _line(item: Item) -> str:
    """`ordinal  time  type  body`."""
    from datetime import UTC, datetime

    from tether.client.items import ExecutionItem
    from tether_cli.render import one_line

    assert isinstance(item, ExecutionItem)
    event = item.event
    which = f"{event.ordinal}" if event.last is None else f"{event.ordinal}-{event.last}"
    at = datetime.fromtimestamp(event.at / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
    return f"{which:>9}  {at}  {event.type:<22}  {one_line(event.body, 400)}"
