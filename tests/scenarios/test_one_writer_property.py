"""Exactly one writer, whatever interleaves: prompts, takeovers, controls, crashes, freezes, losses and duplicates.

Clients, two routers, the agent service, a collector and two backends over one in-memory bus, in virtual time. Routers,
driver, collector (its journal, receipts, spool and log writer) and control leases are the real code; only keepers and
CLIs are models, which write down what reached them. At the end of each run everything is healed and has time, and then:

    at most one CLI of a conversation ever lived at a time        (the model refuses the spawn; see `Machine.spawn`)
    no prompt is lost                                              each has one outcome, and ran as that says
    every accepted control ends once: settled, rejected or unknown in journal and log alike, and only forwards
    no effect happens twice                                        by what reached the CLI's stdin, by id and by question

`TETHER_PROPERTY_EXAMPLES` and `TETHER_PROPERTY_STEPS` make it larger.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from support_plane import WORKSPACE, Plane, Service
from support_router import TENANT, a_prompt
from tether import events as ev
from tether import ids
from tether.control import ControlRequest, Verb
from tether.errors import Code
from tether.ids import ExecutionTarget
from tether.prompt import Prompt
from tether.testing import VirtualTimeLoop
from tether_collector.launching import derived_uuid

EXAMPLES = int(os.environ.get("TETHER_PROPERTY_EXAMPLES", "12"))
STEPS = int(os.environ.get("TETHER_PROPERTY_STEPS", "22"))
QUIET_S = 400.0  # beyond every retry, lease, proof and sweep
FINAL = ("settled", "rejected", "unknown")
RANK = {"accepted": 1, "delivered": 2, "settled": 3, "rejected": 3, "unknown": 3}
CONVERSATIONS = ("c1", "c2")
BEHAVIOURS = ("say", "ask", "hang", "deaf", "stay")
STEPS_OF_COLLECTOR = (
    "journaled",
    "claimed",
    "claim_journaled",
    "spawned",
    "spawn_journaled",
    "control_journaled",
    "receipt_journaled",
    "terminal_stored",
    "final_written",
    "end_journaled",
)

conversations = st.sampled_from(CONVERSATIONS)
moments = st.sampled_from((0.0, 0.01, 0.2, 1.0, 3.0))


class OneWriter(RuleBasedStateMachine):
    """One run. Rules only begin things: nothing is waited for but time."""

    @initialize(seed=st.integers(0, 2**30))
    def open(self, seed: int) -> None:
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.plane = Plane(seed, self.runner.get_loop())
        self.patches = self.plane.patched()
        self.patches.__enter__()
        self.prompts: dict[tuple[str, int], Prompt] = {}
        self.targets: list[ExecutionTarget] = []
        self.conflicts: set[str] = set()
        self.runner.run(self.plane.open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    # --- prompts ---

    @rule(conversation=conversations, mode=st.sampled_from(("auto", "takeover", "interject")), how=st.sampled_from(BEHAVIOURS))
    def prompt(self, conversation: str, mode: Any, how: str) -> None:
        request = f"r{len(self.prompts)}"
        prompt = a_prompt(request, f"{how} {request}", conversation=conversation, workspace=WORKSPACE, mode=mode)
        self.prompts[request, 1] = prompt
        self.run(self.plane.send(prompt))

    @rule(pick=st.integers(0, 1 << 16), forgotten=st.booleans())
    def prompt_again(self, pick: int, forgotten: bool) -> None:
        """A client in doubt, within the duplicate window or long after it."""
        if self.prompts:
            prompt = list(self.prompts.values())[pick % len(self.prompts)]
            self.run(self.plane.send(prompt, again=f"/{pick}" if forgotten else ""))

    @rule(pick=st.integers(0, 1 << 16))
    def retry(self, pick: int) -> None:
        """A failure that may be tried again is, as the next attempt."""
        if self.prompts:
            (request, attempt), prompt = list(self.prompts.items())[pick % len(self.prompts)]
            record = self.run(self.plane.world.request(request))
            if record is not None and record.state == "retryable" and record.attempt == attempt:
                self.prompts[request, attempt + 1] = prompt.model_copy(update={"attempt": attempt + 1})
                self.run(self.plane.send(self.prompts[request, attempt + 1]))

    # --- controls ---

    @rule(
        conversation=conversations,
        verb=st.sampled_from(("answer", "answer", "interrupt", "stop")),
        backend=st.integers(0, 1),
        decision=st.sampled_from(("allow", "deny")),
        old=st.booleans(),
        twice=st.booleans(),
    )
    def control(self, conversation: str, verb: Verb, backend: int, decision: str, old: bool, twice: bool) -> None:
        """`old`: to a target that was seen at some time; `twice`: through both backends in the same moment."""
        current = self.run(self.plane.target(conversation))
        if current is not None:
            self.targets.append(current)
        if not self.targets or (current is None and not old):
            return
        target = self.targets[0] if old or current is None else current
        payload = {"interaction": "ask-1", "decision": decision} if verb == "answer" else {}
        request = ControlRequest(control=f"ctl_{len(self.plane.asked)}", verb=verb, target=target, payload=payload)
        for number in (backend, 1 - backend) if twice else (backend,):
            self.plane.control(self.plane.backends[number], request)
        self.time(0.0)

    @rule(pick=st.integers(0, 1 << 16), backend=st.integers(0, 1), other=st.booleans())
    def control_again(self, pick: int, backend: int, other: bool) -> None:
        """The same id again, or with another payload."""
        if not self.plane.asked:
            return
        asked = list(self.plane.asked.values())[pick % len(self.plane.asked)].request
        if other and asked.verb == "answer":
            self.conflicts.add(asked.control)
            asked = asked.model_copy(update={"payload": {**asked.payload, "text": "other words"}})
        self.plane.control(self.plane.backends[backend], asked)
        self.time(0.0)

    # --- what goes wrong ---

    def service(self, pick: int) -> Service:
        services = self.plane.services()
        return services[pick % len(services)]

    @rule(pick=st.integers(0, 5))
    def kill(self, pick: int) -> None:
        self.run(self.plane.restart(self.service(pick)))

    @rule(pick=st.integers(0, 5), seconds=st.sampled_from((1.0, 6.0, 20.0, 45.0)))
    def freeze(self, pick: int, seconds: float) -> None:
        self.plane.freeze(self.service(pick), seconds)

    @rule(step=st.sampled_from(STEPS_OF_COLLECTOR))
    def collector_dies_at(self, step: str) -> None:
        if len(self.plane.crash_at) < 3:
            self.plane.crash_at.append(step)

    @rule(pick=st.integers(0, 5), seconds=st.sampled_from((0.5, 5.0)))
    def disconnect(self, pick: int, seconds: float) -> None:
        self.service(pick).bus.disconnect(for_s=seconds)
        self.time(0.0)

    @rule(pick=st.integers(0, 1 << 16))
    def keeper_dies(self, pick: int) -> None:
        living = [one for one in self.plane.machine.keepers.values() if one.alive]
        if living and pick % 3 == 0:
            living[pick % len(living)].die()

    @rule(seconds=st.sampled_from((0.05, 0.5, 2.0, 8.0, 31.0)))
    def time(self, seconds: float) -> None:
        async def passes() -> None:
            await asyncio.sleep(seconds)
            await self.plane.revive()

        self.run(passes())

    @rule(seconds=moments)
    def moment(self, seconds: float) -> None:
        self.time(seconds)

    # --- what must hold ---

    @invariant()
    def no_service_failed(self) -> None:
        if hasattr(self, "plane"):
            assert self.plane.failures == []
            for conversation, executions in self.plane.machine.living().items():
                assert len(executions) <= 1, (conversation, executions)

    def teardown(self) -> None:
        if not hasattr(self, "plane"):
            return
        try:
            self.run(self._end())
        finally:
            self.run(self.plane.close())
            self.patches.__exit__(None, None, None)
            self.runner.close()

    async def _end(self) -> None:
        plane = self.plane
        plane.heal()
        deadline_s = plane.loop.time() + QUIET_S
        while plane.loop.time() < deadline_s and not await self._quiet():
            await asyncio.sleep(5.0)
            await plane.revive()
        await asyncio.sleep(10.0)  # what was frozen wakes, what was late comes
        assert plane.failures == []
        await self._check_prompts()
        await self._check_controls()

    async def _quiet(self) -> bool:
        plane = self.plane
        owners = [(await plane.world.owner(name, WORKSPACE)).state for name in CONVERSATIONS]
        asking = any(backend.asking for backend in plane.backends)
        return await plane.world.waiting() == 0 and set(owners) <= {"idle"} and not asking and not plane.machine.living()

    async def _check_prompts(self) -> None:
        plane = self.plane
        assert await plane.world.waiting() == 0, "prompts wait for ever"
        reached = Counter(control for keeper in plane.machine.keepers.values() for control, _ in keeper.stdin)
        assert [name for name, count in reached.items() if count > 1 and not name.startswith("opening:")] == []
        for request in {request for request, _ in self.prompts}:
            record = await plane.world.request(request)
            assert record is not None and record.done is not None, f"{request} has no outcome"
            assert record.state in ("done", "retryable")
            runs = [self._ran(request, attempt) for attempt in range(1, record.attempt + 1)]
            said = [self._said(request, attempt) for attempt in range(1, record.attempt + 1)]
            assert sum(runs) + sum(said) <= 1 or Code.EXECUTION_DURABILITY_GAP in self._codes(record), (request, runs, said)
            if record.done.status == "admitted":
                events = await plane.events(ids.execution_id(TENANT, request, record.attempt))
                outcomes = [event.body["outcome"] for event in events if event.type == ev.EXECUTION_ENDED]
                assert len(outcomes) == 1, (request, outcomes)
                assert [event.type for event in events].count(ev.RESPONSE_ENDED) == 1
                assert outcomes != ["completed"] or runs[-1] == 1, (request, outcomes, runs)
            elif record.done.status == "failed":
                assert sum(runs) == 0, (request, record)

    def _codes(self, record: Any) -> set[str]:
        problem = record.done.problem
        return set() if problem is None else {problem.code}

    def _ran(self, request: str, attempt: int) -> int:
        """CLIs that got this attempt's prompt as their own."""
        execution = ids.execution_id(TENANT, request, attempt)
        keepers = self.plane.machine.of_execution(execution)
        opened = [one for one in keepers for _, line in one.stdin if line.get("id") == derived_uuid(execution, "prompt")]
        assert len(opened) <= 1, f"{execution} got its prompt {len(opened)} times"
        return len(opened)

    def _said(self, request: str, attempt: int) -> int:
        """CLIs into which it was said."""
        control = ids.control_id(TENANT, request, "interject", attempt)
        return sum(name == control for keeper in self.plane.machine.keepers.values() for name, _ in keeper.stdin)

    async def _check_controls(self) -> None:
        plane = self.plane
        told = await self._told()
        journal = plane.journaled()
        for keeper in plane.machine.keepers.values():
            answered = Counter(line["request"] for _, line in keeper.stdin if line["type"] == "answer")
            assert all(count == 1 for count in answered.values()), f"a question got several answers: {keeper.stdin}"
        written = {control for keeper in plane.machine.keepers.values() for control, _ in keeper.stdin}
        for control, statuses in told.items():
            assert control in journal, f"{control} was told and never journaled"
            ranks = [RANK[status] for status in statuses]
            assert ranks == sorted(set(ranks)), f"{control} went {statuses}"
        for control, entry in journal.items():
            status = entry["status"]
            assert status in FINAL, f"{control} ({entry['verb']}) stays {status}"
            finals = [one for one in told.get(control, []) if one in FINAL]
            assert finals in ([], [status]), f"{control}: the log says {finals}, the journal {status}"
            if entry["verb"] in ("answer", "interject", "interrupt"):
                assert status != "rejected" or control not in written, f"{control} was rejected and had its effect"
                assert status != "settled" or control in written, f"{control} was settled without an effect"
            if entry["verb"] == "stop" and status == "settled":
                events = await plane.events(entry["execution"])
                assert events[-1].type == ev.EXECUTION_ENDED and events[-1].body["proof"]
        self._check_replies(journal)

    def _check_replies(self, journal: dict[str, dict[str, Any]]) -> None:
        for control, asked in self.plane.asked.items():
            finals = {reply.status for reply in asked.replies if reply.status in ("settled", "rejected") and not reply.problem}
            assert len(finals) <= 1, f"{control} was told {finals}"
            taken = [reply for reply in asked.replies if reply.status in ("accepted", "delivered", "settled")]
            assert not taken or control in journal, f"{control} was told {taken[0].status} and is not journaled"
            if control not in journal:
                reached = [one for one in self.plane.machine.keepers.values() if control in dict(one.stdin)]
                assert not reached, f"{control} had its effect without a journal"

    async def _told(self) -> dict[str, list[str]]:
        """Control → its receipts in the logs, in order."""
        found: dict[str, list[str]] = {}
        for execution in {keeper.spec.execution for keeper in self.plane.machine.keepers.values()}:
            for event in await self.plane.events(execution):
                if event.type == ev.CONTROL_RECEIPT:
                    found.setdefault(event.body["control"], []).append(event.body["status"])
        return found


@pytest.mark.timeout(600)
def test_whatever_interleaves_there_is_one_writer_and_every_control_ends_once(quiet_logs: None) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        OneWriter,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def quiet_logs() -> Any:
    """What the services log in thousands of virtual seconds is for nobody."""
    import logging

    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)
