"""`tether export`: a whole conversation as one document, to a file or to stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tether_cli.options import DataOption
from tether_cli.output import CliError, Exit


class Format(StrEnum):
    JSON = "json"
    MARKDOWN = "markdown"


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    conversation: Annotated[str, typer.Argument(metavar="CONVERSATION", help="As `tether ps --all` lists it.")],
    kind: Annotated[
        Format | None, typer.Option("--format", help="json or markdown; else by the file's name, else json.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Else to stdout.")] = None,
    data: DataOption = None,
) -> None:
    """Export a conversation: messages, tools, approvals, gaps, recoveries and usage, as JSON or Markdown."""
    from tether_cli import talk

    by_name = Format.MARKDOWN if file is not None and file.suffix in (".md", ".markdown") else Format.JSON
    name, asked = talk.token(conversation, "CONVERSATION"), kind or by_name
    if file is None:
        talk.run(_export(name, asked, sys.stdout.buffer, data))
        return
    try:
        size_bytes = _to_file(name, asked, file, data)
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror}", exit_code=Exit.FAILED) from None
    sys.stderr.write(f"{name} is in {file} ({size_bytes} bytes)\n")


def _to_file(conversation: str, kind: Format, file: Path, data: Path | None) -> int:
    """Whole or not at all: a document that broke off must not look like one. Raises OSError."""
    from tether_cli import talk

    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    whole = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            talk.run(_export(conversation, kind, out, data))
            size_bytes = out.tell()
        whole.replace(file)
    finally:
        whole.unlink(missing_ok=True)
    return size_bytes


async def _export(conversation: str, kind: Format, out: BinaryIO, data: Path | None) -> None:
    from tether_cli import state, talk

    async with (
        talk.http_client(state.require(data)) as client,
        contextlib.aclosing(client.export(conversation, kind.value)) as pieces,
    ):
        async for piece in pieces:
            out.write(piece)
        out.flush()
