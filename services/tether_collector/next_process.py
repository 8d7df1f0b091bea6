"""Preparing the process that follows one which was of no use (`core/fallback.py` decides that there is one).

    again    wait, sweep what is left of the conversation's ended executions ──────────────────────▶ Note process
    history  no other process of the conversation lives?  the material: what an earlier attempt kept,
             else the CLI's own file of the session, else the rows of a backend ─▶ kept on disk ───▶ Note process
             ── a living writer, no room, nobody answers, nothing there ──────────────────────▶ Note process_refused

The note is given back to the execution's shell, which records it and, once everything up to it is in the log, goes on:

    note recorded ─▶ `execution.started{process}`, `session.recovered` stored ─▶ keeper dismissed ─▶ spool handed on
    ─▶ journal: the next process ─▶ native file in its place ─▶ launched ─▶ material removed

A crash after any of these is continued from the spool and the journal; a process whose note is there is never prepared
again, and one that was launched is never launched again (its spawn record). Rows are asked for until HISTORY_WAIT_S is
over: a projection that is behind the cut says so, and catches up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import ValidationError

from tether import subjects
from tether.errors import BusError, Code
from tether.history import History, HistoryRequest
from tether_collector import native_sessions
from tether_collector.core.adapters.base import Launch, config_home
from tether_collector.core.fallback import CHOICES, PROCESS, REFUSED
from tether_collector.core.inputs import NextProcess
from tether_collector.journal import Start
from tether_collector.launching import derived_uuid
from tether_collector.material import NATIVE, ROWS, MaterialError, publish
from tether_collector.surroundings import Surroundings
from tether_collector.sweep import sweep

CUT_REFUSED: Final = "the turn before was cut before its session could be resumed, and no history stands in by itself"
HISTORY_WAIT_S: Final = 20.0  # for a backend whose projection has the cut
ENDING_WAIT_S: Final = 10.0  # for the books on an execution whose process is proven gone
HISTORY_REPLY_S: Final = 8.0  # of one backend that has the request; where none listens it is said at once
HISTORY_AGAIN_S: Final = 0.25
_log = structlog.get_logger("tether.collector")

Note = tuple[str, dict[str, Any]]


class RefusedError(Exception):
    """There is no next process; `code` and the message are the response's, as are `choices`."""

    def __init__(self, code: Code, detail: str, *, choices: Sequence[str] = CHOICES) -> None:
        super().__init__(detail)
        self.code = code
        self.choices = choices


def chosen(start: Start) -> NextProcess:
    """The first process of an execution that begins from the history."""
    return NextProcess(start.target.process_generation, "history", 0)


async def prepare(around: Surroundings, start: Start, launch: Launch, want: NextProcess) -> Note:
    """The note of what is wanted: PROCESS, or REFUSED with the reason. Raises nothing that bus or disk may cause."""
    try:
        if want.why == "again":
            return PROCESS, await _again(around, start, launch, want)
        async with around.material.slot():
            return PROCESS, await _from_history(around, start, launch, want)
    except RefusedError as refused:
        code, detail, choices = refused.code, str(refused), refused.choices
    except MaterialError as error:
        code, detail, choices = Code.QUOTA_EXCEEDED, str(error), CHOICES
    _log.warning("next_process_refused", process=want.process, code=code.value, detail=detail)
    return REFUSED, {"code": code.value, "detail": detail, "choices": list(choices)}


async def _again(around: Surroundings, start: Start, launch: Launch, want: NextProcess) -> dict[str, Any]:
    await asyncio.sleep(max(0.0, want.not_before / 1000 - time.time()))
    _check_sandbox(around, start)
    for execution in around.journal.ended_of(start.conversation):
        await sweep(f"{execution}-")
    return _body(around, want, launch.session, resume=True)


def _body(around: Surroundings, want: NextProcess, session: str, *, resume: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"process": want.process, "why": want.why, "session": session, "resume": resume}
    return {**body, "instance": around.instance}


def _check_sandbox(around: Surroundings, start: Start) -> None:
    if around.settings.recovery or start.target.boot != around.settings.boot:
        raise RefusedError(Code.RESUME_FAILED, "the sandbox in which it could go on is gone")


async def _from_history(around: Surroundings, start: Start, launch: Launch, want: NextProcess) -> dict[str, Any]:
    _check_sandbox(around, start)
    allowed = start.command.fallback
    if not launch.resume and allowed is False:
        raise RefusedError(Code.RESUME_FAILED, CUT_REFUSED)
    await _check_writers(around, start)
    why = "not_found" if launch.resume else "chosen" if allowed is None else "cut"
    session = derived_uuid(start.execution, f"session:{want.process}")
    if launch.resume:
        native = await asyncio.to_thread(_native, around, start, launch, want, session)
        if native is not None:
            recovered = {"why": why, "source": "native", "rows": native, "partial": False}
            return {**_body(around, want, session, resume=True), "native": True, "recovered": recovered}
    history = await _rows(around, start, want.process)
    rows = [row.model_dump(mode="json", exclude_none=True) for row in history.rows]
    return {
        **_body(around, want, session, resume=False),
        "history": {"rows": rows, "partial": history.partial},
        "recovered": {"why": why, "source": "export", "rows": len(rows), "partial": history.partial},
    }


async def _check_writers(around: Surroundings, start: Start) -> None:
    """No other process of the conversation may live. One whose end is in the log may still be being closed here."""
    deadline_s = time.monotonic() + ENDING_WAIT_S
    while True:
        starts = around.journal.unended()
        others = [one.execution for one in starts if one.conversation == start.conversation]
        others.remove(start.execution)
        if not others:
            return
        if time.monotonic() >= deadline_s:
            detail = f"execution {others[0]} of the conversation is not proven to have ended"
            raise RefusedError(Code.SESSION_BUSY, detail)
        await asyncio.sleep(HISTORY_AGAIN_S)


# --- the CLI's own file ---


def _native(around: Surroundings, start: Start, launch: Launch, want: NextProcess, session: str) -> int | None:
    """Keep the session's own file as the next one's; how many rows it has, None where it is not to be found."""
    agent = start.command.agent.kind
    home = Path(config_home(launch, agent))
    found = native_sessions.find(around.settings.state_dir, home, agent, launch.session, session)
    if found is None:
        return None
    around.material.keep(start.execution, want.process, NATIVE, found.data)
    return found.rows


def place(around: Surroundings, start: Start, launch: Launch) -> None:
    """Before the launch of a noted process: what it finds on disk is there. Raises OSError."""
    staged = around.material.path(start.execution, start.target.process_generation, NATIVE)
    home = Path(config_home(launch, start.command.agent.kind))
    publish(staged, native_sessions.claude_file(home, launch.cwd, launch.session), home)


# --- the rows of a backend ---


async def _rows(around: Surroundings, start: Start, process: int) -> History:
    kept = await asyncio.to_thread(around.material.read, start.execution, process, ROWS)
    if kept is not None and (known := _parse(kept, start)) is not None:
        return known
    history = await _ask(around, start)
    if not history.rows:
        detail = "nothing of the conversation's history is there to go on from"
        raise RefusedError(Code.RESUME_FAILED, detail, choices=("fresh",))  # asked again there is none either
    await asyncio.to_thread(around.material.keep, start.execution, process, ROWS, history.encode())
    return history


async def _ask(around: Surroundings, start: Start) -> History:
    target = start.target
    request = HistoryRequest(
        tenant=target.tenant,
        workspace=target.workspace,
        conversation=target.conversation,
        cut=start.command.history_cut or 0,
    )
    subject = subjects.history(target.tenant, target.workspace)
    data = request.model_dump_json().encode()
    deadline_s = time.monotonic() + HISTORY_WAIT_S
    while True:
        try:
            answer = await around.bus.request(subject, data, timeout_s=HISTORY_REPLY_S)
        except BusError as error:
            why = f"nobody answers for it ({error.detail})"
        else:
            history = _parse(answer.data, start)
            if history is not None and history.problem is None:
                return history
            if history is None:
                why = "the answer cannot be read"
            else:
                assert history.problem is not None
                why = history.problem.detail
                if not history.problem.retryable:
                    raise RefusedError(Code.RESUME_FAILED, f"the conversation's history is not to be had: {why}")
        if time.monotonic() >= deadline_s:
            raise RefusedError(Code.RESUME_FAILED, f"the conversation's history is not to be had: {why}")
        await asyncio.sleep(HISTORY_AGAIN_S)


def _parse(data: bytes, start: Start) -> History | None:
    """An answer about this conversation up to this cut."""
    try:
        history = History.model_validate_json(data)
    except ValidationError:
        return None
    asked = (start.conversation, start.command.history_cut or 0)
    return history if (history.conversation, history.cut) == asked else None
