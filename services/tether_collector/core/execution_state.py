"""The state of an execution's machine: made, saved, loaded, asked; and the numbering of its events (`execution.py`).

A dump is complete: `load` of it goes on exactly as the dumped machine would, in another process as well.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Self

from tether import events as ev
from tether.errors import InvalidError
from tether.events import Event
from tether.frames import Position
from tether.ids import ExecutionTarget
from tether_collector.core import fallback as fb
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters import base as b
from tether_collector.core.ending import Ending
from tether_collector.core.facts import Departure, Facts, Status, status_of
from tether_collector.core.interactions import Interaction, Interactions
from tether_collector.core.noise import Noise
from tether_collector.core.receipts import Control, Receipts
from tether_collector.core.redaction import Redactor, Rules
from tether_collector.core.stop import Stop

STATE_VERSION: Final = 1
DELTA_CHARS_MAX: Final = 16 * 1024  # a delta has no blob; escaped six-fold this still fits a frame
_OF_A_TURN: Final = frozenset({ev.TEXT_DELTA, ev.REASONING_DELTA, ev.TOOL_STARTED, ev.INTERACTION_REQUESTED})


class ExecutionBase(ABC):
    """See the module. `adapter` is stateless; `adapter_state` belongs to it."""

    def __init__(self, launch: b.Launch, adapter: b.Adapter, target: ExecutionTarget, claim: Mapping[str, Any]) -> None:
        self.launch = launch
        self.adapter = adapter
        self.claim = dict(claim)
        self._target = target
        self._opening = list(adapter.opening(launch))
        self._adapter_state = adapter.initial(launch)
        self._facts = Facts(adapter_version=str(claim.get("adapter_version") or adapter.version))
        self._ending = Ending()
        self._stop = Stop()
        self._fallback = fb.Fallback()
        self._receipts = Receipts()
        self._interactions = Interactions()
        self._noise = Noise()
        self._redactor = Redactor()
        self._out: list[tuple[Event, Position]] = []
        self._at = 0

    # --- making, saving, loading ---------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        launch: b.Launch,
        adapter: b.Adapter,
        target: ExecutionTarget,
        claim: Mapping[str, Any],
        rules: Rules | None = None,
    ) -> Self:
        """`claim`: the body of `execution.started`, which the shell appended as ordinal 1. `rules`: what is not told,
        the same for every replay of the execution."""
        self = cls(launch, adapter, target, claim)
        self._redactor.rules = rules or Rules()
        return self

    def dump(self) -> bytes:
        """The whole state; `load` of it goes on exactly as this would."""
        state = {
            "v": STATE_VERSION,
            "adapter": self.adapter.name,
            "launch": {**asdict(self.launch), "content": list(self.launch.content), "args": list(self.launch.args)},
            "target": self._target.model_dump(mode="json"),
            "claim": self.claim,
            "adapter_state": self._adapter_state,
            "facts": asdict(self._facts),
            "ending": asdict(self._ending),
            "stop": asdict(self._stop),
            "fallback": asdict(self._fallback),
            "receipts": self._receipts.dump(),
            "interactions": self._interactions.dump(),
            "noise": self._noise.dump(),
            "redaction": self._redactor.dump(),
        }
        return json.dumps(state, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes, rules: Rules | None = None) -> Self:
        """Raises `InvalidError` for a state of another version or an unknown adapter. The adapter's own state may be
        of an earlier version of it: then it migrates it, where it has to (`base.Migrates`)."""
        state = json.loads(data)
        if state.get("v") != STATE_VERSION:
            raise InvalidError("state.v", f"must be {STATE_VERSION}, got {state.get('v')!r}")
        self = cls(
            b.Launch(**state["launch"]),
            adapter_for(state["adapter"]),
            ExecutionTarget.model_validate(state["target"]),
            state["claim"],
        )
        self._facts = Facts(**state["facts"])
        self._adapter_state = b.migrated(self.adapter, state["adapter_state"], self._facts.adapter_version)
        self._ending = Ending(**state["ending"])
        self._stop = Stop(**state["stop"])
        self._fallback = fb.Fallback(**state.get("fallback", {}))
        self._receipts = Receipts(state["receipts"])
        self._interactions = Interactions(state["interactions"])
        self._noise = Noise.load(state["noise"])
        self._redactor.load(state.get("redaction", {}))
        self._redactor.rules = rules or Rules()
        return self

    # --- what a shell asks -----------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """`execution.ended` was made: nothing follows."""
        return self._facts.ended

    @property
    def held(self) -> bool:
        """Nothing of the process is left, and a drain has not said yet what became of the checkpoint."""
        return self._facts.proof is not None and not self._facts.ended

    def departure(self) -> Departure | None:
        """Once nothing of the process is left."""
        facts = self._facts
        if facts.outcome is None or not (facts.ended or facts.proof is not None):
            return None
        killed = self._stop.drain and (self._stop.stage == "killing" or self._ending.rc in (None, -9))
        drained, cut, unheard = facts.outcome == "drained", tuple(facts.interrupted), tuple(facts.unheard)
        return Departure(facts.outcome, drained, killed, cut, unheard)

    @property
    def response_outcome(self) -> str | None:
        """Of `response.ended`, once it was made."""
        return self._facts.outcome

    @property
    def adapter_version(self) -> str:
        """The one that the spool names for what follows."""
        return self._facts.adapter_version

    @property
    def last_record(self) -> int:
        """The last record that was applied; `apply` ignores it and those before."""
        return self._facts.last_record

    @property
    def next_ordinal(self) -> int:
        return self._facts.ordinal + 1

    @property
    def target(self) -> ExecutionTarget:
        """With the native session, once it is known."""
        if self._facts.native_session is None:
            return self._target
        return self._target.model_copy(update={"native_session": self._facts.native_session})

    def pending(self) -> list[Interaction]:
        """Interactions that are not resolved; `control` is set where an answer is on its way."""
        return list(self._interactions.pending.values())

    def unapplied(self) -> list[dict[str, Any]]:
        """Answers of which it is not known that they reached their tool, once the process is gone."""
        return list(self._interactions.unapplied)

    def receipt(self, control: str) -> Control | None:
        """What became of a control, or None for one that was never noted."""
        return self._receipts.get(control)

    def status(self) -> Status:
        alive, pending = self._ending.alive, list(self._interactions.pending.values())
        unanswered = any(entry.control is None for entry in pending)
        return status_of(
            self._facts, alive=alive, again=self._fallback.under_way, pending=len(pending), unanswered=unanswered
        )

    @property
    def process_generation(self) -> int:
        """Of the process that the machine is about: one that is noted and may not be launched yet."""
        return self._target.process_generation

    @property
    def between_processes(self) -> bool:
        """One is proven gone, and the next one is not noted."""
        return self._fallback.stage == "wanted" and not self._facts.ended

    @property
    def next_process(self) -> i.NextProcess | None:
        """What is to be prepared and noted, once the process before is proven gone: see `fallback.py`."""
        return None if self._facts.ended else self._fallback.want(self._target.process_generation)

    @abstractmethod
    def _session_failed(self, reason: fb.Reason, detail: str) -> None:
        """The session that was to be resumed is not there: fall back, or end."""

    # --- events ----------------------------------------------------------------------------------------------------

    def _take_all(self, drafts: Sequence[i.Draft]) -> None:
        for draft in drafts:
            self._take(draft)

    def _take(self, draft: i.Draft) -> None:
        """A draft becomes an event, unless it is one raw line too many; long deltas become several."""
        kind, body = draft.type, draft.body
        if kind in ev.DELTAS:
            text = body["text"]
            self._fallback.shown = True
            if len(text) > DELTA_CHARS_MAX:
                for start in range(0, len(text), DELTA_CHARS_MAX):
                    piece = text[start : start + DELTA_CHARS_MAX]
                    piece_body = {**body, "text": piece, "offset": body["offset"] + start}
                    self._number(kind, self._redactor.delta(kind, piece_body))
                return
            self._number(kind, self._redactor.delta(kind, body))
            return
        if kind == ev.RAW:
            body = self._redactor.body(kind, body)  # before it is kept to explain a failure
            if not self._noise.admits(body):
                return
        elif kind == ev.INTERACTION_REQUESTED:
            if self._interactions.knows(body["interaction"]):
                return
            offered = self._interactions.requested(body, self._at)
            body = body if offered is None else {**body, "offered": offered}
        elif kind == ev.SESSION_BOUND:
            session = body["native_session"]
            if self.launch.resume and session != self.launch.session:
                self._session_failed("not_resumed", f"the agent began the session {session} in its place")
                return  # the conversation's session is still the other one
            self._facts.native_session, self._facts.resumable = session, bool(body.get("resumable"))
            self._facts.cli_version = body.get("cli_version") or self._facts.cli_version
        elif kind == ev.TOOL_STARTED:
            self._facts.tools[body["tool"]] = str(body.get("name") or "tool")
        elif kind == ev.TOOL_COMPLETED:
            name = self._facts.tools.pop(body["tool"], None)
            if name is not None and self._stop.drain and body.get("status") != "ok":
                # A CLI that was told to go kills its tools, and may call that an error: it was cut.
                self._facts.interrupted.append(name)
                body = {**body, "status": "interrupted"}
        self._fallback.shown = self._fallback.shown or kind in fb.SHOWN
        self._emit(kind, body)

    def _emit(self, kind: str, body: dict[str, Any]) -> None:
        """Whatever is no delta, without secrets."""
        if kind == ev.TOOL_COMPLETED:
            self._tell_held(kind, body)
        self._number(kind, self._redactor.body(kind, body))

    def _tell_held(self, kind: str = "", body: Mapping[str, Any] | None = None) -> None:
        for held_kind, held in self._redactor.flush(kind, body):
            self._number(held_kind, held)

    def _number(self, kind: str, body: dict[str, Any]) -> None:
        facts = self._facts
        facts.turn = facts.turn or kind in _OF_A_TURN
        facts.ordinal += 1
        out = self._out
        out.append((Event.made(facts.ordinal, self._at, kind, body), Position(facts.last_record, len(out))))
