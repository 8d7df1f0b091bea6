"""What a collector lists: whom, in what order, in which pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.errors import InvalidError
from tether.limits import DISCOVERY_BYTES_MAX, DISCOVERY_ENTRIES_MAX, DISCOVERY_RESERVED_BYTES
from tether.sandbox import ExecutionState, ExecutionSummary
from tether_collector.core.discovery import bounded, candidates, page

ROOM_BYTES = DISCOVERY_BYTES_MAX - DISCOVERY_RESERVED_BYTES


def summary(
    number: int, state: ExecutionState = "ended", session: str | None = None, *, conversation: str = "c", at: int = 0
) -> ExecutionSummary:
    target = {
        "tenant": "t", "workspace": "w", "conversation": conversation, "response": "r", "response_generation": 1,
        "execution": f"exe_{number}", "execution_generation": 1, "sandbox": "s", "native_session": session,
    }  # fmt: skip
    return ExecutionSummary.model_validate({"target": target, "state": state, "started_at": at or number})


def names(found: list[ExecutionSummary]) -> set[str]:
    return {one.target.execution for one in found}


def test_of_a_native_session_the_latest_end_is_listed_and_everything_that_lives() -> None:
    many = [
        summary(1, session="n"),
        summary(3, session="n"),
        summary(2, session="n"),
        summary(4, "running", session="n"),
        summary(5, session="n", conversation="another"),
        summary(6),
        summary(7),
    ]
    assert names(candidates(many)) == {"exe_3", "exe_4", "exe_5", "exe_6", "exe_7"}


def test_what_waits_comes_first_and_what_has_ended_last_on_whatever_page() -> None:
    many = [summary(n) for n in range(300)] + [summary(300, "waiting"), summary(301, "running")]
    first = page(many)
    assert len(first.entries) == DISCOVERY_ENTRIES_MAX and first.omitted == 46
    assert [one.state for one in first.entries[:3]] == ["waiting", "running", "ended"]
    rest = page(many, first.next)
    assert (len(rest.entries), rest.omitted, rest.next) == (46, 0, None)
    assert bounded(many) == (first.entries, 46)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["waiting", "running", "starting", "exiting", "ended"]),
            st.integers(0, 3),
            st.sampled_from([1, 30_000, ROOM_BYTES + 1]),
        ),
        max_size=40,
    )
)
def test_every_candidate_is_on_one_page_and_every_page_within_its_bytes(
    found: list[tuple[ExecutionState, int, int]],
) -> None:
    many = [summary(n, state, f"{n:04d}" + "s" * width, at=at) for n, (state, at, width) in enumerate(found)]
    seen: list[str] = []
    after: str | None = None
    left = len(many)
    while True:
        one = page(many, after)
        assert sum(len(entry.model_dump_json(exclude_none=True)) for entry in one.entries) <= ROOM_BYTES
        seen += [entry.target.execution for entry in one.entries]
        left -= len(one.entries)
        if after is None:
            assert one.omitted == left
        if one.next is None:
            break
        after = one.next
    fits = [one.target.execution for one, (_, _, width) in zip(many, found, strict=True) if width < ROOM_BYTES]
    assert sorted(seen) == sorted(fits)


@pytest.mark.parametrize("after", ["", "5.1.e", "1.x.e", "1.1.a.>", 7, ["1.1.e"]])
def test_what_is_no_page_is_refused_by_name(after: object) -> None:
    with pytest.raises(InvalidError, match=r"payload\.after"):
        page([], after)
