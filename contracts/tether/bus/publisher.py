"""Publishing to streams: pipelined, each with its own reply token, answers mapped to the error tree.

An answer of the server is a fact: stored (PubAck), refused (WrongLastSequenceError, BusUnavailableError,
MessageTooLargeError: not stored). No answer (timeout, lost connection) and the server's own doubt (10158, 10164) are
UndecidedError: the message may or may not be, or become, stored. The retry rule is the caller's
(same bytes and id again, then read and judge).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from tether import natsheaders as wire_headers
from tether.bus.connection import NO_RESPONDERS, AnswerTimeoutError, Connection, ConnectionLostError
from tether.errors import (
    BusError,
    BusUnavailableError,
    MessageTooLargeError,
    UndecidedError,
    WrongLastSequenceError,
)
from tether.ports import PubAck

WRONG_LAST_SEQUENCE: Final = 10071
MESSAGE_NOT_FOUND: Final = 10037
_TOO_LARGE: Final = 10054
_UNDECIDED: Final = frozenset({10158, 10164})
_NUMBER: Final = re.compile(r"(\d+)\s*$")


def publish_error(subject: str, error: Mapping[str, Any]) -> BusError:
    """The exception of an error in a publish acknowledgement."""
    code = int(error.get("err_code", 0))
    text = str(error.get("description", "refused"))
    if code == WRONG_LAST_SEQUENCE:
        number = _NUMBER.search(text)
        if number is None:  # the server does not know it: the caller reads and judges
            return UndecidedError(text, subject=subject, code=code)
        return WrongLastSequenceError(int(number.group(1)), subject=subject)
    if code in _UNDECIDED:
        return UndecidedError(text, subject=subject, code=code)
    if code == _TOO_LARGE:
        return MessageTooLargeError(text, subject=subject, code=code)
    return BusUnavailableError(text, subject=subject, code=code or error.get("code"))


def _headers(
    headers: Mapping[str, str] | None, msg_id: str | None, expect_last: int | None, ttl_s: int | None
) -> bytes | None:
    named: dict[str, str] = {}
    if msg_id is not None:
        named["Nats-Msg-Id"] = msg_id
    if expect_last is not None:
        named["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
    if ttl_s is not None:
        named["Nats-TTL"] = f"{ttl_s}s"
    if headers:
        named.update(headers)
    return wire_headers.encode(named) if named else None


async def publish(
    connection: Connection,
    subject: str,
    data: bytes,
    *,
    msg_id: str | None,
    expect_last: int | None,
    headers: Mapping[str, str] | None,
    ttl_s: int | None,
    timeout_s: float,
) -> PubAck:
    block = _headers(headers, msg_id, expect_last, ttl_s)
    try:
        raw, body = await connection.ask(subject, data, headers=block, timeout_s=timeout_s)
    except AnswerTimeoutError:
        raise UndecidedError(f"no acknowledgement within {timeout_s:g} s", subject=subject) from None
    except ConnectionLostError:
        raise UndecidedError("the connection was lost before the acknowledgement", subject=subject) from None
    if raw is not None:
        status, description, _ = wire_headers.parse(raw)
        if status == NO_RESPONDERS:
            raise BusUnavailableError("no stream takes this subject", subject=subject, code=status)
        if status:
            raise BusUnavailableError(description, subject=subject, code=status)
    try:
        answer = json.loads(body)
        error = answer.get("error")
        if error is None:
            return PubAck(answer["stream"], int(answer["seq"]), bool(answer.get("duplicate", False)))
    except (ValueError, KeyError, AttributeError):
        raise UndecidedError("the answer is no acknowledgement", subject=subject) from None
    raise publish_error(subject, error)
