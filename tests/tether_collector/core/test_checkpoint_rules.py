"""Which files belong to a checkpoint, and which of a manifest may be written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether import limits
from tether.checkpoint import CheckpointFile, CheckpointManifest, CheckpointReference, digest_of
from tether_collector.core.checkpoint_rules import JOURNAL, LeaveOut, Take, bad_path, judge, too_much, unsafe_path
from tether_collector.core.restore_rules import Refused, Volume, Wanted, Way, check_manifest, decide, targets

HOME = ".tether/agents"
EMPTY = digest_of(b"")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"{HOME}/claude/projects/-work/7f3b.jsonl", "session"),
        (f"{HOME}/claude/settings.json", "session"),
        (f"{HOME}/codex/sessions/2026/11/30/rollout-1.jsonl", "session"),
        (f"{HOME}/codex/config.toml", "session"),
        (f"{HOME}/acp-gemini/tmp/hash/chats/session-1.json", "session"),
        (f"{HOME}/acp-opencode/data/opencode/opencode.db", "session"),
        (f"{HOME}/scripted/sessions/1.json", "session"),
        (".tether/execution-recovery/exe_1.json", "state"),
        (".tether/sessions/1.json", "state"),
        (".tether/recovery-material/exe_1.json", "state"),
    ],
)
def test_sessions_and_state_belong_to_every_checkpoint(path: str, kind: str) -> None:
    for include in ("sessions", "workspace"):
        assert judge(path, include, folder=False) == Take(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{HOME}/claude/.credentials.json", "credentials"),
        (f"{HOME}/claude/.claude.json", "credentials"),
        (f"{HOME}/claude/.claude.json.backup", "credentials"),
        (f"{HOME}/claude/shell-snapshots", "credentials"),
        (f"{HOME}/codex/auth.json", "credentials"),
        (f"{HOME}/codex/shell_snapshots", "credentials"),
        (f"{HOME}/acp-qwen/oauth_creds.json", "credentials"),
        (f"{HOME}/acp-opencode/data/opencode/auth.json", "credentials"),
        (f"{HOME}/claude/sessions", "lock"),
        (f"{HOME}/codex/thread-writer-locks", "lock"),
        (f"{HOME}/acp-codex/x.lock", "lock"),
        (f"{HOME}/codex/state_5.sqlite", "cache"),
        (f"{HOME}/codex/state_5.sqlite-wal", "cache"),
        (f"{HOME}/acp-opencode/cache", "cache"),
        (f"{HOME}/claude/statsig", "cache"),
    ],
)
def test_what_is_secret_or_stale_is_left_out_by_name(path: str, why: str) -> None:
    assert judge(path, "workspace", folder=False) == LeaveOut(why)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        ".tether/collector.lock",
        ".tether/executions",
        ".tether/checkpoints",
        ".tether/restore-failed.json",
        ".tether/.gitignore",
        ".tether/execution-recovery/.exe_1.json.77.tmp",
        ".tether-restore",
        "lost+found",
    ],
)
def test_what_is_tethers_own_is_never_taken(path: str) -> None:
    verdict = judge(path, "workspace", folder=False)
    assert isinstance(verdict, LeaveOut) and not verdict.said


def test_the_users_files_are_taken_only_where_the_workspace_is_included() -> None:
    for path in ("src/main.py", ".git/HEAD", "auth.json", "sub/.tether/journal.sqlite3", ".env"):
        assert judge(path, "workspace", folder=False) == Take("workspace")
        assert judge(path, "sessions", folder=False) == LeaveOut("internal", said=False)


def test_limits_are_told_by_name() -> None:
    assert too_much(limits.CHECKPOINT_FILES_MAX, limits.CHECKPOINT_BYTES_MAX) is None
    assert "files" in (too_much(limits.CHECKPOINT_FILES_MAX + 1, 0) or "")
    assert "MiB" in (too_much(1, limits.CHECKPOINT_BYTES_MAX + 1) or "")
    assert bad_path("a/b") is None
    assert "UTF-8" in (bad_path("a\udcff") or "")
    assert "longer" in (bad_path("a" * 5000) or "")


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a\x00b", "a" * 300, ".tether-restore/x"]
)
def test_a_path_that_leads_elsewhere_is_unsafe(path: str) -> None:
    assert unsafe_path(path) is not None


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b c", "é", ".tether"]), min_size=1, max_size=5))
def test_a_safe_path_stays_below_the_workspace(parts: list[str]) -> None:
    path = "/".join(parts)
    assert (unsafe_path(path) is None) == all(part not in ("", ".", "..") for part in parts)


def a_file(path: str, **more: Any) -> CheckpointFile:
    return CheckpointFile(path=path, bytes=0, digest=EMPTY, kind="workspace", **more)


def a_manifest(*files: CheckpointFile, journal: bool = True, **more: Any) -> CheckpointManifest:
    own = (CheckpointFile(path=JOURNAL, bytes=0, digest=EMPTY, kind="state"),) if journal else ()
    more.setdefault("include", "workspace")
    return CheckpointManifest(
        checkpoint="ckp_1",
        drain="drn_1",
        tenant="t",
        workspace="w",
        sandbox="s",
        boot="b",
        created_at=1,
        clean=True,
        files=(*files, *own),
        **more,
    )


def a_reference(manifest: CheckpointManifest, **more: Any) -> CheckpointReference:
    data = manifest.encode()
    values: dict[str, Any] = {
        "checkpoint": "ckp_1",
        "drain": "drn_1",
        "tenant": "t",
        "workspace": "w",
        "sandbox": "s",
        "boot": "b",
        "manifest": digest_of(data),
        "manifest_bytes": len(data),
        "stored": "both",
        "include": "workspace",
        "clean": True,
    }
    return CheckpointReference.model_validate({**values, **more})


def test_a_whole_manifest_is_taken_and_its_journal_is_placed_last() -> None:
    manifest = a_manifest(
        a_file("src/main.py"), a_file("src/link", link="/etc/passwd"), a_file(f"{HOME}/claude/projects/x.jsonl"),
        empty_folders=("build/empty",),
    )  # fmt: skip
    assert check_manifest(manifest) is None
    assert targets(manifest) == [".tether/agents", "build", "src", JOURNAL]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([a_file("../x")], "plain names"),
        ([a_file("/etc/passwd")], "not relative"),
        ([a_file("a"), a_file("a")], "named twice"),
        ([a_file("a", link="/etc"), a_file("a/passwd")], "lies below 'a'"),
        ([a_file("a"), a_file("a/b")], "lies below 'a'"),
        ([a_file("a", link="x\x00y")], "link to nowhere"),
        ([a_file(".tether/executions/exe_1/1/lock")], "no file that a checkpoint has"),
        ([a_file(".tether/collector.lock")], "no file that a checkpoint has"),
        ([a_file(f"{HOME}/codex/auth.json")], "no file that a checkpoint has"),
        ([a_file(f"{HOME}/codex/shell_snapshots/x")], "no file that a checkpoint has"),
    ],
)
def test_a_manifest_that_would_write_elsewhere_is_refused(files: list[CheckpointFile], says: str) -> None:
    assert says in (check_manifest(a_manifest(*files)) or "")


def test_a_manifest_of_sessions_writes_no_file_of_the_user_and_every_one_has_a_journal() -> None:
    manifest = a_manifest(a_file("src/main.py"), include="sessions")
    assert "no file that a checkpoint has" in (check_manifest(manifest) or "")
    assert check_manifest(a_manifest(journal=False)) == "it has no journal"
    assert "lies below 'a'" in (check_manifest(a_manifest(a_file("a"), empty_folders=("a/b",))) or "")


def test_a_manifest_beyond_the_limits_is_refused() -> None:
    huge = CheckpointFile(path="huge", bytes=limits.CHECKPOINT_BYTES_MAX + 1, digest=EMPTY, kind="workspace")
    assert "MiB" in (check_manifest(a_manifest(huge)) or "")


WANTED = Wanted("ckp_1", 7, "t", "w", "s")
MANIFEST = a_manifest()
REFERENCE = a_reference(MANIFEST)
EMPTY_VOLUME, OTHER_VOLUME = Volume(False, None), Volume(True, None)
SAME_VOLUME, TORN_VOLUME = Volume(True, MANIFEST.encode()), Volume(True, MANIFEST.encode()[:-1])


@pytest.mark.parametrize(
    ("reference", "revision", "volume", "way"),
    [
        (REFERENCE, 7, SAME_VOLUME, Way.WARM),
        (REFERENCE, 7, OTHER_VOLUME, Way.NEWER),
        (None, 0, OTHER_VOLUME, Way.NEWER),
        (REFERENCE, 7, EMPTY_VOLUME, Way.FILL),
        (REFERENCE, 7, Volume(False, b"torn"), Way.FILL),
        (REFERENCE, 7, TORN_VOLUME, "torn"),
        (None, 0, EMPTY_VOLUME, "no reference"),
        (REFERENCE, 8, EMPTY_VOLUME, "by now"),
        (a_reference(MANIFEST, checkpoint="ckp_2"), 7, EMPTY_VOLUME, "by now"),
        (a_reference(MANIFEST, sandbox="other"), 7, EMPTY_VOLUME, "another sandbox"),
        (a_reference(MANIFEST, stored="volume"), 7, EMPTY_VOLUME, "own volume only"),
    ],
)
def test_a_sandbox_goes_on_only_from_what_the_reference_names(
    reference: CheckpointReference | None, revision: int, volume: Volume, way: Way | str
) -> None:
    found = decide(WANTED, reference, revision, volume)
    assert found is way if isinstance(way, Way) else isinstance(found, Refused) and way in found.detail
