"""`make generate` and `make schemas`: what docs/ has from the code, and that a difference is found."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tether_schemas
from tether.client.environment import Endpoint
from tether.errors import Code
from tether.settings import FOREIGN_PREFIXES
from tether_schemas import reference

ROOT = Path(__file__).parents[2]


def test_docs_are_as_the_code_makes_them() -> None:
    assert tether_schemas.drift(ROOT / "docs") == []


def test_writing_twice_makes_the_same_bytes_and_drift_names_each_difference(tmp_path: Path) -> None:
    count = tether_schemas.write(tmp_path)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert tether_schemas.write(tmp_path) == count == len(first)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == first
    assert tether_schemas.drift(tmp_path) == []

    (tmp_path / "asyncapi.json").unlink()
    (tmp_path / "openapi.json").write_text("{}")
    (tmp_path / "schemas" / "gone.json").write_text("{}")
    assert tether_schemas.drift(tmp_path) == [
        "asyncapi.json: missing",
        "openapi.json: differs from the code",
        "schemas/gone.json: not of this code",
    ]
    tether_schemas.write(tmp_path)
    assert tether_schemas.drift(tmp_path) == []


def test_the_command_says_what_differs_and_how_to_mend_it(tmp_path: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tether_schemas", *arguments, str(tmp_path)]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    found = command("--check")
    assert found.returncode == 1
    assert "openapi.json: missing; run `make generate`" in found.stderr
    assert command().returncode == 0
    assert command("--check").returncode == 0


@pytest.mark.parametrize(("title", "_", "model"), reference.SERVICES)
def test_every_setting_says_what_it_means(title: str, _: str, model: type) -> None:
    rows = list(reference.variables(model))
    assert rows
    assert [name for name, entry in rows if not entry.description] == []
    page = reference.settings()
    assert all(f"| `{name}` |" in page for name, _ in rows), title


def test_every_setting_of_the_client_is_told() -> None:
    assert {entry.name for entry in dataclasses.fields(Endpoint)} == set(reference.CLIENT)


def test_every_variable_that_the_product_names_is_on_the_page() -> None:
    named = set()
    for folder in ("contracts", "services", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"\bTETHER_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    page = reference.settings()
    prefixes = {prefix.rstrip("_") for prefix in FOREIGN_PREFIXES}
    assert {name for name in named - prefixes if f"`{name}`" not in page} == set()


def test_every_error_code_has_a_remedy() -> None:
    page = reference.errors()
    assert all(f"| `{code.value}` |" in page for code in Code)


def test_secrets_have_no_default_on_the_page() -> None:
    for line in reference.settings().splitlines():
        if re.match(r"\| `TETHER_\w*(PASSWORD|TOKEN|CREDS)\w*`", line):
            assert "| unset |" in line


def test_a_pipe_in_a_text_does_not_break_its_row() -> None:
    assert reference.table(("a", "b"), [("x|y", "z")]).splitlines()[-1] == "| x\\|y | z |"
