"""`tether page`: where the page is, and on request a link that signs in.

The link carries the token in its fragment, which a browser sends to nobody. It is shown on a terminal alone: a pipe
ends in a log or in another command's arguments, which every process of the machine may read.
"""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import quote

import typer

from tether_cli import state
from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output


def register(app: typer.Typer) -> None:
    app.command("page")(page)


def page(
    sign_in: Annotated[
        bool, typer.Option("--sign-in", help="Show a link that signs in: it holds the token. On a terminal only.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the address of the page: conversations, approvals, executions and sandboxes in a browser."""
    output = Output(as_json)
    up = state.require(data)
    url = f"{up.http_url}/"
    if sign_in:
        if as_json or not sys.stdout.isatty():
            raise CliError(
                "--sign-in shows the token, and does so on a terminal only",
                remedy=f"open {url} and paste the content of {up.token_file}",
                exit_code=Exit.USAGE,
            )
        output.say(f"{url}#token={quote(up.token, safe='')}")
        return
    output.value({"url": url, "token_file": up.token_file})
    output.say(url)
    link = f"tether page --sign-in{state.data_option(up.data)}"
    output.say(f"  sign in with the content of {up.token_file}, or by `{link}`")
