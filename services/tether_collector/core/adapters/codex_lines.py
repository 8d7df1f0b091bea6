"""What the app server's notifications and responses mean: each method is mapped below or ignored by name.

    turn/started ─▶ item/started ─▶ deltas ─▶ item/completed ─▶ … ─▶ turn/completed{completed|interrupted|failed}
                          │ error{willRetry}: the open message's deltas are void (text.discarded)
                          │ a prompt was steered in: the open message was cut there (text.completed, partial)

A message's text is told by its deltas and once more by its completed item, which is what counts. A segment is the
item's id, with a number where the same item begins anew. Items of another thread (a subagent's) get the tool call that
began it as `parent`; its turns are background work, its usage is in no total of ours.

Usage comes as the thread's total after each model request, and for a resumed thread once at the start: a turn's own is
the growth since the turn before. There is no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import codex_items as items
from tether_collector.core.adapters import codex_turns as turns
from tether_collector.core.adapters import segments as seg
from tether_collector.core.adapters.codex_turns import REFUSED
from tether_collector.core.adapters.codex_wire import DENY, HISTORY, INITIALIZE, RPC, THREAD, TURN, State
from tether_collector.core.adapters.jsonrpc import INTERNAL_ERROR, Failure, Notification, Response
from tether_collector.core.inputs import Draft

__all__ = ["REFUSED"]

Params = Mapping[str, Any]
_NOTHING: Final = b.Reading()
_NOT_FOUND: Final = ("no rollout found for thread id", "invalid session id", "thread not found")
_BUSY: Final = "already has an active writer"

# Known and without a meaning for the log; the reason is for whoever reads this.
IGNORED: Final[dict[str, str]] = {
    "thread/started": "the response to thread/start says the same",
    "thread/status/changed": "idle, active and waiting follow from turns and requests",
    "thread/readState/changed": "of the product's own screen",
    "thread/archived": "never asked for",
    "thread/deleted": "never asked for",
    "thread/unarchived": "never asked for",
    "thread/closed": "the exit says so",
    "thread/reverted": "never asked for",
    "thread/name/updated": "a title for a list of threads",
    "thread/section/changed": "of the product's own screen",
    "thread/attachment/updated": "of the product's own screen",
    "thread/goal/updated": "of the product's own screen",
    "thread/goal/cleared": "of the product's own screen",
    "thread/prediction/updated": "a hint for the product's own screen",
    "thread/queue/changed": "prompts are steered, not queued",
    "thread/project/updated": "of the product's own screen",
    "thread/settings/updated": "settings that were sent",
    "thread/compacted": "the model's context was compacted; nothing that was said changes",
    "thread/environment/connected": "of remote environments",
    "thread/environment/disconnected": "of remote environments",
    "project/changed": "of the product's own screen",
    "skills/changed": "the user's own skills",
    "hook/started": "the user's own hooks",
    "hook/completed": "the user's own hooks",
    "turn/diff/updated": "the changes of the turn's file changes, which are told",
    "turn/plan/updated": "the plan tool's list, for a screen",
    "turn/moderationMetadata": "of the product's own screen",
    "item/autoApprovalReview/started": "the decision shows in its item",
    "item/autoApprovalReview/completed": "the decision shows in its item",
    "autoApprovalReview/strictReviewRequired": "the request that follows is told",
    "item/commandExecution/terminalInteraction": "what the model typed into its command",
    "item/fileChange/patchUpdated": "the item has the whole change",
    "item/reasoning/summaryPartAdded": "the summary's parts are told by their deltas",
    "item/mcpToolCall/progress": "a tool's result comes with its item",
    "mcpServer/startupStatus/updated": "the user's own servers; a tool of one that failed is not offered",
    "mcpServer/oauthLogin/completed": "never asked for",
    "mcpServer/event/stream/notification": "never asked for",
    "account/updated": "no account is used",
    "account/login/completed": "never asked for",
    "account/rateLimits/updated": "the account's quota; a refused request shows as a retry or a failure",
    "account/gatewayOAuth/changed": "never asked for",
    "app/list/updated": "of the product's own screen",
    "remoteControl/status/changed": "of the remote product",
    "externalAgentConfig/import/progress": "never asked for",
    "externalAgentConfig/import/completed": "never asked for",
    "fs/changed": "never asked for",
    "model/rerouted": "another model answers; usage names the one that was asked for",
    "model/verification": "of the product's own screen",
    "model/safetyBuffering/updated": "of the product's own screen",
    "modelProvider/authRecoveryStarted": "a retry follows, and is told",
    "modelProvider/authRecoveryCompleted": "a retry follows, and is told",
    "warning": "a hint for the CLI's own screen",
    "guardianWarning": "a hint for the CLI's own screen",
    "configWarning": "a hint for the CLI's own screen",
    "deprecationNotice": "a hint for the CLI's own screen",
}


def initial(
    prompt_id: str, opening: list[dict[str, Any]], thread: dict[str, Any], key_source: str | None = None
) -> State:
    """The state of one process. Keys are strings and values JSON, as it is dumped."""
    return {
        "prompt": prompt_id,
        "opening": opening,  # the first prompt, until its turn was asked for
        "start": thread,  # params of thread/start or thread/resume
        "thread": None,
        "bound": None,  # the body of session.bound, once the thread is known
        "resumable": False,
        "turn": None,  # the running turn of the thread
        "last_turn": None,
        "calls": {INITIALIZE: "initialize"},  # our requests without a response: id → kind
        "later": [],  # prompts that wait for the thread: control, input
        "waiting": {},  # prompts that no item has shown: control → turn they were given to, or None
        "interrupts": [],  # interrupts that wait for the turn
        "segments": {},
        "begun": {},  # how often a text's item of this id began, within the turn
        "tools": {},  # running: id → characters of output so far, parent
        "ended": [],  # tools that ended with their turn, before they did
        "changes": {},  # of file changes that run: what an approval is asked for
        "asks": {},
        "usage": {"base": None, "now": None},  # the thread's totals: at the turn's beginning, at last
        "auth": False,
        "key_source": key_source,
        "children": {},  # another thread → the tool call that began it
        "background": [],  # other threads with a running turn
        "cleaning": None,
        "replies": 0,
    }


def turn_start(state: State, identifier: str, prompt: str, given: list[dict[str, Any]]) -> bytes:
    state["calls"][identifier] = "turn"
    state["waiting"][prompt] = None
    params = {"threadId": state["thread"], "input": given, "clientUserMessageId": prompt}
    return RPC.request(identifier, "turn/start", params)


def turn_interrupt(state: State, control: str) -> bytes:
    state["calls"][control] = "interrupt"
    turn = state["turn"] or state["last_turn"] or ""
    return RPC.request(control, "turn/interrupt", {"threadId": state["thread"] or "", "turnId": turn})


def notified(state: State, message: Notification) -> b.Reading | str:
    handler = _HANDLERS.get(message.method)
    if handler is not None:
        return handler(state, message.params)
    is_known = message.method in IGNORED or message.method.startswith("thread/realtime/")
    return _NOTHING if is_known else "unknown method"


def close_all(state: State) -> b.Reading:
    """The process is gone: end what it left open."""
    over = "the process ended"
    drafts = [*seg.cut(state["segments"]), *items.end_tools(state, over)]
    for thread in state["background"]:
        drafts.append(Draft(ev.BACKGROUND, {"id": thread, "state": "completed", "description": over}))
    state["background"] = []
    return b.Reading(drafts)


# --- responses to our requests ---------------------------------------------------------------------------------------


def answered(state: State, message: Response) -> b.Reading | str:
    identifier = message.id if isinstance(message.id, str) else ""
    kind = state["calls"].pop(identifier, None)
    if kind is None:
        is_ours = identifier.startswith(DENY)  # a text that came too late for its turn is lost with it
        return _NOTHING if is_ours else "a response to no request of ours"
    if message.error is not None:
        return _refused(state, kind, identifier, message.error)
    result = message.result if isinstance(message.result, Mapping) else {}
    match kind:
        case "initialize":
            state["calls"][THREAD] = "thread"
            method = "thread/resume" if "threadId" in state["start"] else "thread/start"
            data = RPC.notification("initialized") + RPC.request(THREAD, method, state["start"])
            return b.Reading((), (b.Reply(THREAD, data),))
        case "thread":
            return _thread(state, result)
        case "history":
            return b.Reading((), _first_turn(state))
        case "turn":
            return _turn_given(state, identifier, result)
        case "interrupt":
            return b.Reading((), (b.InterruptSeen(identifier),))
        case _:  # clean
            return b.Reading((), turns.cleaned(state, identifier))


def _refused(state: State, kind: str, identifier: str, error: Failure) -> b.Reading:
    detail = f"{error.message} ({error.code})"
    match kind:
        case "interrupt":  # there was nothing to interrupt
            return b.Reading((), (b.InterruptSeen(identifier),))
        case "clean":
            return b.Reading((), turns.cleaned(state, identifier))
        case "turn" if identifier != TURN:
            state["waiting"].pop(identifier, None)
            return b.Reading((), (b.PromptRefused(identifier, detail),))
        case "thread" if error.message.startswith(_NOT_FOUND):
            return b.Reading((), (b.SessionFailed("not_found", error.message),))
        case "thread" if _BUSY in error.message:
            return b.Reading((), (b.SessionFailed("busy", error.message),))
    state["opening"] = None
    state["waiting"].pop(state["prompt"], None)  # what was said after it may still get its turn
    later = [b.PromptRefused(control, detail) for control, _ in state["later"]]
    state["later"] = []
    return b.Reading((), (*later, b.TurnEnded("failed", turns.AGENT_ERROR, f"{kind}: {detail}")))


def _thread(state: State, result: Params) -> b.Reading:
    """The thread is there: the first prompt's turn is asked for, and those of whoever came meanwhile."""
    told = result.get("thread")
    thread: Params = told if isinstance(told, Mapping) else {}
    session = lines.id_of(thread.get("id"))
    if session is None:
        return _refused(state, "thread", THREAD, Failure(INTERNAL_ERROR, "the CLI made a thread without an id"))
    state["thread"] = session
    state["resumable"] = "threadId" in state["start"]
    bound: dict[str, Any] = {"native_session": session}
    for field, value in (
        ("cli_version", thread.get("cliVersion")),
        ("model", result.get("model") or thread.get("model")),
        ("cwd", result.get("cwd") or thread.get("cwd")),
    ):
        if (text := lines.text_of(value, lines.NAME_CHARS if field != "cwd" else lines.DETAIL_CHARS)) is not None:
            bound[field] = text
    state["bound"] = bound
    told = Draft(ev.SESSION_BOUND, {**bound, "resumable": state["resumable"]})
    history = state.pop("inject", None)
    if history is None:
        return b.Reading((told,), _first_turn(state))
    state["calls"][HISTORY] = "history"
    data = RPC.request(HISTORY, "thread/inject_items", {"threadId": session, "items": history})
    return b.Reading((told,), (b.Reply(HISTORY, data, work=True),))


def _first_turn(state: State) -> list[b.Signal]:
    """The thread has everything that the first turn follows on."""
    opening, state["opening"] = state["opening"], None
    signals: list[b.Signal] = [b.Reply(TURN, turn_start(state, TURN, state["prompt"], opening or []), work=True)]
    for control, given in state["later"]:
        signals.append(b.Reply(control, turn_start(state, control, control, given), work=True))
    state["later"] = []
    return signals


def _turn_given(state: State, identifier: str, result: Params) -> b.Reading:
    """To which turn a prompt was given: a new one, or the running one."""
    prompt = state["prompt"] if identifier == TURN else identifier
    turn = result.get("turn")
    if prompt in state["waiting"] and isinstance(turn, Mapping):
        state["waiting"][prompt] = lines.id_of(turn.get("id"))
    return _NOTHING  # its item shows that it was taken up


# --- turns -----------------------------------------------------------------------------------------------------------


def _is_ours(state: State, params: Params) -> bool:
    return state["thread"] is not None and params.get("threadId") == state["thread"]


def _turn_started(state: State, params: Params) -> b.Reading | str:
    turn = params.get("turn")
    identifier = lines.id_of(turn.get("id")) if isinstance(turn, Mapping) else None
    if identifier is None:
        return "turn/started without its fields"
    if not _is_ours(state, params):
        return turns.child_began(state, params)
    state["turn"], state["begun"] = identifier, {}
    turns.count_from_here(state)
    signals: list[b.Signal] = [b.TurnBegan()]
    for control in state["interrupts"]:
        signals.append(b.Reply(control, turn_interrupt(state, control)))
    state["interrupts"] = []
    return b.Reading((), signals)


def _turn_completed(state: State, params: Params) -> b.Reading | str:
    turn = params.get("turn")
    if not isinstance(turn, Mapping):
        return "turn/completed without its fields"
    if not _is_ours(state, params):
        return turns.child_ended(state, params)
    return turns.ended(state, turn)


def _error(state: State, params: Params) -> b.Reading | str:
    if not isinstance(params.get("error"), Mapping):
        return "error without its fields"
    if not _is_ours(state, params):
        return _NOTHING  # of a subagent, whose tool call tells its end
    return turns.failed_request(state, params["error"], will_retry=params.get("willRetry") is True)


def _token_usage(state: State, params: Params) -> b.Reading | str:
    usage = params.get("tokenUsage")
    if not isinstance(usage, Mapping) or not isinstance(usage.get("total"), Mapping):
        return "thread/tokenUsage/updated without its fields"
    if not _is_ours(state, params):
        return _NOTHING
    return turns.used(state, params.get("turnId"), usage)


# --- items -----------------------------------------------------------------------------------------------------------


def _parent(state: State, params: Params) -> str | None:
    """The tool call that an item of another thread belongs to."""
    if _is_ours(state, params):
        return None
    thread = lines.id_of(params.get("threadId")) or "another thread"
    parent: str = state["children"].get(thread, thread)
    return parent


def _item(params: Params) -> tuple[Params, str] | None:
    item = params.get("item")
    if not isinstance(item, Mapping):
        return None
    identifier = lines.id_of(item.get("id"))
    return None if identifier is None else (item, identifier)


def _item_started(state: State, params: Params) -> b.Reading | str:
    found = _item(params)
    if found is None:
        return "item/started without its fields"
    item, identifier = found
    if item.get("type") == "userMessage":
        return _prompt_item(state, item, params)
    return items.started(state, item, identifier, _parent(state, params))


def _item_completed(state: State, params: Params) -> b.Reading | str:
    found = _item(params)
    if found is None:
        return "item/completed without its fields"
    item, identifier = found
    parent = _parent(state, params)
    reading = items.completed(state, item, identifier, parent)
    if isinstance(reading, str) or parent is not None or state["resumable"]:
        return reading
    state["resumable"] = True  # the first completed item: the session's file is there
    bound = Draft(ev.SESSION_BOUND, {**(state["bound"] or {}), "resumable": True})
    return b.Reading((*reading.drafts, bound), reading.signals)


def _prompt_item(state: State, item: Params, params: Params) -> b.Reading:
    """A prompt is taken up. What was streaming when it was steered in ends there."""
    if not _is_ours(state, params):
        return _NOTHING
    prompt = item.get("clientId")
    drafts = seg.cut(state["segments"], lambda _key, entry: entry["parent"] is None)
    if not isinstance(prompt, str) or prompt not in state["waiting"]:
        return b.Reading(drafts)
    del state["waiting"][prompt]
    return b.Reading(drafts, (b.PromptTaken(prompt),))


def _delta(state: State, params: Params) -> b.Reading | str:
    return _text_delta(state, params, seg.TEXT, "")


def _summary_delta(state: State, params: Params) -> b.Reading | str:
    return _text_delta(state, params, seg.REASONING, f"/s{lines.count_of(params.get('summaryIndex'))}")


def _reasoning_delta(state: State, params: Params) -> b.Reading | str:
    return _text_delta(state, params, seg.REASONING, f"/c{lines.count_of(params.get('contentIndex'))}")


def _text_delta(state: State, params: Params, kind: str, part: str) -> b.Reading | str:
    item, text = lines.id_of(params.get("itemId")), params.get("delta")
    if item is None or not isinstance(text, str):
        return "a delta without its fields"
    if not text:
        return _NOTHING
    segment = items.segment_of(state, item) + part
    entry = seg.open_segment(state["segments"], segment, kind, _parent(state, params), item)
    return b.Reading((seg.delta(entry, segment, text),))


def _output_delta(state: State, params: Params) -> b.Reading | str:
    tool, text = lines.id_of(params.get("itemId")), params.get("delta")
    if tool is None or not isinstance(text, str):
        return "a delta without its fields"
    if tool not in state["tools"]:
        return _NOTHING  # of a command whose turn has ended
    entry = state["tools"][tool]
    offset, entry["chars"] = entry["chars"], entry["chars"] + len(text)
    return b.Reading((Draft(ev.TOOL_PROGRESS, {"tool": tool, "text": text, "offset": offset}),))


def _resolved(state: State, params: Params) -> b.Reading | str:
    """A request of the server's is settled: by our answer where one was written, else by the CLI itself."""
    request = params.get("requestId")
    settled = [key for key, ask in state["asks"].items() if ask["request"] == request]
    for key in settled:
        del state["asks"][key]
    return b.Reading((), [seen for key in settled for seen in b.answered_or_withdrawn(key)])


_HANDLERS: Final[dict[str, Callable[[State, Params], b.Reading | str]]] = {
    "turn/started": _turn_started,
    "turn/completed": _turn_completed,
    "error": _error,
    "thread/tokenUsage/updated": _token_usage,
    "item/started": _item_started,
    "item/completed": _item_completed,
    "item/agentMessage/delta": _delta,
    "item/plan/delta": _delta,
    "item/reasoning/summaryTextDelta": _summary_delta,
    "item/reasoning/textDelta": _reasoning_delta,
    "item/commandExecution/outputDelta": _output_delta,
    "item/fileChange/outputDelta": _output_delta,
    "serverRequest/resolved": _resolved,
}
