"""Agents that speak the Agent Client Protocol (ACP, protocolVersion 1, JSON-RPC over stdio): `acp:<name>`.

    initialize ─▶ session/new | session/resume | session/load ─▶ mode, model ─▶ session/prompt ─▶ response = turn over
                                                                                    │ session/update, requests
                                                                                    ▼
                                                                        `acp_updates.py`, `acp_asks.py`

Each step is written when the one before was answered. What a session/load replays is dropped until its response.
How agents differ is data (`acp_rules.py`); everything here is the protocol.

* A prompt is a request, and its response ends its turn. Nothing else says that a prompt was taken up, so it counts as
  seen when the agent works and no earlier one is open. Where a second prompt breaks the first it is held back.
* session/cancel is a notification; open permission requests are answered `cancelled` with it. It is seen by the
  response of the turn. Before the first prompt was written it only prevents that.
* A session counts as resumable after its first completed item, where the agent can resume or load one.
* Keys reach the agent through its environment, which the provider fills; nothing of them is here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import acp_asks as asks
from tether_collector.core.adapters import acp_updates as updates
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import jsonrpc as rpc
from tether_collector.core.adapters.acp_rules import MODEL_AUTH, MODEL_ERROR, Profile, Refusal, member_of, profile_of
from tether_collector.core.inputs import Draft, OutputLine

State = dict[str, Any]

OPENING: Final = "opening:initialize"
PROTOCOL_VERSION: Final = 1
AGENT_ERROR: Final = "agent_error"
UNSUPPORTED: Final = "agent_unsupported"
_AUTH_REQUIRED: Final = -32000
_HTTP_STATUS: Final = re.compile(r"\b(?:api|http|status|error|code)\b[^0-9\n]{0,16}\b([45]\d\d)\b", re.IGNORECASE)
_NOTIFICATIONS_IGNORED: Final = ("_auth/status_update", "elicitation/complete")
_NAME: Final = re.compile(r"acp:[a-z0-9][a-z0-9._-]{0,58}")
_NOTHING: Final = b.Reading()
# stopReason → outcome, and why where that is not plain
_STOPPED: Final[dict[str, tuple[Any, str | None]]] = {
    "end_turn": ("completed", None),
    "cancelled": ("interrupted", None),
    "refusal": ("failed", "the model refused to go on"),
    "max_tokens": ("failed", "the model's limit of tokens was reached"),
    "max_turn_requests": ("failed", "the agent's limit of model requests in one turn was reached"),
}
_COUNTS: Final = (
    ("input_tokens", "inputTokens"),
    ("output_tokens", "outputTokens"),
    ("cache_read_tokens", "cachedReadTokens"),
    ("cache_write_tokens", "cachedWriteTokens"),
)


def is_acp(kind: str) -> bool:
    return _NAME.fullmatch(kind) is not None


class Acp:
    """See the module. One instance for each `acp:<name>`."""

    version = "1"
    can_interject = True
    # An adapter starts the CLI as a child of its own, which inherits no further descriptors.
    secret_descriptors: Mapping[str, str] = {}

    def __init__(self, name: str, profile: Profile | None = None) -> None:
        self.name = name
        self.profile = profile_of(name) if profile is None else profile

    # --- launch ------------------------------------------------------------------------------------------------------

    def argv(self, launch: b.Launch, binary: Sequence[str]) -> list[str]:
        return [*binary, *self.profile.arguments, *launch.args]

    def environment(self, launch: b.Launch) -> dict[str, str]:
        home = b.config_home(launch, self.name)
        env = {**self.profile.env, **self.profile.env_by_mode.get(launch.permission_mode or "", {})}
        return {name: value.replace("{home}", home) for name, value in env.items()}

    def initial(self, launch: b.Launch) -> State:
        return {
            **updates.initial(),
            "phase": "initialize",
            "last_id": 1,
            "requests": {rpc.key_of(1): {"step": "initialize", "control": None}},
            "replies": 0,
            "start": {
                "prompt": launch.prompt_id,
                "content": b.opening_content(launch),  # with the history of a lost session in front
                "cwd": launch.cwd,
                "session": launch.session,
                "resume": launch.resume,
                "model": launch.model,
                "mode": launch.permission_mode,
                "key_source": launch.key_source,
            },
            "session": None,
            "bound": None,  # the body of session.bound, once the session is known
            "resumable": False,
            "can_resume": False,
            "can_close": False,
            "cli_version": None,
            "setup": [],  # requests between the session and the prompt: [method, params]
            "prompts": [],  # controls whose prompts are open, the running one first
            "begun": None,
            "held": [],  # prompts that cannot be written yet
            "cancels": [],  # interrupts that no response has shown
            "asks": {},
        }

    def opening(self, launch: b.Launch) -> Sequence[tuple[str, bytes]]:
        capabilities: dict[str, Any] = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
        if self.profile.has_forms:
            capabilities["elicitation"] = {"form": {}}
        params = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": capabilities,
            "clientInfo": {"name": "tether", "title": "Tether", "version": self.version},
        }
        return [(OPENING, asks.DIALECT.request(1, "initialize", params))]

    # --- intents -----------------------------------------------------------------------------------------------------

    def prompt(self, state: State, control: str, content: Sequence[Mapping[str, Any]]) -> bytes | None:
        can_wait_there = self.profile.takes_prompts_while_running or not state["prompts"]
        if state["phase"] != "running" or state["held"] or not can_wait_there:
            state["held"].append({"control": control, "content": [dict(part) for part in content]})
            return None
        return self._prompt(state, control, content)

    def answer(self, state: State, answer: b.Answer) -> bytes:
        return asks.answer(state, answer)

    def interrupt(self, state: State, control: str) -> bytes | None:
        state["cancels"].append(control)
        if state["phase"] != "running":
            return None
        cancel = asks.DIALECT.notification("session/cancel", {"sessionId": state["session"]})
        return cancel + asks.withdraw(state)

    def _prompt(self, state: State, control: str, content: Sequence[Mapping[str, Any]]) -> bytes:
        state["prompts"].append(control)
        params = {"sessionId": state["session"], "prompt": [dict(part) for part in content]}
        return self._request(state, "session/prompt", params, "prompt", control)

    def _request(
        self, state: State, method: str, params: Mapping[str, Any], step: str, control: str | None = None
    ) -> bytes:
        state["last_id"] += 1
        state["requests"][rpc.key_of(state["last_id"])] = {"step": step, "control": control}
        return asks.DIALECT.request(state["last_id"], method, params)

    # --- lines -------------------------------------------------------------------------------------------------------

    def on_line(self, state: State, line: OutputLine) -> b.Reading:
        if line.stream == "stderr":
            is_chatter = line.data.startswith(tuple(start.encode() for start in self.profile.chatter))
            return _NOTHING if is_chatter else b.Reading((lines.raw(line, "stderr"),))
        parsed = lines.parse(line)
        message = parsed if isinstance(parsed, str) else rpc.classify(parsed)
        if isinstance(message, str):
            return b.Reading((lines.raw(line, message),))
        if isinstance(message, rpc.Request):
            return self._begun(state, asks.read(self.profile, state, message))
        reading = (
            self._notification(state, message)
            if isinstance(message, rpc.Notification)
            else self._response(state, message)
        )
        return b.Reading((lines.raw(line, reading),)) if isinstance(reading, str) else reading

    def on_exit(self, state: State, rc: int) -> b.Reading:
        drafts = updates.complete(state, partial=True)
        return b.Reading([*drafts, *updates.end_tools(state, "the process ended")])

    def _notification(self, state: State, message: rpc.Notification) -> b.Reading | str:
        if message.method != "session/update":
            return _NOTHING if message.method in _NOTIFICATIONS_IGNORED else "unknown notification"
        update = message.params.get("update")
        if not isinstance(update, Mapping):
            return "session/update without update"
        if state["phase"] in ("session", "setup"):  # a session/load replays what was said before, and may end late
            updates.note_cost(state, update)
            return _NOTHING
        if message.params.get("sessionId") != state["session"]:
            return "an update of another session"
        said = updates.read(self.profile, state, update)
        if isinstance(said, str):
            return said
        reading = b.Reading(*said)
        return self._begun(state, reading) if update.get("sessionUpdate") in updates.WORK else reading

    def _begun(self, state: State, reading: b.Reading) -> b.Reading:
        """The agent works: on the oldest prompt that is open."""
        prompts: list[str] = state["prompts"]
        if not prompts or state["begun"] == prompts[0]:
            return reading
        state["begun"] = prompts[0]
        return b.Reading(reading.drafts, [b.TurnBegan(prompts[0]), *reading.signals])

    def _response(self, state: State, message: rpc.Response) -> b.Reading | str:
        request = None if message.id is None else state["requests"].pop(rpc.key_of(message.id), None)
        if request is None:
            return "a response to nothing that was asked"
        match request["step"]:
            case "initialize":
                return self._initialized(state, message)
            case "session":
                return self._session(state, message)
            case "setup":
                return self._failed(state, message.error) if message.error is not None else self._next(state)
            case "prompt":
                return self._prompt_over(state, request["control"], message)
            case _:
                return _NOTHING

    # --- handshake ---------------------------------------------------------------------------------------------------

    def _initialized(self, state: State, message: rpc.Response) -> b.Reading:
        if message.error is not None:
            return self._failed(state, message.error)
        version = member_of(message.result, ("protocolVersion",))
        if version != PROTOCOL_VERSION:
            detail = f"the agent speaks version {str(version)[:16]} of ACP, Tether speaks {PROTOCOL_VERSION}"
            return self._refused(state, UNSUPPORTED, detail)
        offered = member_of(message.result, ("agentCapabilities",))
        session = member_of(offered, ("sessionCapabilities",))
        resumes = isinstance(member_of(session, ("resume",)), Mapping)
        loads = member_of(offered, ("loadSession",)) is True
        state["can_resume"] = self.profile.resumes and (resumes or loads)
        state["can_close"] = isinstance(member_of(session, ("close",)), Mapping)
        state["cli_version"] = lines.text_of(member_of(message.result, ("agentInfo", "version")), lines.NAME_CHARS)
        state["phase"] = "session"
        start = state["start"]
        params: dict[str, Any] = {"cwd": start["cwd"], "mcpServers": []}
        if not start["resume"]:
            method = "session/new"
        elif resumes or loads:
            method = "session/resume" if resumes else "session/load"
            params = {"sessionId": start["session"], **params}
            state["cost_before"] = None  # unless the replay tells it
        else:
            return self._session_failed(state, "not_found", "the agent can neither resume nor load a session")
        return b.Reading((), (asks.reply(state, self._request(state, method, params, "session")),))

    def _session(self, state: State, message: rpc.Response) -> b.Reading:
        start = state["start"]
        if message.error is not None:
            if start["resume"]:
                if _is_refusal(self.profile.not_found, message.error):
                    return self._session_failed(state, "not_found", _explained(message.error))
                if _is_refusal(self.profile.busy, message.error):
                    return self._session_failed(state, "busy", _explained(message.error))
            return self._failed(state, message.error)
        given = member_of(message.result, ("sessionId",))
        session = given or start["session"] if start["resume"] else given  # most name a resumed one no more
        if not isinstance(session, str) or not session:
            return self._refused(state, UNSUPPORTED, "the agent made a session without an id")
        state["session"], state["phase"] = session, "setup"
        bound: dict[str, Any] = {"native_session": session, "cwd": start["cwd"]}
        if state["cli_version"] is not None:
            bound["cli_version"] = state["cli_version"]
        if (model := _model(message.result)) is not None:
            bound["model"] = start["model"] or model
        state["bound"], state["resumable"] = bound, bool(start["resume"] and state["can_resume"])
        bound_event = Draft(ev.SESSION_BOUND, {**bound, "resumable": state["resumable"]})
        problem = self._plan_setup(state, message.result)
        following = self._next(state) if problem is None else self._refused(state, UNSUPPORTED, problem)
        return b.Reading([bound_event, *following.drafts], following.signals)

    def _plan_setup(self, state: State, result: Any) -> str | None:
        """What is to be set before the prompt; or why it cannot be."""
        start, session = state["start"], state["session"]
        wanted = self.profile.modes.get(start["mode"] or "", start["mode"])
        if wanted is not None:
            offer = _Offer.of(result, "mode", "modes", "availableModes", "currentModeId", "id")
            if offer.known and wanted not in offer.values:
                asked = start["mode"] or "default"
                offered = ", ".join(offer.values)
                return f"the agent has no mode {wanted!r} for the permission mode {asked!r}; it offers {offered}"
            if wanted != offer.current:
                state["setup"].append(offer.setting(session, wanted, "session/set_mode", "modeId"))
        if start["model"] is not None:
            offer = _Offer.of(result, "model", "models", "availableModels", "currentModelId", "modelId")
            if not offer.known:
                return "the agent does not let its model be chosen; leave `model` out"
            if start["model"] != offer.current:
                state["setup"].append(offer.setting(session, start["model"], "session/set_model", "modelId"))
        return None

    def _next(self, state: State) -> b.Reading:
        """The next step of the set-up, or the prompt."""
        if state["setup"]:
            method, params = state["setup"].pop(0)
            return b.Reading((), (asks.reply(state, self._request(state, method, params, "setup")),))
        state["phase"] = "running"
        start = state["start"]
        if start["resume"]:
            state["cost_before"] = state["cost_usd"]
        content, start["content"] = start["content"], []
        if state["cancels"]:
            body = {"turn": start["prompt"], "outcome": "interrupted", "reason": "interrupted before it began"}
            ended = b.TurnEnded("interrupted")
            after = self._after(state, ended) if state["held"] else []  # an interrupt ends one turn, not the next
            return b.Reading((Draft(ev.TURN_COMPLETED, body),), (*self._cancels_seen(state), ended, *after))
        # A written prompt is a turn: an agent whose model is silent shows nothing else of it, for minutes.
        first = asks.reply(state, self._prompt(state, start["prompt"], content), work=True)
        signals: list[b.Signal] = [first, b.TurnBegan()]
        if self.profile.takes_prompts_while_running:
            while state["held"]:
                signals.append(self._release(state))
        return b.Reading((), signals)

    def _release(self, state: State) -> b.Reply:
        held = state["held"].pop(0)
        return b.Reply(held["control"], self._prompt(state, held["control"], held["content"]), work=True)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _prompt_over(self, state: State, control: str, message: rpc.Response) -> b.Reading:
        prompts: list[str] = state["prompts"]
        was_running = prompts[:1] == [control]
        prompts.remove(control)
        ended = self._verdict(state, message)
        withdrawn = [key for key, ask in state["asks"].items() if ask["withdrawn"]] if was_running else []
        cut = ended.outcome == "interrupted" or message.error is not None
        drafts = [*updates.settle_tools(state, None), *updates.complete(state, partial=cut)]
        if not prompts:
            drafts += updates.end_tools(state, "the turn ended")
        if ended.code in (MODEL_ERROR, MODEL_AUTH):
            drafts.append(_failed_request(ended, message.error))
        drafts += self._usage(state, control, message.result)
        body: dict[str, Any] = {"turn": control, "outcome": ended.outcome}
        for name, value in (("reason", ended.code or _reason(message.result)), ("detail", ended.detail)):
            if value is not None:
                body[name] = value
        drafts.append(Draft(ev.TURN_COMPLETED, body))
        signals: list[b.Signal] = []
        if not prompts:
            for key in state["asks"]:
                signals += b.answered_or_withdrawn(key)
            state["asks"] = {}
        elif withdrawn:  # asked by the turn that was cancelled; the next one goes on
            signals += [b.AnswerSeen(key, "cancelled") for key in withdrawn]
            state["asks"] = {key: ask for key, ask in state["asks"].items() if key not in withdrawn}
        signals.append(b.PromptTaken(control))
        if was_running:
            signals += [*self._cancels_seen(state), ended, *self._after(state, ended)]
        return b.Reading(drafts, signals)

    def _after(self, state: State, ended: b.TurnEnded) -> list[b.Signal]:
        """What follows the turn that has ended: the next prompt, written already or held until now."""
        prompts: list[str] = state["prompts"]
        if prompts:
            state["begun"] = prompts[0]
            return [b.TurnBegan(prompts[0])]
        if state["held"]:
            return [self._release(state), b.TurnBegan()]
        if ended.outcome == "interrupted" and self.profile.close_after_cancel and state["can_close"]:
            close = self._request(state, "session/close", {"sessionId": state["session"]}, "close")
            return [asks.reply(state, close)]
        return []

    def _cancels_seen(self, state: State) -> list[b.Signal]:
        seen: list[b.Signal] = [b.InterruptSeen(control) for control in state["cancels"]]
        state["cancels"] = []
        return seen

    def _verdict(self, state: State, message: rpc.Response) -> b.TurnEnded:
        """How a prompt's turn ended."""
        model_failed, state["model_failed"] = state["model_failed"], False
        if message.error is not None:
            if state["cancels"]:  # some fail over the interrupt, where the protocol wants `cancelled`
                return b.TurnEnded("interrupted", None, _explained(message.error))
            return self._error(state, message.error)
        reason = member_of(message.result, ("stopReason",))
        stopped: tuple[Any, str | None] = ("completed", None)
        if isinstance(reason, str):
            stopped = _STOPPED.get(reason, stopped)
        outcome, detail = stopped
        if model_failed and outcome == "completed":
            return b.TurnEnded("failed", MODEL_ERROR, updates.last_text(state) or "the model request failed")
        return b.TurnEnded(outcome, str(reason) if outcome == "failed" else None, detail)

    def _error(self, state: State, error: rpc.Failure) -> b.TurnEnded:
        text = _explained(error)
        found = _HTTP_STATUS.search(text)
        status = error.code if 400 <= error.code <= 599 else int(found.group(1)) if found else 0
        named = self.profile.error_names.get(str(member_of(error.data, ("errorName",))))
        if error.code == _AUTH_REQUIRED or status in (401, 403) or named == MODEL_AUTH:
            return b.TurnEnded("failed", MODEL_AUTH, f"{b.refused_key(state['start']['key_source'])}: {text}")
        return b.TurnEnded("failed", MODEL_ERROR if status else named or AGENT_ERROR, text)

    def _failed(self, state: State, error: rpc.Failure) -> b.Reading:
        """The handshake failed: there is no turn."""
        ended = self._error(state, error)
        return self._refused(state, ended.code or AGENT_ERROR, ended.detail or "")

    def _refused(self, state: State, code: str, detail: str) -> b.Reading:
        state["phase"] = "failed"
        body = {"turn": state["start"]["prompt"], "outcome": "failed", "reason": code, "detail": detail}
        signals = (b.TurnEnded("failed", code, detail), *self._drop_held(state))
        return b.Reading((Draft(ev.TURN_COMPLETED, body),), signals)

    def _session_failed(self, state: State, reason: Any, detail: str) -> b.Reading:
        state["phase"] = "failed"
        return b.Reading((), (b.SessionFailed(reason, detail), *self._drop_held(state)))

    def _drop_held(self, state: State) -> list[b.Signal]:
        """There is no session for what waited for one."""
        held, state["held"] = state["held"], []
        return [b.PromptRefused(each["control"], "the agent made no session") for each in held]

    def _usage(self, state: State, turn: str, result: Any) -> list[Draft]:
        """Of the turn. The cost is told for the session: what it grew by."""
        usage = member_of(result, ("usage",))
        body: dict[str, Any] = {"turn": turn}
        total, before = state["cost_usd"], state["cost_before"]
        if isinstance(usage, Mapping):
            body.update({name: lines.count_of(usage.get(theirs)) for name, theirs in _COUNTS})
        if total is not None:
            if before is not None:
                body["cost_usd"] = round(max(0.0, total - before), 9)
            state["cost_before"] = total
        models = member_of(result, ("_meta", "quota", "model_usage"))
        if isinstance(models, list) and len(models) == 1:
            model = lines.text_of(member_of(models[0], ("model",)), lines.NAME_CHARS)
            body.update({} if model is None else {"model": model})
        return [Draft(ev.USAGE, body)] if len(body) > 1 else []


class _Offer:
    """A setting that a session offers: as one of its `configOptions`, or in the older form of its own."""

    def __init__(self, option: str | None, values: list[str], current: str | None, *, known: bool) -> None:
        self.option, self.values, self.current, self.known = option, values, current, known

    @classmethod
    def of(cls, result: Any, category: str, older: str, listed: str, current: str, key: str) -> _Offer:
        table = member_of(result, (older,))
        if isinstance(table, Mapping):
            values = _strings(table.get(listed), key)
            return cls(None, values, lines.text_of(table.get(current)), known=True)
        options = member_of(result, ("configOptions",))
        for option in options if isinstance(options, list) else []:
            name = member_of(option, ("id",))
            if member_of(option, ("category",)) == category and isinstance(name, str):
                groups = option.get("options")
                values = _strings(groups, "value")
                for group in groups if isinstance(groups, list) else []:
                    values += _strings(member_of(group, ("options",)), "value")
                return cls(name, values, lines.text_of(option.get("currentValue")), known=True)
        return cls(None, [], None, known=False)

    def setting(self, session: str, value: str, method: str, key: str) -> list[Any]:
        if self.option is None:
            return [method, {"sessionId": session, key: value}]
        return ["session/set_config_option", {"sessionId": session, "configId": self.option, "value": value}]


def _strings(entries: Any, key: str) -> list[str]:
    found = [member_of(entry, (key,)) for entry in (entries if isinstance(entries, list) else [])]
    return [each for each in found if isinstance(each, str)]


def _model(result: Any) -> str | None:
    """Which model a session uses."""
    offer = _Offer.of(result, "model", "models", "availableModels", "currentModelId", "modelId")
    return lines.text_of(offer.current, lines.NAME_CHARS)


def _reason(result: Any) -> str | None:
    reason = lines.text_of(member_of(result, ("stopReason",)), lines.NAME_CHARS)
    return None if reason == "end_turn" else reason


def _failed_request(ended: b.TurnEnded, error: rpc.Failure | None) -> Draft:
    body: dict[str, Any] = {"state": "failed"}
    found = _HTTP_STATUS.search(ended.detail or "")
    status = error.code if error is not None and 400 <= error.code <= 599 else int(found.group(1)) if found else None
    if status is not None:
        body["http_status"] = status
    if ended.detail is not None:
        body["detail"] = ended.detail
    return Draft(ev.MODEL_REQUEST, body)


def _explained(error: rpc.Failure) -> str:
    """What an error says, in one line: agents put what matters into the message or into `data`."""
    further = next(
        (text for name in ("details", "message", "error") if (text := lines.detail_of(member_of(error.data, (name,))))),
        lines.detail_of(error.data),
    )
    parts = [error.message, *([further] if further and further not in error.message else [])]
    return f"{': '.join(parts)} ({error.code})"


def _is_refusal(refusals: Sequence[Refusal], error: rpc.Failure) -> bool:
    whole = f"{error.message} {json.dumps(error.data)}".lower()
    return any(refusal.code == error.code and refusal.text.lower() in whole for refusal in refusals)


def adapter_of(kind: str) -> Acp | None:
    """For `acp:<name>`; None for another kind."""
    return Acp(kind) if is_acp(kind) else None
