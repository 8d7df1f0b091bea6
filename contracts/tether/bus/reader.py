"""Reading streams: single messages from the leader or by direct get, batches by direct get, states, subjects.

Batch direct get has no consumer: one question, answers until `204 EOB` (or 404). Any replica answers; one that lags
ends early, which is why callers compare with a sequence from the leader. A batch that ends without its EOB (a lost
connection, a server that went away) is not returned in part: it raises BusUnavailableError.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

from tether import natsheaders as wire_headers
from tether.bus.connection import ATTEMPTS, NO_RESPONDERS, Answer, AnswerTimeoutError, Connection, ConnectionLostError
from tether.bus.publisher import MESSAGE_NOT_FOUND
from tether.errors import BusUnavailableError
from tether.ports import ConsumerState, StoredMessage, StreamState
from tether.topology_apply import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError

_EOB: Final = 204
_NOT_FOUND: Final = 404
_NOT_DELETED: Final = (10043, 10057)  # of a message that is not there; the second also of one that may not go
_OWN_HEADERS: Final = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
)


async def api(connection: Connection, subject: str, request: Any = None, *, once: bool = False) -> dict[str, Any]:
    """A JetStream API answer without error. Raises ApiError, BusUnavailableError, PermissionDeniedError."""
    answer = await connection.api(subject, request, once=once)
    error = answer.get("error")
    if error is not None:
        raise ApiError(subject, error)
    return answer


async def _get(connection: Connection, stream: str, request: dict[str, Any]) -> StoredMessage | None:
    try:
        answer = await api(connection, f"$JS.API.STREAM.MSG.GET.{stream}", request)
    except ApiError as error:
        if error.code == MESSAGE_NOT_FOUND:
            return None
        raise error.unavailable() from None
    message = answer["message"]
    raw = base64.b64decode(message["hdrs"]) if message.get("hdrs") else None
    return StoredMessage(
        message["subject"],
        int(message["seq"]),
        wire_headers.time_ns(message["time"]),
        base64.b64decode(message.get("data", "")),
        wire_headers.parse(raw)[2],
    )


async def last(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    return await _get(connection, stream, {"last_by_subj": subject})


async def at(connection: Connection, stream: str, sequence: int) -> StoredMessage | None:
    if sequence < 1:
        return None
    return await _get(connection, stream, {"seq": sequence})


async def next_after(connection: Connection, stream: str, sequence: int, subject: str) -> StoredMessage | None:
    return await _get(connection, stream, {"seq": max(sequence, 0) + 1, "next_by_subj": subject})


def _direct(raw: bytes | None, data: bytes) -> tuple[int, str, StoredMessage | None]:
    status, description, headers = wire_headers.parse(raw)
    if status:
        return status, description, None
    own = {key: value for key, value in headers.items() if key not in _OWN_HEADERS}
    return (
        0,
        "",
        StoredMessage(
            headers["Nats-Subject"],
            int(headers["Nats-Sequence"]),
            wire_headers.time_ns(headers["Nats-Time-Stamp"]),
            data,
            own,
        ),
    )


async def last_direct(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    """By direct get with the subject appended, the form that permissions can confine."""
    api_subject = f"$JS.API.DIRECT.GET.{stream}.{subject}"
    raw, data = await connection.question(api_subject, b"")
    status, description, message = _direct(raw, data)
    if status == _NOT_FOUND:
        return None
    if message is None:
        raise BusUnavailableError(description or "no direct get", subject=api_subject, code=status)
    return message


async def read(
    connection: Connection, stream: str, after: int, subject: str, limit: int, bytes_max: int
) -> Sequence[StoredMessage]:
    api_subject = f"$JS.API.DIRECT.GET.{stream}"
    request = {"seq": max(after, 0) + 1, "next_by_subj": subject, "batch": limit, "max_bytes": bytes_max}
    messages: list[StoredMessage] = []
    end: list[tuple[int, str]] = []

    def take(answer: Answer) -> bool:
        status, description, message = _direct(*answer)
        if message is not None:
            messages.append(message)
            return False
        end.append((status, description))
        return True

    for attempt in range(1, ATTEMPTS + 1):
        try:
            messages.clear()
            await connection.ask_many(
                api_subject,
                json.dumps(request).encode(),
                take=take,
                timeout_s=connection.config.api_timeout_s * attempt / ATTEMPTS,
            )
            break
        except (AnswerTimeoutError, ConnectionLostError):
            if attempt == ATTEMPTS:
                raise BusUnavailableError("the batch was not answered in full", subject=api_subject) from None
    status, description = end[0]
    if status == _NOT_FOUND:
        return ()
    if status != _EOB:
        what = "no stream answers" if status == NO_RESPONDERS else description
        raise BusUnavailableError(what, subject=api_subject, code=status)
    return messages


async def subjects(connection: Connection, stream: str, filter_subject: str) -> dict[str, int]:
    found: dict[str, int] = {}
    offset = 0
    while True:
        request = {"subjects_filter": filter_subject, "offset": offset}
        try:
            answer = await api(connection, f"$JS.API.STREAM.INFO.{stream}", request)
        except ApiError as error:
            raise error.unavailable() from None
        page = answer["state"].get("subjects") or {}
        found.update((name, int(count)) for name, count in page.items())
        offset += len(page)
        if not page or offset >= int(answer.get("total", 0)):
            return found


async def state(connection: Connection, stream: str) -> StreamState | None:
    try:
        answer = await api(connection, f"$JS.API.STREAM.INFO.{stream}")
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            return None
        raise error.unavailable() from None
    now = answer["state"]
    return StreamState(
        stream,
        answer["created"],
        int(now["messages"]),
        int(now["bytes"]),
        int(now["first_seq"]),
        int(now["last_seq"]),
        int(answer["config"].get("max_bytes", -1)),
    )


async def consumer(connection: Connection, stream: str, durable: str) -> ConsumerState | None:
    try:
        answer = await api(connection, f"$JS.API.CONSUMER.INFO.{stream}.{durable}")
    except ApiError as error:
        if error.code in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
            return None
        raise error.unavailable() from None
    return ConsumerState(
        durable,
        answer["created"],
        int(answer["ack_floor"]["stream_seq"]),
        int(answer["delivered"]["stream_seq"]),
        int(answer["num_pending"]),
        int(answer["num_ack_pending"]),
    )


async def delete_consumer(connection: Connection, stream: str, durable: str) -> None:
    try:
        await api(connection, f"$JS.API.CONSUMER.DELETE.{stream}.{durable}")
    except ApiError as error:
        if error.code not in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
            raise error.unavailable() from None


async def delete_stream(connection: Connection, stream: str) -> None:
    try:
        await api(connection, f"$JS.API.STREAM.DELETE.{stream}")
    except ApiError as error:
        if error.code != STREAM_NOT_FOUND:
            raise error.unavailable() from None


async def erase(connection: Connection, stream: str, sequence: int) -> bool:
    try:
        await api(connection, f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": False})
    except ApiError as error:
        if error.code not in _NOT_DELETED or await at(connection, stream, sequence) is not None:
            raise error.unavailable() from None
        return False
    return True


async def purge(connection: Connection, stream: str, subject: str, up_to: int | None) -> int:
    request: dict[str, Any] = {"filter": subject}
    if up_to is not None:
        request["seq"] = up_to
    try:
        # Once: a second request would answer with its own count.
        answer = await api(connection, f"$JS.API.STREAM.PURGE.{stream}", request, once=True)
    except ApiError as error:
        raise error.unavailable() from None
    return int(answer["purged"])
