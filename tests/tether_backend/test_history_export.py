"""The history that a backend gives to an agent whose session is lost: up to the cut, bounded, and its own only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support_backend import Backend, Log, ended, event, running_backend
from tether import events as ev
from tether import subjects
from tether.errors import Code
from tether.history import History, HistoryRequest
from tether.limits import HISTORY_BYTES_MAX, HISTORY_ROWS_MAX
from tether.testing import MemoryBus, MemoryServer
from tether_backend.core.export import MARK, TEXT_BYTES_MAX, TOOL_BYTES_MAX, Said, Turn, rows_of
from tether_backend.history import HistoryServer

TENANT = "acme"
World = tuple[MemoryBus, Backend, Log]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    bus = MemoryBus(MemoryServer())
    async with (
        running_backend(bus, [TENANT], tmp_path) as backend,
        HistoryServer(bus, backend.deps.database, TENANT).serving(),
    ):
        yield bus, backend, Log(bus, TENANT)


async def ask(bus: MemoryBus, log: Log, cut: int, *, workspace: str | None = None, named: str | None = None) -> History:
    """`workspace`: of the subject; `named`: that the request names."""
    request = HistoryRequest(
        tenant=TENANT,
        workspace=named or workspace or log.workspace,
        conversation=log.conversation,
        cut=cut,
    )
    subject = subjects.history(TENANT, workspace or log.workspace)
    answer = await bus.request(subject, request.model_dump_json().encode(), timeout_s=5.0)
    return History.model_validate_json(answer.data)


async def said(log: Log, backend: Backend, number: int, *middle: Any) -> int:
    """A turn that is over and projected; the log's last sequence then."""
    execution = f"e{number}"
    await log.prompt(f"q{number}", f"r{number}", execution, f"question {number}")
    text = event(2, ev.TEXT_COMPLETED, {"segment": "s1", "text": f"answer {number}"})
    events = [log.started(execution), text, *middle]
    last = await log.frame(execution, [*events, *ended(len(events) + 1)])
    await backend.projected(log.conversation, execution, len(events) + 2)
    return last


def told(history: History) -> list[tuple[str, str]]:
    return [(row.role, row.text) for row in history.rows]


async def test_rows_are_told_up_to_the_cut_whatever_the_projection_has_by_then(world: World) -> None:
    bus, backend, log = world
    cut = await said(log, backend, 1)
    later = await said(log, backend, 2)
    history = await ask(bus, log, cut)
    assert told(history) == [("user", "question 1"), ("assistant", "answer 1")]
    assert (history.cut, history.partial, history.problem) == (cut, False, None) and history.through >= later
    assert told(await ask(bus, log, later))[2:] == [("user", "question 2"), ("assistant", "answer 2")]


async def test_tools_are_rows_with_what_became_of_them_and_reasoning_is_left_out(world: World) -> None:
    bus, backend, log = world
    middle = [
        event(3, ev.REASONING_COMPLETED, {"segment": "s2", "text": "hm"}),
        event(4, ev.TOOL_STARTED, {"tool": "t1", "name": "Bash", "input": {"command": "make"}}),
        event(5, ev.TOOL_COMPLETED, {"tool": "t1", "status": "interrupted", "output": "half"}),
        event(6, ev.TOOL_STARTED, {"tool": "t2", "name": "Read", "input": {}, "parent": "t1"}),
        event(7, ev.TOOL_COMPLETED, {"tool": "t2", "status": "ok", "output": "of a subagent"}),
    ]
    history = await ask(bus, log, await said(log, backend, 1, *middle))
    assert [row.role for row in history.rows] == ["user", "assistant", "tool"]
    tool = history.rows[-1]
    assert (tool.name, tool.input, tool.output, tool.status) == ("Bash", {"command": "make"}, "half", "interrupted")


async def test_a_prompt_that_joined_a_turn_is_told_within_it(world: World) -> None:
    bus, backend, log = world
    await log.prompt("q1", "r1", "e1", "first")
    body = {"request": "q2", "prompt_sequence": 2, "content": [{"type": "text", "text": "and this"}], "into": "r1"}
    await log.note(ev.PROMPT_ADMITTED, "q2/prompt.admitted", body)
    text = event(2, ev.TEXT_COMPLETED, {"segment": "s1", "text": "both done"})
    cut = await log.frame("e1", [log.started("e1"), text, *ended(3)])
    await backend.projected("c1", "e1", 4)
    assert told(await ask(bus, log, cut)) == [("user", "first"), ("user", "and this"), ("assistant", "both done")]


async def test_a_cut_that_the_projection_has_not_reached_is_to_be_asked_again(world: World) -> None:
    bus, backend, log = world
    cut = await said(log, backend, 1)
    history = await ask(bus, log, cut + 1)
    assert history.problem is not None and history.rows == ()
    assert (history.problem.code, history.problem.retryable) == (Code.RUNTIME_UNAVAILABLE, True)
    assert history.through == cut


async def test_another_workspaces_conversation_does_not_exist(world: World) -> None:
    bus, backend, log = world
    cut = await said(log, backend, 1)
    for answer in (
        await ask(bus, log, cut, workspace="w-other"),
        await ask(bus, log, cut, workspace="w-other", named=log.workspace),
        await ask(bus, Log(bus, TENANT, "c-unknown", log.workspace), cut),
    ):
        assert answer.problem is not None and answer.problem.code is Code.NOT_FOUND
        assert not answer.problem.retryable and answer.rows == ()


# --- bounds ---


def a_turn(number: int, text: str = "answer") -> Turn:
    prompt = Said(number, [{"type": "text", "text": f"question {number}"}])
    return Turn(prompt, [], [{"kind": "text", "state": "completed", "id": "s", "text": text}])


def test_the_newest_rows_are_kept_and_what_is_left_out_is_said() -> None:
    turns = [a_turn(number) for number in range(150)]
    rows, partial = rows_of(turns, more=False)
    assert partial and len(rows) == HISTORY_ROWS_MAX
    assert rows[0].text == "question 50" and rows[-1].text == "answer"
    assert rows_of(turns[:10], more=False)[1] is False
    assert rows_of(turns[:10], more=True)[1] is True


def test_rows_stay_within_the_bytes_of_an_answer() -> None:
    rows, partial = rows_of([a_turn(number, "é" * 8_000) for number in range(40)], more=False)
    answer = History(conversation="c1", cut=1, rows=tuple(rows), partial=partial)
    assert partial and 0 < len(rows) < 40 and len(answer.encode()) <= HISTORY_BYTES_MAX


def test_long_fields_are_cut_and_marked() -> None:
    tool = {
        "kind": "tool",
        "state": "ok",
        "id": "t",
        "name": "Bash",
        "input": {"a": "x" * 9_000},
        "output": "y" * 9_000,
    }
    turn = a_turn(1, "z" * 20_000)
    turn.items = [*turn.items, tool]
    (prompt, text, cut), partial = rows_of([turn], more=False)
    assert partial and (prompt.cut, text.cut, cut.cut) == (False, True, True)
    assert len(text.text) == TEXT_BYTES_MAX + len(MARK) and text.text.endswith(MARK)
    assert len(str(cut.input)) == len(str(cut.output)) == TOOL_BYTES_MAX + len(MARK)


def test_a_turn_of_which_rows_are_missing_makes_it_partial() -> None:
    turn = a_turn(1)
    turn.missing = True
    assert rows_of([turn], more=False)[1] is True
