"""The recovery material's quotas, and the CLIs' own session files: found by what is known of them, or not taken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tether.limits import RECOVERY_MATERIAL_CONCURRENCY
from tether_collector import material as module
from tether_collector.material import NATIVE, ROWS, Material, MaterialError, publish
from tether_collector.native_sessions import claude_file, find, record, recorded

SESSION, NEW = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
CWD = "/sandbox/my ws"


def test_what_was_kept_is_read_again_and_is_gone_once_it_was_used(tmp_path: Path) -> None:
    material = Material(tmp_path)
    material.keep("exe_1", 2, ROWS, b"rows")
    material.keep("exe_1", 2, ROWS, b"rows again")
    assert Material(tmp_path).read("exe_1", 2, ROWS) == b"rows again"
    material.drop("exe_1", 2)
    assert material.read("exe_1", 2, ROWS) is None and list((tmp_path / "recovery-material").iterdir()) == []


def test_bytes_and_files_are_bounded_by_name_and_nothing_is_pushed_out(tmp_path: Path) -> None:
    material = Material(tmp_path, bytes_max=100, files_max=2)
    material.keep("exe_1", 2, ROWS, b"x" * 60)
    with pytest.raises(MaterialError, match="60 bytes of 100: no room for 41 more"):
        material.keep("exe_2", 2, ROWS, b"x" * 41)
    material.keep("exe_2", 2, NATIVE, b"x" * 40)
    with pytest.raises(MaterialError, match="2 files, 2 are allowed"):
        material.keep("exe_3", 2, ROWS, b"")
    assert material.read("exe_1", 2, ROWS) == b"x" * 60


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "recovery-material").write_text("no folder")
    with pytest.raises(MaterialError, match="cannot be written"):
        Material(tmp_path).keep("exe_1", 2, ROWS, b"x")


def test_leftovers_of_executions_that_are_over_are_deleted(tmp_path: Path) -> None:
    material = Material(tmp_path)
    material.keep("exe_1", 2, ROWS, b"x")
    material.keep("exe_2", 2, ROWS, b"y")
    material.clean({"exe_2"})
    assert [path.name for path in (tmp_path / "recovery-material").iterdir()] == ["exe_2-2.json"]


async def test_no_more_than_so_many_are_prepared_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_WAIT_S", 0.05)
    material = Material(tmp_path)
    free = asyncio.Event()

    async def prepare() -> None:
        async with material.slot():
            await free.wait()

    others = [asyncio.create_task(prepare(), name=f"{n}") for n in range(RECOVERY_MATERIAL_CONCURRENCY)]
    await asyncio.sleep(0)
    with pytest.raises(MaterialError, match="2 others are being prepared"):
        async with material.slot():
            pass
    free.set()
    await asyncio.gather(*others)
    async with material.slot():
        pass


def test_a_staged_file_is_put_into_its_place_once(tmp_path: Path) -> None:
    staged, place = tmp_path / "staged", tmp_path / "a" / "b" / "file"
    staged.write_text("x")
    publish(staged, place, tmp_path)
    publish(staged, place, tmp_path)
    assert place.read_text() == "x" and not staged.exists()


# --- sessions ---


def rows(session: str = SESSION) -> bytes:
    lines = [
        {"type": "user", "sessionId": session, "message": {"content": "hello"}},
        {"type": "assistant", "sessionId": session, "message": {"content": "hi"}},
        {"type": "cost-state", "sessionId": session},
        {"type": "summary"},
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def made(tmp_path: Path, data: bytes | None = None) -> tuple[Path, Path, Path]:
    """(state folder, the CLI's home, the session's file), noted as it is."""
    state, home = tmp_path / ".tether", tmp_path / "home"
    path = claude_file(home, CWD, SESSION)
    path.parent.mkdir(parents=True)
    path.write_bytes(rows() if data is None else data)
    record(state, home, CWD, "claude", SESSION, "2.1.332", 7)
    return state, home, path


def test_agent_version_and_file_are_noted_with_a_session(tmp_path: Path) -> None:
    state, _, path = made(tmp_path)
    assert path.parent.name == "-sandbox-my-ws"
    noted = recorded(state, SESSION)
    assert noted is not None
    assert (noted["agent"], noted["cli_version"], noted["bytes"], noted["at"]) == ("claude", "2.1.332", len(rows()), 7)
    assert recorded(state, NEW) is None and recorded(state, "../../etc/passwd") is None


def test_a_file_under_another_name_is_found_and_becomes_the_new_sessions(tmp_path: Path) -> None:
    state, home, path = made(tmp_path)
    path.rename(home / "kept.jsonl.bak")
    found = find(state, home, "claude", SESSION, NEW)
    assert found is not None and found.rows == 2
    assert {row.get("sessionId", NEW) for row in map(json.loads, found.data.splitlines())} == {NEW}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"hello", b"jello"),
        lambda data: data + b'{"type": "user"}\n',
        lambda data: data[:-3],
    ],
    ids=["changed", "longer", "torn"],
)
def test_a_file_that_is_not_as_it_was_noted_is_not_taken(tmp_path: Path, change: object) -> None:
    state, home, path = made(tmp_path)
    assert callable(change)
    path.write_bytes(change(rows()))
    assert find(state, home, "claude", SESSION, NEW) is None


def test_a_file_of_another_session_is_not_taken_whatever_was_noted(tmp_path: Path) -> None:
    state, home, _ = made(tmp_path, rows("33333333-3333-4333-8333-333333333333"))
    assert find(state, home, "claude", SESSION, NEW) is None


def test_another_agents_session_and_one_that_is_not_known_are_not_looked_for(tmp_path: Path) -> None:
    state, home, _ = made(tmp_path)
    assert find(state, home, "codex", SESSION, NEW) is None
    assert find(state, home, "claude", NEW, SESSION) is None
