"""R1–R6, P1, P3, C2: a short seeded round of the chaos run, and the judge's own power to find what it looks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tether.client import Submission
from tether.errors import Code
from tether.events import ConversationEvent, Event
from tether_chaos import judge
from tether_chaos.hostile import attack
from tether_chaos.load import Outcome
from tether_chaos.plan import ALL, SERVICES, Plan, PromptPlan, draw
from tether_chaos.readers import Got
from tether_chaos.round import Round
from tether_oracle import Truth
from tether_oracle.truth import ProcessTruth, StdinLine


def plan(seed: int = 43) -> Plan:
    return draw(seed, conversations=3, workspaces=2, seconds=8.0, services=SERVICES)


@pytest.mark.timeout(240)
async def test_nothing_is_lost_or_doubled_while_every_service_is_killed_and_frozen(tmp_path: Path) -> None:
    drawn = plan()
    assert {*SERVICES, ALL} == {fault.service for fault in drawn.faults if fault.freeze_s is None}
    assert any(fault.freeze_s for fault in drawn.faults)
    result = await Round(drawn, tmp_path).run()
    assert result.violations == [], (result.faults_done, result.violations)
    assert len(result.faults_done) > len(drawn.faults) / 2, "most faults found their victim alive"
    assert result.events > 100


@pytest.mark.timeout(240)
async def test_rubbish_on_every_subject_ends_no_service_and_stops_nobody_elses_work(tmp_path: Path) -> None:
    report = await attack(5, 200, tmp_path)
    assert report.violations == []
    assert report.answered["INVALID"] > 0
    assert set(report.sent) == {"prompt", "command", "event", "control", "agent", "record"}


def test_a_seed_draws_the_same_plan_again() -> None:
    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


# --- the judge ---


def an_event(ordinal: int, kind: str = "text.completed", last: int | None = None, **body: Any) -> Event:
    return Event(ordinal=ordinal, last=last, at=1, type=kind, body=body)


def a_log() -> judge.Log:
    events = [
        an_event(1, "execution.started"),
        an_event(2, "text.delta", last=4),
        an_event(5, "response.ended", outcome="completed"),
        an_event(6, "execution.ended", outcome="completed", proof={"method": "pid_namespace"}),
    ]
    told = [ConversationEvent(id=id_, generation=1, at=1, type="x", body={}) for id_ in ("r/a", "r/b")]
    return judge.Log({"e": events}, told)


def a_reader(log: judge.Log) -> Got:
    return Got("reader", {"e": list(log.executions["e"])}, [event.id for event in log.conversation])


def test_a_whole_log_and_a_reader_who_has_it_are_clean() -> None:
    log = a_log()
    assert judge.log_faults(log) == judge.reader_faults(a_reader(log), log) == []


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda log: log.executions["e"].pop(1), "lost at ordinal 2"),
        (lambda log: log.executions["e"].insert(2, log.executions["e"][1]), "doubled at ordinal 5"),
        (lambda log: log.executions["e"].pop(), "no end with a proof"),
        (lambda log: log.executions["e"][-1].body.pop("proof"), "no end with a proof"),
        (lambda log: log.executions["e"].pop(2), "response.ended 0 times"),
        (lambda log: log.conversation.append(log.conversation[0]), "is there 2 times"),
    ],
)
def test_damage_to_a_log_is_found(damage: Callable[[judge.Log], object], word: str) -> None:
    log = a_log()
    damage(log)
    assert any(word in fault for fault in judge.log_faults(log))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda got: got.executions["e"].pop(), "has 5 of 6"),
        (lambda got: got.executions["e"].pop(1), "lost at ordinal 2"),
        (lambda got: got.executions["e"].append(got.executions["e"][0]), "doubled at ordinal 7"),
        (lambda got: got.conversation.pop(), "lost Counter({'r/b': 1})"),
        (lambda got: got.conversation.append("r/a"), "doubled Counter({'r/a': 1})"),
        (lambda got: got.trouble.append("GapItem"), "GapItem"),
    ],
)
def test_damage_to_what_a_reader_got_is_found(damage: Callable[[Got], object], word: str) -> None:
    log = a_log()
    got = a_reader(log)
    damage(got)
    assert any(word in fault for fault in judge.reader_faults(got, log)), judge.reader_faults(got, log)


PROMPT = PromptPlan("r1", "<r1>", "!say <r1>", "http", None, "run", 0.0, False)


def an_agent(began: float, ended: float, prompts: int = 1) -> ProcessTruth:
    line = '{"type":"prompt","id":"p1","text":"!say <r1>\\n!tool x"}'
    stdin = tuple(StdinLine(n, line, None) for n in range(prompts))
    records = ({"ev": "start", "at": began}, {"ev": "exit", "at": ended})
    return ProcessTruth("f", "s", 1, began, (), stdin, 0, records)


def submitted() -> Outcome:
    submission = Submission("c", "r1", "admitted", "rsp", "e", "cur")
    return Outcome(PROMPT, submission, None, [("admitted", "rsp", "e"), ("admitted", "rsp", "e")])


def test_a_prompt_must_reach_an_agent_exactly_once() -> None:
    log = a_log()
    found = [judge.prompt_faults(Truth((an_agent(1, 2, count),), ()), [submitted()], log, set()) for count in (0, 1, 2)]
    assert [len(faults) for faults in found] == [1, 0, 1]
    twice = Truth((an_agent(1, 2), an_agent(3, 4)), ())
    assert judge.prompt_faults(twice, [submitted()], log, set())


def test_different_answers_to_one_request_and_an_effect_of_a_refused_one_are_found() -> None:
    log, truth = a_log(), Truth((an_agent(1, 2),), ())
    other = submitted()
    other.answers[1] = ("admitted", "rsp", "e2")
    assert judge.prompt_faults(truth, [other], log, set())
    refused = replace(submitted(), submission=None, refused=Code.REQUEST_CONFLICT)
    assert judge.prompt_faults(truth, [refused], log, set())


def test_two_agents_at_a_time_are_found() -> None:
    assert judge.overlap_faults("c", [an_agent(1, 2), an_agent(2, 3)]) == []
    assert judge.overlap_faults("c", [an_agent(1, 2.5), an_agent(2, 3)])


def test_an_execution_that_nobody_cut_must_complete() -> None:
    log = a_log()
    assert judge.outcome_faults([], log, set()) == []
    log.executions["e"][-1].body["outcome"] = "lost"
    assert judge.outcome_faults([], log, set())
    assert judge.outcome_faults([], log, {"e"}) == []
