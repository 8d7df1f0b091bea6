"""first_event_ms_p50, first_output_ms_p50: from a prompt's POST to what its reader sees first."""

from __future__ import annotations

import time
from typing import Final

from tether_bench.rig import START_S, Rig, lines_of
from tether_bench.stats import Figure, Target, median
from tether_bench.tap import BenchError, SseReplay

FIRST: Final = "first_event_ms_p50"
OUTPUT: Final = "first_output_ms_p50"
_BUDGET_S: Final = 6.0  # of a short run's rounds


def first_event(rig: Rig) -> list[Figure]:
    rounds, prompts = (3, 3) if rig.short else (5, 6)
    rig.warm()
    events: list[float] = []
    outputs: list[float] = []
    bare: list[float] = []
    for _ in rig.rounds(rounds, _BUDGET_S):
        bare.append(median([_bare(rig) for _ in range(prompts)]))
        both = [_prompted(rig) for _ in range(prompts)]
        events.append(median([first for first, _ in both]))
        outputs.append(median([output for _, output in both]))
    baselines = {"pipe": tuple(bare)}
    return [
        Figure(FIRST, "ms", tuple(events), baselines, Target("at most", 80.0), note="the execution's claim"),
        Figure(OUTPUT, "ms", tuple(outputs), baselines, note="keeper and CLI started, its first line"),
    ]


def _prompted(rig: Rig) -> tuple[float, float]:
    """One prompt; ms to the first event of its execution, and to the first that the CLI printed."""
    conversation = rig.name("first")
    with rig.tap() as tap, rig.http() as client:
        stream = rig.follow(tap, conversation)
        client.ask("GET", "/healthz")  # the connection is there before the time is taken
        sent_s = time.time()
        rig.prompt(client, conversation, "!say hello")
        rig.wait(lambda: stream.has(b'"execution.ended"'), START_S, "an execution's end", poll_s=0.05)
        first_s = output_s = 0.0
        for received_s, event in SseReplay(stream).told():
            if "execution" not in event:
                continue
            first_s = first_s or received_s
            if event["type"] != "execution.started":
                output_s = received_s
                break
        if not output_s:
            raise BenchError("an execution without output")
    return 1000 * (first_s - sent_s), 1000 * (output_s - sent_s)


def _bare(rig: Rig) -> float:
    """ms from before the spawn of a bare agent to its first line."""
    with rig.tap() as tap:
        sent_s = time.time()
        with rig.bare_agents(tap, ["!say hello"]) as agents:
            pipe, _ = agents[0]
            rig.wait(lambda: pipe.has(b'"result"'), START_S, "a bare agent's result")
            first_s = next(lines_of(pipe))[0]
    return 1000 * (first_s - sent_s)
