"""Cursors are opaque, bound to tenant and conversation, and position is no identity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.cursor import WHOLE, Cursor, Standing, judge, tag_of
from tether.errors import InvalidError
from tether.ports import StoredMessage

SEQUENCES = st.integers(0, 2**64 - 1)


def stored(sequence: int, at_ns: int) -> StoredMessage:
    return StoredMessage("tether.event.t.w.c.e", sequence, at_ns, b"{}")


@given(SEQUENCES, st.integers(0, WHOLE), st.integers(0, 2**32 - 1))
def test_a_cursor_survives_the_way_through_a_client(sequence: int, index: int, tag: int) -> None:
    cursor = Cursor(sequence, index, tag)
    assert Cursor.decode(cursor.encode("acme", "c1"), "acme", "c1") == cursor


@pytest.mark.parametrize(("tenant", "conversation"), [("other", "c1"), ("acme", "c2"), ("acmec", "1")])
def test_a_cursor_of_another_tenant_or_conversation_is_refused(tenant: str, conversation: str) -> None:
    token = Cursor(7, WHOLE, 9).encode("acme", "c1")
    with pytest.raises(InvalidError, match="another tenant or conversation"):
        Cursor.decode(token, tenant, conversation)


@given(st.text(max_size=100))
def test_rubbish_is_refused_by_name_and_never_raises_anything_else(token: str) -> None:
    try:
        Cursor.decode(token, "acme", "c1")
    except InvalidError as error:
        assert error.field == "cursor"


@given(SEQUENCES, st.integers(0, 40), st.characters(codec="ascii"))
def test_a_changed_token_is_never_taken_for_another_conversations(sequence: int, at: int, char: str) -> None:
    token = Cursor(sequence, 3, 1).encode("acme", "c1")
    changed = token[: at % len(token)] + char + token[at % len(token) + 1 :]
    try:
        Cursor.decode(changed, "acme", "c2")
    except InvalidError:
        return
    raise AssertionError("a damaged token was accepted for another conversation")


def test_the_same_sequence_with_another_time_is_another_message() -> None:
    cursor = Cursor.after(10, 1_000)
    assert judge(cursor, stored(10, 1_000), last_sequence=50) is Standing.CURRENT
    assert judge(cursor, stored(10, 2_000), last_sequence=50) is Standing.CHANGED
    assert judge(cursor, None, last_sequence=9) is Standing.CHANGED
    assert judge(cursor, None, last_sequence=50) is Standing.EVICTED
    assert judge(Cursor.beginning(), None, last_sequence=0) is Standing.CURRENT


@given(st.integers(0, 2**63 - 1))
def test_a_tag_fits_its_place(at_ns: int) -> None:
    assert 0 <= tag_of(at_ns) < 2**32
