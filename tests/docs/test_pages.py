"""README, CHANGELOG and docs/: links and anchors lead somewhere, code in them is of this version, no foreign hosts."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from tether.failpoints import FOLDER_VARIABLE, VARIABLE
from tether.settings import PREFIX
from tether_cli.app import build
from tether_schemas import reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
# Homepages of projects that a page may name; everything else is this machine.
HOMEPAGES: Final = frozenset(
    {
        *("docs.astral.sh", "keepachangelog.com", "semver.org", "github.com", "docs.nats.io", "nats.io"),
        *("opentelemetry.io", "www.standardwebhooks.com", "example.org", "example.com"),
    }
)
LOCAL: Final = re.compile(r"^(127\.0\.0\.1|localhost|\[::1\]|0\.0\.0\.0|[\w.-]+\.(internal|example|invalid|test))$")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> Iterator[str]:
    for match in re.finditer(r"(?<!\\)\]\(([^)\s]+)\)", prose(path)):
        yield match[1]


def slug(heading: str) -> str:
    """The anchor of a heading, as forges make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    found: dict[str, int] = {}
    result = set()
    for match in re.finditer(r"^#{1,6} (.+)$", prose(path), re.MULTILINE):
        base = slug(match[1])
        count = found.get(base, 0)
        found[base] = count + 1
        result.add(base if count == 0 else f"{base}-{count}")
    return result


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_and_anchor_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        is_there = path.exists() and path.is_relative_to(ROOT)
        if not is_there or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_no_host_but_this_machine_and_projects_homepages(page: Path) -> None:
    hosts = re.findall(r"\b(?:https?|nats|tls|wss?)://(\[[^\]]*\]|[\w.-]+)", page.read_text(encoding="utf-8"))
    assert {host for host in hosts if not LOCAL.match(host) and host not in HOMEPAGES} <= {"url"}


def test_every_page_is_reached_from_the_index() -> None:
    start = ROOT / "docs" / "README.md"
    seen, waiting = {start}, [start]
    while waiting:
        page = waiting.pop()
        for link in links(page):
            path = (page.parent / link.partition("#")[0]).resolve()
            if path.suffix == ".md" and path.is_file() and path not in seen:
                seen.add(path)
                waiting.append(path)
    missing = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - seen
    assert {name(page) for page in missing} == set()


def fenced(path: Path, *languages: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [match[2] for match in found if match[1] in languages]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_on_a_page_parses_and_what_it_imports_is_there(page: Path) -> None:
    for text in fenced(page, "python"):
        # A fragment may await or iterate at its top.
        tree = compile(textwrap.dedent(text), name(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0].startswith("tether"):
                module = importlib.import_module(node.module)
                assert [one.name for one in node.names if not hasattr(module, one.name)] == [], node.module


def commands() -> dict[str, Any]:
    root: Any = typer.main.get_command(build())
    found: dict[str, Any] = {}
    for each, command in root.commands.items():
        found[each] = command
        for sub, inner in getattr(command, "commands", {}).items():
            found[f"{each} {sub}"] = inner
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_on_a_page_exist_with_their_options(page: Path) -> None:
    known = commands()
    text = page.read_text(encoding="utf-8")
    spoken = [line.strip() for block in fenced(page, "sh", "bash", "") for line in block.splitlines()]
    spoken += re.findall(r"`(tether [^`\n]+)`", prose(page))
    assert text
    for line in spoken:
        words = line.split("#")[0].split()
        if len(words) < 2 or words[0] != "tether" or not re.fullmatch(r"[a-z-]+", words[1]):
            continue
        command = known.get(" ".join(words[1:3])) or known.get(words[1])
        assert command is not None, line
        options = {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
        for word in words[2:]:
            if re.fullmatch(r"--[a-z-]+", word):
                assert word in options, line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_on_a_page_are_those_of_the_code(page: Path) -> None:
    known = set(re.findall(rf"`({PREFIX}[A-Z_]+)`", reference.settings())) | {VARIABLE, FOLDER_VARIABLE}
    named = set(re.findall(rf"\b{PREFIX}[A-Z][A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
    assert {one for one in named - known if not any(each.startswith(f"{one}_") for each in known)} == set()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title: `code`\n\n[x](gone.md) [y](#a-title-code)\n\n```\n[z](not-a-link.md)\n```\n")
    assert list(links(page)) == ["gone.md", "#a-title-code"]
    assert anchors(page) == {"a-title-code"}
