"""What the chaos run does to sandboxes, and its judge's power to find what a drain must not do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tether.checkpoint import KEPT_MAX, CheckpointReference, DrainedExecution
from tether.client import Submission
from tether.events import Event
from tether.ids import ExecutionTarget
from tether_chaos.drains import Allowed, drain_faults, drained
from tether_chaos.judge import Log, prompt_faults
from tether_chaos.load import Outcome
from tether_chaos.operators import Door
from tether_chaos.plan import OPERATIONS_MAX, SERVICES, Operation, PromptPlan, draw
from tether_collector.launching import derived_uuid
from tether_oracle import Truth
from tether_oracle.truth import ProcessTruth, StdinLine

ORDERED = Allowed(orders={"op-1"})


def an_event(ordinal: int, type_: str, /, **body: object) -> Event:
    return Event(ordinal=ordinal, at=1, type=type_, body=body)


def a_log() -> Log:
    events = [
        an_event(1, "execution.started"),
        an_event(2, "tool.started", tool="t1", name="build"),
        an_event(3, "interaction.requested", interaction="i1", kind="approval"),
        an_event(4, "interaction.resolved", interaction="i1", outcome="expired"),
        an_event(5, "tool.completed", tool="t1", status="interrupted"),
        an_event(6, "response.ended", outcome="drained"),
        an_event(7, "execution.ended", outcome="drained", checkpoint="chk", proof={"method": "pid_namespace"}),
    ]
    return Log({"e": events})


def a_reference(outcome: str = "graceful", drain: str = "op-1") -> CheckpointReference:
    target = ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation="c",
        response="r",
        response_generation=1,
        execution="e",
        execution_generation=1,
        sandbox="s",
    )
    one = DrainedExecution.model_validate({"target": target, "outcome": outcome, "cut": outcome != "completed"})
    return CheckpointReference(
        checkpoint="chk",
        drain=drain,
        tenant="t",
        workspace="w",
        sandbox="s",
        boot="b",
        manifest="0" * 64,
        manifest_bytes=1,
        stored="volume",
        include="sessions",
        clean=True,
        executions=(one,),
    )


@pytest.mark.parametrize("outcome", ["graceful", "forced"])
def test_an_execution_that_an_ordered_drain_cut_is_clean(outcome: str) -> None:
    log = a_log()
    assert drained(log) == {"e"}
    assert drain_faults(log, [a_reference(outcome)], ORDERED) == []


def test_a_drain_by_the_machine_has_an_id_that_nobody_ordered() -> None:
    reference = a_reference(drain="drn_of_the_boot")
    assert drain_faults(a_log(), [reference], Allowed(by_machine=True)) == []
    [fault] = drain_faults(a_log(), [reference], ORDERED)
    assert "which nobody ordered" in fault


def ended(log: Log, **body: object) -> None:
    log.executions["e"][-1] = an_event(7, "execution.ended", **body)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda log: ended(log, outcome="drained", checkpoint="other"), "no reference says that it was cut"),
        (lambda log: ended(log, outcome="drained"), "no reference says that it was cut"),
        (lambda log: ended(log, outcome="drained", error={"code": "CHECKPOINT_FAILED"}), "nothing was kept"),
        (lambda log: ended(log, outcome="completed"), "which ended completed"),
        (lambda log: log.executions["e"].pop(3), "interactions asked {'i1': 1}, resolved {}"),
        (lambda log: log.executions["e"].pop(4), "tools that are open: ['t1']"),
        (lambda log: log.executions["e"].pop(5), "its response ended []"),
    ],
)
def test_what_a_drain_left_or_did_unsaid_is_found(damage: Callable[[Log], object], word: str) -> None:
    log = a_log()
    damage(log)
    assert any(word in fault for fault in drain_faults(log, [a_reference()], ORDERED))


def test_what_only_completed_in_a_drain_was_not_cut_by_it() -> None:
    assert drain_faults(a_log(), [a_reference("completed")], ORDERED)
    log = a_log()
    ended(log, outcome="completed")
    assert drain_faults(log, [a_reference("completed")], ORDERED) == []


def test_a_checkpoint_may_be_missing_only_where_a_disk_was_full() -> None:
    log = a_log()
    ended(log, outcome="drained", error={"code": "CHECKPOINT_FAILED"})
    assert drain_faults(log, [], Allowed(may_fail=True)) == []
    ended(log, outcome="drained", error={"code": "INVALID"})
    assert drain_faults(log, [], Allowed(may_fail=True))


# --- operations ---


def operations(seed: int, seconds: float = 40.0) -> tuple[Operation, ...]:
    return draw(seed, conversations=6, workspaces=3, seconds=seconds, services=SERVICES).operations


def test_each_workspace_has_a_few_operations_and_none_begins_with_a_resume() -> None:
    drawn = [operations(seed) for seed in range(40)]
    assert drawn[3] == operations(3) != drawn[4]
    for plan in drawn:
        for workspace in ("w0", "w1", "w2"):
            mine = [one for one in plan if one.workspace == workspace]
            assert 2 <= len(mine) <= OPERATIONS_MAX and mine[0].deed != "resume"
            assert len({one.drain for one in mine}) == len(mine)
    every = {one.deed for plan in drawn for one in plan}
    assert every == {"drain", "suspend", "force", "resume", "delete", "terminate", "lose_volume"}


def test_every_checkpoint_of_a_round_is_still_there_when_it_is_judged() -> None:
    assert len([one for one in operations(1, 600.0) if one.workspace == "w0"]) == OPERATIONS_MAX
    assert OPERATIONS_MAX + 1 <= KEPT_MAX


async def test_a_door_that_is_shut_lets_out_who_is_inside_and_nobody_in() -> None:
    door, order = Door(), []
    inside = asyncio.Event()

    async def request(name: str) -> None:
        async with door.passed():
            order.append(f"{name} in")
            await inside.wait()
        order.append(f"{name} out")

    async with asyncio.TaskGroup() as group:
        group.create_task(request("first"), name="first")
        await asyncio.sleep(0)
        async with door.shut():
            group.create_task(request("second"), name="second")
            await asyncio.sleep(0)
            inside.set()
            await door.emptied()
            order.append("empty")
    assert order == ["first in", "first out", "empty", "second in", "second out"]


# --- messages that had joined a turn which was cut ---


def a_process(prompt: str, *texts: str, taken_up: bool = False) -> ProcessTruth:
    """One whose first prompt has the id `prompt`; each further text joined its turn."""
    names = [prompt, *(f"ctl_{number}" for number in range(1, len(texts)))]
    lines = [json.dumps({"type": "prompt", "id": name, "text": text}) for name, text in zip(names, texts, strict=True)]
    begun = names if taken_up else names[:1]
    records: list[dict[str, object]] = [{"ev": "start", "at": 1.0}]
    records += [{"ev": "stdout", "line": json.dumps({"type": "turn.started", "prompt": name})} for name in begun]
    stdin = tuple(StdinLine(number, line, None) for number, line in enumerate(lines))
    return ProcessTruth(prompt, "s", 1, 1.0, (), stdin, 143, (*records, {"ev": "exit", "code": 143}))


def joined(*processes: ProcessTruth) -> list[str]:
    """The faults of a message that joined the turn of execution `e`, which a drain cut; `e2` came after it."""
    log = a_log()
    log.executions["e2"] = [an_event(1, "execution.started"), an_event(2, "session.bound", native_session="s")]
    prompt = PromptPlan("r1", "<r1>", "!say <r1>", "http", None, "run", 0.0, False, mode="interject")
    submission = Submission("c", "r1", "interjected", "rsp", "e", "cur")
    outcome = Outcome(prompt, submission, None, [("interjected", "rsp", "e")])
    return prompt_faults(Truth(processes, ()), [outcome], log, {"e"})


FIRST, SECOND = derived_uuid("e", "prompt"), derived_uuid("e2", "prompt")


def test_a_message_that_was_not_read_is_told_again_and_that_is_once() -> None:
    cut, after = a_process(FIRST, "!say <r0>", "!say <r1>"), a_process(SECOND, "unread:\n!say <r1>\nend\n!say <r2>")
    assert joined(cut, after) == []
    [lost] = joined(cut, a_process(SECOND, "!say <r2>"))
    assert "reached no agent" in lost


def test_a_message_that_was_taken_up_and_is_told_again_is_twice() -> None:
    cut = a_process(FIRST, "!say <r0>", "!say <r1>", taken_up=True)
    assert joined(cut, a_process(SECOND, "!say <r2>")) == []
    [twice] = joined(cut, a_process(SECOND, "unread:\n!say <r1>\nend\n!say <r2>"))
    assert "reached an agent 2 times" in twice
