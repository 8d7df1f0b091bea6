"""The load's own judgement: what it counts, and when it says that it does not know."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from tether_load.prompts import most_at_once
from tether_load.readers import Crowd, Reader
from tether_load.report import FOREIGN_SHARE_MAX, Finding, Share, table


def test_overlapping_spans_are_counted_and_neighbours_are_not() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 1), (1, 2), (2, 3)]) == 1
    assert most_at_once([(0, 10), (1, 2), (1.5, 3), (4, 5)]) == 3


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_the_most_at_once_is_what_counting_every_moment_finds(spans: list[tuple[int, int]]) -> None:
    whole = [(float(begin), float(begin + length)) for begin, length in spans]
    moments = (sum(begin <= at < end for begin, end in whole) for at in range(75))
    assert most_at_once(whole) == max(moments)


def finding(*shares: Share) -> Finding:
    one = Finding("noisy", shares=list(shares))
    one.row("fine", 1.0, "ms", "≤ 2", good=True)
    one.row("told", 5.0, "ms")
    return one


def test_a_missed_limit_fails_and_is_inconclusive_where_others_used_the_machine() -> None:
    busy, calm = Share(FOREIGN_SHARE_MAX * 2, 0.0), Share(0.01, 0.0)
    assert finding(busy).verdict == "pass", "what was reached in spite of them is reached"
    for shares, verdict in (((calm,), "fail"), ((calm, busy), "inconclusive"), ((Share(0.0, 0.5),), "inconclusive")):
        one = finding(*shares)
        one.row("slow", 9.0, "ms", "≤ 2", good=False)
        assert one.verdict == verdict
    one.faults.append("an event is missing")
    assert one.verdict == "fail", "a loss is one on any machine"
    assert one.document()["missed"] == ["slow 9.00 ms, ≤ 2"]
    assert "an event is missing" in table([one]) and "fail" in table([one])


class Server:
    """Answers one connection after the other with what it was given."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.heads: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answers.pop(0) if self._answers else b"")
        await writer.drain()
        writer.close()


def chunk(*frames: str) -> bytes:
    data = "".join(frames).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(ordinal: int, kind: str = "text.delta", last: int | None = None) -> str:
    told = {"execution": "e", "ordinal": ordinal, "type": kind} | ({} if last is None else {"last": last})
    return f"id: c{ordinal}\ndata: {json.dumps(told)}\n\n"


async def read(*answers: bytes) -> tuple[Crowd, Reader, Server]:
    server = Server(*answers)
    async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()[:2]
        crowd = Crowd(host, port, "token")
        reader = Reader(1, crowd)
        async with asyncio.timeout(30):
            await reader.run()
    return crowd, reader, server


OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def refusal(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


async def test_a_reader_goes_on_from_its_cursor_and_a_problem_with_a_code_is_no_fault() -> None:
    problem = {"code": "QUOTA_EXCEEDED", "title": "t", "detail": "d", "status": 429, "retryable": True}
    crowd, reader, server = await read(
        OK + chunk(event(1), event(2, last=4)) + b"0\r\n\r\n",
        refusal(429, problem),
        OK + chunk(event(5, "execution.ended")),
    )
    assert not crowd.faults and reader.applied == {"e": 5}
    assert crowd.answers == {"200": 2, "QUOTA_EXCEEDED": 1}
    assert b"Last-Event-ID" not in server.heads[0] and b"Last-Event-ID: c2\r\n" in server.heads[2]


async def test_a_hole_a_repetition_an_answer_without_a_code_and_none_at_all_are_faults() -> None:
    crowd, _, _ = await read(
        OK + chunk(event(1), event(1), event(3)) + b"0\r\n\r\n",
        refusal(500, {"message": "oops"}),
        b"",
        OK + chunk(event(4, "execution.ended")),
    )
    assert [fault.split(": ")[1].split(" at ")[0] for fault in crowd.faults[:2]] == ["doubled", "lost"]
    assert "500 without a code" in crowd.faults[2] and "IncompleteReadError" in crowd.faults[3]
