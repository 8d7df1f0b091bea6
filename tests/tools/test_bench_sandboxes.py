"""`tether_bench`: drains, checkpoints and resumes as figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.limits import MIB
from tether_bench.__main__ import chosen
from tether_bench.draining import log_bytes, sizes_of
from tether_bench.resuming import remembered, with_target
from tether_bench.sandboxes import fill, told
from tether_bench.stats import Figure
from tether_bench.tap import BenchError


def _event(at: float, kind: str, **body: Any) -> tuple[float, dict[str, Any]]:
    return at, {"type": kind, "body": body}


def test_a_resume_is_taken_to_the_first_event_that_its_session_printed_not_to_the_claim() -> None:
    events = [
        _event(10.2, "execution.started"),
        _event(10.5, "session.bound"),
        _event(10.6, "text.completed", text="I remember 2 earlier turns: a b"),
        _event(10.7, "session.bound"),
    ]
    found = told(10.0, events)
    assert found.claimed_ms == pytest.approx(200.0)
    assert found.printed_ms == pytest.approx(500.0)
    assert remembered(found.said) == 2


def test_an_execution_whose_cli_never_spoke_is_no_sample() -> None:
    with pytest.raises(BenchError, match=r"without a session: execution\.started"):
        told(10.0, [_event(10.2, "execution.started")])


@pytest.mark.parametrize(
    ("said", "turns"),
    [
        ("I remember 12 earlier turns: a", 12),
        ("I remember 0 earlier turns: none", 0),
        ("I remember", 0),
        ("hello", 0),
        ("", 0),
    ],
)
def test_what_an_agent_does_not_say_it_remembers_counts_as_forgotten(said: str, turns: int) -> None:
    assert remembered(said) == turns


def test_a_warm_resume_is_judged_by_what_it_takes_above_the_own_start_of_the_same_run() -> None:
    slow = with_target(Figure("x", "ms", (900.0, 800.0, 700.0), {"own start": (280.0, 290.0, 310.0)}))
    assert slow.target is not None
    assert slow.target.limit == pytest.approx(790.0)
    assert slow.met is False
    assert with_target(Figure("x", "ms", (780.0,), {"own start": (290.0,)})).met is True


def test_the_figures_of_the_life_of_sandboxes_are_asked_for_by_these_names() -> None:
    names = {"drain_20_s", "resume_warm_ms_p95", "resume_cold_s_p95", "checkpoint_stored_bytes"}
    sizes = {"checkpoint_1mib_s", "checkpoint_50mib_s", "checkpoint_500mib_s"}
    assert names | sizes <= set(chosen([], short=False))
    short = set(chosen([], short=True))
    assert (names | sizes) - short == {"drain_20_s", "checkpoint_500mib_s"}
    assert "drain_5_s" in short
    assert "drain_5_s" not in chosen([], short=False)
    assert chosen(["drain_20_s"], short=True) == ["drain_20_s"]


def test_the_blob_store_gets_the_room_that_the_checkpoints_of_all_rounds_need() -> None:
    assert log_bytes(["resume_cold_s_p95"], short=False) is None
    whole = log_bytes(chosen([], short=False), short=False)
    assert whole is not None
    assert 2 * 500 * MIB + 3 * 51 * MIB < whole <= 1536 * MIB
    short = log_bytes(chosen([], short=True), short=True)
    assert short is not None
    assert short < 512 * MIB
    assert sizes_of(["checkpoint_stored_bytes"]) == [1, 50]
    assert sizes_of(["checkpoint_500mib_s", "checkpoint_stored_bytes"]) == [500]


def test_a_folder_is_filled_with_what_nobody_has_stored_yet(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    fill(folder, MIB)
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert (len(before), sum(map(len, before)), len(set(before))) == (16, MIB, 16)
    fill(folder, MIB)
    assert not set(before) & {path.read_bytes() for path in folder.iterdir()}


@pytest.mark.timeout(240)
def test_drains_checkpoints_and_resumes_are_measured_against_a_real_set(tmp_path: Path) -> None:
    report_file = tmp_path / "bench.json"
    names = ["resume_cold_s_p95", "drain_5_s", "checkpoint_1mib_s", "checkpoint_stored_bytes"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tether_bench", "--short", "--only", *names, "--report", str(report_file)],
        env={**os.environ, "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(report_file.read_bytes())
    figures, details = content["figures"], content["details"]
    assert (content["verdict"], figures["lost"], figures["duplicated"]) == ("pass", 0, 0)
    assert figures["resume_cold_s_p95"] > details["resume_cold_s_p95"]["baselines"]["own start"]["rounds"][0]
    assert 0 < figures["drain_5_s"] < 60
    assert figures["checkpoint_1mib_s"] > details["checkpoint_1mib_s"]["baselines"]["copy"]["rounds"][0]
    assert MIB < figures["checkpoint_stored_bytes"]["1mib"] < 2 * MIB
    assert list(scratch.iterdir()) == []
