"""What is found on a volume, and what is said of the rest."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tether.checkpoint import KEPT_MAX, CheckpointFile, Include, digest_of
from tether_collector import checkpoint_files as files
from tether_collector.checkpoint_files import Found, UnfitFileError
from tether_collector.core import checkpoint_rules as rules
from tether_collector.journal import Journal


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "w"
    (workspace / ".tether" / "agents" / "scripted" / "sessions").mkdir(parents=True)
    (workspace / ".tether" / "agents" / "scripted" / "sessions" / "1.json").write_text("{}")
    Journal(workspace / ".tether" / "journal.sqlite3").close()
    return workspace


def collected(workspace: Path, include: Include = "workspace") -> Found:
    try:
        return files.collect(workspace, "ckp_1", include, (), 1)
    finally:
        files.end(workspace, "ckp_1")


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def named(found: Found) -> dict[str, CheckpointFile]:
    return {file.path: file for file in found.files}


def test_sessions_and_a_copy_of_the_journal_are_taken_with_their_digests(workspace: Path) -> None:
    (workspace / "main.py").write_text("print()")
    found = files.collect(workspace, "ckp_1", "sessions", (), 1)
    assert list(named(found)) == [".tether/agents/scripted/sessions/1.json", ".tether/journal.sqlite3"]
    session = named(found)[".tether/agents/scripted/sessions/1.json"]
    assert (session.digest, session.bytes, session.kind) == (digest_of(b"{}"), 2, "session")
    copy = found.sources[".tether/journal.sqlite3"]
    assert digest_of(copy.read_bytes()) == named(found)[".tether/journal.sqlite3"].digest
    assert rows(copy, "SELECT count(*) FROM executions") == [(0,)]
    files.end(workspace, "ckp_1")
    assert not list((workspace / ".tether" / "checkpoints").iterdir())


def test_links_modes_and_empty_folders_are_kept_as_they_are(workspace: Path) -> None:
    (workspace / "tool.sh").write_text("#!/bin/sh")
    (workspace / "tool.sh").chmod(0o755)
    (workspace / "inside").symlink_to("tool.sh")
    (workspace / "outside").symlink_to("/etc")
    (workspace / "build" / "empty").mkdir(parents=True)
    found = collected(workspace)
    by_path = named(found)
    assert by_path["tool.sh"].mode == 0o755
    assert {path: file.link for path, file in by_path.items() if file.link} == {
        "inside": "tool.sh",
        "outside": "/etc",
    }
    assert not any(path.startswith("outside/") for path in by_path), "nothing is read through a link"
    assert found.empty_folders == ["build/empty"]


def test_what_is_no_file_is_left_out_and_named(workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(workspace)  # the path of a socket may not be long
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
        home = workspace / ".tether" / "agents" / "scripted"
        (home / "auth.json").write_text("secret")
        (home / "x.lock").touch()
        found = collected(workspace)
    assert {(one.path, one.why) for one in found.left_out} == {
        ("pipe", "special_file"),
        ("socket", "special_file"),
        (".tether/agents/scripted/auth.json", "credentials"),
        (".tether/agents/scripted/x.lock", "lock"),
    }
    assert not {"pipe", "socket"} & set(named(found))


def test_what_vanishes_during_the_walk_is_no_part_of_the_checkpoint_and_a_folder_that_was_begun_is_named(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("gone", "replaced", "linked", "parent/only", "stays"):
        (workspace / folder).mkdir(parents=True)
        (workspace / folder / "file").write_text(folder)
    outside = workspace.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("not ours")
    real = files._entries

    def entries(folder: Path, root: Path) -> list[files._Entry]:
        name = str(folder.relative_to(workspace))
        if name in ("gone", "replaced", "linked", "parent/only"):
            shutil.rmtree(folder)
        if name == "replaced":
            folder.write_text("a file now")
        if name == "linked":
            folder.symlink_to(outside)
        found = real(folder, root)
        if name == "stays":
            (folder / "file").unlink()
        return found

    monkeypatch.setattr(files, "_entries", entries)
    found = collected(workspace)
    vanished = ["gone", "linked", "parent/only", "replaced"]
    assert sorted(out.path for out in found.left_out if out.why == files.VANISHED) == vanished
    assert [path for path in named(found) if not path.startswith(".tether/")] == [], "nothing is read through a link"
    assert found.empty_folders == ["parent", "stays"]


def test_a_workspace_that_is_away_is_not_taken_for_an_empty_one(workspace: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files._walk(workspace / "away", "", "workspace", Found(workspace))


def test_one_file_too_many_or_too_large_fails_by_name(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "large.bin").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(rules, "CHECKPOINT_BYTES_MAX", 99_999 + 60_000)
    with pytest.raises(UnfitFileError, match=r"more than .* MiB; large.bin is one too many"):
        collected(workspace)
    monkeypatch.undo()
    monkeypatch.setattr(rules, "CHECKPOINT_FILES_MAX", 2)
    with pytest.raises(UnfitFileError, match=r"more than 2 files; large.bin is one too many"):
        collected(workspace)


def test_a_name_that_is_no_utf_8_fails_by_name(workspace: Path) -> None:
    Path(os.fsdecode(os.fsencode(workspace) + b"/na\xffme")).touch()
    with pytest.raises(UnfitFileError, match="not UTF-8"):
        collected(workspace)


def test_a_file_that_is_being_written_fails_by_name(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workspace / "busy.log"
    path.write_bytes(b"x")
    real = os.read

    def reading(descriptor: int, size: int) -> bytes:
        with path.open("ab") as file:
            file.write(b"y")
        return real(descriptor, size) if os.fstat(descriptor).st_size < 50 else b""

    monkeypatch.setattr("os.read", reading)
    with pytest.raises(UnfitFileError, match=r"busy.log is being written"):
        files._digest(path, path.parent)


def test_the_journal_is_copied_as_who_goes_on_elsewhere_is_to_find_it(workspace: Path) -> None:
    path = workspace / ".tether" / "journal.sqlite3"
    journal = Journal(path)
    journal.boot_seen("boot_1", 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("INSERT INTO executions VALUES ('e','c','k','d','{}','{}','n',x'00','spawned',1,NULL,NULL)")
        db.execute("INSERT INTO ends VALUES ('e',1,1,1)")
    found = files.collect(workspace, "ckp_1", "sessions", (), 77)
    copy = found.sources[".tether/journal.sqlite3"]
    assert rows(copy, "SELECT phase, ended_at FROM executions") == [("ended", 77)]
    for table in ("ends", "drains", "boots"):
        assert rows(copy, f"SELECT count(*) FROM {table}") == [(0,)]
    assert rows(path, "SELECT phase FROM executions") == [("spawned",)], "the journal itself is as it was"
    journal.close()
    files.end(workspace, "ckp_1")


def test_the_last_manifests_are_kept_and_leftovers_of_a_crash_go(workspace: Path) -> None:
    files.begin(workspace, "ckp_dead")
    for number in range(12):
        files.write_manifest(workspace, f"ckp_{number:02d}", b"{}")
        os.utime(files.manifest_path(workspace, f"ckp_{number:02d}"), (number, number))
    files.begin(workspace, "ckp_live")
    files.end(workspace, "ckp_live")
    assert files.prune(workspace, "ckp_00") == 12 - KEPT_MAX
    kept = sorted(path.stem for path in (workspace / ".tether" / "checkpoints").iterdir())
    assert kept == ["ckp_00", *(f"ckp_{number:02d}" for number in range(5, 12))]


def test_a_sparse_file_beyond_the_limit_fails_by_name_without_being_read(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (workspace / "disk.img").open("wb") as file:
        file.truncate(1 << 40)
    read = files._digest

    def digest(path: Path, root: Path) -> tuple[int, str]:
        assert path.name != "disk.img"
        return read(path, root)

    monkeypatch.setattr(files, "_digest", digest)
    with pytest.raises(UnfitFileError, match=r"MiB; disk\.img is one too many"):
        collected(workspace)


def test_folders_nested_without_end_fail_by_name_and_those_within_the_limit_are_taken(workspace: Path) -> None:
    deepest = workspace.joinpath(*["d"] * rules.DEPTH_MAX)
    deepest.mkdir(parents=True)
    (deepest / "leaf").write_text("x")
    assert f"{'d/' * rules.DEPTH_MAX}leaf" in named(collected(workspace))
    (deepest / "d").mkdir()
    (deepest / "d" / "leaf").write_text("x")
    with pytest.raises(UnfitFileError, match=f"it lies more than {rules.DEPTH_MAX} folders deep"):
        collected(workspace)


def test_a_folder_that_becomes_a_link_out_of_the_workspace_is_not_read(workspace: Path, tmp_path: Path) -> None:
    """The name was a folder when it was looked at, and is a link when it is opened: nobody's file is taken for ours."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "secret").write_text("another tenant's")
    (workspace / "way").symlink_to(outside)
    with pytest.raises(OSError, match="leads out of its folder"):
        files._digest(workspace / "way" / "deep" / "secret", workspace)
    with pytest.raises(OSError, match="leads out of its folder"):
        files._entries(workspace / "way" / "deep", workspace)
    found = collected(workspace)
    assert [file.link for file in found.files if file.path == "way"] == [str(outside)], "kept as the link that it is"
    assert not any("secret" in file.path for file in found.files)
