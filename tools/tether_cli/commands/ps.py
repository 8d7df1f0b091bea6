"""`tether ps`: what runs, and what has run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import Output


def register(app: typer.Typer) -> None:
    app.command("ps")(ps)


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended executions too.")] = False,
    conversations: Annotated[bool, typer.Option("--conversations", "-c", help="List conversations.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many, the newest first.")] = 50,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions that run (or all), or conversations."""
    from tether_cli import talk

    talk.run(_ps(everything, conversations, limit, data, Output(as_json)))


async def _ps(everything: bool, conversations: bool, limit: int, data: Path | None, output: Output) -> None:
    from tether_cli import state, talk
    from tether_cli.render import duration

    now_s = time.time()

    def age(at_ms: int | None) -> str:
        return "" if not at_ms else f"{duration(max(0.0, now_s - at_ms / 1000))} ago"

    async with talk.http_client(state.require(data)) as client:
        if conversations:
            listed = await client.conversations(limit=limit)
            output.value(listed.model_dump(mode="json"))
            output.table(
                ("CONVERSATION", "WORKSPACE", "MESSAGES", "ACTIVE", "WAITING", "CHANGED"),
                (
                    (
                        view.conversation,
                        view.workspace,
                        view.messages,
                        view.active_execution or "",
                        view.pending_interactions or "",
                        age(view.updated_at),
                    )
                    for view in listed.conversations
                ),
            )
            more = listed.next_page
        else:
            found = await client.executions(active=not everything, limit=limit)
            output.value(found.model_dump(mode="json"))
            output.table(
                ("CONVERSATION", "EXECUTION", "STATE", "AGENT", "WAITING", "STARTED"),
                (
                    (
                        view.conversation,
                        view.execution,
                        view.state if view.outcome is None else f"{view.state} ({view.outcome})",
                        view.agent or "",
                        view.pending_interactions or "",
                        age(view.started_at),
                    )
                    for view in found.executions
                ),
            )
            more = found.next_page
    if more:
        output.note(f"there are more than {limit}; --limit shows more")
