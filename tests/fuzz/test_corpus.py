"""Every input of the committed corpus, and every seed: what broke something once breaks nothing again."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether_fuzz import corpus
from tether_fuzz.__main__ import replay
from tether_fuzz.engine import check, smaller, too_long
from tether_fuzz.mutate import Mutator
from tether_fuzz.target import Target, law
from tether_fuzz.targets import TARGETS

QUICK = sorted(name for name in TARGETS if not name.startswith("flood-"))


@pytest.fixture(autouse=True)
def _deadlines() -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, too_long)
    yield
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", QUICK)
def test_nothing_of_the_corpus_breaks_its_target(name: str) -> None:
    assert replay(name) == []


@pytest.mark.parametrize("name", sorted(set(TARGETS) - set(QUICK)))
def test_no_flood_that_once_grew_without_bound_does_so_again(name: str) -> None:
    assert replay(name, only="fault-*") == []


def test_the_corpus_is_small_and_of_known_targets() -> None:
    files = [path for path in corpus.FOLDER.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert all(path.stat().st_size < 64 * 1024 for path in files)
    assert sum(path.stat().st_size for path in files) < 1024 * 1024


def test_a_seed_makes_the_same_inputs_again() -> None:
    for shape in ("json", "lines", "bytes", "text", "spool"):
        runs = []
        for _ in range(2):
            mutate = Mutator(random.Random("7"), shape, 1000, [b'{"a":[1,{"b":"c"}]}\n{"d":2}'])
            runs.append([mutate(b'{"x":{"y":[1,2]},"z":"w"}') for _ in range(200)])
        assert runs[0] == runs[1] and len(set(runs[0])) > 20, shape
        assert all(len(data) <= 1000 for data in runs[0])


def _target(what: object) -> Target:
    return Target("own", "own", "json", what, list, cpu_s=0.2)  # type: ignore[arg-type]


def test_what_is_wrong_with_an_input_is_found_and_named() -> None:
    def raises(data: bytes) -> list[str]:
        json.loads(data)
        return ["good"]

    def lies(data: bytes) -> list[str]:
        law(len(data) < 3, f"at most 2 bytes, got {len(data)}")
        return []

    def hangs(data: bytes) -> list[str]:
        while True:
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001 - as something that is fuzzed may do
                return []

    def swallows(data: bytes) -> list[str]:
        raise MemoryError

    assert check(_target(raises), b"1") == {"good"}
    assert check(_target(raises), b"{")[0] == "crash"  # type: ignore[index]
    told = check(_target(lies), b"abc")
    assert isinstance(told, tuple) and told[:2] == ("crash", "LawBrokenError at most 0 bytes, got 0")
    assert check(_target(hangs), b"")[0] == "hang"  # type: ignore[index]
    assert check(_target(swallows), b"")[0] == "memory"  # type: ignore[index]


def test_a_finding_is_made_smaller_and_stays_the_same_finding() -> None:
    def refuses(data: bytes) -> list[str]:
        law(b"x" not in data, "there is no x")
        return []

    data = b"a long line\nanother with x in it\n" + b"more\n" * 50
    told = check(_target(refuses), data)
    assert isinstance(told, tuple)
    assert smaller(_target(refuses), data, told[:2]) == b"x"


def test_what_is_found_once_stays_in_the_corpus_however_it_is_thinned_out(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()
    (place / "fault-1").write_bytes(b"fault")
    corpus.replace("own", [bytes([65 + at % 26]) * (at * 40) for at in range(1, 200)], tmp_path)
    kept = corpus.load("own", tmp_path)
    assert b"fault" in kept and 1 < len(kept) <= corpus.FILES_MAX + 1
    assert sum(map(len, kept)) <= corpus.TARGET_BYTES_MAX + len(b"fault")
    corpus.replace("own", [], tmp_path)
    assert corpus.load("own", tmp_path) == [b"fault"]
