"""What an engine's words mean."""

from __future__ import annotations

import pytest

from tether_agent.core.container import (
    After,
    Container,
    Died,
    End,
    Failed,
    Recover,
    Stopped,
    Unproven,
    after,
    end_of,
)

ID = "c" * 64
RUN = "2026-01-01T00:00:00Z"


def seen(status: str, **more: object) -> Container:
    values: dict[str, object] = {"id": ID, "name": "n", "status": status, "started_at": RUN, **more}
    return Container(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["running", "paused", "restarting", "removing"])
def test_what_may_live_is_never_taken_for_ended(status: str) -> None:
    assert end_of(ID, RUN, seen(status), Died(0, RUN), True) is None


def test_an_end_is_told_with_its_code_and_its_reason() -> None:
    found = end_of(ID, RUN, seen("exited", exit_code=137, finished_at="later", out_of_memory=True), None, False)
    assert found == End(f"the engine says that container {ID[:12]} ended with 137 at later, out of memory", 137)


def test_a_container_that_is_not_there_is_gone_only_by_the_engines_word_or_the_machines_boot() -> None:
    assert end_of(ID, RUN, None, None, False) is None
    died = end_of(ID, RUN, None, Died(3, "then"), False)
    assert died is not None and died.code == 3
    booted = end_of(ID, RUN, None, None, True)
    assert booted is not None and booted.code is None


def test_another_container_of_the_same_name_says_nothing() -> None:
    assert end_of("d" * 64, RUN, seen("exited"), None, False) is None


def test_a_container_that_was_started_again_has_ended_what_ran_in_it() -> None:
    found = end_of(ID, "2025-12-31T00:00:00Z", seen("running"), None, False)
    assert found is not None and "anew" in found.proof


@pytest.mark.parametrize(
    ("code", "used", "recovery", "released", "drained", "expected"),
    [
        (0, True, False, False, True, Stopped()),  # docker stop: it drained
        (0, True, False, False, False, Recover()),  # it ended by itself, and no checkpoint tells why
        (0, True, True, False, False, Stopped()),  # all is told
        (1, True, True, False, False, Recover()),
        (137, True, False, False, False, Recover()),
        (137, True, False, True, False, Stopped()),  # who drains it told it to go
        (75, True, False, False, True, Recover()),  # something was left behind
        (None, True, False, False, False, Recover()),
        (None, False, False, False, False, Stopped()),  # it was never started
        (78, False, False, False, False, Failed("the collector refuses its configuration")),
        (1, False, False, False, False, Failed("its container ended with 1 before the collector was ready")),
    ],
)
def test_what_follows_an_end(
    code: int | None, used: bool, recovery: bool, released: bool, drained: bool, expected: After
) -> None:
    end = End("proof", code)
    assert after(end, used=used, recovery=recovery, released=released, drained=drained) == expected


def test_without_proof_nothing_follows() -> None:
    assert after(None, used=False, recovery=True, released=True, drained=True) == Unproven()
