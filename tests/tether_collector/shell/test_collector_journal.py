"""The journal: what was promised is there after any end, and says the same."""

from __future__ import annotations

import gc
import sqlite3
import warnings
from pathlib import Path

import pytest

from tether import ids
from tether.control import ControlRequest, StartCommand
from tether.errors import Code, problem
from tether.prompt import AgentSpec, TextContent
from tether.sandbox import ExecutionSummary
from tether_collector.journal import Journal, JournalError, Start


def a_start(execution: str = "exe_1", at: int = 5) -> tuple[Start, ControlRequest]:
    target = ids.ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation="c",
        response="rsp_1",
        response_generation=1,
        execution=execution,
        execution_generation=1,
        sandbox="sbx_1",
        boot="boot_1",
        process_generation=1,
    )
    command = StartCommand(
        control=f"ctl_{execution}",
        target=target,
        owner_revision=3,
        request_id="req_1",
        attempt=1,
        content=(TextContent(text="grüße"),),
        agent=AgentSpec(kind="scripted"),
    )
    request = ControlRequest(control=command.control, verb="start", payload=command.model_dump(mode="json"))
    start = Start(execution, "c", request.control, request.digest, command, target, "n" * 20, b"{}", "journaled", at)
    return start, request


def a_control(control: str = "ctl_1") -> ControlRequest:
    return ControlRequest(control=control, verb="answer", payload={"interaction": "i", "decision": "allow"})


def test_a_start_is_the_same_after_reopening(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    start, request = a_start()
    journal.add_start(start, request)
    journal.close()
    again = Journal(tmp_path / "j")
    assert again.start("exe_1") == start and again.unended() == [start]
    control = again.control(request.control)
    assert control is not None and (control.verb, control.status, control.digest) == (
        "start",
        "accepted",
        request.digest,
    )
    again.close()


def test_a_second_start_of_an_execution_leaves_no_trace(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    start, request = a_start()
    journal.add_start(start, request)
    with pytest.raises(sqlite3.IntegrityError):
        journal.add_start(start, request.model_copy(update={"control": "ctl_other"}))
    assert journal.control("ctl_other") is None
    journal.close()


def test_receipts_and_tokens_only_grow(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    start, request = a_start()
    journal.add_start(start, request)
    journal.add_control(a_control("ctl_1"), "exe_1", 6, token=("c", "lease", 9))
    journal.add_control(a_control("ctl_2"), "exe_1", 7, token=("c", "lease", 4))
    assert journal.token("c", "lease") == 9 and journal.token("c", "owner") == 0
    why = problem(Code.INTERACTION_SETTLED, "too late", interaction="i")
    journal.set_receipt("ctl_2", "rejected", why)
    found = journal.control("ctl_2")
    assert found is not None and found.status == "rejected" and found.problem == why
    assert [entry.control for entry in journal.controls_of("exe_1")] == [request.control, "ctl_1", "ctl_2"]
    assert found.reply().problem == why
    journal.close()


def test_what_ended_is_listed_until_it_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for number in range(3):
        start, request = a_start(f"exe_{number}", at=number)
        journal.add_start(start, request)
        refused = number == 2
        summary = None if refused else ExecutionSummary(target=start.target, state="ended", last_ordinal=4)
        journal.set_ended(start.execution, 100 + number, summary)
    assert [summary.target.execution for summary in journal.ended(10)] == ["exe_1", "exe_0"]
    assert [summary.target.execution for summary in journal.ended(1)] == ["exe_1"]
    assert journal.unended() == []
    assert journal.ended_at() == {"exe_0": 100, "exe_1": 101, "exe_2": 102}
    journal.forget(["exe_0"])
    assert journal.start("exe_0") is None and journal.control("ctl_exe_0") is None
    journal.close()


def test_the_latest_that_ended_are_found_without_reading_all_that_is_kept(tmp_path: Path) -> None:
    """At every end, on the loop's thread: up to 1,024 rows are kept, each with its prompt."""
    journal = Journal(tmp_path / "j")
    statements: list[str] = []
    journal._db.set_trace_callback(statements.append)
    journal.ended(256)
    journal.ended_at()
    journal._db.set_trace_callback(None)
    plans = [journal._db.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall() for sql in statements]
    assert len(plans) == 2
    for plan in plans:
        told = " ".join(str(row[3]) for row in plan)
        assert "executions_ended" in told and "TEMP B-TREE" not in told
    journal.close()


def test_a_journal_of_a_newer_version_or_no_journal_at_all_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    with sqlite3.connect(tmp_path / "j") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(JournalError, match="version 99"):
            Journal(tmp_path / "j")
        gc.collect()
    assert not left_open, "a refused journal is closed"
    (tmp_path / "text").write_text("this is no database, whatever its name says" * 100)
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "text")
