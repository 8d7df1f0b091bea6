"""What a volume forgets of a conversation: its files and rows to the last byte, and nothing of anybody else."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tether import ids
from tether.checkpoint import DrainedExecution, UnheardMessage
from tether.control import ControlRequest, StartCommand
from tether.deletion import Forgotten
from tether.prompt import AgentSpec, TextContent
from tether.sandbox import DrainOrder, ExecutionSummary
from tether_collector.core.draining import Draining, Run
from tether_collector.forget import Request, forget
from tether_collector.forgetting import delete_sessions
from tether_collector.journal import Journal, Start

MARKER: Final = "MARKER-of-what-is-forgotten"
SESSION: Final = "11111111-2222-3333-4444-555555555555"
OTHER: Final = "99999999-2222-3333-4444-555555555555"


def target_of(conversation: str, session: str | None) -> ids.ExecutionTarget:
    return ids.ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation=conversation,
        response=f"rsp_{conversation}",
        response_generation=1,
        execution=f"exe_{conversation}",
        execution_generation=1,
        sandbox="sbx_1",
        boot="boot_1",
        process_generation=1,
        native_session=session,
    )


def journaled(journal: Journal, conversation: str, text: str, session: str, *, ended: bool = True) -> str:
    """A start with its control, an answer, a gap; its execution's id."""
    target = target_of(conversation, None)
    command = StartCommand(
        control=f"ctl_{conversation}",
        target=target,
        owner_revision=3,
        request_id=f"req_{conversation}",
        attempt=1,
        content=(TextContent(text=text),),
        agent=AgentSpec(kind="scripted"),
    )
    request = ControlRequest(control=command.control, verb="start", payload=command.model_dump(mode="json"))
    execution = target.execution
    journal.add_start(
        Start(
            execution, conversation, request.control, request.digest, command, target, "n" * 20, text.encode(),
            "journaled", 5,
        ),
        request,
    )  # fmt: skip
    answer = ControlRequest(control=f"ans_{conversation}", verb="answer", payload={"text": text})
    journal.add_control(answer, execution, 6, token=(conversation, "lease", 7))
    summary = ExecutionSummary(target=target_of(conversation, session), state="ended", last_ordinal=9)
    if ended:
        journal.set_ended(execution, 10, summary)
        journal.add_gap(summary, "retention_gap", 10)
    return execution


def volume(folder: Path, *, ended: bool = True) -> Path:
    """A workspace with two conversations; the marker in everything of `doomed`."""
    state = folder / ".tether"
    state.mkdir()
    journal = Journal(state / "journal.sqlite3")
    for conversation, text, session in (("doomed", MARKER, SESSION), ("calm", "neighbour", OTHER)):
        execution = journaled(journal, conversation, text, session, ended=ended or conversation == "calm")
        files: dict[str, Any] = {
            f"executions/{execution}/1/spool/000000000001.seg": text,
            f"execution-recovery/{execution}.json": text,
            f"recovery-material/{execution}-2.json": text,
            f"sessions/{session}.json": text,
            f"agents/scripted/sessions/{session}.json": text,
            f"agents/claude/projects/-w/{session}.jsonl": text,
            f"agents/claude/todos/{session}-agent.json": text,
            f"agents/claude/session-env/{session}/env": text,
        }
        for name, content in files.items():
            path = state / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    lines = [{"sessionId": SESSION, "display": MARKER}, {"sessionId": OTHER, "display": "neighbour"}]
    shared = state / "agents/claude/history.jsonl"
    shared.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (state / "checkpoints").mkdir()
    (state / "checkpoints" / "ckp_1.json").write_text(MARKER)
    (state / "checkpoints" / ".work-ckp_2").mkdir()
    (state / "checkpoints" / ".work-ckp_2" / "journal.sqlite3").write_text(MARKER)
    for drain, conversation, text in (("drn_1", "doomed", MARKER), ("drn_2", "calm", "neighbour")):
        heard = UnheardMessage(request="req_1", text=text)
        left = DrainedExecution(target=target_of(conversation, None), outcome="forced", unheard=(heard,))
        run = Run(stage="ended", left=left)
        order = DrainOrder(drain=drain, reason="maintenance")
        journal.add_drain(Draining(order=order, boot="boot_1", at=5, phase="over", runs={f"exe_{conversation}": run}))
    journal.close()
    (folder / "notes.txt").write_text(f"the user's own: {MARKER}")
    return state


def found_in(folder: Path, marker: str = MARKER) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and marker.encode() in path.read_bytes()
    )


def test_everything_of_the_conversation_goes_and_the_neighbours_stays(tmp_path: Path) -> None:
    state = volume(tmp_path)
    neighbours = set(found_in(tmp_path, "neighbour"))
    assert len(found_in(tmp_path)) >= 12
    done = forget(Request(workspace_dir=tmp_path, conversation="doomed", sessions=()))
    assert done == Forgotten(clean=True, executions=1, files=done.files)
    assert found_in(tmp_path) == ["notes.txt"], "the user's files are the user's"
    assert set(found_in(tmp_path, "neighbour")) == neighbours
    journal = Journal(state / "journal.sqlite3")
    assert journal.start("exe_calm") is not None and journal.start("exe_doomed") is None
    assert journal.control("ans_calm") is not None and journal.control("ans_doomed") is None
    assert journal.token("calm", "lease") == 7 and journal.token("doomed", "lease") == 0
    assert [one.target.conversation for one, _ in journal.gaps()] == ["calm"]
    assert journal.drain("drn_1") is None and journal.drain("drn_2") is not None
    journal.close()
    kept, blanked = reversed((state / "agents/claude/history.jsonl").read_text().splitlines())
    assert json.loads(kept) == {"sessionId": OTHER, "display": "neighbour"}
    assert json.loads(blanked) == {}, "a line stays a line, and its file as long as it was"


def test_it_may_be_done_twice_and_begun_again_after_a_crash(tmp_path: Path) -> None:
    volume(tmp_path)
    request = Request(workspace_dir=tmp_path, conversation="doomed", sessions=(SESSION,))
    delete_sessions(tmp_path / ".tether" / "agents", (SESSION,))  # as far as it came
    assert forget(request).clean
    again = forget(request)
    assert again.clean and again.executions == 0
    assert found_in(tmp_path) == ["notes.txt"]


def test_an_execution_that_is_not_told_to_its_end_keeps_everything_and_is_named(tmp_path: Path) -> None:
    volume(tmp_path, ended=False)
    before = found_in(tmp_path)
    done = forget(Request(workspace_dir=tmp_path, conversation="doomed"))
    assert not done.clean and done.pending_on == "execution exe_doomed is not told to its end"
    assert found_in(tmp_path) == before


def test_a_drain_that_is_under_way_is_gone_on_with_first(tmp_path: Path) -> None:
    state = volume(tmp_path)
    journal = Journal(state / "journal.sqlite3")
    journal.add_drain(Draining(order=DrainOrder(drain="drn_3"), boot="boot_1", at=6))
    journal.close()
    before = found_in(tmp_path)
    done = forget(Request(workspace_dir=tmp_path, conversation="doomed"))
    assert not done.clean and done.pending_on == "drain drn_3 is under way"
    assert found_in(tmp_path) == before


def test_a_volume_without_a_journal_loses_the_sessions_that_are_named(tmp_path: Path) -> None:
    sessions = tmp_path / ".tether" / "agents" / "codex" / "sessions"
    sessions.mkdir(parents=True)
    (sessions / f"rollout-2026-{SESSION}.jsonl").write_text(MARKER)
    assert forget(Request(workspace_dir=tmp_path, conversation="doomed", sessions=(SESSION,))).clean
    assert found_in(tmp_path) == []
    assert forget(Request(workspace_dir=tmp_path / "nothing", conversation="doomed")).clean


def test_links_that_an_agent_put_there_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{SESSION}.json").write_text("somebody's")
    (outside / "history.jsonl").write_text(json.dumps({"sessionId": SESSION}) + "\n")
    agents = tmp_path / "agents"
    (agents / "claude").mkdir(parents=True)
    (agents / "claude" / "projects").symlink_to(outside)
    (agents / "claude" / "history.jsonl").symlink_to(outside / "history.jsonl")
    (agents / f"{SESSION}-link").symlink_to(outside)
    delete_sessions(agents, (SESSION,))
    assert (outside / f"{SESSION}.json").read_text() == "somebody's"
    assert json.loads((outside / "history.jsonl").read_text()) == {"sessionId": SESSION}
    assert not (agents / f"{SESSION}-link").exists() and not (agents / f"{SESSION}-link").is_symlink()


@pytest.mark.parametrize("name", ["short", "a/../b", ""])
def test_a_name_that_could_be_anything_deletes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "shorter.json").write_text("kept")
    assert delete_sessions(tmp_path, (name,) if name else ()) == 0
    assert (tmp_path / "shorter.json").exists()


def test_the_process_leaves_a_volume_alone_that_a_collector_holds(tmp_path: Path) -> None:
    state = volume(tmp_path)
    descriptor = os.open(state / "collector.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        held = asked(tmp_path)
        assert not held.clean and "a collector holds the volume" in held.pending_on
        assert found_in(tmp_path)
    finally:
        os.close(descriptor)
    assert asked(tmp_path).clean
    assert found_in(tmp_path) == ["notes.txt"]


def asked(folder: Path) -> Forgotten:
    """Of the process that an agent service starts."""
    request = {"workspace_dir": str(folder), "conversation": "doomed", "sessions": [SESSION]}
    done = subprocess.run(
        [sys.executable, "-m", "tether_collector.forget"],
        input=json.dumps(request).encode(),
        capture_output=True,
        check=True,
        timeout=30,
    )
    return Forgotten.model_validate_json(done.stdout)
