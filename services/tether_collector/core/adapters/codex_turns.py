"""How a turn of Codex ends, what its model requests came to, and what it used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import codex_items as items
from tether_collector.core.adapters import segments as seg
from tether_collector.core.adapters.codex_wire import CLEAN, RPC, State, reply_id
from tether_collector.core.inputs import Draft

MODEL_AUTH: Final = "model_auth"
MODEL_ERROR: Final = "model_error"
AGENT_ERROR: Final = "agent_error"
REFUSED: Final = "the model server refused the key"  # said by the command that reads it, when it is asked again
_NOTHING: Final = b.Reading()
_AUTH_STATUS: Final = (401, 403)
_OF_THE_AGENT: Final = ("sandboxError", "threadRollbackFailed", "tooManyDenials", "inferenceHookDenied")
_ATTEMPT: Final = re.compile(r"(\d{1,6})/(\d{1,6})$")
_OUTCOMES: Final[dict[str, Any]] = {"completed": "completed", "interrupted": "interrupted", "failed": "failed"}
_TOTALS: Final = ("inputTokens", "cachedInputTokens", "cacheWriteInputTokens", "outputTokens")


def ended(state: State, turn: Mapping[str, Any]) -> b.Reading | str:
    """The thread's turn is over: everything that it left open ends with it."""
    identifier, status = lines.id_of(turn.get("id")), turn.get("status")
    outcome = _OUTCOMES.get(status) if isinstance(status, str) else None
    if identifier is None or outcome is None:
        return "turn/completed without its fields"
    verdict = _verdict(state, outcome, turn.get("error"))
    if outcome == "failed":
        drafts = seg.discard(state["segments"], lambda _key, entry: entry["parent"] is None)
    else:
        drafts = seg.cut(state["segments"], lambda _key, entry: entry["parent"] is None)
    left = items.end_tools(state, "the turn ended before it", lambda parent: parent is None)
    drafts += left
    if (usage := _usage_of(state, identifier)) is not None:
        drafts.append(Draft(ev.USAGE, usage))
    body: dict[str, Any] = {"turn": identifier, "outcome": outcome}
    if verdict.code is not None:
        body["reason"] = verdict.code
    if verdict.detail is not None:
        body["detail"] = verdict.detail
    if duration_ms := lines.count_of(turn.get("durationMs")):
        body["duration_ms"] = duration_ms
    drafts.append(Draft(ev.TURN_COMPLETED, body))
    signals: list[b.Signal] = [b.AnswerSeen(key, "cancelled") for key in state["asks"]]
    signals += _dropped_prompts(state, identifier, outcome)
    state["asks"], state["turn"], state["last_turn"], state["auth"] = {}, None, identifier, False
    if left:
        signals += _clean(state)
    return b.Reading(drafts, (*signals, verdict))


def _verdict(state: State, outcome: Any, error: Any) -> b.TurnEnded:
    if outcome != "failed":
        return b.TurnEnded(outcome)
    error = error if isinstance(error, Mapping) else {}
    text = lines.detail_of(error.get("message"))
    if state["auth"] or _is_auth(error):
        return b.TurnEnded("failed", MODEL_AUTH, b.refused_key(state["key_source"]))
    info = error.get("codexErrorInfo")
    is_agents = info in _OF_THE_AGENT if isinstance(info, str) else False
    return b.TurnEnded("failed", AGENT_ERROR if is_agents else MODEL_ERROR, text)


def _dropped_prompts(state: State, turn: str, outcome: str) -> list[b.Signal]:
    """An interrupted turn takes along what was steered into it and not yet taken up: no turn of its own follows."""
    if outcome != "interrupted":
        return []
    dropped = [control for control, given in state["waiting"].items() if given == turn]
    for control in dropped:
        del state["waiting"][control]
    return [b.PromptRefused(control, "the turn was interrupted before the prompt was taken up") for control in dropped]


def _clean(state: State) -> list[b.Signal]:
    """A command that the turn left running is ended before anything else; waited for, for a moment."""
    identifier = reply_id(state, CLEAN)
    state["calls"][identifier] = "clean"
    state["cleaning"] = identifier
    data = RPC.request(identifier, "thread/backgroundTerminals/clean", {"threadId": state["thread"]})
    return [b.Reply(identifier, data), background_now(state)]


def cleaned(state: State, identifier: str) -> list[b.Signal]:
    if state["cleaning"] == identifier:
        state["cleaning"] = None
    return [background_now(state)]


def background_now(state: State) -> b.BackgroundChanged:
    return b.BackgroundChanged(len(state["background"]), 0 if state["cleaning"] is None else 1)


# --- model requests --------------------------------------------------------------------------------------------------


def failed_request(state: State, error: Mapping[str, Any], *, will_retry: bool) -> b.Reading:
    """What the failed attempt had streamed is void."""
    drafts = seg.discard(state["segments"], lambda _key, entry: entry["parent"] is None)
    body: dict[str, Any] = {"state": "retrying" if will_retry else "failed"}
    message = lines.detail_of(error.get("message")) or ""
    if will_retry and (attempt := _ATTEMPT.search(message)):
        body["attempt"], body["attempts_max"] = int(attempt[1]), int(attempt[2])
    if (status := _status(error)) is not None:
        body["http_status"] = status
    detail = lines.detail_of(error.get("additionalDetails")) or message
    if _is_auth(error):
        state["auth"] = True
        body.setdefault("http_status", 401)
        detail = b.refused_key(state["key_source"])
    if detail:
        body["detail"] = detail
    return b.Reading([*drafts, Draft(ev.MODEL_REQUEST, body)])


def _status(error: Mapping[str, Any]) -> int | None:
    info = error.get("codexErrorInfo")
    for told in info.values() if isinstance(info, Mapping) else ():
        if isinstance(told, Mapping) and (status := lines.count_of(told.get("httpStatusCode"))):
            return status
    return None


def _is_auth(error: Mapping[str, Any]) -> bool:
    if error.get("codexErrorInfo") == "unauthorized" or _status(error) in _AUTH_STATUS:
        return True
    return any(REFUSED in text for key in ("message", "additionalDetails") if isinstance(text := error.get(key), str))


# --- usage -----------------------------------------------------------------------------------------------------------


def count_from_here(state: State) -> None:
    """A turn begins: its own usage is what comes on top of the total so far."""
    usage = state["usage"]
    usage["base"] = usage["now"]


def used(state: State, turn: Any, told: Mapping[str, Any]) -> b.Reading:
    """The total after a model request, or, for a resumed thread, of the turns before."""
    usage = state["usage"]
    usage["now"] = _totals(told["total"])
    is_current = state["turn"] is not None and turn == state["turn"]
    if not is_current:
        usage["base"] = usage["now"]
        return _NOTHING
    if usage["base"] is None:  # the first request of this process, in a thread whose total nobody told
        last = _totals(told["last"]) if isinstance(told.get("last"), Mapping) else usage["now"]
        usage["base"] = {name: max(0, usage["now"][name] - last[name]) for name in _TOTALS}
    return b.Reading((Draft(ev.MODEL_REQUEST, {"state": "completed"}),))


def _totals(told: Mapping[str, Any]) -> dict[str, int]:
    return {name: lines.count_of(told.get(name)) for name in _TOTALS}


def _usage_of(state: State, turn: str) -> dict[str, Any] | None:
    """The turn's own; None where no model request of it came to an end. Cached input is told apart, as elsewhere."""
    base, now = state["usage"]["base"], state["usage"]["now"]
    if base is None or now is None or base == now:
        return None
    own = {name: max(0, now[name] - base[name]) for name in _TOTALS}
    cached = own["cachedInputTokens"] + own["cacheWriteInputTokens"]
    state["usage"]["base"] = now
    body: dict[str, Any] = {
        "turn": turn,
        "input_tokens": max(0, own["inputTokens"] - cached),
        "output_tokens": own["outputTokens"],
        "cache_read_tokens": own["cachedInputTokens"],
        "cache_write_tokens": own["cacheWriteInputTokens"],
    }
    model = (state["bound"] or {}).get("model")
    return body if model is None else {**body, "model": model}


# --- other threads ---------------------------------------------------------------------------------------------------


def child_began(state: State, params: Mapping[str, Any]) -> b.Reading:
    """A subagent's turn: work in the background until it ends."""
    thread = lines.id_of(params.get("threadId"))
    if thread is None or thread in state["background"]:
        return _NOTHING
    state["background"].append(thread)
    draft = Draft(ev.BACKGROUND, {"id": thread, "state": "started", "description": "a subagent's turn"})
    return b.Reading((draft,), (background_now(state),))


def child_ended(state: State, params: Mapping[str, Any]) -> b.Reading:
    thread = lines.id_of(params.get("threadId"))
    if thread is None or thread not in state["background"]:
        return _NOTHING
    state["background"].remove(thread)
    parent = state["children"].get(thread, thread)
    drafts = seg.cut(state["segments"], lambda _key, entry: bool(entry["parent"] == parent))
    drafts += items.end_tools(state, "the subagent's turn ended before it", lambda of: of == parent)
    drafts.append(Draft(ev.BACKGROUND, {"id": thread, "state": "completed"}))
    return b.Reading(drafts, (background_now(state),))
