"""The `tether` command: every module in `tether_cli.commands` is one command.

A command module has `register(app)`, which adds its command (or group) to the Typer application. Nothing else is
needed: modules are found, not listed. They import what is heavy inside the command, so that `tether --help` is quick.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup

from tether_cli import commands
from tether_cli.output import CliError, Exit, report

# The order of `tether --help`; a command that is not named here follows, by name.
_ORDER: Final = (
    *("up", "down", "run", "ps", "top", "show", "attach", "answer", "say", "interrupt", "stop", "logs"),
    *("export", "rm", "drain", "suspend", "resume", "sandbox"),
    *("agents", "doctor", "topology", "nats_context", "nats_permissions", "version"),
)
_HELP: Final = """Run CLI coding agents as durable executions: one unbroken stream, whatever restarts.

Exit codes: 0 done, 1 the outcome is a failure, 2 wrong usage, 3 no set is up or it cannot be reached,
4 denied, 5 the outcome is lost or partial, 130 interrupted."""


class _Group(TyperGroup):
    """Typer reads values by pydantic and tells its words: here they are ours, as everywhere."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from tether.refusals import problems_of

            if isinstance(error.__cause__, ValidationError):
                error.message = problems_of(error.__cause__.errors(include_input=False, include_url=False))[0].remedy
            raise


def build() -> typer.Typer:
    """The application with every command registered."""
    app = typer.Typer(
        cls=_Group,
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def _root() -> None:
        """Keeps `tether` a group, however many commands there are."""

    _root.__doc__ = _HELP
    app.registered_callback.help = _HELP  # type: ignore[union-attr]
    names = [module.name for module in pkgutil.iter_modules(commands.__path__) if not module.name.startswith("_")]
    for name in sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)):
        importlib.import_module(f"{commands.__name__}.{name}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        build()(args=arguments, prog_name="tether")
    except CliError as error:
        report(error, as_json="--json" in arguments)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(Exit.OK if end.code is None else Exit.FAILED)
    return int(Exit.OK)
