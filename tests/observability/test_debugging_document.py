"""docs/debugging.md: its `tether` commands are run against a set, in order, and show what the document says."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_local_set import Http
from support_set import TetherSet, environment, running_set
from tether import topology

pytestmark = pytest.mark.timeout(180)
DOCUMENT = (Path(__file__).parents[2] / "docs/debugging.md").read_text(encoding="utf-8")
DEADLINE_S = 30.0
PROMPTS = {"demo": "!say I will remove it\n!ask remove\n!say done", "other": "!say hello"}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each `$ tether …` with the lines that the document shows for it."""
    for block in blocks("console"):
        for part in block.split("$ tether ")[1:]:
            command, *lines = part.splitlines()
            yield command, [line for line in lines if line.strip() and line.strip() != "…"]


def shape(line: str) -> str:
    """A line without what differs each time: numbers, times, ids, places, how far a receipt is, which proof."""
    line = line.partition("…")[0]
    line = re.sub(r"/\S+", "PATH", line)
    line = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", line)
    line = re.sub(r"\b(boot|ins|ctl|sbx|r1|projection)[_-][\w-]+", "ID", line)
    line = re.sub(r"\b(accepted|delivered|settled)\b", "STATUS", line)
    line = re.sub(r"\b(pid_namespace|subreaper_sweep)\b", "PROOF", line)  # an ordinary user has no PID namespaces
    line = re.sub(r"(?<![\w.])\d[\w.:%]*( s ago)?", "0", line)
    return " ".join(line.split())


def run(up: TetherSet, command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tether_cli", *command.split()],
        env=environment(up.home, {"TETHER_CLI_DATA": str(up.data), "COLUMNS": "110"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"tether {command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set(options=["--log-format", "json"]) as started:
        yield started


async def prepare(up: TetherSet) -> None:
    """The two conversations that the document speaks of."""
    async with Http(up.state) as http:
        for name, text in PROMPTS.items():
            await http.prompt(name, f"{name}-1", text, workspace="demo")
        await http.ended("other", 1)
        deadline_s = time.monotonic() + DEADLINE_S
        while [one["state"] for one in (await http.conversation("demo")).get("executions", [])] != ["waiting"]:
            assert time.monotonic() < deadline_s


def is_shown(line: str, actual: list[str]) -> bool:
    """A documented line ends where its `…` stands."""
    wanted = shape(line)
    return any(one.startswith(wanted) if "…" in line else one == wanted for one in actual)


async def test_every_command_of_the_document_shows_what_it_says(up: TetherSet) -> None:
    await prepare(up)
    count = 0
    for command, lines in commands():
        count += 1
        actual: list[str] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while missing := [line for line in lines if not is_shown(line, actual)] or not actual:
            # What the registration or the projection tells a moment later.
            assert time.monotonic() < deadline_s or not actual, (
                f"tether {command} does not show {missing}\n" + "\n".join(actual)
            )
            actual = [shape(line) for line in run(up, command).splitlines() if line.strip()]
            if command.startswith("answer"):
                assert all(is_shown(line, actual) for line in lines), actual
    assert count >= 12


def test_the_nats_commands_name_streams_buckets_and_consumers_that_exist() -> None:
    base, own = topology.base(), topology.tenant("default")
    streams = {*topology.names(base), *topology.names(own)}
    durables = {consumer.durable for consumer in base.consumers}
    lines = [line for line in DOCUMENT.splitlines() if "nats --context tether" in line]
    assert len(lines) > 10
    for line in lines:
        for verb in re.findall(r"(?:stream|consumer) \w+ ([A-Z]\w+)", line):
            assert verb in streams, line
        for bucket in re.findall(r"kv \w+ (\w+)", line):
            assert f"KV_{bucket}" in streams, line
        for durable in re.findall(r"consumer info \w+ ([\w-]+)", line):
            assert durable in durables, line


def test_log_events_and_fields_that_the_document_names_are_in_the_code() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("contracts", "services")
        for path in (Path(__file__).parents[2] / folder).rglob("*.py")
    ]
    named = {name for name in re.findall(r"`([a-z]+_[a-z_]+)`", DOCUMENT) if not name.startswith("tether_")}
    assert len(named) > 15
    assert {name for name in named if not any(re.search(rf"\b{name}\b", text) for text in sources)} == set()


def test_the_document_answers_ten_questions_and_each_with_a_command() -> None:
    questions = re.findall(r"^## (\d+)\. .+?$", DOCUMENT, re.MULTILINE)
    assert questions == [str(number) for number in range(1, 11)]
    for part in re.split(r"^## \d+\. ", DOCUMENT, flags=re.MULTILINE)[1:]:
        assert "```" in part
