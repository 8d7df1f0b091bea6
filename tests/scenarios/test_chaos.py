"""R1–R6, P1, P3, C2: a short seeded round of the chaos run, and the judge's own power to find what it looks for."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support_nats import running_server
from tether.client import Submission
from tether.errors import Code
from tether.events import ConversationEvent, Event
from tether_chaos import flat_load, judge, report
from tether_chaos.flatness import WARM_UP, Measured, compare, measure, table
from tether_chaos.hostile import attack
from tether_chaos.load import Outcome
from tether_chaos.outages import (
    Chain,
    Outage,
    Receipt,
    failover_samples,
    merged,
    percentile,
    start_sample,
    stream_samples,
)
from tether_chaos.plan import ALL, READER_KINDS, SERVICES, Plan, PromptPlan, draw
from tether_chaos.proxy import NatsProxy
from tether_chaos.readers import Got
from tether_chaos.round import Result, Round, until
from tether_chaos.writers import WriterWatch
from tether_oracle import Truth
from tether_oracle.truth import LedgerLine, ProcessTruth, StdinLine


@pytest.fixture
def nats_port() -> Iterator[int]:
    with running_server() as server:
        yield server.port


def plan(seed: int = 832) -> Plan:
    return draw(seed, conversations=3, workspaces=2, seconds=8.0, services=SERVICES, rate=2.0)


@pytest.mark.timeout(240)
async def test_nothing_is_lost_or_doubled_while_every_service_is_killed_and_frozen(tmp_path: Path) -> None:
    drawn = plan()
    assert {*SERVICES, ALL} == {fault.service for fault in drawn.faults if fault.how == "kill"}
    assert {"freeze", "stall", "cut"} <= {fault.how for fault in drawn.faults}
    assert {reader for one in drawn.conversations for reader in one.readers} == set(READER_KINDS)
    result = await Round(drawn, tmp_path).run()
    assert result.violations == [], (result.faults_done, result.violations)
    assert len(result.faults_done) > len(drawn.faults) / 2, "most faults found their victim alive"
    assert result.events > 100 and sum(result.kills.values()) > 5
    assert result.looks > 50, "living agents were counted all the while"
    assert sum(map(len, result.reattach_s.values())) > 0
    sandboxes = {one.workspace for one in drawn.conversations}
    assert len(result.operations) == len(drawn.operations) + len(sandboxes), "each is suspended in the end"
    assert report.figures([report.entry(result, {})])["kills"] == sum(result.kills.values())


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
    return Got("reader", "nats", {"e": list(log.executions["e"])}, [event.id for event in log.conversation])


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


def test_an_interjection_that_found_nobody_may_be_tried_again_by_another_caller() -> None:
    log, truth = a_log(), Truth((an_agent(1, 2),), ())
    found_nobody: tuple[str, str | None, str | None] = (Code.SESSION_STREAM_NOT_ACTIVE, None, None)
    again = submitted()
    again.answers.insert(0, found_nobody)
    assert judge.prompt_faults(truth, [again], log, set()), "a prompt that may start an agent is never told so"
    again.prompt = replace(PROMPT, mode="interject")
    assert judge.prompt_faults(truth, [again], log, set()) == []
    again.answers.append(("interjected", "rsp", "e2"))
    assert judge.prompt_faults(truth, [again], log, set())


def test_two_agents_at_a_time_are_found() -> None:
    assert judge.overlap_faults("c", [an_agent(1, 2), an_agent(2, 3)]) == []
    assert judge.overlap_faults("c", [an_agent(1, 2.5), an_agent(2, 3)])


def test_an_execution_that_nobody_cut_must_complete() -> None:
    log = a_log()
    assert judge.outcome_faults([], log, set()) == []
    log.executions["e"][-1].body["outcome"] = "lost"
    assert judge.outcome_faults([], log, set())
    assert judge.outcome_faults([], log, {"e"}) == []


def test_what_is_found_counts_in_the_columns_of_the_table() -> None:
    log = a_log()
    got = a_reader(log)
    got.executions["e"].pop(1)
    got.conversation.append("r/a")
    found = [*judge.reader_faults(got, log), *judge.overlap_faults("c", [an_agent(1, 2.5), an_agent(2, 3)])]
    counts = judge.tally(found)
    assert (counts["lost"], counts["duplicated"], counts["two_writers"]) == (3, 1, 1)
    assert judge.tally(judge.prompt_faults(Truth((an_agent(1, 2, 3),), ()), [submitted()], log, set())) == {
        **dict.fromkeys(judge.COLUMNS, 0),
        "second_prompts": 2,
    }


def test_conversation_events_in_another_order_than_in_the_log_are_found() -> None:
    log = a_log()
    got = a_reader(log)
    got.conversation.reverse()
    assert judge.tally(judge.reader_faults(got, log))["reordered"] == 1


def test_a_side_effect_that_was_done_twice_counts() -> None:
    line = LedgerLine("p/1", "work", "p", "s", "f")
    assert judge.tally(judge.effect_faults(Truth((), (line, line, line))))["repeated_side_effects"] == 2
    assert judge.effect_faults(Truth((), (line,))) == []


def test_an_execution_that_was_taken_over_need_not_complete() -> None:
    log = a_log()
    log.executions["e"][-1].body["outcome"] = "stopped"
    log.executions["f"] = list(log.executions["e"])
    taking = Outcome(replace(PROMPT, mode="takeover"), Submission("c", "r1", "admitted", "rsp", "f", "cur"))
    assert judge.taken_over([taking], log) == {"e"}
    assert judge.taken_over([submitted()], log) == set()


@pytest.mark.parametrize(("lived_ms", "allowed"), [(900, set()), (25_000, {"e"})])
def test_only_what_was_not_heard_of_for_long_may_be_superseded_by_a_prompt_without_a_mode(
    lived_ms: int, allowed: set[str]
) -> None:
    log = a_log()
    events = log.executions["e"]
    events[0] = Event(ordinal=1, at=1, type="execution.started", body={"target": {"response": "rsp1"}})
    events[-1] = events[-1].model_copy(update={"at": 1 + lived_ms})
    log.conversation.append(
        ConversationEvent(id="r/s", generation=2, at=1, type="response.superseded", body={"response": "rsp1"})
    )
    assert judge.taken_over([], log) == allowed


# --- times ---

OVER_HTTP = Chain(frozenset({"backend", "nats", "collector"}), "w0")


def reading(*times_s: tuple[float, float]) -> Chain:
    return replace(OVER_HTTP, receipts=[Receipt(*one) for one in times_s])


def test_a_reader_is_attached_again_at_the_first_event_after_the_outage() -> None:
    outages = [
        Outage("backend", "", 10.0, 12.0),
        Outage("router", "", 11.0, 20.0),
        Outage("collector", "w1", 9.0, 30.0),
    ]
    assert stream_samples(outages, reading((9.0, 9.0), (12.5, 11.0))) == {"backend": [0.5]}


def test_an_agent_that_says_nothing_for_a_while_is_no_wait_of_the_reader() -> None:
    samples = stream_samples([Outage("backend", "", 10.0, 12.0)], reading((9.0, 9.0), (17.25, 17.0)))
    assert samples == {"backend": [0.25]}


def test_outages_that_overlap_are_one_and_belong_to_the_last_to_be_up() -> None:
    outages = [Outage("backend", "", 10.0, 12.0), Outage("nats", "", 11.0, 14.0), Outage("collector", "w0", 13.0, 13.5)]
    assert merged(outages, OVER_HTTP) == [Outage("nats", "", 10.0, 14.0)]
    assert stream_samples(outages, reading((9.0, 9.0), (14.5, 10.0))) == {"nats": [0.5]}


def test_a_chain_that_breaks_again_before_an_event_came_is_another_outage() -> None:
    outages = [Outage("backend", "", 10.0, 12.0), Outage("backend", "", 12.1, 13.0)]
    assert stream_samples(outages, reading((9.0, 9.0), (13.5, 10.0))) == {"backend": [0.5]}
    assert stream_samples([*outages, Outage("nats", "", 13.1, None)], reading((9.0, 9.0), (13.5, 10.0))) == {
        "backend": [0.5]
    }


def test_a_prompt_waits_from_when_it_could_begin() -> None:
    chain = replace(OVER_HTTP, tiers=OVER_HTTP.tiers | {"router"})
    outages = [Outage("router", "", 10.0, 12.0)]
    assert start_sample(outages, chain, due_s=9.0, began_s=12.5) == ("router", 0.5)
    assert start_sample(outages, chain, due_s=12.2, began_s=12.5) is None
    again = [*outages, Outage("router", "", 12.1, 14.0)]
    assert start_sample(again, chain, due_s=9.0, began_s=14.25) == ("router", 0.25)
    assert start_sample(again, chain, due_s=9.0, began_s=12.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([], 0.99) == 0.0


def test_a_failover_is_the_longest_that_an_event_took_to_a_reader_while_one_of_a_cluster_was_away() -> None:
    outages = [Outage("nats", "", 10.0, 14.0), Outage("backend", "", 10.0, 30.0), Outage("nats", "", 40.0, None)]
    delayed = reading((9.0, 9.0), (10.1, 9.9), (13.0, 10.5), (13.1, 13.0), (14.2, 14.1), (60.0, 20.0))
    assert failover_samples(outages, delayed) == [2.5]
    assert failover_samples(outages, reading((9.0, 9.0), (17.5, 9.5))) == [7.5]
    assert failover_samples(outages, reading((12.0, 8.0))) == []


# --- from outside ---


def test_two_living_agents_of_one_conversation_are_two_writers(tmp_path: Path) -> None:
    watch = WriterWatch(tmp_path)
    watch.seen[frozenset({"e1", "e2", "e3"})] = 4
    assert watch.conflicts({"e1": "c1", "e2": "c2", "e3": "c2"}) == [
        "c2: agents of e2 and e3 lived at once, in 4 looks"
    ]
    assert watch.conflicts({"e1": "c1", "e2": "c2", "e3": "c3"}) == []


async def test_a_living_agent_is_seen_by_its_marker_and_a_stranger_is_not(tmp_path: Path) -> None:
    def agent(nonce: str, truth: Path) -> subprocess.Popen[bytes]:
        environment = {"TETHER_PROCESS_NONCE": nonce, "TETHER_SCRIPTED_TRUTH": str(truth), "PATH": os.environ["PATH"]}
        command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", "scripted_agent"]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)

    agents = [agent("e1-aa", tmp_path), agent("e2-bb", tmp_path), agent("e3-cc", tmp_path / "other")]
    watch = WriterWatch(tmp_path)
    task = asyncio.create_task(watch.run(), name="watch")

    async def seen() -> bool:
        return frozenset({"e1", "e2"}) in watch.seen

    try:
        assert await until(seen, 20)
    finally:
        task.cancel()
        for one in agents:
            one.kill()
            one.communicate()
    assert set(watch.seen) == {frozenset({"e1", "e2"})} and not watch.doubled


async def test_a_stalled_network_moves_nothing_and_loses_nothing(nats_port: int) -> None:
    proxy = NatsProxy("router", lambda: nats_port)
    async with proxy.running():
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert (await reader.readline()).startswith(b"INFO ")
        writer.write(b'CONNECT {"name":"tether-collector a/b","verbose":false}\r\nPING\r\n')
        assert await reader.readline() == b"PONG\r\n"
        stall = asyncio.create_task(proxy.stall("collector", 0.5), name="stall")
        await asyncio.sleep(0)
        writer.write(b"PING\r\n")
        answer = asyncio.create_task(reader.readline(), name="answer")
        done, _ = await asyncio.wait({stall, answer}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {stall}
        assert await answer == b"PONG\r\n"
        assert proxy.cut("router") == 0
        assert proxy.cut("collector") == 1
        assert await reader.read() == b""
        writer.close()


# --- a run that goes on ---


def test_a_run_goes_on_from_its_state_with_seeds_that_were_not_run(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    first = report.State(path)
    assert first.next_seed(5, 2) == 5
    done = Result(5, kills={"nats": 2, "router": 1}, reattach_s={"nats": [0.1, 0.3]}, restart_s={"nats": [0.2, 0.4]})
    first.add(report.entry(done, {"rate": 1.0}))
    again = report.State(path)
    assert (again.kills, again.next_seed(5, 2), again.next_seed(4, 2)) == (3, 7, 4)
    assert report.write(again.rounds, tmp_path / "reports" / "chaos.json")
    again.add(report.entry(Result(7, violations=[judge.Fault("c0: lost", lost=2)]), {}))
    assert not report.write(again.rounds, tmp_path / "reports" / "chaos.json")
    written = json.loads((tmp_path / "reports" / "chaos.json").read_text())
    figures = written["figures"]
    assert written["restarts"]["nats"]["restart_s_max"] == 0.4
    assert (figures["kills"], figures["lost"], figures["seeds"]) == (3, 2, [5, 7])
    assert figures["reattach_s_max"] == figures["tiers"]["nats"]["reattach_s_p99"] == 0.3
    assert set(figures) == {
        *("kills", "executions", "events", "lost", "duplicated", "reordered", "second_prompts"),
        *("repeated_side_effects", "reattach_s_p50", "reattach_s_p99", "reattach_s_max", "tiers", "seeds"),
    }


# --- what grows ---


@pytest.mark.timeout(600)
async def test_ten_restarts_of_every_service_leave_nothing_behind() -> None:
    found = await measure(10)
    assert found.done == len(SERVICES) * (10 + WARM_UP)
    assert found.before.counts["consumers"] > 0 and found.before.counts["subscriptions"] > 0
    assert found.growth == [], table(found)


@pytest.mark.timeout(240)
async def test_load_without_a_pause_is_read_back_whole_and_leaves_nothing_behind() -> None:
    found = await flat_load.measure(6000)
    assert found.events[-1] >= 6000 and found.executions * flat_load.DELTAS <= found.events[-1]
    assert [one.counts["consumers"] for one in found.measured] == [found.measured[0].counts["consumers"]] * 3
    assert {"tasks", "fds", "rss_mib"} <= set(found.measured[2].processes["collector"])
    assert found.growth == [], flat_load.table(found)


def test_what_grows_between_two_measurements_is_told() -> None:
    before = Measured({"consumers": 4}, {"router": {"fds": 20.0, "threads": 3.0, "rss_mib": 60.0}})
    after = Measured({"consumers": 5}, {"router": {"fds": 90.0, "threads": 4.0, "rss_mib": 70.0}})
    assert compare(before, before) == []
    assert compare(before, after) == ["consumers: 4 → 5", "router fds: 20 → 90"]
