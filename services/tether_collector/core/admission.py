"""May a control be taken now? Asked before it is journaled, and again when its note is applied, as a race may lie
between: of two answers in the same millisecond both are admitted, and the second note is refused by name.

    target     another tenant, workspace or conversation → TARGET_UNKNOWN; another generation → TARGET_STALE
    answer     never asked → TARGET_UNKNOWN; answered or closed before → INTERACTION_SETTLED (names the winner)
    interject  the agent cannot → CAPABILITY_MISSING
    all        between two processes of the execution → RUNTIME_UNAVAILABLE, to be asked again
               the response is over, or being stopped → SESSION_STREAM_NOT_ACTIVE{ended}; a stop is always taken,
               as is the drain of the sandbox
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from tether.control import AnswerPayload, InterjectPayload
from tether.errors import Code, InvalidError, Problem, problem
from tether.ids import ExecutionTarget
from tether.prompt import invalid
from tether_collector.core.adapters import base as b
from tether_collector.core.interactions import Interactions

_MARK: Final = re.compile(r"\[redacted:[A-Za-z][A-Za-z0-9_-]{0,63}\]")


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a control cannot be taken now. `problem.context` names the current target, or the winning control."""

    problem: Problem

    @property
    def code(self) -> Code:
        return self.problem.code


@dataclass(frozen=True, slots=True)
class Now:
    """What admission looks at."""

    adapter: b.Adapter
    adapter_state: dict[str, Any]
    interactions: Interactions
    response_over: bool
    process_gone: bool
    stopping: bool
    stdin_closed: bool
    ended: bool
    between_processes: bool = False


def check_target(current: ExecutionTarget, target: ExecutionTarget | None, verb: str) -> Rejection | None:
    if target is None:
        return Rejection(InvalidError("target", f"is required for {verb}").problem)
    field = current.differs(target)
    if field is None:
        return None
    detail = f"{field} is not that of the running execution"
    if field in ("tenant", "workspace", "conversation"):
        return Rejection(problem(Code.TARGET_UNKNOWN, detail, retryable=False))
    return Rejection(problem(Code.TARGET_STALE, detail, target=current.model_dump(mode="json")))


def judge(now: Now, verb: str, payload: Mapping[str, Any]) -> Rejection | None:
    try:
        match verb:
            case "answer":
                return _answer(now, AnswerPayload.model_validate(dict(payload)))
            case "interject":
                InterjectPayload.model_validate(dict(payload))
                if not now.adapter.can_interject:
                    detail = f"{now.adapter.name} takes no prompt while a turn runs"
                    return Rejection(problem(Code.CAPABILITY_MISSING, detail, verb=verb))
                return _active(now)
            case "interrupt":
                return _active(now)
            case "stop" | "drain":
                return _not_active("the execution has ended", ended=True) if now.ended else None
            case _:
                return Rejection(problem(Code.CAPABILITY_MISSING, f"an execution takes no {verb[:64]}"))
    except ValidationError as error:
        return Rejection(invalid(error, "payload").problem)
    except InvalidError as error:
        return Rejection(error.problem)


def answer_of(payload: AnswerPayload) -> b.Answer:
    return b.Answer(payload.interaction, payload.decision, payload.text, payload.input, payload.answers)


def _answer(now: Now, answer: AnswerPayload) -> Rejection | None:
    key = answer.interaction
    if not now.interactions.knows(key):
        detail = "no such interaction was asked"
        return Rejection(problem(Code.TARGET_UNKNOWN, detail, retryable=False, interaction=key))
    winner = now.interactions.settled_by(key)
    if winner is not None:
        detail = "the interaction was settled before"
        if not winner:
            return Rejection(problem(Code.INTERACTION_SETTLED, detail, interaction=key))
        return Rejection(problem(Code.INTERACTION_SETTLED, f"{detail} by {winner}", interaction=key, control=winner))
    if answer.input is not None and _MARK.search(json.dumps(answer.input)) is not None:
        detail = "has a mark in place of a secret that was redacted; answer without input, or give the value itself"
        raise InvalidError("payload.input", detail)
    inactive = _active(now)
    if inactive is None:
        now.adapter.answer(now.adapter_state, answer_of(answer))  # raises InvalidError for one that does not fit
    return inactive


def _active(now: Now) -> Rejection | None:
    if now.response_over:
        return _not_active("the response has ended", ended=True)
    if now.between_processes:
        detail = "the agent's session could not be resumed; its next process is being prepared"
        return Rejection(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=True))
    if now.process_gone:
        return _not_active("the process has ended", ended=False)
    if now.stopping:
        return _not_active("the execution is being stopped", ended=False)
    if now.stdin_closed:
        return _not_active("the agent's stdin is closed", ended=False)
    return None


def _not_active(detail: str, *, ended: bool) -> Rejection:
    return Rejection(problem(Code.SESSION_STREAM_NOT_ACTIVE, detail, ended=ended))
