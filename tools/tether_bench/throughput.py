"""collector_lines_per_s and projection_events_per_s: how much gets through in a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tether import events as ev
from tether.bus import NatsBus
from tether.frames import Frame, decode
from tether.subjects import EventAddress
from tether_bench.logfill import MadeExecution, introduce, made_execution, publish
from tether_bench.processes import CpuMeter, pids
from tether_bench.rig import WORKSPACE, Rig, lines_of, projected, projection_of
from tether_bench.stats import Figure, Target
from tether_bench.tap import BenchError

LINES: Final = 50_000
PROJECTED: Final = 50_000
FLOOD_S: Final = 120.0  # of one flood
_LOOK_S: Final = 0.02
_BUDGET_S: Final = 6.0  # of a short run's rounds


def collector_lines(rig: Rig) -> list[Figure]:
    rounds = 2 if rig.short else 3
    workspace = rig.warm()
    whole: list[float] = []
    stored: list[float] = []
    bare: list[float] = []
    cpu = CpuMeter(pids(rig.state, workspace))
    for _ in rig.rounds(rounds, _BUDGET_S):
        bare.append(_bare_lines(rig))
        cpu.start()
        both = flood(rig, LINES)
        cpu.stop()
        whole.append(both[0])
        stored.append(both[1])
    baselines = {"pipe": tuple(bare)}
    return [
        Figure(
            "collector_lines_per_s",
            "lines/s",
            tuple(whole),
            baselines,
            Target("at least", 25_000.0),
            note=f"{LINES} lines, stored and projected",
            cpu_us=cpu.per(len(whole) * LINES),
        ),
        Figure("collector_stored_lines_per_s", "lines/s", tuple(stored), baselines, note="until the log has them"),
    ]


def _bare_lines(rig: Rig) -> float:
    with rig.tap() as tap, rig.bare_agents(tap, [f"!lines {LINES}"]) as agents:
        pipe, _ = agents[0]
        rig.wait(lambda: pipe.has(b'"result"'), FLOOD_S, "a bare flood")
        times = [received_s for received_s, line in lines_of(pipe) if line["type"] == "text"]
    rig.losses.count("lines of a bare pipe", expected=LINES, distinct=len(times))
    return LINES / (times[-1] - times[0])


@dataclass(frozen=True, slots=True)
class _Flooded:
    """What the log has of an execution. `last_*`: of the frame with its last line."""

    lines: dict[str, int]
    session: str
    ordinal: int
    last_sequence: int
    last_stored_s: float


def flood(rig: Rig, lines: int) -> tuple[float, float]:
    """One execution of so many lines: lines a second until projected, and until stored. Checks that all are there."""
    return floods(rig, lines, [WORKSPACE])


def floods(rig: Rig, lines: int, workspaces: Sequence[str]) -> tuple[float, float]:
    """As many lines in each workspace at once: all lines together over the time from the first line of any."""
    with rig.http() as client:
        subjects: dict[str, str] = {}
        for workspace in workspaces:
            conversation = rig.name("flood")
            execution = rig.prompt(client, conversation, f"!lines {lines}", workspace)
            subjects[execution] = EventAddress(rig.state.tenant, workspace, conversation, execution).subject

        async def work(bus: NatsBus) -> tuple[dict[str, _Flooded], list[tuple[float, int]]]:
            durable = await projection_of(bus, rig.log)
            floors = await _watch(bus, rig.log, durable, list(subjects.values()))
            read = {execution: await _read_back(bus, rig.log, where, lines) for execution, where in subjects.items()}
            return read, floors

        flooded, floors = rig.on_bus(work, timeout_s=FLOOD_S)
        rows = {execution: client.ask("GET", f"/v1/executions/{execution}") for execution in flooded}
    for execution, one in flooded.items():
        rig.losses.count(f"lines of {execution} in the log", expected=lines, got=one.lines)
        applied = int(rows[execution]["applied"])
        rig.losses.count(f"events of {execution} projected", expected=one.ordinal, distinct=applied)
    sessions = [one.session for one in flooded.values()]
    first_s = min(next(at_s for at_s, line in rig.printed(one) if line["type"] == "text") for one in sessions)
    last_sequence = max(one.last_sequence for one in flooded.values())
    projected_s = next(at_s for at_s, floor in floors if floor >= last_sequence)
    stored_s = max(one.last_stored_s for one in flooded.values())
    total = lines * len(flooded)
    return total / (projected_s - first_s), total / (stored_s - first_s)


async def _watch(bus: NatsBus, log: str, durable: str, subjects: Sequence[str]) -> list[tuple[float, int]]:
    """(when, the projection's ack floor), until it has acked the end of every execution."""
    floors: list[tuple[float, int]] = []
    ends: dict[str, int] = {}
    while len(ends) < len(subjects) or floors[-1][1] < max(ends.values()):
        await asyncio.sleep(_LOOK_S)
        consumer = await bus.consumer(log, durable)
        floors.append((time.time(), 0 if consumer is None else consumer.ack_floor))
        for subject in subjects:
            if subject not in ends and (last := await bus.last(log, subject)) and b'"execution.ended"' in last.data:
                ends[subject] = last.sequence
    return floors


async def _read_back(bus: NatsBus, log: str, subject: str, lines: int) -> _Flooded:
    got: dict[str, int] = {}
    session, last = "", f"l{lines:06d}"
    after = ordinal = last_sequence = 0
    last_stored_s = 0.0
    while batch := await bus.read(log, after, subject):
        for message in batch:
            after = message.sequence
            frame = decode(message.subject, message.data)
            assert isinstance(frame, Frame)
            ordinal = frame.last
            for event in frame.events:
                if event.type == ev.TEXT_COMPLETED:
                    text = event.body["text"]
                    got[text] = got.get(text, 0) + 1
                    if text == last:
                        last_sequence, last_stored_s = message.sequence, message.stored_at_ns / 1e9
                elif event.type == ev.SESSION_BOUND:
                    session = event.body["native_session"]
    if not last_sequence:
        raise BenchError(f"the last of {lines} lines is not in the log")
    return _Flooded(got, session, ordinal, last_sequence, last_stored_s)


# --- projection alone ---


def projection_events(rig: Rig) -> list[Figure]:
    rounds = 2 if rig.short else 3
    rates: list[float] = []
    cpu = CpuMeter(pids(rig.state))
    bare: list[float] = []
    for _ in rig.rounds(rounds, _BUDGET_S / 2):
        made = made_execution(rig.state.tenant, rig.name("projected"), PROJECTED)

        async def work(bus: NatsBus, made: MadeExecution = made) -> tuple[float, float]:
            await introduce(bus, made)
            cpu.start()
            begun_s = time.monotonic()
            ack = await publish(bus, made)
            await projected(bus, rig.log, ack.sequence)
            projected_s = time.monotonic() - begun_s
            cpu.stop()
            begun_s = time.monotonic()
            await _decode_all(bus, rig.log, made)
            return projected_s, time.monotonic() - begun_s

        projected_s, read_s = rig.on_bus(work, timeout_s=FLOOD_S)
        rates.append(PROJECTED / projected_s)
        bare.append(PROJECTED / read_s)
        with rig.http() as client:
            rows = client.ask("GET", f"/v1/executions/{made.address.execution}")
        rig.losses.count(f"events of {made.address.execution}", expected=PROJECTED, distinct=int(rows["applied"]))
    note = f"{PROJECTED} events in frames of 512"
    used = cpu.per(len(rates) * PROJECTED)
    return [Figure("projection_events_per_s", "events/s", tuple(rates), {"read": tuple(bare)}, note=note, cpu_us=used)]


async def _decode_all(bus: NatsBus, log: str, made: MadeExecution) -> None:
    after = events = 0
    while batch := await bus.read(log, after, made.address.subject):
        for message in batch:
            after = message.sequence
            frame = decode(message.subject, message.data)
            assert isinstance(frame, Frame)
            events += frame.last - frame.first + 1
    if events != made.events:
        raise BenchError(f"{events} of {made.events} events were read back")
