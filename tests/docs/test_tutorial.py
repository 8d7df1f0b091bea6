"""The tutorial, run as a reader would: its `sh` blocks in order in one shell, its files saved, its outputs compared.

A line of a `text` block must appear in the output of the blocks before it; `…` stands for anything, spaces for spaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support_set import environment

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
FOLDER = "tether-tutorial"
SECONDS = 200  # some twenty commands, each a Python process; 20 s on an idle machine
NOT_RUN = "<!-- not run by the test"


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    before: str  # the paragraph above it


def blocks() -> list[Block]:
    found = []
    text = TUTORIAL.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        above = text[: match.start()].rstrip().rpartition("\n\n")[2]
        found.append(Block(match[1], match[2], above))
    return found


def saved_as(block: Block) -> str | None:
    named = re.search(r"[Ss]ave this as `([\w.]+)`", block.before)
    return named[1] if named else None


def pattern(line: str) -> re.Pattern[str]:
    parts = [re.escape(part).replace(r"\ ", " ") for part in re.sub(r"\s+", " ", line.strip()).split("…")]
    return re.compile(".*".join(parts))


def test_every_block_is_run_compared_or_says_why_not() -> None:
    for block in blocks():
        if block.language == "bash":
            assert block.before.startswith(NOT_RUN), block.text
        elif block.language == "python":
            assert saved_as(block), block.text
        else:
            assert block.language in ("sh", "text"), block.language
    assert sum(block.language == "sh" for block in blocks()) > 8


@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial uses curl")
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    script = ["set -euo pipefail", "trap 'tether down --wipe > /dev/null 2>&1 || true' EXIT"]
    wanted: list[tuple[int, list[str]]] = []
    count = 0
    home = tmp_path / "home"
    (home / FOLDER).mkdir(parents=True)
    for block in blocks():
        if block.language == "sh":
            count += 1
            script += [f"echo '@@{count}'", block.text]
        elif block.language == "text":
            wanted.append((count, [line for line in block.text.splitlines() if line.strip()]))
        elif name := saved_as(block):
            (home / FOLDER / name).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        env=environment(home, {"PATH": path}),
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    parts = re.split(r"^@@\d+$", done.stdout, flags=re.MULTILINE)
    assert len(parts) == count + 1
    for number, lines in wanted:
        shown = re.sub(r"[^\S\n]+", " ", parts[number])
        for line in lines:
            assert re.search(pattern(line), shown), f"not in the output of block {number}: {line}\n{parts[number]}"
