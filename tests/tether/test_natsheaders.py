"""Headers beside a message, as a server writes them and as anybody may write them on a live subject."""

from __future__ import annotations

import pytest

from tether.natsheaders import live_message, parse

STAMP = "2026-01-02T03:04:05.678901234Z"


def test_a_copy_has_the_place_and_time_that_the_server_gave_it() -> None:
    headers = {"Nats-Sequence": "5", "Nats-Last-Sequence": "3", "Nats-Time-Stamp": STAMP}
    message = live_message("tether.live.a.b.c.d", b"x", headers)
    assert (message.sequence, message.previous, message.stored_at_ns) == (5, 3, 1_767_323_045_678_901_234)


@pytest.mark.parametrize("number", ["", "-1", "x", "²", "٣", "9" * 20, "9" * 5000, "1.5", " 5"])
def test_a_sequence_that_no_server_writes_counts_as_none(number: str) -> None:
    message = live_message("s", b"", {"Nats-Sequence": number, "Nats-Last-Sequence": number})
    assert (message.sequence, message.previous) == (0, 0)


@pytest.mark.parametrize(
    "stamp", ["x", "2026", "2026-13-01T00:00:00Z", STAMP[:-1] + "O", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"]
)
def test_a_time_that_no_server_writes_counts_as_none(stamp: str) -> None:
    assert live_message("s", b"", {"Nats-Time-Stamp": stamp}).stored_at_ns == 0


def test_a_status_that_is_no_number_is_none() -> None:
    assert parse("NATS/1.0 ²\r\n\r\n".encode())[0] == 0
    assert parse(b"NATS/1.0 404 No Messages\r\n\r\n")[:2] == (404, "No Messages")
