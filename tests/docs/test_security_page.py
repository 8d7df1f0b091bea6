"""SECURITY.md names what exists: each defence has a test, each link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_test_and_page_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w./-]+)`", PAGE) + re.findall(r"\]\(([\w./-]+?)(?:#[\w-]+)?\)", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_every_boundary_has_a_test_that_proves_its_defence() -> None:
    table = "| boundary |" + PAGE.split("| boundary |")[1].split("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("|") and "---" not in row][1:]
    assert len(rows) >= 12
    assert [row for row in rows if "`tests/" not in row] == []


def test_assets_actors_and_what_is_not_defended_are_said() -> None:
    for heading in ("## Report", "## Supported versions", "## Threat model", "### What is not defended"):
        assert f"{heading}\n" in PAGE, heading
