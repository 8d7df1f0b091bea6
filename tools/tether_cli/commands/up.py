"""`tether up`: the set in the foreground, or detached.

Detached, the set is this same command in a session of its own, with its output in `{data}/logs/up.log`; who asked for
it waits until its state file is there, or until it has ended, and then tells why.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tether.processes import identify
from tether_cli import state
from tether_cli.options import AgentsDirOption, DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output
from tether_cli.state import Paths, SetState

if TYPE_CHECKING:
    from tether_cli.set import SetOptions

DETACH_S: Final = 120.0
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 20

AgentsFileOption = Annotated[
    Path | None,
    typer.Option(
        "--agents-file",
        metavar="FILE",
        help="Agents' commands and where their keys come from.  [default: ~/.config/tether/agents.toml]",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("up")(up)


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the set is ready.")] = False,
    data: DataOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP API; 0 takes a free one.")] = 0,
    agents_dir: AgentsDirOption = None,
    agents_file: AgentsFileOption = None,
    idle_s: Annotated[
        float | None,
        typer.Option(
            "--idle-s",
            metavar="SECONDS",
            help="Suspend a sandbox in which nothing has run for so long; a message wakes it.  "
            "[default: TETHER_AGENT_IDLE_S, else never]",
        ),
    ] = None,
    log_format: Annotated[str, typer.Option(help="console or json")] = "console",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
    as_json: JsonOption = False,
) -> None:
    """Start the set on this machine: nats-server, router, agent service, backend. Loopback only."""
    if log_format not in ("console", "json"):
        raise CliError("--log-format must be console or json", exit_code=Exit.USAGE)
    if log_level not in ("debug", "info", "warning", "error"):
        raise CliError("--log-level must be debug, info, warning or error", exit_code=Exit.USAGE)
    if idle_s is not None and not 0 < idle_s < math.inf:
        raise CliError("--idle-s must be more than 0 seconds", exit_code=Exit.USAGE)
    output = Output(as_json)
    from tether_cli import containers
    from tether_cli.set import SetOptions, unused_settings

    containers.check(os.environ)
    for name in unused_settings(os.environ):
        output.note(f"{name} of this shell is not used: a set decides it itself (docs/reference/settings.md)")

    options = SetOptions(
        data=state.data_dir(data),
        http_port=port,
        agents_dir=None if agents_dir is None else agents_dir.expanduser().absolute(),
        agents_file=None if agents_file is None else agents_file.expanduser().absolute(),
        log="json" if log_format == "json" else "console",
        log_level=log_level,
        idle_s=idle_s,
    )
    if detach:
        _detach(options, output)
        return
    asyncio.run(_foreground(options, output))


async def _foreground(options: SetOptions, output: Output) -> None:
    from tether_cli.set import ServiceSet

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    assert starting is not None
    started = False

    def interrupted() -> None:
        stop.set()
        if not started:
            starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupted)
    try:
        async with ServiceSet(options) as running:
            started = True
            announce(running.state, output)
            failing = asyncio.create_task(running.failed(), name="set-failed")
            stopping = asyncio.create_task(stop.wait(), name="set-stopping")
            await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            output.note("ending; executions are stopped first")
            stopping.cancel()
            failing.cancel()
            for ended in await asyncio.gather(failing, stopping, return_exceptions=True):
                if isinstance(ended, CliError):
                    raise ended
    except asyncio.CancelledError:
        raise CliError("interrupted while the set was starting", exit_code=Exit.INTERRUPTED) from None


def announce(up: SetState, output: Output) -> None:
    """What somebody who has just started a set wants to know."""
    output.value(up.public())
    output.say(f"tether is up: {up.http_url}")
    output.say(f"  token file  {up.token_file}")
    output.say(f"  page        {up.http_url}/ (`tether page --sign-in` shows a link that signs in)")
    output.say(f"  NATS        {up.nats_url} (`tether nats-context` sets up the nats CLI)")
    output.say(f"  data        {up.data}")
    where = state.data_option(up.data)
    output.say("next:")
    output.say(f'  tether run "say hello" --agent scripted{where}')
    output.say(f'  curl -H "Authorization: Bearer $(cat {up.token_file})" {up.http_url}/v1/executions')
    output.say(f"  tether down{where}")


def _arguments(options: SetOptions) -> list[str]:
    """The same command, in the foreground."""
    arguments = ["up", "--data", str(options.data), "--port", str(options.http_port)]
    arguments += ["--log-format", "json", "--log-level", options.log_level]
    if options.agents_dir is not None:
        arguments += ["--agents-dir", str(options.agents_dir)]
    if options.agents_file is not None:
        arguments += ["--agents-file", str(options.agents_file)]
    if options.idle_s is not None:
        arguments += ["--idle-s", str(options.idle_s)]
    return arguments


def _detach(options: SetOptions, output: Output) -> None:
    paths = Paths(options.data)
    with state.locked(paths):
        pass  # says at once, and here, that another set has it
    log = paths.logs / "up.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tether_cli", *_arguments(options)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd="/",
            start_new_session=True,
        )
    deadline_s = time.monotonic() + DETACH_S
    try:
        while time.monotonic() < deadline_s:
            found = state.read(paths)
            if found is not None and found.supervisor == identify(process.pid):
                process.returncode = 0  # it is nobody's child from here on: no warning that it still runs
                announce(found, output)
                return
            if process.poll() is not None:
                code = Exit.USAGE if process.returncode == Exit.USAGE else Exit.FAILED
                raise CliError(_why(log), exit_code=code)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait()
        raise
    process.terminate()
    process.wait()
    raise CliError(f"the set was not ready within {DETACH_S:g} s", remedy=f"see {log}")


def _why(log: Path) -> str:
    """The set's own last word, if it had one; else what it said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].startswith("tether: ")), None)
    if told is not None:
        return "\n".join(lines[told:]).removeprefix("tether: ")
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"the set ended before it was ready (its log is {log}); its last lines:\n{tail}"
