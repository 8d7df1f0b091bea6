"""The execution machine: one run of one CLI, from its claim to the proof that nothing of it is left.

    claimed ──first line──▶ running ◀──turn begins── waiting for a human
       │                       │ ▲
       │                       │ └── interjection queued, background work open: a terminal line is not the end
       │                       ▼
       │         terminal line, nothing queued, nothing in the background ──▶ response.ended{completed|failed|cancelled}
       │                       │                                                    │ stdin closed, watchdog (ending.py)
       │ spawn_failed          │ stop (stop.py): interrupt → SIGTERM → kill         ▼
       ▼                       ▼                                                 exiting
    failed                  Exited ── no terminal line: response.ended{lost|stopped|failed} ──▶ exited
                                                                                    │ Proved
                                                                                    ▼
                                                           receipts, execution.ended{outcome, proof}   (the fence)

A process that had to leave before anything of it was shown may be followed by another one (fallback.py).

A drain of the sandbox (stop.py: leaving) cuts what is not over: response.ended{drained}, and with the proof the end is
held until `Note(released)` says what became of the checkpoint.

Everything that changes it is an `Input`, recorded in the spool before: the same inputs make the same events with the
same ordinals, wherever the machine was dumped and loaded in between. It has no clock; deadlines are `wants()`, which
are level-triggered: a shell that was restarted replays the spool and looks again.

Ordinal 1 is `execution.started`, the claim, which the shell appends before any spool exists. The machine is given its
body, so that a dump is complete, and numbers its own events from 2. `response.ended` comes once, before
`execution.ended`; nothing follows `execution.ended`.

`wants()` are for a process that runs: a shell looks at them once the spawn is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from tether import events as ev
from tether.control import AnswerPayload, InterjectPayload
from tether.errors import Code
from tether.events import Event, GapReason, Proof
from tether.frames import Position
from tether.ids import ExecutionTarget
from tether.limits import FIRST_EVENT_S, WATCHDOG_AFTER_TERMINAL_S
from tether_collector.core import bounds, replies, verdict
from tether_collector.core import fallback as fb
from tether_collector.core import inputs as i
from tether_collector.core.adapters import base as b
from tether_collector.core.admission import Now, Rejection, answer_of, check_target, judge
from tether_collector.core.ending import Ending
from tether_collector.core.execution_state import ExecutionBase
from tether_collector.core.facts import Facts
from tether_collector.core.stop import Stop
from tether_collector.core.verdict import AGENT_START_FAILED

SETTLE_MS: Final = 2000  # how long a turn that background work owes is waited for
TAKE_UP_MS: Final = int(WATCHDOG_AFTER_TERMINAL_S * 1000)  # and one for a queued interjection: a CLI may hang
FIRST_EVENT: Final = "first_event"
SETTLE: Final = "settle"
_PROOFS: Final = (b.PromptSeen, b.InterruptSeen, b.AnswerSeen)
_PROOF_METHODS: Final = frozenset(get_args(Proof.model_fields["method"].annotation))
_GAP_REASONS: Final = frozenset(get_args(GapReason))


class Execution(ExecutionBase):
    """See the module."""

    def __init__(self, launch: b.Launch, adapter: b.Adapter, target: ExecutionTarget, claim: Mapping[str, Any]) -> None:
        super().__init__(launch, adapter, target, claim)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            i.OutputLine: self._on_line,
            i.StdinLine: self._on_stdin_line,
            i.StdinDone: self._on_stdin_done,
            i.StreamClosed: self._on_stream_closed,
            i.Exited: self._on_exited,
            i.Proved: self._on_proved,
            i.Timer: self._on_timer,
            i.Note: self._on_note,
        }

    # --- what a shell does ---------------------------------------------------------------------------------------

    def wants(self) -> list[i.Want]:
        """Everything that should be done now, in order; empty once the proof is in."""
        facts = self._facts
        if facts.ended or self._fallback.stage == "wanted":
            return []
        wants: list[i.Want] = []
        if self._ending.alive:
            wants += self._writes()
            if facts.opened_at_ms and not facts.first_line_seen and not facts.silence_told:
                wants.append(i.Deadline(FIRST_EVENT, facts.opened_at_ms + int(FIRST_EVENT_S * 1000)))
            if (settle_at := self._settle_at()) is not None:
                wants.append(i.Deadline(SETTLE, settle_at))
            wants += [want for want in self._stop.wants() if want not in wants]
        wants += [want for want in self._ending.wants() if want not in wants]
        return wants

    def check_control(self, verb: str, target: ExecutionTarget | None, payload: Mapping[str, Any]) -> Rejection | None:
        """Whether a control can be taken now; asked before it is journaled."""
        return check_target(self.target, target, verb) or judge(self._now(), verb, payload)

    # --- inputs --------------------------------------------------------------------------------------------------

    def apply(self, input_: i.Input, record: int) -> list[tuple[Event, Position]]:
        """Events that this input makes. A record that was applied before, or comes after the end, makes none."""
        facts = self._facts
        if facts.ended or record <= facts.last_record:
            return []
        facts.last_record = record
        self._at = input_.at
        out: list[tuple[Event, Position]] = []
        self._out = out
        self._handlers[type(input_)](input_)
        if facts.terminal is not None and facts.outcome is None and not facts.ended:
            self._look_for_end()
        return out

    def _on_line(self, line: i.OutputLine) -> None:
        facts = self._facts
        if line.stream == "stdout":
            facts.first_line_seen = True
        reading = self.adapter.on_line(self._adapter_state, line)
        self._on_reading(reading)
        facts.unmeasured_bytes += len(line.data)
        if facts.unmeasured_bytes > bounds.MEASURE_BYTES:
            facts.unmeasured_bytes = 0
            self._bound(bounds.give_up_by_size(self._adapter_state))
        elif facts.last_record % bounds.LOOK_EVERY == 0 or len(self._interactions.pending) > bounds.ASKS_MAX:
            self._bound(bounds.give_up(self._adapter_state, bounds.ENTRIES_MAX, bounds.ASKS_MAX))

    def _on_reading(self, reading: b.Reading) -> None:
        signals = reading.signals
        if not signals:
            for draft in reading.drafts:
                self._take(draft)
            return
        for signal in signals:
            if isinstance(signal, _PROOFS):
                self._on_proof_of_control(signal)
        for draft in reading.drafts:
            self._take(draft)
        for signal in signals:
            if not isinstance(signal, _PROOFS):
                self._on_signal(signal)

    def _bound(self, given_up: bounds.GivenUp) -> None:
        """What is open beyond the bounds; of what this machine keeps beside the adapter the oldest goes as well."""
        pending = self._interactions.pending
        asks = [*given_up.asks, *list(pending)[: max(0, len(pending) - bounds.ASKS_MAX)]]
        self._on_reading(b.Reading(given_up.drafts, [b.AnswerSeen(key, "cancelled") for key in asks]))
        tools = self._facts.tools
        for tool in list(tools)[: max(0, len(tools) - bounds.ENTRIES_MAX)]:
            del tools[tool]

    def _on_proof_of_control(self, signal: b.PromptSeen | b.InterruptSeen | b.AnswerSeen) -> None:
        match signal:
            case b.PromptSeen(prompt):
                self._seen(prompt)
            case b.InterruptSeen(control):
                self._seen(control)
            case b.AnswerSeen(interaction, outcome, only_if_written):
                if only_if_written and not self._receipts.written(self._interactions.settled_by(interaction)):
                    return
                drafts, entry = self._interactions.resolve(interaction, outcome)
                self._take_all(drafts)
                if entry is not None and entry.control is not None:
                    if outcome == "cancelled":
                        detail = "the agent withdrew the interaction before the answer was taken"
                        self._take_all(self._receipts.reject(entry.control, Code.INTERACTION_SETTLED, detail))
                    else:
                        self._take_all(self._receipts.deliver(entry.control))
                        self._take_all(self._receipts.settle(entry.control))

    def _seen(self, control: str) -> None:
        """A control showed in the CLI's output. A stop is settled by proof alone."""
        entry = self._receipts.get(control)
        if entry is None or entry.verb == "stop":
            return
        self._take_all(self._receipts.deliver(control))
        self._take_all(self._receipts.settle(control))

    def _on_signal(self, signal: b.Signal) -> None:
        facts = self._facts
        match signal:
            case b.TurnBegan(prompt):
                facts.turn = True
                self._change_stop(lambda stop: stop.turn_began(self._at))
                if not (self._stop.cut or facts.final):
                    facts.terminal, facts.settled = None, False
                if prompt is not None:
                    self._seen(prompt)
                    self._receipts.taken(prompt)
            case b.PromptTaken(prompt):
                self._seen(prompt)
                self._receipts.taken(prompt)
            case b.PromptRefused(prompt, detail):
                self._take_all(self._receipts.reject(prompt, Code.SESSION_STREAM_NOT_ACTIVE, detail))
                self._receipts.taken(prompt)
            case b.TurnEnded(outcome, code, detail):
                self._terminal(outcome, code, detail)
                if outcome == "interrupted":
                    for entry in self._receipts.open("interrupt"):
                        if entry.status == "delivered":
                            self._take_all(self._receipts.settle(entry.control))
            case b.BackgroundChanged(open_, owed):
                facts.background, facts.owed = open_, owed
            case b.Reply():
                if ":" in signal.control:
                    replies.add(facts.replies, signal)
                else:
                    self._receipts.supply(signal.control, signal.data)
            case b.SessionFailed(reason, detail):
                self._session_failed(reason, detail)
            case _:
                pass  # proofs were taken before the line's events

    def _session_failed(self, reason: fb.Reason, detail: str) -> None:
        """The agent has no such session, or another one has it: another process, or the end."""
        if self._fallback.under_way or self._facts.final:
            return  # said twice
        if not self._stop.requested and self._fallback.begin(reason, detail, self.launch, self._at):
            self._facts.turn = False
            self._ending.hurry(self._at)
            return
        code = fb.failure_code(reason)
        self._facts.final = True
        self._terminal("failed", code.value, detail, fb.CHOICES if code is Code.RESUME_FAILED else None)
        if reason == "not_resumed":
            self._facts.discarded = True
            self._ending.hurry(self._at)

    def _terminal(
        self, outcome: str, code: str | None, detail: str | None, choices: Sequence[str] | None = None
    ) -> None:
        facts = self._facts
        if self._fallback.under_way or ((facts.final or self._stop.cut) and facts.terminal is not None):
            return  # the refusal of the session explains more; and behind a stop no further turn counts
        facts.turn = False
        facts.terminal = {"outcome": outcome, "code": code, "detail": detail}
        if choices is not None:
            facts.terminal["choices"] = list(choices)
        facts.waiting_since_ms = self._at
        facts.settled = False
        self._stop.turn_ended()

    def _on_stdin_line(self, line: i.StdinLine) -> None:
        if any(control == line.control for control, _ in self._opening):
            self._facts.opening_begun.append(line.control)
        elif not replies.begun(self._facts.replies, line.control):
            self._receipts.write_begun(line.control)

    def _on_stdin_done(self, done: i.StdinDone) -> None:
        facts = self._facts
        if any(control == done.control for control, _ in self._opening):
            facts.opening_done.append(done.control)
            if done.result == "written" and len(facts.opening_done) == len(self._opening):
                facts.opened_at_ms = done.at
        else:
            self._take_all(self._receipts.write_done(done.control, done.result))

    def _on_stream_closed(self, closed: i.StreamClosed) -> None:
        """stdout or stderr: no end, as the process may live on, and others may have inherited the pipe."""
        if closed.stream == "stdin":
            self._facts.stdin_closed = True
            self._take_all(self._receipts.stdin_closed())

    def _on_timer(self, timer: i.Timer) -> None:
        facts = self._facts
        if timer.name == FIRST_EVENT and facts.opened_at_ms and not facts.first_line_seen and not facts.silence_told:
            facts.silence_told = True
            detail = f"the agent has said nothing for {int(FIRST_EVENT_S)} s after its prompt was written"
            self._emit(ev.MODEL_REQUEST, {"state": "started", "detail": detail})
        elif timer.name == SETTLE and (settle_at := self._settle_at()) is not None:
            # A deadline of an earlier turn may be recorded after the next one ended: it settles nothing.
            facts.settled = timer.at >= settle_at
        if self._ending.alive:
            self._change_stop(lambda stop: stop.timer(timer.name, timer.at))
            self._ending.timer(timer.name, timer.at)

    def _change_stop(self, change: Callable[[Stop], None]) -> None:
        """A stop is delivered, at the latest, when its interrupt is waited for no more."""
        before = self._stop.stage
        change(self._stop)
        if before == "interrupting" and self._stop.stage == "terminating":
            for stop in self._receipts.open("stop"):
                self._take_all(self._receipts.deliver(stop.control))

    def _on_note(self, note: i.Note) -> None:
        body = note.body
        if note.kind == "control":
            self._on_control(body)
        elif note.kind == "gap":
            reason = body.get("reason")
            gap = {name: body[name] for name in ("from", "to", "detail") if body.get(name) is not None}
            self._emit(ev.GAP, {"reason": reason if reason in _GAP_REASONS else "corrupt", **gap})
        elif note.kind == "spawn_failed":
            self._facts.terminal = None
            self._respond("failed", AGENT_START_FAILED, str(body.get("detail", "the agent could not be started")))
            self._gone(None, note.at)
            self._end({"method": "never_spawned", "at": note.at})
        elif note.kind == "released":
            self._facts.released = dict(body)
            if self._facts.proof is not None:
                self._end(self._facts.proof)
        elif note.kind == fb.PROCESS:
            self._on_process(body)
        elif note.kind == "offers":
            self._interactions.offer(body.get("offers") or ())
        elif note.kind == fb.REFUSED:
            self._on_process_refused(body)
        elif note.kind == "adapter":
            self._facts.adapter_version = str(body.get("version", ""))

    # --- another process -----------------------------------------------------------------------------------------

    def _on_process(self, body: Mapping[str, Any]) -> None:
        """How the next process is launched; or the first one, before it is."""
        facts, process, want = self._facts, body.get("process"), self.next_process
        first = process == self._target.process_generation and self._is_unlaunched
        if not first and (want is None or process != want.process):
            return
        lost = self.launch.session if self.launch.resume and want is not None and want.why == "history" else None
        self.launch = fb.next_launch(self.launch, body)
        self._opening = list(self.adapter.opening(self.launch))
        self._adapter_state = self.adapter.initial(self.launch)
        if not first:
            self._facts = Facts(facts.ordinal, facts.last_record, facts.adapter_version)
            self._ending = Ending()
            self._fallback.taken()
            session = self.launch.session if self.launch.resume else None
            self._target = self._target.model_copy(update={"process_generation": process, "native_session": session})
            started = {**self.claim, "process": process, "target": self._target.model_dump(mode="json")}
            started |= {name: body[name] for name in ("instance",) if isinstance(body.get(name), str)}
            self._emit(ev.EXECUTION_STARTED, {**started, "resumed_from": session})
        recovered = fb.told(body, lost)
        if recovered is not None:
            self._emit(ev.SESSION_RECOVERED, recovered)

    @property
    def _is_unlaunched(self) -> bool:
        """It is about the first process, and nothing of that has been seen."""
        facts, first = self._facts, self.claim.get("process") == self._target.process_generation
        return first and self.launch.history is None and not (facts.first_line_seen or facts.opening_begun)

    def _on_process_refused(self, body: Mapping[str, Any]) -> None:
        """There is no further process, or no first one: what it needs is not to be had."""
        if self._facts.ended or not (self._fallback.stage == "wanted" or self._is_unlaunched):
            return
        proof = self._fallback.proof or {"method": "never_spawned", "at": self._at}
        code, detail = str(body.get("code") or Code.RESUME_FAILED.value), str(body.get("detail") or "")
        self._give_up(code, detail, tuple(one for one in fb.CHOICES if one in (body.get("choices") or fb.CHOICES)))
        self._gone(None, self._at)
        self._prove(proof)

    def _give_up(self, code: str, detail: str, choices: Sequence[str] = fb.CHOICES) -> None:
        self._fallback.over()
        if self._stop.requested:
            stop = self._stop
            self._respond(*verdict.of_exit(None, stopping=True, session_known=True, stderr=(), draining=stop.drain))
        else:
            self._respond("failed", code, detail, None if code == Code.SESSION_BUSY else choices)

    # --- controls ------------------------------------------------------------------------------------------------

    def _now(self) -> Now:
        facts = self._facts
        return Now(
            adapter=self.adapter,
            adapter_state=self._adapter_state,
            interactions=self._interactions,
            response_over=facts.outcome is not None,
            process_gone=not self._ending.alive,
            stopping=self._stop.requested,
            stdin_closed=facts.stdin_closed,
            ended=facts.ended,
            between_processes=self._fallback.under_way,
        )

    def _on_control(self, body: Mapping[str, Any]) -> None:
        control, verb = str(body.get("control", "")), str(body.get("verb", ""))
        payload = body.get("payload")
        payload = payload if isinstance(payload, Mapping) else {}
        if self._receipts.get(control) is not None:
            return
        rejection = judge(self._now(), verb, payload)
        if rejection is not None:
            key = payload.get("interaction")
            interaction = key[:256] if isinstance(key, str) else None
            self._take_all(self._receipts.refuse(control, verb, rejection.code, rejection.problem.detail, interaction))
            return
        data: bytes | None
        fields: dict[str, Any] = {}
        match verb:
            case "answer":
                answer = AnswerPayload.model_validate(dict(payload))
                data = self.adapter.answer(self._adapter_state, answer_of(answer))
                fields["interaction"] = answer.interaction
                self._interactions.answered(answer.interaction, control, answer.model_dump(mode="json"))
            case "interject":
                content = [part.model_dump() for part in InterjectPayload.model_validate(dict(payload)).content]
                data = self.adapter.prompt(self._adapter_state, control, content)
                fields["queued"] = True
                self._facts.waiting_since_ms, self._facts.settled = self._at, False
            case "interrupt":
                data = self.adapter.interrupt(self._adapter_state, control)
            case "drain":
                kill_at = payload.get("kill_at")
                self._stop.leave(control, self._at, kill_at if isinstance(kill_at, int) else self._at)
                data = None
            case _:
                over = self._facts.outcome is not None or not self._ending.alive
                writes = self._stop.request(control, self._at, response_over=over)
                can_write = writes and not self._facts.stdin_closed
                data = self.adapter.interrupt(self._adapter_state, control) if can_write else None
        fields["data"] = None if data is None else data.decode()
        self._take_all(self._receipts.accept(control, verb, **fields))
        if verb in ("stop", "drain") and data is None:
            self._take_all(self._receipts.deliver(control))
        if self._stop.requested and self._fallback.stage == "wanted":
            self._give_up("", "")
            self._prove(self._fallback.proof or {})

    def _writes(self) -> list[i.Want]:
        """Opening lines first; while stopping only the stop's interrupt."""
        facts = self._facts
        if facts.stdin_closed or facts.final or self._fallback.under_way:
            return []
        if self._stop.requested:
            return [*replies.wants(facts.replies, stopping=True), *self._receipts.wants("stop", turn=facts.turn)]
        begun = (*facts.opening_begun, *facts.opening_done)
        opening: list[i.Want] = [i.WriteStdin(control, data) for control, data in self._opening if control not in begun]
        return [*opening, *replies.wants(facts.replies, stopping=False), *self._receipts.wants(turn=facts.turn)]

    # --- ends ------------------------------------------------------------------------------------------------------

    def _settle_at(self) -> int | None:
        """When to stop waiting for a turn that the CLI owes after its terminal line; None where none is owed, or
        where background work runs, which is waited for without a bound."""
        facts = self._facts
        if facts.terminal is None or facts.outcome is not None or facts.background or facts.settled:
            return None
        if self._receipts.queued():
            return facts.waiting_since_ms + TAKE_UP_MS
        return facts.waiting_since_ms + SETTLE_MS if facts.owed else None

    def _look_for_end(self) -> None:
        """A terminal line was said and no turn runs: is it the end?"""
        facts = self._facts
        if self._stop.requested and self._is_waiting():
            self._change_stop(lambda stop: stop.cut_off(self._at))
        if self._stop.cut or facts.discarded:
            return  # the process is told to go: what it says until then belongs before the response's end
        if facts.final or (not facts.background and self._settle_at() is None):
            self._respond_as_said()

    def _respond_as_said(self) -> None:
        stop = self._stop
        self._respond(*verdict.as_said(self._facts.terminal or {}, stopping=stop.requested, draining=stop.drain))

    def _respond(self, outcome: str, code: str | None, detail: str, choices: Sequence[str] | None = None) -> None:
        facts = self._facts
        if facts.outcome is not None:
            return
        facts.outcome = outcome
        facts.error = None if code is None else {"code": code, "detail": detail}
        if facts.error is not None and choices:
            facts.error["choices"] = list(choices)
        self._emit(ev.RESPONSE_ENDED, {"outcome": outcome, **({"error": facts.error} if facts.error else {})})
        self._ending.finish(self._at)

    def _on_exited(self, exited: i.Exited) -> None:
        self._gone(exited.rc, exited.at)

    def _gone(self, rc: int | None, at: int) -> None:
        """The CLI is no more: close what it left open, then say how it ended."""
        if not self._ending.alive:
            return
        facts = self._facts
        self._close_what_is_open(rc)
        if facts.outcome is None and not self._fallback.under_way:
            self._respond_without_end(rc)
        self._ending.exited(rc, at)

    def _close_what_is_open(self, rc: int | None) -> None:
        self._take_all(self.adapter.on_exit(self._adapter_state, -9 if rc is None else rc).drafts)
        self._tell_held()
        self._take_all(self._interactions.expire_all())
        self._facts.unheard = self._facts.unheard or self._receipts.unheard()
        self._take_all(self._receipts.process_gone())
        for draft in self._noise.summary():
            self._emit(draft.type, draft.body)

    def _respond_without_end(self, rc: int | None) -> None:
        facts = self._facts
        said = facts.terminal is not None and not (self._stop.cut or (self._stop.requested and self._is_waiting()))
        if said:
            self._respond_as_said()
        else:
            stopping, draining, known = self._stop.requested, self._stop.drain, facts.native_session is not None
            tail = self._noise.tail
            self._respond(*verdict.of_exit(rc, stopping=stopping, session_known=known, stderr=tail, draining=draining))

    def _is_waiting(self) -> bool:
        return self._receipts.queued() or self._facts.background > 0

    def _on_proved(self, proved: i.Proved) -> None:
        self._gone(None, proved.at)
        proof: dict[str, Any] = {"method": proved.method, "at": proved.at}
        if proved.detail is not None:
            proof["detail"] = proved.detail
        if proved.method not in _PROOF_METHODS:
            proof.update(method="provider", detail=f"{proved.method}: {proved.detail or ''}")
        if self._fallback.under_way:
            if not (self._fallback.shown or self._stop.requested):
                self._fallback.proven(proof, proved.at)
                return
            code = Code.SESSION_BUSY if self._fallback.why == "again" else Code.RESUME_FAILED
            self._give_up(code.value, self._fallback.detail)
        self._prove(proof)

    def _prove(self, proof: dict[str, Any]) -> None:
        """Nothing of the process is left. The end of one that was drained waits for the checkpoint."""
        self._facts.proof = proof
        if self._facts.outcome != "drained" or self._facts.released is not None:
            self._end(proof)

    def _end(self, proof: dict[str, Any]) -> None:
        facts = self._facts
        self._close_what_is_open(self._ending.rc)  # lines may come after the exit, from whoever inherited the pipe
        outcome = facts.outcome
        for stop in self._receipts.open("stop", "drain"):
            self._take_all(self._receipts.deliver(stop.control))
            detail = None if outcome in ("stopped", "drained") else f"the response had ended before: {outcome}"
            self._take_all(self._receipts.settle(stop.control, detail))
        body: dict[str, Any] = {"outcome": outcome, "proof": proof}
        if self._ending.rc is not None:
            body["exit"] = self._ending.rc
        if outcome == "drained":
            body.update(facts.released or {})
        elif facts.error is not None:
            body["error"] = facts.error
        self._emit(ev.EXECUTION_ENDED, body)
        self._ending.proven(self._at)
        facts.ended = True
