"""From a claimed execution to its process, and from one process of it to the next.

    raise_process   a keeper that lives is adopted; one that was never started is launched, once, with what is noted of
                    its process; one that is gone stays gone
    Succession      waits until the machine wants another process (`core/fallback.py`), has it prepared and noted
                    (`next_process.py`), and ends once that is told: then
    hand_over       the old keeper is dismissed, its spool handed on, the journal names the next process

In `hand_over` each step may be done again: the old spool does not change any more, and nothing was launched in the next
folder before the journal named it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from tether import tracing
from tether.ids import ExecutionTarget
from tether_collector import native_sessions, redacting
from tether_collector.core.adapters.base import config_home
from tether_collector.core.execution import Execution
from tether_collector.core.fallback import PROCESS, REFUSED, next_launch
from tether_collector.journal import Start
from tether_collector.keeper_link import LaunchSpec
from tether_collector.launching import agent_launch, launch_spec, next_nonce
from tether_collector.next_process import chosen, place, prepare
from tether_collector.process import AgentProcess, keeper_folder
from tether_collector.spool_inputs import KeeperAliveError, hand_on, noted_process
from tether_collector.surroundings import Surroundings, now_ms

AGAIN_S: Final = 2.0  # a note whose record was not seen is recorded again; what is noted twice counts once
FIRST_PROCESS: Final = 1
KEEPER_LOOK_S: Final = 0.05
_log = structlog.get_logger("tether.collector")


async def raise_process(around: Surroundings, start: Start, process: AgentProcess) -> None:
    alive = await process.adopt()
    around.step("adopted" if alive else "nobody_adopted")
    first = start.target.process_generation == FIRST_PROCESS
    may = start.target.boot == around.settings.boot and not around.settings.recovery
    if not alive and not process.spawned and start.phase != "spawned" and may:
        spec = await _spec(around, start, process)
        failure: str | None = None
        if isinstance(spec, LaunchSpec):
            await asyncio.to_thread(redacting.note, process.directory, around.settings, spec.given)
            around.step("redaction_noted")
            with tracing.scope("start agent"):
                failure = await process.launch(spec)
        elif spec is not None:
            failure = spec
            process.append_dead("note", {"kind": "spawn_failed"}, {"detail": spec}, unless="note")
        around.step("spawned" if first else "next_spawned")
        _log.info("agent_started" if failure is None else "agent_failed", detail=failure)
    if start.phase != "spawned":
        around.journal.set_phase(start.execution, "spawned")
        around.step("spawn_journaled" if first else "next_spawn_journaled")
    around.material.drop(start.execution, start.target.process_generation)


async def _spec(around: Surroundings, start: Start, process: AgentProcess) -> LaunchSpec | str | None:
    """With what is noted of this process; a reason where it cannot be launched; None where it is noted that it is
    not to be."""
    last, kind, noted = await asyncio.to_thread(noted_process, process.directory)
    launch, _ = agent_launch(around.settings, start)
    if not kind and start.command.resume == "history":
        kind, noted = await prepare(around, start, launch, chosen(start))
        process.append_dead("note", {"kind": kind}, noted)
        around.step("process_noted")
        last, kind, noted = await asyncio.to_thread(noted_process, process.directory)
    if kind == REFUSED:
        return None
    if launch.resume and not kind:
        known = await asyncio.to_thread(native_sessions.recorded, around.settings.state_dir, launch.session)
        if known is not None and known.get("unapplied"):
            process.append_dead("note", {"kind": "offers"}, {"offers": known["unapplied"]})
            last, _, _ = await asyncio.to_thread(noted_process, process.directory)
    if noted.get("native") is True:
        try:
            await asyncio.to_thread(place, around, start, next_launch(launch, noted))
        except OSError as error:
            return f"the session's file cannot be put into its place: {error.strerror}"
        around.step("native_placed")
    return launch_spec(around.settings, start, noted if kind == PROCESS else None, spool_after=last)


async def remember_session(around: Surroundings, start: Start, machine: Execution) -> None:
    """Note the CLI's session as the process left it, for whoever looks for its file later. A volume that takes nothing
    has worse to tell: then its file counts as changed."""
    status, launch = machine.status(), machine.launch
    if status.native_session is None:
        return
    agent, home = machine.adapter.name, Path(config_home(launch, machine.adapter.name))
    note = partial(
        native_sessions.record,
        around.settings.state_dir,
        home,
        launch.cwd,
        agent,
        status.native_session,
        status.cli_version,
        now_ms(),
        machine.unapplied(),
    )
    try:
        await asyncio.to_thread(note)
    except OSError as error:
        _log.warning("session_not_noted", session=status.native_session, error=str(error))


class Succession:
    """One process's. `judging`: the machine, once it knows all that is recorded. `record`: a note into the spool.
    `told`: waits until everything offered is stored; False where that is not so."""

    def __init__(
        self,
        around: Surroundings,
        start: Start,
        judging: Callable[[], Execution | None],
        record: Callable[[dict[str, Any], dict[str, Any]], Awaitable[None]],
        told: Callable[[], Awaitable[bool]],
    ) -> None:
        self._around = around
        self._start = start
        self._judging = judging
        self._record = record
        self._told = told
        self._moved = asyncio.Event()
        self._remembered = False

    def look(self) -> None:
        """Something moved."""
        self._moved.set()

    async def run(self) -> None:
        """Until the next process is noted and told."""
        while True:
            self._moved.clear()
            machine = self._judging()
            pause_s: float | None = None
            if machine is not None:
                if machine.held and not self._remembered:  # a drain is about to keep what is on disk
                    self._remembered = True
                    await remember_session(self._around, self._start, machine)
                if machine.process_generation > self._start.target.process_generation:
                    if await self._told():
                        self._around.step("process_told")
                        return
                    pause_s = AGAIN_S
                elif machine.next_process is not None:
                    await self._note(machine)
                    pause_s = AGAIN_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._moved.wait()
            except TimeoutError:
                pass

    async def _note(self, machine: Execution) -> None:
        want, launch = machine.next_process, machine.launch
        assert want is not None
        kind, body = await prepare(self._around, self._start, launch, want)
        machine_now = self._judging()
        if machine_now is not None and machine_now.next_process == want:  # a stop may have come in between
            self._around.step("process_prepared")
            await self._record({"kind": kind}, body)
            self._around.step("process_noted")


async def hand_over(around: Surroundings, start: Start, process: AgentProcess, target: ExecutionTarget) -> Start:
    """The start as it goes on with the process that `target` names."""
    await process.dismiss()
    folder = keeper_folder(around.settings.state_dir, start.execution, target.process_generation)
    while True:
        try:
            await asyncio.to_thread(hand_on, process.directory, folder)
            break
        except KeeperAliveError:
            await asyncio.sleep(KEEPER_LOOK_S)
            if process.live is None and await process.adopt():
                await process.dismiss()
    around.step("spool_handed_on")
    named = start.target.model_copy(update={"process_generation": target.process_generation})
    nonce = next_nonce(start.nonce, target.process_generation)
    around.journal.set_process(start.execution, named, nonce)
    around.step("process_journaled")
    _log.info("next_process", process=target.process_generation)
    return replace(start, target=named, nonce=nonce, phase="claimed")
