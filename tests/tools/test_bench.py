"""`tether_bench`: its statistics, its report, and one figure measured for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tether.events import body_of
from tether.fold import ExecutionFold
from tether.frames import Frame, decode
from tether_bench import report
from tether_bench.__main__ import NAMES, chosen
from tether_bench.logfill import made_execution
from tether_bench.stats import Figure, Losses, Target, median, number, percentile
from tether_bench.tap import BenchError, Recording, SseReplay

LATENCY = Figure("x", "ms", (3.0, 1.0, 2.0), {"pipe": (0.5, 0.25, 0.5)}, Target("at most", 2.0))


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7.0
    assert median([3.0, 1.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0], 1.5)


def test_a_figure_is_the_median_of_its_rounds_beside_that_of_its_baseline() -> None:
    assert LATENCY.value == 2.0
    assert LATENCY.ratio("pipe") == 4.0
    assert LATENCY.met is True
    assert Figure("y", "1/s", (9.0,), target=Target("at least", 10.0)).met is False
    assert Figure("z", "ms", problem="no", target=Target("at most", 1.0)).met is None


def test_losses_count_what_is_missing_and_what_came_twice() -> None:
    losses = Losses()
    losses.count("all there", expected=2, got={"a": 1, "b": 1})
    assert (losses.lost, losses.duplicated, losses.examples) == (0, 0, [])
    losses.count("deltas", expected=4, got={"a": 3, "b": 1})
    losses.count("rows", expected=5, distinct=4)
    assert (losses.lost, losses.duplicated) == (3, 2)
    assert losses.examples == ["deltas: 2 of 4 lost, 2 doubled", "rows: 1 of 5 lost, 0 doubled"]


def test_the_table_has_a_line_for_each_baseline_and_says_why_a_figure_is_missing() -> None:
    figure = Figure("two", "ms", (2.0,), {"pipe": (1.0,), "nats": (4.0,)}, Target("at most", 1.0))
    lines = report.table([figure, Figure("none", "ms", problem="the bus is away")]).splitlines()
    assert lines[2].split() == ["two", "2.00", "ms", "1", "≤", "1.00", "no", "pipe", "1.00", "2.00×"]
    assert lines[3].split() == ["nats", "4.00", "0.50×"]
    assert lines[4].split()[:2] == ["none", "—"]
    assert "the bus is away" in lines[4]


def test_a_missed_target_is_told_and_fails_nothing_but_a_missing_figure_or_a_loss_does() -> None:
    missed = Figure("slow", "ms", (5.0,), target=Target("at most", 1.0))
    whole = report.document([missed], Losses(), {"cpus": 2})
    assert whole["verdict"] == "pass"
    assert whole["figures"] == {"slow": 5.0, "lost": 0, "duplicated": 0}
    assert whole["details"]["slow"]["target"]["met"] is False
    missing = report.document([missed, Figure("none", "ms", problem="no")], Losses(), {})
    assert (missing["verdict"], missing["figures"]["none"]) == ("fail", None)
    assert report.document([missed], Losses(lost=1), {})["verdict"] == "fail"
    assert report.document([], Losses(), {})["verdict"] == "fail"


def test_parts_of_a_figure_are_grouped_under_its_name() -> None:
    figures = [Figure("rss_mib", "MiB", (40.0,), key="router_idle"), Figure("rss_mib", "MiB", (50.0,), key="nats_idle")]
    assert report.document(figures, Losses(), {})["figures"]["rss_mib"] == {"router_idle": 40.0, "nats_idle": 50.0}


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.123, 12.34, 123.4, 12345.6)] == ["0.12", "12.3", "123", "12,346"]


def test_figures_are_chosen_by_name_or_by_the_beginning_of_names() -> None:
    not_all = {"rss_growth_mib_10min", "drain_5_s"}
    assert chosen([], short=False) == [name for name in NAMES if name not in not_all]
    assert chosen([], short=False, soaked=True) == [name for name in NAMES if name != "drain_5_s"]
    assert "added_latency_ms_p50_x100" not in chosen([], short=True)
    assert chosen(["added_latency_ms_p50_x1"], short=True) == ["added_latency_ms_p50_x1"]
    assert chosen(["attach"], short=True) == ["attach_ms_p50_100", "attach_ms_p50_10000", "attach_ms_p50_200000"]
    with pytest.raises(ValueError, match="no figure is called latency"):
        chosen(["latency"], short=False)


def test_the_report_has_every_figure_by_the_name_under_which_it_is_asked_for() -> None:
    asked = {
        *(f"added_latency_ms_p50_x{executions}" for executions in (1, 20, 100)),
        "added_latency_ms_p99_x20",
        "first_event_ms_p50",
        "answer_ms_p50",
        "takeover_ms_p50",
        "collector_lines_per_s",
        "collectors_4_lines_per_s",
        "projection_events_per_s",
        "readers_1000_cut",
        "readers_1000_ms_p99",
        *(f"attach_ms_p50_{size}" for size in (100, 10000, 200000)),
        "rss_mib",
        "keeper_rss_mib",
    }
    assert asked <= set(chosen([], short=False))
    assert asked - set(chosen([], short=True)) == {"added_latency_ms_p50_x100"}


def _chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_recorded_stream_is_read_back_with_the_time_at_which_each_event_was_whole(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + _chunked(b'event: open\ndata: {}\n\ndata: {"type": "a"', b'}\n\n: hb\n\ndata: {"type": "b"}\n\n')
    pieces = [(float(at), data[at : at + size]) for at in range(0, len(data), size)]
    told = list(SseReplay(Recording("r", pieces)).told())
    assert [event["type"] for _, event in told] == ["a", "b"]
    end_of_a = data.index(b"}\n\n: hb") + len(b"}\n\n") - 1
    assert told[0][0] == end_of_a // size * size


def test_a_refused_stream_says_what_the_server_answered() -> None:
    refused = Recording("r", [(0.0, b"HTTP/1.1 401 Unauthorized\r\n\r\n{}")])
    with pytest.raises(BenchError, match="401 Unauthorized"):
        list(SseReplay(refused).told())


def test_a_recording_finds_what_was_cut_between_two_pieces_once() -> None:
    recording = Recording("r", [(0.0, b"e0000"), (0.1, b"60 e")])
    assert recording.has(b"e000060 ")
    assert not recording.has(b"e000060 ")


@pytest.mark.parametrize("events", [2, 100, 1025])
def test_a_made_execution_has_exactly_the_events_that_were_asked_for(events: int) -> None:
    made = made_execution("t", "c", events)
    frames = [decode(made.address.subject, data) for data, _ in made.frames]
    assert all(isinstance(frame, Frame) for frame in frames)
    log = [event for frame in frames if isinstance(frame, Frame) for event in frame.events]
    assert [event.ordinal for event in log] == list(range(1, events + 1))
    assert all(body_of(event) is not None for event in log)
    fold = ExecutionFold()
    for event in log:
        fold.apply(event)
    assert fold.freeze().applied == events
    assert not fold.freeze().partial


@pytest.mark.timeout(180)
def test_figures_are_measured_against_a_real_set_and_nothing_is_left_behind(tmp_path: Path) -> None:
    report_file = tmp_path / "reports" / "bench.json"
    command = [
        sys.executable,
        "-m",
        "tether_bench",
        "--short",
        "--only",
        "keeper_rss_mib",
        "answer",
        "--report",
        str(report_file),
    ]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        command,
        # Without the agent CLIs that are installed here: one that is asked for its version leaves files of its own.
        env={**os.environ, "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(report_file.read_bytes())
    assert content["verdict"] == "pass"
    assert 4 < content["figures"]["keeper_rss_mib"] < 40
    assert content["figures"]["answer_ms_p50"] > content["details"]["answer_ms_p50"]["baselines"]["pipe"]["rounds"][0]
    assert content["environment"]["nats_server"].startswith("v2.")
    assert "keeper_rss_mib" in done.stdout
    assert list(scratch.iterdir()) == []
