"""The watchdog over a child that is fuzzing: what ends it, or holds it, is found with the input that did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tether_fuzz import guard

CHILD = """
import os, struct, sys, time, json, mmap
file = open(sys.argv[sys.argv.index("--slot") + 1], "r+b")
slot = mmap.mmap(file.fileno(), 1 << 20)
slot[16:21] = b"input"
slot[:16] = struct.pack("<QQ", 7, 5)
if sys.argv[1] == "dies":
    sys.stderr.write("what it said last")
    sys.stderr.flush()
    os.abort()
if sys.argv[1] == "hangs":
    time.sleep(600)
print(json.dumps({"done": 9, "lines": 1, "features": 2, "pool": 3}))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CHILD in place of the engine."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(guard, "ENGINE", (sys.executable, str(script)))
    monkeypatch.setattr(guard, "RESTARTS_MAX", 0)


@pytest.mark.usefixtures("child")
def test_a_child_that_dies_leaves_the_input_that_it_was_at() -> None:
    (finding,) = guard.run_one("dies", 0.1, 1).findings
    assert (finding.kind, finding.data) == ("crash", b"input")
    assert "what it said last" in finding.text


@pytest.mark.usefixtures("child")
def test_a_child_that_shows_no_new_input_is_ended_and_its_input_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "STALL_S", 1.0)
    (finding,) = guard.run_one("hangs", 0.1, 1).findings
    assert (finding.kind, finding.data) == ("hang", b"input")


@pytest.mark.usefixtures("child")
def test_a_child_that_ends_by_itself_tells_its_figures() -> None:
    result = guard.run_one("good", 0.1, 1)
    assert (result.inputs, result.lines, result.features, result.findings) == (9, 1, 2, [])


def test_a_real_run_of_a_target_tries_inputs_and_shows_lines() -> None:
    result = guard.run_one("cursor", 1.0, 1)
    assert result.findings == [] and result.inputs > 20 and result.lines > 10


def test_a_finding_is_kept_with_what_happened(tmp_path: Path) -> None:
    path = guard.keep(guard.Finding("own", "crash", "here", "how", b"data"), tmp_path)
    assert path.read_bytes() == b"data" and path.name.startswith("fault-")
    assert "crash: here" in path.with_suffix(".txt").read_text()
