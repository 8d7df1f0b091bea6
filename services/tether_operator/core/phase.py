"""What the operator does next about one task: facts → effects, phase and conditions. Pure.

    compute      annotation `run`   ─▶ claim, policy, pod of the asked boot — never beside another boot's pod
                 annotation `stop`  ─▶ the pod is deleted; the kubelet's word, or its node's taint, ends the boot
    suspension   spec.suspend, each change of it once ─▶ asked of the agent service
    deletion     Draining, told at once ─▶ drained through the agent service ─▶ reference told ─▶ compute over ─▶ gone
                 DRAIN_DEADLINE after its begin ─▶ gone in any case, with what was not saved said

The proof of a boot's end is written to the status before the pod is let go, so a crash in between loses neither. A pod
that was seen and is not there any more, without that proof, blocks its task: nobody knows whether its processes run,
and a second pod could be a second writer. An administrator ends that wait by the taint, or by the annotation BURIED.

Every effect may be repeated: the shell asks again after a crash, with the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tether import kube
from tether.api_sandboxes import DrainView, SandboxView
from tether.kube import AgentTaskSpec, AgentTaskStatus, Condition, Ended, Phase

BURIED: Final = "tether.dev/buried"  # annotation of a task: the boot that an administrator vouches to be over
AGAIN_S: Final = 1.0  # while something is under way
LOOK_S: Final = 15.0  # otherwise
Reach = Literal["reached", "unreached", "unknown"]  # the agent service, by the last request


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod of the task. `terminated`: exit code of its container as the kubelet reports it. `node`: "" while it is
    bound to none. `reason`: Evicted, OOMKilled, …"""

    name: str
    boot: str
    phase: str = "Pending"
    ready: bool = False
    deleting: bool = False
    terminated: int | None = None
    node: str = ""
    node_out: bool = False
    held: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Of one look. `deleting_since` and `now` in unix seconds. `sandbox`: None where there is no record of it, or it
    could not be read (`reach`). `operation`: the drain or suspend that was asked for, as it stands.
    `acted_suspend`: the value of spec.suspend that was acted upon last. `response`: of the task's own prompt."""

    name: str
    uid: str
    generation: int
    spec: AgentTaskSpec
    status: AgentTaskStatus
    now: float
    deleting_since: float | None = None
    held: bool = True
    boot: str = ""
    compute: Literal["run", "stop", ""] = ""
    buried: str = ""
    told: bool = False
    claim: bool = False
    policy: bool = False
    pods: tuple[PodSeen, ...] = ()
    sandbox: SandboxView | None = None
    reach: Reach = "unknown"
    operation: DrainView | None = None
    problem: str = ""
    acted_suspend: bool | None = None
    prompted: bool = False
    response: Literal["none", "running", "completed", "failed"] = "none"

    @property
    def workspace(self) -> str:
        return kube.workspace_of(self.name, self.spec)


# --- effects ---


@dataclass(frozen=True, slots=True)
class Hold:
    """Put the finalizer on: nothing of the task is made before it is there."""


@dataclass(frozen=True, slots=True)
class MakeClaim:
    pass


@dataclass(frozen=True, slots=True)
class MakePolicy:
    pass


@dataclass(frozen=True, slots=True)
class MakePod:
    boot: str


@dataclass(frozen=True, slots=True)
class EndPod:
    """Delete it, with its grace, which it drains in; or, with `at_once`, without: nothing of it is wanted. The kubelet
    ends it and says so."""

    name: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class TellEnd:
    """Write `status.ended`."""

    ended: Ended


@dataclass(frozen=True, slots=True)
class ReleasePod:
    """Take its finalizer away: the proof of its end is told."""

    name: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Of the agent service. `drain`: the operation's id, "" for a resume."""

    verb: Literal["suspend", "resume", "delete"]
    drain: str = ""
    checkpoint: bool = True


@dataclass(frozen=True, slots=True)
class NoteSuspend:
    """This value of spec.suspend was acted upon."""

    value: bool


@dataclass(frozen=True, slots=True)
class GivePrompt:
    request: str


@dataclass(frozen=True, slots=True)
class TellEvent:
    """A Kubernetes event, told once for each task and reason."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DeleteClaim:
    pass


@dataclass(frozen=True, slots=True)
class Release:
    """Take the task's finalizer away."""


Effect = (
    Hold
    | MakeClaim
    | MakePolicy
    | MakePod
    | EndPod
    | TellEnd
    | ReleasePod
    | Ask
    | NoteSuspend
    | GivePrompt
    | TellEvent
    | DeleteClaim
    | Release
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The status is written before the effects, so that what is under way is seen. `again_s`: look again after."""

    phase: Phase
    effects: tuple[Effect, ...] = ()
    conditions: tuple[Condition, ...] = ()
    checkpoint_ref: str | None = None
    boot: str | None = None
    again_s: float = LOOK_S


def drain_id(uid: str) -> str:
    """Of the operation that deletes the task: the same after every restart."""
    return f"k8s-delete-{uid[:32]}"


def suspend_id(uid: str, generation: int) -> str:
    return f"k8s-suspend-{uid[:32]}-{generation}"


def request_id(uid: str) -> str:
    """Of the task's own prompt: given once, however often it is published."""
    return f"k8s-prompt-{uid[:32]}"


def proof_of(pod: PodSeen) -> Ended | None:
    """How it is known that nothing of the pod runs; None where it is not. That a pod is said to have failed proves
    nothing: controllers say so of pods whose node they do not reach."""
    if pod.terminated is not None:
        why = f" ({pod.reason})" if pod.reason else ""
        return Ended(boot=pod.boot, proof=f"the kubelet reports its end{why}", code=pod.terminated)
    if not pod.node and pod.deleting:
        return Ended(boot=pod.boot, proof="it was deleted before it was bound to a node")
    if pod.node and pod.node_out:
        return Ended(boot=pod.boot, proof=f"node {pod.node} is tainted out-of-service")
    return None


def decide(facts: TaskFacts) -> Decision:
    """See the module."""
    if not facts.held and facts.deleting_since is None:
        return Decision("Pending", (Hold(),), again_s=0.0)
    ends = list(_ends(facts))
    if facts.deleting_since is not None:
        return _deleting(facts, ends)
    effects: list[Effect] = [*ends, *_compute(facts), *_suspension(facts)]
    if facts.spec.task.prompt is not None and not facts.prompted and facts.reach != "unreached":
        effects.append(GivePrompt(request_id(facts.uid)))
    phase = _phase(facts)
    return Decision(
        phase,
        tuple(effects),
        tuple(_conditions(facts, phase)),
        _reference(facts),
        _boot(facts),
        again_s=LOOK_S if phase in ("Running", "Idle", "Suspended", "Completed") and not effects else AGAIN_S,
    )


# --- compute ---


def _ended(facts: TaskFacts, boot: str) -> bool:
    return facts.status.ended is not None and facts.status.ended.boot == boot


def _ends(facts: TaskFacts) -> Iterator[Effect]:
    for pod in facts.pods:
        proof = proof_of(pod)
        if proof is None:
            continue
        if not _ended(facts, pod.boot):
            yield TellEnd(proof)
            return  # one proof in the status at a time: the pod that it is about goes before the next is told of
        if not pod.deleting:
            yield EndPod(pod.name)
        if pod.held:
            yield ReleasePod(pod.name)
    gone = facts.buried
    if gone and gone == _vanished(facts):
        yield TellEnd(Ended(boot=gone, proof="an administrator vouches for it"))


def _vanished(facts: TaskFacts) -> str | None:
    """The boot whose pod was seen, is not there, and of whose end there is no proof."""
    boot = facts.status.boot
    if not boot or _ended(facts, boot) or any(pod.boot == boot for pod in facts.pods):
        return None
    return boot


def _compute(facts: TaskFacts) -> Iterator[Effect]:
    others = [pod for pod in facts.pods if pod.boot != facts.boot or facts.compute == "stop"]
    for pod in others:
        if not pod.deleting and proof_of(pod) is None:
            yield EndPod(pod.name)
    if facts.compute != "run" or not facts.boot or _ended(facts, facts.boot):
        return
    if facts.pods or _vanished(facts) is not None:
        return  # it is there, or another's end is not proven
    if not facts.claim and facts.spec.workspace.claim is None:
        yield MakeClaim()
    if not facts.policy:
        yield MakePolicy()
    if facts.told:  # what its collector is told lies in the boot's Secret
        yield MakePod(facts.boot)


def _boot(facts: TaskFacts) -> str | None:
    """The boot whose pod was seen last."""
    for pod in facts.pods:
        if pod.boot == facts.boot:
            return pod.boot
    return facts.pods[0].boot if facts.pods else facts.status.boot


# --- suspension ---


def _suspension(facts: TaskFacts) -> Iterator[Effect]:
    """A change of spec.suspend is acted upon once: what wakes the sandbox later, a prompt, is not undone."""
    wanted, acted = facts.spec.suspend, bool(facts.acted_suspend)
    if wanted == acted or facts.reach == "unreached":
        return
    state = None if facts.sandbox is None else facts.sandbox.state
    if wanted:
        if state is None:
            if facts.reach == "reached":
                yield NoteSuspend(True)  # nothing runs, and nothing will before a prompt
        elif state == "suspended":
            yield NoteSuspend(True)
        elif facts.operation is None or not facts.operation.is_final:
            yield Ask("suspend", suspend_id(facts.uid, facts.generation))
        else:
            yield NoteSuspend(True)  # it failed, as the condition says; it is asked again by a new change
    elif state in ("suspended", "resuming"):
        yield Ask("resume")
    elif state != "draining" and (state is not None or facts.reach == "reached"):
        yield NoteSuspend(False)


# --- deletion ---


def _deleting(facts: TaskFacts, ends: list[Effect]) -> Decision:
    assert facts.deleting_since is not None
    if not facts.held:
        return Decision(facts.status.phase, checkpoint_ref=_reference(facts), again_s=LOOK_S)
    late = facts.now - facts.deleting_since >= kube.seconds(facts.spec.lifecycle.drain_deadline)
    living = [pod for pod in facts.pods if proof_of(pod) is None]
    ending = late or _drained(facts) or facts.compute == "stop"  # whoever drains it waits for the pod's end
    drops = facts.spec.lifecycle.on_delete == "delete"
    effects = [*ends, *(EndPod(pod.name, at_once=drops) for pod in living if ending and not pod.deleting)]
    if late and (living or not _drained(facts) or _vanished(facts) is not None):
        return _forced(facts, effects)
    drained = _condition(facts, "Drained", "False", "Draining", _waits_for(facts))
    if _drained(facts):
        drained = _condition(facts, "Drained", "True", "Drained", _unsaved(facts) or "nothing was lost")
        if not living and _vanished(facts) is None and not any(isinstance(effect, TellEnd) for effect in ends):
            effects += _letting_go(facts)
    elif facts.status.phase == "Draining":  # it is seen before anything is asked for
        keep = facts.spec.lifecycle.on_delete == "checkpoint"
        effects.append(Ask("delete", next_drain_id(facts), checkpoint=keep))
    return Decision("Draining", tuple(effects), (drained,), _reference(facts), _boot(facts), again_s=AGAIN_S)


def _drained(facts: TaskFacts) -> bool:
    """Nothing is left that a checkpoint could keep: it was drained, or there is no sandbox of this workspace."""
    if facts.operation is not None and facts.operation.state == "done" and facts.operation.purpose == "delete":
        return True
    return facts.reach == "reached" and facts.sandbox is None


def next_drain_id(facts: TaskFacts) -> str:
    """The running operation's, or, where one has failed, a further one: its id alone would only tell the failure."""
    first = drain_id(facts.uid)
    found = facts.operation
    if found is None or not found.drain.startswith(first):
        return first
    if found.state != "failed":
        return found.drain
    number = found.drain.removeprefix(first).removeprefix("-")
    return f"{first}-{int(number or 0) + 1}" if number.isdigit() or not number else first


def _forced(facts: TaskFacts, effects: list[Effect]) -> Decision:
    """The deadline is over. Pods that are not proven to be over keep their own finalizer: their workspace stays blocked
    for a second writer by the agent service's record, not by this resource."""
    what = _unsaved(facts) or f"no checkpoint was made: {_waits_for(facts)}"
    deadline = facts.spec.lifecycle.drain_deadline
    reason = "ForcedByDeadline"
    message = f"released after {deadline} without its drain; {what}"
    reference = _reference(facts)
    if reference is not None:
        message += f"; the last checkpoint is {reference}"
    forced = _condition(facts, "Drained", "False", reason, message)
    if not any(one.type == "Drained" and one.reason == reason for one in facts.status.conditions):
        return Decision("Draining", (TellEvent("Warning", reason, message),), (forced,), reference, again_s=0.0)
    return Decision("Draining", (*effects, Release()), (forced,), reference, _boot(facts), again_s=AGAIN_S)


def _letting_go(facts: TaskFacts) -> Iterator[Effect]:
    """Of a task that is drained and whose compute is over."""
    reference = _reference(facts)
    if reference is not None and facts.spec.lifecycle.on_delete == "checkpoint":
        yield TellEvent("Normal", "Checkpointed", f"the workspace's work is kept in checkpoint {reference}")
    if facts.claim and not facts.spec.lifecycle.keeps_volume and facts.spec.workspace.claim is None:
        yield DeleteClaim()
    yield Release()


def _unsaved(facts: TaskFacts) -> str | None:
    return None if facts.operation is None else facts.operation.unsaved


def _waits_for(facts: TaskFacts) -> str:
    if facts.reach == "unreached":
        return f"the agent service is not reached: {facts.problem or 'it does not answer'}"
    found = facts.operation
    if found is None:
        return "the drain has not begun"
    if found.state == "failed":
        why = found.unsaved if found.problem is None else found.problem.detail
        return f"the drain failed: {why or 'no reason was told'}"
    return f"the drain is in its phase {found.phase}"


# --- what is told ---


def _reference(facts: TaskFacts) -> str | None:
    """The newest checkpoint that is known: it outlives the sandbox and this look."""
    for kept in (
        None if facts.operation is None else facts.operation.checkpoint,
        None if facts.sandbox is None else facts.sandbox.checkpoint,
    ):
        if kept is not None:
            return f"{facts.spec.tenant}/{facts.workspace}/{kept.checkpoint}"
    return facts.status.checkpoint_ref


def _phase(facts: TaskFacts) -> Phase:
    if not facts.spec.task.interactive and facts.response == "completed":
        return "Completed"
    if not facts.spec.task.interactive and facts.response == "failed":
        return "Failed"
    view = facts.sandbox
    if view is None:
        running = facts.compute == "run" and not _ended(facts, facts.boot)
        return "Provisioning" if running else "Suspended" if facts.acted_suspend else "Pending"
    match view.state:
        case "draining" | "deleting":
            return "Draining"
        case "suspended":
            return "Suspended"
        case "resuming":
            return "Resuming"
        case "provisioning":
            return "Provisioning"
    if not view.connected:
        return "Resuming" if facts.pods else "Provisioning"
    return "Running" if any(one.get("state") != "ended" for one in _executions(view)) else "Idle"


def _executions(view: SandboxView) -> list[dict[str, object]]:
    return [one if isinstance(one, dict) else one.model_dump(mode="json") for one in view.executions]


def _conditions(facts: TaskFacts, phase: Phase) -> Iterator[Condition]:
    ready = any(pod.ready and pod.boot == facts.boot for pod in facts.pods)
    connected = facts.sandbox is not None and facts.sandbox.connected
    if ready and connected:
        yield _condition(facts, "Ready", "True", "Connected", "its collector is registered")
    else:
        yield _condition(facts, "Ready", "False", phase, "its pod is up" if ready else "no pod of it is up")
    suspended = phase == "Suspended"
    reason = "Suspended" if suspended else "WokenByPrompt" if facts.acted_suspend and facts.spec.suspend else "Awake"
    yield _condition(facts, "Suspended", "True" if suspended else "False", reason, "")
    lost = _vanished(facts)
    if lost is not None:
        message = (
            f"the pod of boot {lost} is gone and no kubelet told its end: taint its node out-of-service, or set the "
            f"annotation {BURIED}={lost} once it is certain that nothing of it runs"
        )
        yield _condition(facts, "Degraded", "True", "EndNotProven", message)
    elif facts.reach == "unreached":
        yield _condition(facts, "Degraded", "True", "AgentServiceUnreached", facts.problem)
    else:
        yield _condition(facts, "Degraded", "False", "AsExpected", "")


def _condition(
    facts: TaskFacts, kind: str, status: Literal["True", "False", "Unknown"], reason: str, message: str
) -> Condition:
    return Condition(
        type=kind, status=status, reason=reason, message=message[:1024], observed_generation=facts.generation
    )
