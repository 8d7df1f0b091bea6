"""answer_ms_p50: from an answer's POST to its bytes in the CLI's stdin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

from tether_bench.rig import END_S, START_S, Http, Rig
from tether_bench.stats import Figure, Target, median
from tether_bench.tap import BenchError, Recording, SseReplay

NAME: Final = "answer_ms_p50"
RECEIPT: Final = "answer_receipt_ms_p50"
TARGET_MS: Final = 10.0
_BUDGET_S: Final = 6.0  # of a short run's rounds
_LOOK_S: Final = 0.001


def answers(rig: Rig) -> list[Figure]:
    """Each round: as many asks on a bare pipe, as many questions of the API alone, and through the product."""
    rounds, asks = (3, 5) if rig.short else (5, 20)
    rig.warm()
    product: list[float] = []
    receipts: list[float] = []
    pipe: list[float] = []
    api: list[float] = []
    for _ in rig.rounds(rounds, _BUDGET_S):
        pipe.append(median(_bare(rig, asks)))
        with rig.http() as client:
            api.append(median([_asked(client) for _ in range(asks)]))
        both = _answered(rig, asks)
        product.append(median([stdin for stdin, _ in both]))
        receipts.append(median([receipt for _, receipt in both]))
    baselines = {"pipe": tuple(pipe), "http": tuple(api)}
    target = Target("at most", TARGET_MS)
    return [
        Figure(NAME, "ms", tuple(product), baselines, target, note="POST of an approval → the CLI has read it"),
        Figure(RECEIPT, "ms", tuple(receipts), {"http": tuple(api)}, note="POST of an approval → its receipt"),
    ]


def _script(asks: int) -> str:
    return f"!repeat {asks}\n!ask Bash\n!end"


def _stdin(records: Iterator[dict[str, Any]]) -> list[float]:
    """When the agent had read each answer, in order."""
    return [record["at"] for record in records if record["ev"] == "stdin" and '"answer"' in record["line"]]


def _answered(rig: Rig, asks: int) -> list[tuple[float, float]]:
    """For each approval: ms until the CLI had read it, ms until the receipt was there."""
    conversation = rig.name("answer")
    posted: list[float] = []
    receipts: list[float] = []
    session = ""
    with rig.tap() as tap, rig.http() as client:
        stream = rig.follow(tap, conversation)
        rig.prompt(client, conversation, _script(asks))
        replay = SseReplay(stream)
        while len(posted) < asks:
            for _, event in replay.told():
                if event["type"] == "session.bound":
                    session = str(event["body"]["native_session"])
                if event["type"] == "interaction.requested":
                    path = f"/v1/conversations/{conversation}/interactions/{event['body']['interaction']}"
                    posted.append(time.time())
                    answer = client.ask("POST", path, {"decision": "allow"})
                    receipts.append(1000 * (time.time() - posted[-1]))
                    if answer["status"] in ("rejected", "unknown"):
                        raise BenchError(f"an answer was {answer['status']}")
            _more(rig, stream, replay)
        rig.wait(lambda: stream.has(b'"execution.ended"'), END_S, "an execution's end")
    read = _stdin(rig.records(session))
    if len(read) != asks:
        raise BenchError(f"the agent read {len(read)} of {asks} answers")
    return [
        (1000 * (read_s - posted_s), receipt) for read_s, posted_s, receipt in zip(read, posted, receipts, strict=True)
    ]


def _more(rig: Rig, stream: Recording, replay: SseReplay) -> None:
    rig.wait(lambda: replay.behind or stream.closed, START_S, "an approval that waits", poll_s=_LOOK_S)
    if stream.closed and not replay.behind:
        raise BenchError("the stream ended before all approvals had come")


def _asked(client: Http) -> float:
    """The API and its edge alone: ms of one question that touches no bus."""
    begun_s = time.perf_counter()
    client.ask("GET", "/healthz")
    return 1000 * (time.perf_counter() - begun_s)


def _bare(rig: Rig, asks: int) -> list[float]:
    """ms from before the write into a bare agent's stdin until it has read it."""
    posted: list[float] = []
    with rig.agent_process(_script(asks)) as (process, session):
        assert process.stdin is not None and process.stdout is not None
        for raw in process.stdout:
            line = json.loads(raw)
            if line["type"] == "ask":
                answer = {"type": "answer", "request": line["request"], "decision": "allow"}
                data = json.dumps(answer).encode() + b"\n"
                posted.append(time.time())
                process.stdin.write(data)
                process.stdin.flush()
            if line["type"] == "result":
                break
    read = _stdin(rig.records(session))
    if len(read) != asks:
        raise BenchError(f"a bare agent read {len(read)} of {asks} answers")
    return [1000 * (read_s - posted_s) for read_s, posted_s in zip(read, posted, strict=True)]
