"""The scripted agent (`tools/scripted_agent`), our own CLI with a small script language: one JSON object a line.

Its vocabulary is close to Tether's, so this is also the shortest example of an adapter. What needs thought:

* A prompt that comes while a turn runs is `queued` (a turn of its own follows) or `steered` into the running turn.
  A steered one is taken when the turn's steps are over (`model completed`); after a turn that ended otherwise it may
  still get a turn of its own, which is waited for.
* Usage comes once per turn, before the result, and names the prompt: that is the turn's id.
* `resumed: false`: the session is another one, whatever its id. The history of a lost one goes with the prompt, apart.
* Background jobs begin no turns by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import segments as seg
from tether_collector.core.history import digest_text
from tether_collector.core.inputs import Draft, OutputLine

OPENING: Final = "opening:prompt"
_STATUS: Final = {"ok": "completed", "error": "failed", "interrupted": "interrupted"}
_MODEL: Final = ("started", "retrying", "failed", "completed")  # a tuple: what is looked up may be unhashable
_SESSION_ERRORS: Final[dict[str, Any]] = {
    "session_not_found": "not_found",
    "invalid_session_id": "not_found",
    "session_exists": "busy",
    "session_busy": "busy",
}

State = dict[str, Any]
Line = dict[str, Any]


class Scripted:
    """See the module."""

    name = "scripted"
    version = "1"
    can_interject = True
    secret_descriptors: Mapping[str, str] = {}

    def argv(self, launch: b.Launch, binary: Sequence[str]) -> list[str]:
        return [*binary, "--resume" if launch.resume else "--session-id", launch.session, *launch.args]

    def environment(self, launch: b.Launch) -> dict[str, str]:
        return {"TETHER_SCRIPTED_HOME": b.config_home(launch, self.name)}

    def initial(self, launch: b.Launch) -> State:
        return {
            "opening": launch.prompt_id,
            "bound": None,
            "resumable": False,
            "turn": None,
            "segments": {},
            "reasonings": 0,
            "tools": {},
            "asks": {},
            "steered": [],
            "background": [],
        }

    def opening(self, launch: b.Launch) -> Sequence[tuple[str, bytes]]:
        message: Line = {"type": "prompt", "id": launch.prompt_id, "text": text_of_content(launch.content)}
        if launch.history is not None:
            message["history"] = digest_text(launch.history["rows"], partial=launch.history["partial"])
        return [(OPENING, _line(message))]

    def prompt(self, state: State, control: str, content: Sequence[Mapping[str, Any]]) -> bytes | None:
        return _line({"type": "prompt", "id": control, "text": text_of_content(content)})

    def answer(self, state: State, answer: b.Answer) -> bytes:
        ask = state["asks"].get(answer.interaction)
        if ask is None:
            raise InvalidError("payload.interaction", "is not open")
        message: Line = {"type": "answer", "request": ask["request"], "decision": answer.decision}
        if answer.text is not None:
            message["text"] = answer.text
        if answer.input is not None:
            if ask["kind"] != "approval":
                raise InvalidError("payload.input", "only an approval takes a changed input")
            message["input"] = dict(answer.input)
        if answer.answers:
            unknown = sorted(set(answer.answers) - set(ask["questions"]))
            if unknown:
                known = ", ".join(ask["questions"]) or "none, it is an approval"
                raise InvalidError(f"payload.answers.{unknown[0]}", f"must be a question's id: {known}")
            message["answers"] = {key: list(labels) for key, labels in answer.answers.items()}
        return _line(message)

    def interrupt(self, state: State, control: str) -> bytes | None:
        return _line({"type": "interrupt", "id": control})

    def on_line(self, state: State, line: OutputLine) -> b.Reading:
        if line.stream == "stderr":
            return b.Reading((lines.raw(line, "stderr"),))
        message = lines.parse(line)
        if isinstance(message, str):
            return b.Reading((lines.raw(line, message),))
        kind = message.get("type")
        handler = _HANDLERS.get(kind) if isinstance(kind, str) else None
        reading = None if handler is None else handler(state, message)
        if reading is None:
            why = "unknown type" if handler is None else f"{kind} without its fields"
            return b.Reading((lines.raw(line, why),))
        return reading

    def on_exit(self, state: State, rc: int) -> b.Reading:
        drafts = seg.cut(state["segments"])
        for tool in state["tools"]:
            body = {"tool": tool, "status": "interrupted", "detail": "the process ended"}
            drafts.append(Draft(ev.TOOL_COMPLETED, body))
        drafts += [Draft(ev.BACKGROUND, {"id": job, "state": "completed"}) for job in state["background"]]
        state["tools"], state["background"] = {}, []
        return b.Reading(drafts)


def _line(message: Line) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def text_of_content(content: Sequence[Mapping[str, Any]]) -> str:
    """The text parts of a prompt, one below the other."""
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")


# --- lines: each handler gives None where required fields are missing ---------------------------------------------


def _session(state: State, line: Line) -> b.Reading | None:
    session = lines.id_of(line.get("session_id"))
    if session is None:
        return None
    if line.get("resumed") is False:
        return b.Reading((), (b.SessionFailed("not_resumed", f"the agent resumed nothing and began {session}"),))
    bound: Line = {"native_session": session, "resumable": state["resumable"]}
    if version := lines.text_of(line.get("version"), lines.NAME_CHARS):
        bound["cli_version"] = version
    state["bound"] = bound
    return b.Reading((Draft(ev.SESSION_BOUND, dict(bound)),))


def _proven(state: State, drafts: list[Draft]) -> list[Draft]:
    """The first completed item shows that the session can be resumed."""
    if state["bound"] is not None and not state["resumable"]:
        state["resumable"] = True
        drafts.append(Draft(ev.SESSION_BOUND, {**state["bound"], "resumable": True}))
    return drafts


def _turn_started(state: State, line: Line) -> b.Reading | None:
    prompt = lines.id_of(line.get("prompt"))
    state["turn"] = prompt
    owed = _unsteer(state, prompt)
    return b.Reading((), (b.TurnBegan(prompt), *owed))


def _unsteer(state: State, prompt: str | None) -> list[b.Signal]:
    if prompt in state["steered"]:
        state["steered"].remove(prompt)
        return [_background_now(state)]
    return []


def _background_now(state: State) -> b.BackgroundChanged:
    return b.BackgroundChanged(len(state["background"]), len(state["steered"]))


def _prompt_accepted(state: State, line: Line) -> b.Reading | None:
    prompt = lines.id_of(line.get("id"))
    if prompt is None:
        return None
    if line.get("mode") != "steered":
        return b.Reading((), (b.PromptSeen(prompt),))
    state["steered"].append(prompt)
    return b.Reading((), (b.PromptSeen(prompt), b.PromptTaken(prompt), _background_now(state)))


def _delta(state: State, line: Line) -> b.Reading | None:
    segment, text = lines.id_of(line.get("segment")), line.get("text")
    if segment is None or not isinstance(text, str):
        return None
    entry = seg.open_segment(state["segments"], segment, seg.TEXT, None)
    return b.Reading((seg.delta(entry, segment, text),))


def _text(state: State, line: Line) -> b.Reading | None:
    segment, text = lines.id_of(line.get("segment")), line.get("text")
    if segment is None or not isinstance(text, str):
        return None
    state["segments"].pop(segment, None)
    partial = line.get("aborted") is True
    return b.Reading(_proven(state, [seg.completed(segment, seg.TEXT, text, None, partial=partial)]))


def _discard(state: State, line: Line) -> b.Reading | None:
    segment = lines.id_of(line.get("segment"))
    if segment is None:
        return None
    return b.Reading(seg.discard(state["segments"], lambda key, _entry: key == segment))


def _reasoning(state: State, line: Line) -> b.Reading | None:
    text = line.get("text")
    if not isinstance(text, str):
        return None
    state["reasonings"] += 1
    return b.Reading((seg.completed(f"reasoning-{state['reasonings']}", seg.REASONING, text, None),))


def _tool_start(state: State, line: Line) -> b.Reading | None:
    tool = lines.id_of(line.get("id"))
    if tool is None:
        return None
    state["tools"][tool] = 0
    name = lines.text_of(line.get("name"), lines.NAME_CHARS) or ""
    return b.Reading((Draft(ev.TOOL_STARTED, {"tool": tool, "name": name, "input": line.get("input")}),))


def _tool_progress(state: State, line: Line) -> b.Reading | None:
    tool, text = lines.id_of(line.get("id")), line.get("text")
    if tool is None or not isinstance(text, str):
        return None
    offset = state["tools"].get(tool, 0)
    state["tools"][tool] = offset + len(text)
    return b.Reading((Draft(ev.TOOL_PROGRESS, {"tool": tool, "text": text, "offset": offset}),))


def _tool_end(state: State, line: Line) -> b.Reading | None:
    tool, status = lines.id_of(line.get("id")), line.get("status")
    if tool is None or status not in ("ok", "error", "interrupted"):
        return None
    state["tools"].pop(tool, None)
    body = {"tool": tool, "status": status, "output": line.get("output")}
    return b.Reading(_proven(state, [Draft(ev.TOOL_COMPLETED, body)]))


def _ask(state: State, line: Line) -> b.Reading | None:
    request, kind = line.get("request"), line.get("kind")
    interaction = lines.token_of(request)
    if interaction is None or kind not in ("approval", "question"):
        return None
    questions = _questions(line.get("questions")) if kind == "question" else []
    state["asks"][interaction] = {"request": request, "kind": kind, "questions": [entry["id"] for entry in questions]}
    body: Line = {"interaction": interaction, "kind": kind}
    if name := lines.text_of(line.get("tool"), lines.NAME_CHARS):
        body["name"] = name
    if kind == "approval":
        body["input"] = line.get("input")
    if tool := lines.id_of(line.get("tool_id")):
        body["tool"] = tool
    if questions:
        body["questions"] = questions
    return b.Reading((Draft(ev.INTERACTION_REQUESTED, body),))


def _questions(value: Any) -> list[Line]:
    questions: list[Line] = []
    for number, entry in enumerate(value if isinstance(value, list) else [], 1):
        if isinstance(entry, dict):
            options = entry.get("options")
            questions.append(
                {
                    "id": lines.id_of(entry.get("id")) or f"q{number}",
                    "question": lines.text_of(entry.get("question")) or "",
                    "options": [
                        option if isinstance(option, dict) else {"label": str(option)}
                        for option in (options if isinstance(options, list) else [])
                    ],
                    "multiple": entry.get("multi") is True,
                }
            )
    return questions


def _ask_resolved(state: State, line: Line) -> b.Reading | None:
    interaction = lines.token_of(line.get("request"))
    if interaction is None:
        return None
    state["asks"].pop(interaction, None)
    outcome: Any = "denied" if line.get("decision") == "deny" else "answered"
    return b.Reading((), (b.AnswerSeen(interaction, outcome),))


def _ask_cancelled(state: State, line: Line) -> b.Reading | None:
    interaction = lines.token_of(line.get("request"))
    if interaction is None:
        return None
    state["asks"].pop(interaction, None)
    return b.Reading((), (b.AnswerSeen(interaction, "cancelled"),))


def _interrupted(state: State, line: Line) -> b.Reading | None:
    control = lines.id_of(line.get("id"))
    return None if control is None else b.Reading((), (b.InterruptSeen(control),))


def _model(state: State, line: Line) -> b.Reading | None:
    request_state = line.get("state")
    if request_state not in _MODEL:
        return None
    body: Line = {"state": request_state}
    for name in ("attempt", "attempts_max", "delay_ms"):
        if name in line:
            body[name] = lines.count_of(line[name])
    if (detail := lines.detail_of(line.get("message", line.get("error")))) is not None:
        body["detail"] = detail
    signals: list[b.Signal] = []
    if request_state == "completed" and state["steered"]:
        state["steered"] = []  # the turn's steps are over, those of what was steered into it as well
        signals.append(_background_now(state))
    return b.Reading((Draft(ev.MODEL_REQUEST, body),), signals)


def _usage(state: State, line: Line) -> b.Reading | None:
    cost = line.get("cost_usd")
    body: Line = {
        "turn": lines.id_of(line.get("prompt")) or state["turn"] or state["opening"],
        "input_tokens": lines.count_of(line.get("input_tokens")),
        "output_tokens": lines.count_of(line.get("output_tokens")),
    }
    if isinstance(cost, int | float) and not isinstance(cost, bool):
        body["cost_usd"] = float(cost)
    return b.Reading((Draft(ev.USAGE, body),))


def _background(state: State, line: Line) -> b.Reading | None:
    job = lines.id_of(line.get("id"))
    if job is None or line.get("state") not in ("started", "done"):
        return None
    jobs: list[str] = state["background"]
    if line["state"] == "started":
        if job not in jobs:
            jobs.append(job)
    elif job in jobs:
        jobs.remove(job)
    told = "started" if line["state"] == "started" else "completed"
    return b.Reading((Draft(ev.BACKGROUND, {"id": job, "state": told}),), (_background_now(state),))


def _result(state: State, line: Line) -> b.Reading | None:
    outcome: Any = _STATUS.get(line["status"]) if isinstance(line.get("status"), str) else None
    if outcome is None:
        return None
    turn = lines.id_of(line.get("prompt")) or state["turn"] or state["opening"]
    code = lines.text_of(line.get("code"), lines.NAME_CHARS)
    detail = lines.detail_of(line.get("message"))
    body: Line = {"turn": turn, "outcome": outcome}
    if code is not None:
        body["reason"] = code
    if detail is not None:
        body["detail"] = detail
    if outcome == "failed":
        code = code or "agent_error"
    drafts = [*seg.cut(state["segments"]), Draft(ev.TURN_COMPLETED, body)]
    return b.Reading(_proven(state, drafts), (b.TurnEnded(outcome, code, detail),))


def _error(state: State, line: Line) -> b.Reading | None:
    code = line.get("code")
    reason = _SESSION_ERRORS.get(code) if isinstance(code, str) else None
    if reason is None:
        return None
    return b.Reading((), (b.SessionFailed(reason, lines.detail_of(line.get("message")) or str(code)),))


_HANDLERS: Final[dict[str, Callable[[State, Line], b.Reading | None]]] = {
    "session": _session,
    "turn.started": _turn_started,
    "prompt.accepted": _prompt_accepted,
    "delta": _delta,
    "text": _text,
    "discard": _discard,
    "reasoning": _reasoning,
    "tool.start": _tool_start,
    "tool.progress": _tool_progress,
    "tool.end": _tool_end,
    "ask": _ask,
    "ask.resolved": _ask_resolved,
    "ask.cancelled": _ask_cancelled,
    "interrupted": _interrupted,
    "model": _model,
    "usage": _usage,
    "background": _background,
    "result": _result,
    "error": _error,
}

SCRIPTED: Final = Scripted()
