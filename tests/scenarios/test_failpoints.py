"""A kill at every named step of the code: each is found by a scan, has a scenario, and is passed; nothing is lost."""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tether.failpoints import FOLDER_VARIABLE, VARIABLE
from tether_chaos.failpoint_cases import ELSEWHERE, SCENARIOS, TABLE, conversation, scenario_of, unused
from tether_chaos.failpoint_run import FailpointRun, cases, run
from tether_chaos.failpoints import scan

SEED = int(os.environ.get("CHAOS_SEED", datetime.datetime.now(datetime.UTC).strftime("%j")))
TIERS = ("agent", "attach", "backend", "collector", "router")
AT_ONCE = 3  # exercised by each run of the tests; all of them by `make chaos CHAOS_ARGS=--failpoints`
KILLED = -9


def names() -> list[str]:
    """Those that a conversation comes by."""
    return [point.name for point in scan() if point.name not in ELSEWHERE]


def subset(seed: int) -> list[str]:
    """One failpoint each of some tiers: which ones goes round with the day, or with CHAOS_SEED."""
    rng = random.Random(seed)
    tiers = rng.sample(TIERS, AT_ONCE)
    return [rng.choice([name for name in names() if name.startswith(f"{tier}.")]) for tier in tiers]


def test_every_failpoint_of_the_code_has_a_scenario_that_the_runner_uses() -> None:
    assert {name for name in names() if scenario_of(name) not in SCENARIOS} == set()
    assert [case.failpoint for case in cases(names())] == names()


def test_what_no_conversation_comes_by_is_killed_in_a_test_of_its_own() -> None:
    assert set(ELSEWHERE) <= {point.name for point in scan()}
    for name, test in ELSEWHERE.items():
        path, _, function = test.partition("::")
        source = (Path(__file__).parents[2] / path).read_text()
        assert f"def {function}(" in source and f'"{name.rpartition(".")[2]}"' in source


def test_the_table_names_no_failpoint_that_the_code_does_not_have() -> None:
    assert unused(frozenset(names())) == []
    assert set(TABLE.values()) <= set(SCENARIOS)
    assert {name for scenario in SCENARIOS.values() for name in scenario.also} <= set(names())


def test_the_scan_finds_the_steps_of_every_machine() -> None:
    found = names()
    assert len(found) == len(set(found))
    for tier in TIERS:
        assert any(name.startswith(f"{tier}.") for name in found), tier
    wanted = {
        "attach.subscribed",
        "backend.projection.committed",
        "collector.frame.stored",
        "collector.control_journaled",
        "collector.adopted",
        "router.admission.write_owner",
        "router.admission.send_control",
        "agent.command.ask",
        "agent.drain.idle",
        "collector.next_spawned",
        "collector.restore_placing",
    }
    assert wanted <= set(found)


def test_a_scenario_is_longest_prefix_first() -> None:
    assert scenario_of("router.admission.wait") == "queue"
    assert scenario_of("router.admission.bind") == "talk"
    assert scenario_of("nobody.knows") is None


def test_cases_of_the_agent_service_have_a_sandbox_of_their_own() -> None:
    plans = [conversation(number, "agent.command.ask", SCENARIOS["talk"]) for number in range(2)]
    assert plans[0].workspace != plans[1].workspace


def test_who_is_drained_has_a_sandbox_of_its_own_and_somebody_to_wake_it() -> None:
    drains = {name: one for name, one in SCENARIOS.items() if one.own_sandbox}
    assert {"drain", "drain_deaf", "suspend", "idle", "restore", "delete", "delete_suspended"} == set(drains)
    for scenario in drains.values():
        plans = [conversation(number, "collector.drain_over", scenario) for number in (0, 3)]
        assert plans[0].workspace != plans[1].workspace and len(plans[0].turns) == 2
        asked = [prompt.request for turn in plans[0].turns for prompt in turn]
        assert len(asked) == len(set(asked))


@pytest.mark.timeout(240)
def test_whoever_dies_in_a_failpoint_loses_nothing_and_does_nothing_twice(tmp_path: Path) -> None:
    chosen = subset(SEED)
    result, fired_s = run(chosen, tmp_path)
    assert result.violations == [], (SEED, chosen, result.violations)
    assert set(fired_s) == set(chosen)
    assert result.executions >= len(chosen) - 1 and result.events > 100


# Passed by whoever recovers: the first of each service is killed before (of routers: in the step before), the second
# dies here, the third completes what both began.
AGAIN = (
    "agent.sandbox.adopted",
    "collector.adopted",
    "backend.projection.caught_up",
    "backend.projection.consumer_made",
    "router.admission.write_owner",
)
BEFORE = "router.admission.bind"


@pytest.mark.timeout(240)
def test_whoever_is_killed_again_in_the_middle_of_its_recovery_loses_nothing_and_does_nothing_twice(
    tmp_path: Path,
) -> None:
    twice = FailpointRun(AGAIN, tmp_path)
    [admission] = [case for case in twice.cases if case.failpoint.startswith("router.")]
    assert {case.scenario.act for case in twice.cases if case is not admission} <= {
        *("kill_agent", "kill_collector", "kill_backend", "lose_database")
    }
    twice.cases[twice.cases.index(admission)] = replace(admission, scenario=replace(admission.scenario, also=(BEFORE,)))
    result = asyncio.run(twice.run())
    assert result.violations == []
    assert set(twice.fired_s) == set(AGAIN)


# --- the module ---


def passing(count: int, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"""
from tether.failpoints import failpoint
for number in range({count}):
    failpoint("a.step")
    failpoint("a.other_step")
    print(number, flush=True)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TETHER_")}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=kept | environment, capture_output=True, text=True, check=False
    )


def test_a_process_without_the_variables_passes_every_step() -> None:
    assert passing(2).stdout.split() == ["0", "1"]


def test_a_process_dies_when_it_passes_the_step_for_the_nth_time() -> None:
    done = passing(5, **{VARIABLE: "b.step,a.step:3"})
    assert (done.returncode, done.stdout.split()) == (KILLED, ["0", "1"])


def test_an_armed_step_kills_once_whoever_passes_it(tmp_path: Path) -> None:
    (tmp_path / "a.other_step").touch()
    first, second = (passing(1, **{FOLDER_VARIABLE: str(tmp_path)}) for _ in range(2))
    assert (first.returncode, second.returncode) == (KILLED, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["step", "a.step:0", "a.step:x", "a..step", "A.step"])
def test_a_value_that_names_no_step_is_refused_at_the_start(text: str) -> None:
    done = passing(1, **{VARIABLE: text})
    assert done.returncode == 1 and VARIABLE in done.stderr
