"""The operator's decisions, in a world that crashes it between any two effects and answers late."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from tether.api_sandboxes import CheckpointView, DrainView, SandboxView
from tether.kube import AgentTaskSpec, AgentTaskStatus, LifecycleSpec, TaskSpec
from tether_operator.core import phase
from tether_operator.core.phase import Decision, PodSeen, TaskFacts, decide, proof_of

UID = "0b5f3c2e-1111-2222-3333-444455556666"
KEPT = CheckpointView(
    checkpoint="ckp_1", created_at=1, clean=True, include="sessions", stored="both", size_bytes=1, files=1, revision=7
)


def facts(**changes: Any) -> TaskFacts:
    base = TaskFacts(
        name="t1", uid=UID, generation=1, spec=AgentTaskSpec(), status=AgentTaskStatus(), now=1000.0, reach="reached"
    )
    return replace(base, **changes)


def view(state: Any = "active", **fields: Any) -> SandboxView:
    known = {"workspace": "t1", "sandbox": "sbx_1", "state": state, "provider": "kubernetes", "connected": True}
    return SandboxView(**{**known, **fields})


def of_kind(decision: Decision, kind: type[Any]) -> list[Any]:
    return [effect for effect in decision.effects if isinstance(effect, kind)]


def test_nothing_of_a_task_is_made_before_its_finalizer_is_there() -> None:
    decision = decide(facts(held=False, boot="b1", compute="run", told=True))
    assert decision.effects == (phase.Hold(),)


def test_a_pod_is_made_for_the_asked_boot_once_its_collector_can_be_told_of_it() -> None:
    asked = facts(boot="b1", compute="run", claim=True, policy=True)
    assert of_kind(decide(asked), phase.MakePod) == []
    assert of_kind(decide(replace(asked, told=True)), phase.MakePod) == [phase.MakePod("b1")]


def test_no_pod_is_made_beside_one_whose_end_is_not_proven_whatever_the_api_says_of_it() -> None:
    for old in (
        PodSeen("p0", "b0", "Running", node="n1"),
        PodSeen("p0", "b0", "Failed", node="n1", deleting=True, reason="NodeLost"),
        PodSeen("p0", "b0", "Unknown", node="n1", deleting=True),
    ):
        decision = decide(facts(boot="b1", compute="run", claim=True, policy=True, told=True, pods=(old,)))
        assert of_kind(decision, phase.MakePod) == []
        assert of_kind(decision, phase.ReleasePod) == []


def test_a_pod_that_vanished_without_a_proof_blocks_until_somebody_vouches_for_it() -> None:
    asked = facts(
        boot="b1", compute="run", claim=True, policy=True, told=True, status=AgentTaskStatus(boot="b0", phase="Running")
    )
    blocked = decide(asked)
    assert of_kind(blocked, phase.MakePod) == []
    [degraded] = [one for one in blocked.conditions if one.type == "Degraded"]
    assert (degraded.status, degraded.reason) == ("True", "EndNotProven")
    assert phase.BURIED in degraded.message
    [told] = of_kind(decide(replace(asked, buried="b0")), phase.TellEnd)
    assert told.ended.boot == "b0"
    assert of_kind(decide(replace(asked, buried="another")), phase.TellEnd) == []


def test_what_proves_an_end_is_the_kubelets_report_a_taint_or_that_it_was_bound_to_no_node() -> None:
    assert proof_of(PodSeen("p", "b", terminated=137, node="n1", reason="OOMKilled")) is not None
    assert proof_of(PodSeen("p", "b", node="n1", node_out=True)) is not None
    assert proof_of(PodSeen("p", "b", deleting=True)) is not None
    assert proof_of(PodSeen("p", "b")) is None
    assert proof_of(PodSeen("p", "b", node="n1", deleting=True)) is None


def test_draining_is_seen_before_anything_is_asked_for() -> None:
    going = facts(deleting_since=999.0, sandbox=view(), status=AgentTaskStatus(phase="Running"))
    first = decide(going)
    assert first.phase == "Draining" and of_kind(first, phase.Ask) == []
    second = decide(replace(going, status=AgentTaskStatus(phase="Draining")))
    assert of_kind(second, phase.Ask) == [phase.Ask("delete", phase.drain_id(UID), checkpoint=True)]
    dropped = AgentTaskSpec(lifecycle=LifecycleSpec(on_delete="delete"))
    third = decide(replace(going, status=AgentTaskStatus(phase="Draining"), spec=dropped))
    assert of_kind(third, phase.Ask) == [phase.Ask("delete", phase.drain_id(UID), checkpoint=False)]


def test_a_drain_that_failed_is_asked_for_again_under_a_further_id() -> None:
    failed = DrainView(workspace="t1", drain=phase.drain_id(UID), state="failed", phase="over", purpose="delete")
    going = facts(deleting_since=999.0, sandbox=view(), status=AgentTaskStatus(phase="Draining"), operation=failed)
    [asked] = of_kind(decide(going), phase.Ask)
    assert asked.drain == phase.drain_id(UID) + "-1"
    again = failed.model_copy(update={"drain": asked.drain})
    assert of_kind(decide(replace(going, operation=again)), phase.Ask)[0].drain == phase.drain_id(UID) + "-2"
    running = again.model_copy(update={"state": "running"})
    assert of_kind(decide(replace(going, operation=running)), phase.Ask)[0].drain == again.drain


def test_the_deadline_releases_the_task_and_first_says_what_was_not_saved() -> None:
    going = facts(
        deleting_since=1000.0 - 120,
        reach="unreached",
        problem="no agent service answers for now",
        status=AgentTaskStatus(phase="Draining", checkpoint_ref="default/t1/ckp_0"),
        pods=(PodSeen("p0", "b0", "Running", node="n1"),),
    )
    first = decide(going)
    [event] = of_kind(first, phase.TellEvent)
    assert event.kind == "Warning" and "no agent service answers" in event.message and "ckp_0" in event.message
    assert of_kind(first, phase.Release) == [], "it is told before"
    second = decide(replace(going, status=going.status.model_copy(update={"conditions": first.conditions})))
    assert of_kind(second, phase.Release) and of_kind(second, phase.EndPod) == [phase.EndPod("p0")]
    assert of_kind(second, phase.ReleasePod) == [], "its own finalizer goes with the kubelet's word alone"
    assert of_kind(second, phase.DeleteClaim) == [], "what was not saved may lie there"


def test_a_pod_is_ended_during_a_deletion_as_soon_as_whoever_drains_it_asks_for_that() -> None:
    running = DrainView(workspace="t1", drain=phase.drain_id(UID), state="running", phase="releasing", purpose="delete")
    going = facts(
        deleting_since=999.0,
        status=AgentTaskStatus(phase="Draining"),
        sandbox=view("deleting"),
        operation=running,
        boot="b0",
        compute="run",
        pods=(PodSeen("p0", "b0", "Running", node="n1"),),
    )
    assert of_kind(decide(going), phase.EndPod) == []
    assert of_kind(decide(replace(going, compute="stop")), phase.EndPod) == [phase.EndPod("p0")]


def test_suspend_is_acted_upon_once_for_each_change_so_that_a_prompt_may_wake() -> None:
    wanted = facts(spec=AgentTaskSpec(suspend=True), sandbox=view(), generation=3)
    assert of_kind(decide(wanted), phase.Ask) == [phase.Ask("suspend", phase.suspend_id(UID, 3))]
    assert of_kind(decide(replace(wanted, sandbox=view("suspended"))), phase.NoteSuspend) == [phase.NoteSuspend(True)]
    woken = replace(wanted, acted_suspend=True)
    assert of_kind(decide(woken), phase.Ask) == [], "a prompt woke it: that is not undone"
    [suspended] = [one for one in decide(woken).conditions if one.type == "Suspended"]
    assert suspended.reason == "WokenByPrompt"
    back = replace(woken, spec=AgentTaskSpec(suspend=False), sandbox=view("suspended"), generation=4)
    assert of_kind(decide(back), phase.Ask) == [phase.Ask("resume")]


def test_a_task_that_is_not_interactive_is_completed_with_its_response() -> None:
    once = facts(spec=AgentTaskSpec(task=TaskSpec(prompt="go", interactive=False)), prompted=True, sandbox=view())
    assert decide(replace(once, response="completed")).phase == "Completed"
    assert decide(replace(once, response="failed")).phase == "Failed"


# --- a whole world ---


@dataclass
class World:
    """The API, the kubelet and the agent service, as far as one task sees them."""

    spec: AgentTaskSpec
    status: AgentTaskStatus = field(default_factory=AgentTaskStatus)
    now: float = 1000.0
    held: bool = False
    deleting_since: float | None = None
    boot: str = ""
    compute: Literal["run", "stop", ""] = ""
    claim: bool = False
    claimed: bool = False
    policy: bool = False
    pods: dict[str, PodSeen] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)  # boots whose processes really run
    proven: set[str] = field(default_factory=set)
    sandbox: str | None = None
    operation: DrainView | None = None
    acted: bool | None = None
    reached: bool = True
    exists: bool = True
    events: list[str] = field(default_factory=list)
    boots: int = 0

    def facts(self) -> TaskFacts:
        return TaskFacts(
            name="t1",
            uid=UID,
            generation=1,
            spec=self.spec,
            status=self.status,
            now=self.now,
            deleting_since=self.deleting_since,
            held=self.held,
            boot=self.boot,
            compute=self.compute,
            told=bool(self.boot),
            claim=self.claim,
            policy=self.policy,
            pods=tuple(self.pods.values()),
            sandbox=None if self.sandbox is None or not self.reached else view(self.sandbox),
            reach="reached" if self.reached else "unreached",
            operation=self.operation,
            acted_suspend=self.acted,
        )

    def reconcile(self, crash_after: int | None) -> None:
        decision = decide(self.facts())
        update = {"phase": decision.phase, "boot": decision.boot, "checkpoint_ref": decision.checkpoint_ref}
        self.status = self.status.model_copy(update={**update, "conditions": decision.conditions})
        for number, effect in enumerate(decision.effects):
            if crash_after is not None and number >= crash_after:
                return
            self.perform(effect)

    def perform(self, effect: phase.Effect) -> None:
        match effect:
            case phase.Hold():
                self.held = True
            case phase.MakeClaim():
                self.claim = self.claimed = True
            case phase.MakePolicy():
                self.policy = True
            case phase.MakePod(boot=boot):
                assert self.claim and self.policy and self.held
                assert self.running <= {boot}, "a second writer"
                if boot not in self.pods and boot not in self.proven:
                    self.pods[boot] = PodSeen(f"p-{boot}", boot, "Running", ready=True, node="n1")
                    self.running.add(boot)
            case phase.EndPod(name=name):
                for boot, pod in self.pods.items():
                    if pod.name == name:
                        self.pods[boot] = replace(pod, deleting=True)
            case phase.TellEnd(ended=ended):
                assert ended.boot not in self.running
                self.proven.add(ended.boot)
                self.status = self.status.model_copy(update={"ended": ended})
            case phase.ReleasePod(name=name):
                [boot] = [boot for boot, pod in self.pods.items() if pod.name == name]
                assert boot in self.proven, "the proof is told before the pod is let go"
                del self.pods[boot]
            case phase.Ask(verb="delete") if self.reached:
                self.operation = DrainView(
                    workspace="t1", drain=effect.drain, state="running", phase="turn", purpose="delete"
                )
                self.sandbox = "deleting" if self.sandbox else None
            case phase.Ask(verb="suspend") if self.reached:
                self.sandbox = "suspended"
                self.compute = "stop"
            case phase.Ask(verb="resume") if self.reached:
                self.sandbox = "active"
            case phase.NoteSuspend(value=value):
                self.acted = value
            case phase.TellEvent(reason=reason):
                self.events.append(reason)
            case phase.DeleteClaim():
                assert not self.spec.lifecycle.keeps_volume
                self.claim = False
            case phase.Release():
                forced = "ForcedByDeadline" in self.events
                assert forced or not self.running, "nothing runs when the task is let go"
                assert forced or self.operation is None or self.operation.state == "done"
                self.exists = False
            case _:
                pass

    # what others do

    def start(self) -> None:
        """The agent service asks for a boot, once the last one's end is proven."""
        last = self.boot
        if self.deleting_since is None and (not last or last in self.proven):
            self.boots += 1
            self.boot, self.compute, self.sandbox = f"b{self.boots}", "run", "active"

    def stop(self) -> None:
        if self.boot:
            self.compute = "stop"

    def kubelet(self) -> None:
        """Ends what is to be ended, and says so."""
        for boot, pod in self.pods.items():
            if pod.deleting and pod.terminated is None:
                self.running.discard(boot)
                self.pods[boot] = replace(pod, terminated=0)

    def crash(self) -> None:
        for boot, pod in self.pods.items():
            if pod.terminated is None:
                self.running.discard(boot)
                self.pods[boot] = replace(pod, terminated=137, reason="OOMKilled")

    def drained(self) -> None:
        if self.operation is not None and self.operation.state == "running" and self.reached:
            done = {"state": "done", "phase": "over", "checkpoint": KEPT}
            self.operation = self.operation.model_copy(update=done)
            self.sandbox = None
            self.compute = "stop"

    def delete(self) -> None:
        if self.deleting_since is None:
            self.deleting_since = self.now
            self.exists = self.held  # the API holds nothing without a finalizer

    def cut(self) -> None:
        self.reached = not self.reached

    def wait(self) -> None:
        self.now += 20


STEPS = ("start", "stop", "kubelet", "crash", "drained", "delete", "cut", "wait")


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.none() | st.integers(0, 3)), max_size=40),
    keeps=st.booleans(),
)
def test_never_two_writers_and_every_deletion_ends_however_often_the_operator_is_killed(
    steps: list[tuple[str, int | None]], keeps: bool
) -> None:
    world = World(AgentTaskSpec(lifecycle=LifecycleSpec(on_delete="checkpoint" if keeps else "delete")))
    for step, crash_after in steps:
        getattr(world, step)()
        if world.exists:
            world.reconcile(crash_after)
    world.delete()
    for _ in range(40):
        if not world.exists:
            break
        world.wait()
        world.kubelet()
        world.drained()
        world.reconcile(None)
    assert not world.exists, "every deletion ends"
    if "ForcedByDeadline" not in world.events:
        assert not world.running and not world.pods
        assert world.claim == (keeps and world.claimed)
