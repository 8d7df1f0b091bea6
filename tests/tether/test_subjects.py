"""Subjects: what a process remembers of those that it has parsed."""

from __future__ import annotations

from tether.subjects import SUBJECTS_CACHED_MAX, EventAddress, parse_event


def test_however_many_executions_ran_only_so_many_parsed_subjects_are_remembered() -> None:
    for number in range(SUBJECTS_CACHED_MAX + 500):
        address = EventAddress("t", "w", "c", f"exe_{number}")
        assert parse_event(address.subject) == address
    assert parse_event.cache_info().currsize == SUBJECTS_CACHED_MAX


def test_a_running_executions_subject_is_parsed_once() -> None:
    address = EventAddress("t", "w", "c", "exe_once")
    assert parse_event(address.subject) is parse_event(address.subject)
