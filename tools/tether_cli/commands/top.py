"""`tether top`: the set at a glance, again every second."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import Output

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from tether_cli.looking import Looker, View
    from tether_cli.state import SetState

REFRESH_S: Final = 1.0
WIDE: Final = 100  # columns from which everything is shown
OVERHEAD_LINES: Final = 12  # of four tables: a blank line, the headings, what was cut
QUIT: Final = frozenset({"q", "Q", "\x03", "\x04"})


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch services, sandboxes, executions and streams; q or Ctrl-C ends it. With --json one object for each look."""
    from tether_cli import state, talk

    paths = state.Paths(state.data_dir(data))
    found = state.read(paths)
    if found is None:
        found = state.require(data)  # says that none is up
    talk.run(_top(found, data, once=once, output=Output(as_json)))


async def _top(up: SetState, data: Path | None, *, once: bool, output: Output) -> None:
    from rich.console import Console

    from tether_cli.looking import Looker

    looker = Looker(up)
    try:
        if output.as_json or once:
            await _print(looker, Console(), once=once, output=output)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            await _print(looker, Console(), once=True, output=output)  # nobody could end it with q
        else:
            await _watch(looker, Console())
    finally:
        await looker.close()


async def _print(looker: Looker, console: Console, *, once: bool, output: Output) -> None:
    await looker.look()
    await asyncio.sleep(0.2 if once else 0.0)  # a rate needs two looks
    while True:
        view = await looker.look()
        output.value(asdict(view))
        if not output.as_json:
            console.print(render(view, console.width))
        if once:
            return
        await asyncio.sleep(REFRESH_S)


async def _watch(looker: Looker, console: Console) -> None:
    from rich.live import Live

    stop = asyncio.Event()
    async with _keys(stop):
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                view = await looker.look()
                live.update(render(view, console.width, height=console.height), refresh=True)
                try:
                    async with asyncio.timeout(REFRESH_S):
                        await stop.wait()
                except TimeoutError:
                    continue


@asynccontextmanager
async def _keys(stop: asyncio.Event) -> AsyncIterator[None]:
    """Set `stop` at q, Ctrl-C, Ctrl-D or the terminal's end; the terminal is as it was afterwards."""
    import os
    import signal
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(descriptor, 64).decode("utf-8", "replace")
        if not keys or not QUIT.isdisjoint(keys):
            stop.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- what it looks like ---


def render(view: View, width: int, *, height: int | None = None) -> RenderableType:
    """The whole picture for a terminal of `width` columns; with a `height` long tables are cut until it fits."""
    from rich.console import Group
    from rich.text import Text

    head = Text()
    for name, count in (("prompts waiting", view.prompts_waiting), ("commands waiting", view.commands_waiting)):
        head.append(f"{name} {'?' if count is None else count}   ", style="bold" if count else "")
    head.append(f"executions {len(view.executions) + view.executions_omitted}")
    lines = [head, *(Text(f"! {problem}", style="red") for problem in view.problems)]
    tables = [part(view, width) for part in (_executions, _services, _sandboxes, _streams)]
    if view.quotas:
        tables.insert(1, _quotas(view))
    if height is not None:
        _fit(tables, height - len(lines) - OVERHEAD_LINES)
    return Group(*lines, *(line for table in tables for line in (Text(), table)))


def _fit(tables: Sequence[Table], rows_max: int) -> None:
    """Cut the longest table, again and again, until no more than `rows_max` rows are left in all."""
    rows = [table.row_count for table in tables]
    while sum(rows) > rows_max and max(rows) > 1:
        rows[rows.index(max(rows))] -= 1
    for table, kept in zip(tables, rows, strict=True):
        left_out = table.row_count - kept
        if left_out:
            del table.rows[kept:]
            for column in table.columns:
                del column._cells[kept:]  # rich has no way to take rows out again
            table.caption = f"{left_out} more rows"


def _table(*columns: tuple[str, bool]) -> Table:
    """`columns`: heading, and whether it holds numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="reverse", caption_justify="left")
    for heading, is_number in columns:
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    return table


def short(name: object, width: int, others: int) -> str:
    """A name for a row whose other columns take `others` columns: on a narrow terminal it is what gives way."""
    text, room = str(name), max(8, width - others)
    return text if len(text) <= room else text[: room - 1] + "…"


def _add(table: Table, *cells: object, style: str = "") -> None:
    from rich.text import Text

    table.add_row(*(Text(str(cell)) for cell in cells), style=style)


def _cut(table: Table, rows_max: int) -> Table:
    left_out = table.row_count - rows_max
    if left_out > 0:
        del table.rows[rows_max:]
        for column in table.columns:
            del column._cells[rows_max:]  # rich has no way to take rows out again
        table.caption = f"{left_out} more"
    return table


def _services(view: View, width: int) -> Table:
    wide = width >= WIDE
    columns = [("SERVICE", False), ("STATE", False), ("RSS", True), ("CPU", True)]
    table = _table(*columns, *([("UP", True), ("PID", True)] if wide else []))
    for one in view.services:
        cells: list[object] = [short(one.name, width, 50 if wide else 28), "up" if one.alive else "down"]
        cells += [size(one.rss_bytes) if one.alive else "", "" if one.cpu_share is None else f"{one.cpu_share:.0%}"]
        cells += [age(one.up_s) if one.alive else "", one.pid] if wide else []
        _add(table, *cells, style="" if one.alive else "red")
    return table


def _sandboxes(view: View, width: int) -> Table:
    wide = width >= WIDE
    columns = [("WORKSPACE", False), ("STATE", False), ("COLLECTOR", False), ("EXECUTIONS", True)]
    table = _table(*columns, *([("STARTS", True), ("SANDBOX", False)] if wide else []))
    for one in view.sandboxes:
        cells: list[object] = [short(one.workspace, width, 90 if wide else 44), one.state]
        asleep = one.state == "suspended"
        cells += ["connected" if one.connected else "asleep" if asleep else "away", one.executions]
        style = "dim" if asleep else "yellow" if one.state == "draining" or not one.connected else ""
        _add(table, *cells, *((one.starts, one.sandbox) if wide else ()), style=style)
    return table


def _executions(view: View, width: int) -> Table:
    wide = width >= WIDE
    names = [("CONVERSATION", False), ("STATE", False), ("AGENT", False)]
    numbers = [("AGE", True), ("EV/S", True), ("WAIT", True)]
    table = _table(*names, *numbers, *([("EVENTS", True), ("EXECUTION", False)] if wide else []))
    for one in view.executions:
        rate = "" if one.events_per_s is None else f"{one.events_per_s:.1f}"
        cells: list[object] = [short(one.conversation, width, 100 if wide else 50), one.state, short(one.agent, 20, 8)]
        cells += [age(one.age_s), rate, one.waiting or "", *((one.events, one.execution) if wide else ())]
        _add(table, *cells, style="bold" if one.waiting else "")
    if view.executions_omitted:
        table.caption = f"{view.executions_omitted} more"
    return table


def _quotas(view: View) -> Table:
    table = _table(("QUOTA", False), ("USED", True), ("LIMIT", True))
    for one in view.quotas:
        told = size if one.name.endswith("_bytes") else str
        style = "red" if one.used >= one.limit else "yellow" if 10 * one.used >= 9 * one.limit else ""
        _add(table, one.name, told(one.used), told(one.limit), style=style)
    return table


def _streams(view: View, width: int) -> Table:
    table = _table(("STREAM", False), ("MESSAGES", True), ("SIZE", True), ("LAG", False))
    for one in view.streams:
        named = width >= WIDE
        lag = "  ".join(f"{consumer.name} {consumer.lag}" if named else str(consumer.lag) for consumer in one.consumers)
        _add(table, short(one.name, width, 34), one.messages, size(one.size_bytes), lag)
    return table


def size(count: int) -> str:
    """`12.3M`."""
    value, unit = float(count), ""
    for unit in ("", "K", "M", "G", "T"):  # noqa: B007 - the last one counts
        if value < 1024:
            break
        value /= 1024
    return f"{value:.0f}{unit}" if not unit or value >= 100 else f"{value:.1f}{unit}"


def age(seconds: float) -> str:
    """`45s`, `12m`, `3h05`, `2d04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
