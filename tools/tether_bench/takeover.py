"""takeover_ms_p50: from the POST of a prompt that takes over to the claim of its execution, where the old CLI obeys."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from tether.ids import new_id
from tether_bench.rig import START_S, WORKSPACE, Http, Rig
from tether_bench.stats import Figure, Target, median
from tether_bench.tap import BenchError, Recording, SseReplay

NAME: Final = "takeover_ms_p50"
TARGET_MS: Final = 300.0
_BUDGET_S: Final = 6.0  # of a short run's rounds
_LOOK_S: Final = 0.001
_BUSY: Final = "!say busy\n!hang"  # an interrupt ends it, and nothing else


def takeovers(rig: Rig) -> list[Figure]:
    """Each round: as many prompts to idle conversations, then a conversation that is taken over again and again."""
    rounds, times = (3, 4) if rig.short else (5, 10)
    rig.warm()
    product: list[float] = []
    idle: list[float] = []
    for _ in rig.rounds(rounds, _BUDGET_S):
        idle.append(median([_taken(rig, 1)[0] for _ in range(times)]))
        product.append(median(_taken(rig, times + 1)[1:]))
    note = "one stop, its proof in the log, and the new claim"
    return [Figure(NAME, "ms", tuple(product), {"idle": tuple(idle)}, Target("at most", TARGET_MS), note=note)]


def _taken(rig: Rig, times: int) -> list[float]:
    """ms from each POST to the claim of its execution, in one conversation; the first finds it idle."""
    conversation = rig.name("takeover")
    took: list[float] = []
    with rig.tap() as tap, rig.http() as client:
        reader = _Reader(rig, rig.follow(tap, conversation))
        client.ask("GET", "/healthz")  # the connection is there before the time is taken
        execution = ""
        for _ in range(times):
            sent_s = time.time()
            execution = _prompt(rig, client, conversation)
            took.append(1000 * (reader.told(execution, "execution.started") - sent_s))
            reader.told(execution, "text.completed")
        client.ask("POST", f"/v1/executions/{execution}/stop")
        reader.told(execution, "execution.ended")
    return took


def _prompt(rig: Rig, client: Http, conversation: str) -> str:
    """Sent once; the same request is asked again while it is pending. Its execution."""
    body = {
        "request_id": new_id("req"),
        "content": [{"type": "text", "text": _BUSY}],
        "agent": {"kind": "scripted"},
        "workspace": WORKSPACE,
        "mode": "takeover",
    }
    until_s = time.monotonic() + START_S
    while True:
        answer = client.ask("POST", f"/v1/conversations/{conversation}/messages", body)
        if answer["status"] == "admitted":
            return str(answer["execution_id"])
        if time.monotonic() > until_s or rig.stopping.is_set():
            raise BenchError(f"a takeover is {answer['status']} after {START_S:g} s")


class _Reader:
    """Events of a stream in order, each once."""

    def __init__(self, rig: Rig, stream: Recording) -> None:
        self._rig = rig
        self._stream = stream
        self._replay = SseReplay(stream)
        self._events: deque[tuple[float, dict[str, Any]]] = deque()

    def told(self, execution: str, kind: str) -> float:
        """When this event of this execution was received; what came before it is passed."""
        while True:
            while self._events:
                received_s, event = self._events.popleft()
                if event["type"] == kind and event.get("execution") == execution:
                    return received_s
            self._rig.wait(self._moved, START_S, f"{kind} of a takeover", poll_s=_LOOK_S)
            if self._stream.closed and not self._replay.behind:
                raise BenchError("the stream ended in the middle of a takeover")
            self._events.extend(self._replay.told())

    def _moved(self) -> bool:
        return self._replay.behind or self._stream.closed
