"""Exactly one writer, whatever interleaves: prompts, takeovers, controls, crashes, freezes, losses and duplicates.

Clients, two routers, the agent service, a collector and two backends over one in-memory bus, in virtual time. Routers,
driver, collector (its journal, receipts, spool and log writer) and control leases are the real code; only keepers and
CLIs are models, which write down what reached them. At the end of each run everything is healed and has time, and then:

    at most one CLI of a conversation ever lived at a time        (the model refuses the spawn; see `Machine.spawn`)
    no prompt is lost                                              each has one outcome, and ran as that says
    every accepted control ends once: settled, rejected or unknown in journal and log alike, and only forwards
    no effect happens twice                                        by what reached the CLI's stdin, by id, by question

`TETHER_PROPERTY_EXAMPLES` and `TETHER_PROPERTY_STEPS` make it larger; `TETHER_PROPERTY_SHRINK=1` shortens a failure.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from support_plane import WORKSPACE, Plane, Service
from support_router import TENANT, a_prompt
from tether import events as ev
from tether import ids
from tether.control import ControlRequest, Verb
from tether.errors import Code
from tether.ids import ExecutionTarget
from tether.prompt import Mode, Prompt
from tether.testing import VirtualTimeLoop
from tether_collector.launching import derived_uuid

EXAMPLES = int(os.environ.get("TETHER_PROPERTY_EXAMPLES", "50"))
STEPS = int(os.environ.get("TETHER_PROPERTY_STEPS", "30"))
SHRINK = os.environ.get("TETHER_PROPERTY_SHRINK", "") == "1"  # takes minutes; the steps of a failure are printed anyway
QUIET_S = 400.0  # beyond every retry, lease, proof and sweep
FINAL = ("settled", "rejected", "unknown")
RANK = {"accepted": 1, "delivered": 2, "settled": 3, "rejected": 3, "unknown": 3}
CONVERSATIONS = ("c1", "c2")
BEHAVIOURS = ("ask", "hang", "say", "deaf", "ask", "stay")
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

MODES: tuple[Mode, ...] = ("auto", "auto", "takeover", "interject")
CLIENTS = (
    *("prompt", "prompt", "prompt", "prompt again", "retry", "answer", "contest", "contest", "interrupt", "stop"),
    "control again",
)
FAULTS = ("kill", "kill", "freeze", "disconnect", "collector dies at a step", "collector dies at a step", "keeper dies")


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
        self.runner.run(self.plane.open())

    def run(self, work: Any) -> Any:
        """And a moment after it: none, or long enough for something to come of it."""

        async def then() -> Any:
            result = await work
            await asyncio.sleep(self.plane.random.choice((0.0, 0.01, 0.1, 0.6, 2.5)))
            await self.plane.revive()
            return result

        return self.runner.run(then())

    # --- clients: few rules with many kinds, so that every run has them all ---

    @rule(first=st.sampled_from(CLIENTS), more=st.integers(0, 4))
    def clients(self, first: str, more: int) -> None:
        """Some at once, or nearly."""
        self._client(first)
        for _ in range(more):
            self._client(self.plane.random.choice(CLIENTS))

    def _client(self, what: str) -> None:
        draw = self.plane.random
        pick = draw.randrange(1 << 16)
        conversation = self._busy() if draw.random() < 0.7 else draw.choice(CONVERSATIONS)
        match what:
            case "prompt":
                self._prompt(conversation, draw.choice(MODES), draw.choice(BEHAVIOURS))
            case "prompt again":
                self._prompt_again(pick)
            case "retry":
                self._retry(pick)
            case "control again":
                self._control_again(pick)
            case "contest":
                self._contest(conversation)
            case _:
                self._control(conversation, cast(Verb, what), pick)

    def _busy(self) -> str:
        """A conversation in which a CLI lives, one that waits for an answer before others."""
        living = [one for one in self.plane.machine.keepers.values() if one.alive]
        chosen = next((one for one in living if one.waits), living[-1] if living else None)
        return CONVERSATIONS[0] if chosen is None else self.plane.conversations[chosen.spec.execution]

    def _prompt(self, conversation: str, mode: Mode, how: str) -> None:
        request = f"r{len(self.prompts)}"
        prompt = a_prompt(request, f"{how} {request}", conversation=conversation, workspace=WORKSPACE, mode=mode)
        self.prompts[request, 1] = prompt
        self.run(self.plane.send(prompt))

    def _prompt_again(self, pick: int) -> None:
        """A client in doubt, within the duplicate window or long after it."""
        if self.prompts:
            prompt = list(self.prompts.values())[pick % len(self.prompts)]
            self.run(self.plane.send(prompt, again=f"/{pick}" if pick % 2 else ""))

    def _retry(self, pick: int) -> None:
        """A failure that may be tried again is, as the next attempt."""
        if self.prompts:
            (request, attempt), prompt = list(self.prompts.items())[pick % len(self.prompts)]
            record = self.run(self.plane.world.request(request))
            if record is not None and record.state == "retryable" and record.attempt == attempt:
                self.prompts[request, attempt + 1] = prompt.model_copy(update={"attempt": attempt + 1})
                self.run(self.plane.send(self.prompts[request, attempt + 1]))

    def _control(self, conversation: str, verb: Verb, pick: int) -> None:
        """Now and then to a target of the past, or through both backends in the same moment."""
        current = self.run(self.plane.target(conversation))
        if current is not None and current not in self.targets:
            self.targets.append(current)
        if not self.targets:
            return
        target = self.targets[pick % len(self.targets)] if current is None or pick % 5 == 0 else current
        payload = {"interaction": "ask-1", "decision": "deny" if pick % 3 else "allow"} if verb == "answer" else {}
        request = ControlRequest(control=f"ctl_{len(self.plane.asked)}", verb=verb, target=target, payload=payload)
        for backend in self.plane.backends if pick % 4 == 0 else self.plane.backends[pick % 2 :][:1]:
            self.plane.control(backend, request)
        self.run(asyncio.sleep(0.0))

    def _contest(self, conversation: str) -> None:
        """Two people answer the same question, otherwise, in the same moment."""
        target = self.run(self.plane.target(conversation))
        if target is None:
            return
        draw = self.plane.random
        for decision in ("allow", "deny"):
            payload = {"interaction": "ask-1", "decision": decision}
            control = f"ctl_{len(self.plane.asked)}"
            request = ControlRequest(control=control, verb="answer", target=target, payload=payload)
            self.plane.control(draw.choice(self.plane.backends), request)
        self.run(asyncio.sleep(0.0))

    def _control_again(self, pick: int) -> None:
        """The same id again, or with another payload."""
        if not self.plane.asked:
            return
        asked = list(self.plane.asked.values())[pick % len(self.plane.asked)].request
        if pick % 3 == 0 and asked.verb == "answer":
            asked = asked.model_copy(update={"payload": {**asked.payload, "text": "other words"}})
        self.plane.control(self.plane.backends[pick % 2], asked)
        self.run(asyncio.sleep(0.0))

    # --- what goes wrong ---

    @rule(what=st.sampled_from(FAULTS))
    def fault(self, what: str) -> None:
        draw = self.plane.random
        service = draw.choice(self.plane.services())
        seconds = draw.choice((0.5, 3.0, 20.0, 45.0))
        match what:
            case "kill":
                self.run(self.plane.restart(service))
            case "freeze":
                self.plane.freeze(service, seconds)
            case "disconnect":
                self.run(self._disconnect(service, min(seconds, 5.0)))
            case "collector dies at a step" if len(self.plane.crash_at) < 3:
                self.plane.crash_at.append(draw.choice(STEPS_OF_COLLECTOR))
            case "keeper dies":
                living = [one for one in self.plane.machine.keepers.values() if one.alive]
                if living:
                    draw.choice(living).die()

    async def _disconnect(self, service: Service, seconds: float) -> None:
        if not service.over:
            service.bus.disconnect(for_s=seconds)

    @rule(seconds=st.sampled_from((0.05, 0.5, 2.0, 8.0, 31.0)))
    def time(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    # --- what must hold ---

    @invariant()
    def no_service_failed(self) -> None:
        if hasattr(self, "plane"):
            assert not self.plane.failures, "\n".join(self.plane.failures)
            for conversation, executions in self.plane.machine.living().items():
                assert len(executions) <= 1, (conversation, executions)

    def teardown(self) -> None:
        if not hasattr(self, "plane"):
            return
        try:
            self.run(self._end())
        except AssertionError:
            print(self.runner.run(self.plane.story()))
            raise
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
        assert await self._quiet(), f"not settled within {QUIET_S:g} s: {await self._unsettled()}"
        await asyncio.sleep(50.0)  # what was frozen wakes, what was late comes
        assert not plane.failures, "\n".join(plane.failures)
        await self._check_prompts()
        await self._check_controls()

    async def _quiet(self) -> bool:
        plane = self.plane
        owners = await self._owners()
        asking = any(backend.asking for backend in plane.backends)
        return (
            await plane.world.waiting() == 0 and set(owners) <= {"idle"} and not asking and not plane.machine.living()
        )

    async def _owners(self) -> list[str]:
        return [(await self.plane.world.owner(name, WORKSPACE)).state for name in CONVERSATIONS]

    async def _unsettled(self) -> str:
        machine = self.plane.machine
        clis = [f"{one.spec.execution} {one.behaviour} {one.stdin}" for one in machine.keepers.values() if one.alive]
        asking = [task.get_name() for backend in self.plane.backends for task in backend.asking]
        owners = [str(await self.plane.world.owner(name, WORKSPACE)) for name in CONVERSATIONS]
        return "\n".join([*owners, *clis, *asking, f"{await self.plane.world.waiting()} prompts wait"])

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
            assert sum(runs) + sum(said) <= 1 or Code.EXECUTION_DURABILITY_GAP in self._codes(record), (
                request,
                runs,
                said,
            )
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
        opened = [
            one for one in keepers for _, line in one.stdin if line.get("id") == derived_uuid(execution, "prompt")
        ]
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
            answered = [line["request"] for _, line in keeper.stdin if line["type"] == "answer"]
            assert len(answered) <= 1, f"a question got several answers: {keeper.stdin}"
        acted = [control for keeper in plane.machine.keepers.values() for control in keeper.effects]
        effects = Counter(acted)
        assert not [name for name, count in effects.items() if count > 1 and name != "opening:prompt"], effects
        for control, statuses in told.items():
            assert control in journal, f"{control} was told and never journaled"
            ranks = [RANK[status] for status in statuses]
            assert ranks == sorted(set(ranks)), f"{control} went {statuses}"
        for control, entry in journal.items():
            status = entry["status"]
            assert status in FINAL, f"{control} ({entry['verb']}) stays {status}"
            finals = [one for one in told.get(control, []) if one in FINAL]
            assert finals == [status] or control not in told, f"{control}: the log says {told}, the journal {entry}"
            if entry["verb"] in ("answer", "interject", "interrupt"):
                assert status != "rejected" or control not in effects, f"{entry} was rejected and had its effect"
            if entry["verb"] in ("answer", "interject"):  # an interrupt is settled by the end of the process, too
                assert status != "settled" or control in effects, f"{entry} was settled without an effect"
            if entry["verb"] == "stop" and status == "settled":
                events = await plane.events(entry["execution"])
                assert events[-1].type == ev.EXECUTION_ENDED and events[-1].body["proof"]
        self._check_replies(journal)

    def _check_replies(self, journal: dict[str, dict[str, Any]]) -> None:
        for control, asked in self.plane.asked.items():
            finals = {
                reply.status for reply in asked.replies if reply.status in ("settled", "rejected") and not reply.problem
            }
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
    run_state_machine_as_test(
        OneWriter,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,),
            database=None,
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
