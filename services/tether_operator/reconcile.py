"""One task, looked at and carried one step on: facts → `core.phase` → status → effects.

    notes of the operator (annotation) ─┐
    API: task, pods, claim, policy ─────┼─▶ TaskFacts ─▶ decide ─▶ status ─▶ effects, one after the other
    bus: sandbox, operation, response ──┘

The status is written first, so that what is under way is seen while it is. A crash after any step is no matter: the
next look decides anew, and every effect bears repeating. What the API does not keep (which value of spec.suspend was
acted upon, the operation that was asked for, whether the prompt was given) is in the operator's own annotation.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from tether import kube
from tether.errors import InvalidError
from tether.failpoints import failpoint, failpoint_of
from tether.kube import AgentTaskSpec, AgentTaskStatus, Condition, Ended
from tether_operator.cluster import NOTES, Cluster, Seen
from tether_operator.control_plane import ControlPlane, Told
from tether_operator.core import phase
from tether_operator.core.phase import AGAIN_S, LOOK_S, Decision, Effect, TaskFacts

_log = structlog.get_logger("tether_operator")


class Notes(BaseModel):
    """NOTES: what the operator remembers of a task. `suspended`: the value of spec.suspend that was acted upon last."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    suspended: bool | None = None
    operation: str | None = None
    prompted: bool = False

    @staticmethod
    def of(annotations: Mapping[str, str]) -> Notes:
        try:
            return Notes.model_validate_json(annotations.get(NOTES, "{}"))
        except ValidationError:
            return Notes()  # somebody's hand: what it noted is found out anew by the same ids


@dataclass(slots=True)
class Reconciler:
    """Of one namespace."""

    cluster: Cluster
    control: ControlPlane

    async def once(self, name: str) -> float | None:
        """One step of the task `name`. Returns in how many seconds to look again; None: it is gone. Raises ApiError."""
        seen = await self.cluster.look(name)
        if seen is None:
            return None
        status = kube.status_of(seen.status)
        try:
            spec = kube.spec_of(seen.spec)
        except InvalidError as error:
            return await self._refuse(seen, status, str(error))
        notes = Notes.of(seen.annotations)
        told = await self.control.look(spec, kube.workspace_of(name, spec), notes.operation, notes.prompted, seen.uid)
        facts = self._facts(seen, spec, status, notes, told)
        decision = phase.decide(facts)
        await self._tell(seen, status, facts, decision)
        failpoint("operator.status_told")
        for effect in decision.effects:
            notes = await self._perform(seen, spec, notes, effect)
            failpoint_of("operator", effect, Effect)
        return decision.again_s

    async def orphans(self) -> None:
        """Pods whose task was let go before the kubelet's word, by the deadline: it is waited for here."""
        for pod in await self.cluster.orphans(await self.cluster.uids()):
            if not pod.deleting:
                await self.cluster.end_pod(pod.name)
            if pod.held and phase.proof_of(pod) is not None:
                await self.cluster.release_pod(pod.name)
                _log.info("orphan_released", pod=pod.name, boot=pod.boot)

    async def _refuse(self, seen: Seen, status: AgentTaskStatus, why: str) -> float:
        """A spec that cannot be used: said, and a deletion is not held up by it."""
        if seen.deleting_since is not None and not seen.pods:
            await self.cluster.release(seen)
            return AGAIN_S
        condition = Condition(type="Ready", status="False", reason="InvalidSpec", message=why[:1024])
        refused = status.model_copy(
            update={"phase": "Failed", "conditions": _stamped(status.conditions, [condition], seen.generation)}
        )
        if refused != status:
            await self.cluster.tell(seen.name, refused)
        return LOOK_S

    def _facts(self, seen: Seen, spec: AgentTaskSpec, status: AgentTaskStatus, notes: Notes, told: Told) -> TaskFacts:
        return TaskFacts(
            name=seen.name,
            uid=seen.uid,
            generation=seen.generation,
            spec=spec,
            status=status,
            now=time.time(),
            deleting_since=seen.deleting_since,
            held=kube.DRAIN in seen.finalizers,
            boot=seen.annotations.get(kube.BOOT, ""),
            compute=_compute(seen.annotations.get(kube.COMPUTE)),
            buried=seen.annotations.get(phase.BURIED, ""),
            told=seen.told,
            claim=seen.claim,
            policy=seen.policy,
            pods=seen.pods,
            sandbox=told.sandbox,
            reach=told.reach,
            operation=told.operation,
            problem=told.problem,
            acted_suspend=notes.suspended,
            prompted=notes.prompted,
            response=told.response,
        )

    async def _tell(self, seen: Seen, status: AgentTaskStatus, facts: TaskFacts, decision: Decision) -> None:
        activity = status.last_activity_time
        if facts.sandbox is not None:
            since = facts.sandbox.idle_since
            activity = _rfc3339(facts.now if since is None else since / 1000)
            if since is None and status.last_activity_time is not None and decision.phase == status.phase:
                activity = status.last_activity_time  # it is busy: the phase says so, no need to write every look
        new = status.model_copy(
            update={
                "phase": decision.phase,
                "boot": decision.boot or status.boot,
                "checkpoint_ref": decision.checkpoint_ref or status.checkpoint_ref,
                "sandbox": status.sandbox if facts.sandbox is None else facts.sandbox.sandbox,
                "conversation": facts.spec.task.conversation or seen.name,
                "conditions": _stamped(status.conditions, decision.conditions, seen.generation),
                "observed_generation": seen.generation,
                "last_activity_time": activity,
            }
        )
        if new != status:
            await self.cluster.tell(seen.name, new)
            if new.phase != status.phase:
                _log.info("task_phase", task=seen.name, before=status.phase, phase=new.phase)

    async def _perform(self, seen: Seen, spec: AgentTaskSpec, notes: Notes, effect: Effect) -> Notes:
        """The notes as they are afterwards."""
        cluster = self.cluster
        match effect:
            case phase.Hold():
                await cluster.hold(seen)
            case phase.MakeClaim():
                await cluster.make_claim(seen)
            case phase.MakePolicy():
                await cluster.make_policy(seen)
            case phase.MakePod(boot=boot):
                await cluster.make_pod(seen, boot)
            case phase.EndPod(name=name, at_once=at_once):
                await cluster.end_pod(name, at_once=at_once)
            case phase.TellEnd(ended=ended):
                await self._tell_end(seen, ended)
            case phase.ReleasePod(name=name):
                await cluster.release_pod(name)
            case phase.Ask(verb=verb, drain=drain, checkpoint=checkpoint):
                if drain and notes.operation != drain:  # noted before it is asked for: an answer may be lost
                    notes = await self._note(seen, _changed(notes, operation=drain))
                workspace = kube.workspace_of(seen.name, spec)
                await self.control.ask(verb, spec, workspace, drain, checkpoint=checkpoint)
            case phase.NoteSuspend(value=value):
                notes = await self._note(seen, _changed(notes, suspended=value, operation=None))
            case phase.GivePrompt(request=request):
                if await self.control.give(spec, kube.workspace_of(seen.name, spec), seen.name, request):
                    notes = await self._note(seen, _changed(notes, prompted=True))
            case phase.TellEvent(kind=kind, reason=reason, message=message):
                await cluster.tell_event(seen, kind, reason, message)
            case phase.DeleteClaim():
                await cluster.delete_claim(seen.name)
            case phase.Release():
                await cluster.release(seen)
                _log.info("task_released", task=seen.name)
        return notes

    async def _tell_end(self, seen: Seen, ended: Ended) -> None:
        stamped = ended.model_copy(update={"at": _rfc3339(time.time())})
        current = await self.cluster.look(seen.name)
        if current is not None:
            status = kube.status_of(current.status)
            await self.cluster.tell(seen.name, status.model_copy(update={"ended": stamped}))
        _log.info("boot_ended", task=seen.name, boot=ended.boot, proof=ended.proof, code=ended.code)

    async def _note(self, seen: Seen, notes: Notes) -> Notes:
        await self.cluster.note(seen.name, notes.model_dump_json(exclude_none=True))
        return notes


def _changed(notes: Notes, **changes: Any) -> Notes:
    return notes.model_copy(update=changes)


def _compute(value: str | None) -> Literal["run", "stop", ""]:
    return "run" if value == "run" else "stop" if value == "stop" else ""


def _stamped(before: Sequence[Condition], now: Sequence[Condition], generation: int) -> tuple[Condition, ...]:
    """With the time since which each has its status; those that were not decided on are kept."""
    known = {one.type: one for one in before}
    at = _rfc3339(time.time())
    for one in now:
        old = known.get(one.type)
        since = old.last_transition_time if old is not None and old.status == one.status else at
        update = {"last_transition_time": since or at, "observed_generation": generation}
        known[one.type] = one.model_copy(update=update)
    return tuple(known[name] for name in sorted(known))


def _rfc3339(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(int(at_s), datetime.UTC).isoformat().replace("+00:00", "Z")
