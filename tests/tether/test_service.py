"""What every service process shares: its logging and its boundary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.service import write_whole

_FAILING = """
import sys
from tether.service import run
from tether.settings import ServiceSettings

async def main(stop):
    password = "".join(["not-", "to-be-", "told"])
    raise OSError("the port is taken")

sys.exit(run(main, ServiceSettings(nats_url="nats://127.0.0.1:4222", log_format=sys.argv[1]), service="router"))
"""


def failing(log_format: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", _FAILING, log_format], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_nobody_expected_is_logged_with_its_traceback_and_no_local_variable(log_format: str) -> None:
    done = failing(log_format)
    assert done.returncode == 1
    assert "service_failed" in done.stderr
    assert "the port is taken" in done.stderr
    assert "main" in done.stderr
    assert "not-to-be-told" not in done.stderr


def test_a_json_log_is_one_object_per_line_with_the_service_in_it() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in failing("json").stderr.splitlines()]
    assert [(line["service"], line["event"]) for line in lines] == [("router", "service_failed")]


def test_what_a_killed_writer_left_is_deleted_by_a_later_write_and_a_living_ones_is_not(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.json.7.tmp", ".a.json.8.tmp", ".ab.json.7.tmp"))
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (1, 1))
    write_whole(tmp_path / "a.json", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", new.name, other.name}
    assert (tmp_path / "a.json").read_bytes() == b"whole"
