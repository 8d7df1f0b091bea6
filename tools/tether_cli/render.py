"""Items of a conversation to what a terminal shows. Pure: items in, pieces out; the shell writes them in order.

    Text   the agent's own words, as they come: no newline of ours in between
    Line   a whole line beside them: tools, approvals, retries, gaps, the end

A tool is one line: opened when it starts, closed with its status when nothing came in between, else told again with it.
Whatever the agent printed is shown without control characters: a terminal obeys those.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from tether import events as ev
from tether.client.items import (
    CaughtUp,
    ConversationItem,
    ExecutionItem,
    GapItem,
    Item,
    PositionChanged,
    SnapshotItem,
)
from tether.events import Event
from tether.fold import ExecutionFold, ExecutionState, InteractionItem, SessionItem, TextItem, ToolItem

INPUT_CHARS_MAX: Final = 100
OUTPUT_CHARS_MAX: Final = 160
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SPACE: Final = re.compile(r"\s+")
_STATUS: Final = {"ok": "ok", "error": "failed", "interrupted": "interrupted", "unknown": "outcome unknown"}
# Of a tool's input, what says most in one line.
_TELLING: Final = ("command", "file_path", "path", "pattern", "url", "query", "prompt", "description")


@dataclass(frozen=True, slots=True)
class Text:
    """Goes where the cursor is."""

    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of its own. `open`: its end may still be written (`Close`)."""

    text: str
    open: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """The rest of the line that is open."""

    text: str


Piece = Text | Line | Close


def clean(text: str) -> str:
    """Without what a terminal would obey; newlines and tabs stay."""
    return _CONTROL.sub("�", text.replace("\r\n", "\n"))


def one_line(value: object, chars_max: int = INPUT_CHARS_MAX) -> str:
    """Any JSON value in one bounded line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = _SPACE.sub(" ", clean(text)).strip()
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def tool_label(name: str, value: Any) -> str:
    """`Bash: ls -la` rather than the whole input."""
    shown: Any = value
    if isinstance(value, dict):
        shown = next((value[key] for key in _TELLING if isinstance(value.get(key), str)), value or None)
    return one_line(name or "tool") + (f": {one_line(shown)}" if shown not in (None, "") else "")


def interaction_lines(asked: InteractionItem) -> list[str]:
    """What waits for a human, with the id to answer it by."""
    identity = one_line(asked.id)
    if asked.asks == "approval":
        return [f"? may it run {tool_label(asked.name, asked.input)}  [{identity}]", *_about_answers(asked)]
    lines = [f"? it asks  [{identity}]"]
    for question in asked.questions:
        options = ", ".join(one_line(str(one.get("label", one))) for one in question.get("options", []))
        lines.append(f"    {one_line(question.get('question', ''), 400)}" + (f"  ({options})" if options else ""))
    return [*lines, *_about_answers(asked)]


def _about_answers(asked: InteractionItem) -> list[str]:
    """What may be answered beyond allow and deny, and what was answered before."""
    always = [one for one in asked.options if str(one.get("kind", "")).endswith("_always")]
    labels = ", ".join(one_line(str(one.get("label") or one.get("id"))) for one in always)
    lines = [f"    it offers, too: {labels}"] if labels else []
    if asked.offered is not None:
        lines.append("    answered before, not known to be applied; `tether answer … same` gives that answer again")
    return lines


@dataclass(slots=True)
class Renderer:
    """State: what is on the screen of each segment, and which tool's line is open. `prompts`: show users' messages."""

    prompts: bool = True
    _shown: dict[tuple[str, str], str] = field(default_factory=dict)
    _segment: tuple[str, str] | None = None
    _tools: dict[tuple[str, str], str] = field(default_factory=dict)
    _open: tuple[str, str] | None = None

    def render(self, item: Item) -> list[Piece]:
        match item:
            case ExecutionItem():
                return self._event(item.execution, item.event)
            case ConversationItem():
                return self._conversation(item)
            case SnapshotItem():
                pieces: list[Piece] = [
                    self._line("[snapshot] the state as it stands, in place of the events before it")
                ]
                for execution, state in item.executions.items():
                    pieces += self.state(execution, state)
                return pieces
            case GapItem():
                return [self._line(_gap_line(item.first, item.last, item.reason, item.detail))]
            case PositionChanged():
                self._shown.clear()
                return [self._line("[stream] the log is another one (made anew, or an older copy): from its beginning")]
            case CaughtUp():
                return []

    def state(self, execution: str, state: ExecutionState) -> list[Piece]:
        """A folded execution: what its events would have shown, less what is shown already."""
        pieces: list[Piece] = []
        for item in state.items:
            match item:
                case TextItem(kind="text", parent=None) if item.state != "discarded":
                    pieces += self._whole(execution, item.id, item.text)
                case ToolItem():
                    label = tool_label(item.name, item.input)
                    pieces.append(self._line(f"→ {label}  {_STATUS.get(item.state, item.state)}"))
                case InteractionItem() if item.state == "pending":
                    pieces += [self._line(line) for line in interaction_lines(item)]
                case SessionItem():
                    pieces.append(self._line(_recovered_line(item.why, item.rows, partial=item.partial)))
                case _:
                    pass
        return pieces

    # --- lines and text ---

    def _line(self, text: str, *, tool: tuple[str, str] | None = None) -> Line:
        self._segment = None
        self._open = tool
        return Line(text, open=tool is not None)

    def _whole(self, execution: str, segment: str, text: str) -> list[Piece]:
        """The segment's whole text: what its deltas did not show; all of it where they showed something else."""
        key = (execution, segment)
        shown = self._shown.get(key, "")
        self._shown[key] = text
        if not text.startswith(shown):
            return [*self._words(key, text, fresh=True), *self._end_segment()]
        rest = text[len(shown) :]
        pieces = self._words(key, rest, fresh=not shown) if rest else []
        return [*pieces, *self._end_segment()] if text else []

    def _words(self, key: tuple[str, str], text: str, *, fresh: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._segment is not None and self._segment != key:
            pieces.append(Text("\n"))
        self._segment, self._open = key, None
        return [*pieces, Text(clean(text))]

    def _end_segment(self) -> list[Piece]:
        if self._segment is None:
            return []
        self._segment = None
        return [Text("\n")]

    # --- events ---

    def _event(self, execution: str, event: Event) -> list[Piece]:
        body = event.body
        match event.type:
            case ev.TEXT_DELTA if body.get("parent") is None:
                return self._delta(execution, body)
            case ev.TEXT_COMPLETED if body.get("parent") is None:
                return self._whole(execution, str(body["segment"]), str(body["text"]))
            case ev.TEXT_DISCARDED:
                return self._discarded(execution, str(body.get("segment")))
            case ev.TOOL_STARTED:
                return self._tool_started(execution, body)
            case ev.TOOL_COMPLETED:
                return self._tool_completed(execution, body)
            case ev.INTERACTION_REQUESTED:
                asked = ExecutionFold()  # the item that the event makes, by itself; one that lies makes none
                asked.apply(event.model_copy(update={"ordinal": 1, "last": None}))
                return [self._line(line) for item in asked.freeze().pending() for line in interaction_lines(item)]
            case ev.INTERACTION_RESOLVED:
                return [self._line(f"  {body.get('outcome')}  [{one_line(body.get('interaction', ''))}]")]
            case ev.SESSION_RECOVERED:
                rows = body.get("rows")
                line = _recovered_line(
                    str(body.get("why")), rows if isinstance(rows, int) else 0, partial=bool(body.get("partial"))
                )
                return [self._line(line)]
            case ev.MODEL_REQUEST if body.get("state") in ("retrying", "failed"):
                return [self._line(_model_line(body))]
            case ev.GAP:
                detail = str(body.get("detail") or "")
                return [self._line(_gap_line(body.get("from"), body.get("to"), str(body.get("reason")), detail))]
            case ev.RAW:
                return [self._line(f"[{body.get('stream')}] {one_line(body.get('preview', ''), OUTPUT_CHARS_MAX)}")]
            case ev.BACKGROUND:
                what = one_line(body.get("description") or body.get("id") or "")
                return [self._line(f"[background] {body.get('state')}: {what}")]
            case ev.RESPONSE_ENDED:
                return self._ended(body)
            case ev.EXECUTION_ENDED if body.get("outcome") in ("lost", "never_started"):
                return [self._line(f"[execution] {body['outcome']}{_error_text(body.get('error'))}")]
            case _:
                return []

    def _delta(self, execution: str, body: dict[str, Any]) -> list[Piece]:
        key = (execution, str(body["segment"]))
        shown = self._shown.get(key, "")
        text = str(body["text"])[max(0, len(shown) - int(body["offset"])) :]
        if not text:
            return []
        self._shown[key] = shown + text
        return self._words(key, text, fresh=not shown)

    def _discarded(self, execution: str, segment: str) -> list[Piece]:
        if not self._shown.pop((execution, segment), ""):
            return []
        return [*self._end_segment(), self._line("[model] the text above is void: the model's request was made anew")]

    def _tool_started(self, execution: str, body: dict[str, Any]) -> list[Piece]:
        key = (execution, str(body["tool"]))
        label = ("  " if body.get("parent") else "") + f"→ {tool_label(body.get('name', ''), body.get('input'))}"
        self._tools[key] = label
        return [self._line(label, tool=key)]

    def _tool_completed(self, execution: str, body: dict[str, Any]) -> list[Piece]:
        key = (execution, str(body["tool"]))
        status = _STATUS.get(str(body.get("status")), str(body.get("status")))
        why = body.get("detail") or (body.get("output") if body.get("status") == "error" else None)
        told = status + (f" ({one_line(why, OUTPUT_CHARS_MAX)})" if why else "")
        label = self._tools.pop(key, "→ tool")
        if self._open == key:
            self._open = None
            return [Close(f"  {told}")]
        return [self._line(f"{label}  {told}")]

    def _ended(self, body: dict[str, Any]) -> list[Piece]:
        pieces = self._end_segment()
        if body.get("outcome") == "completed":
            return pieces
        return [*pieces, self._line(f"[response] {body.get('outcome')}{_error_text(body.get('error'))}")]

    def _conversation(self, item: ConversationItem) -> list[Piece]:
        body = item.event.body
        match item.type:
            case ev.PROMPT_ADMITTED if self.prompts or body.get("into"):
                texts = [str(part.get("text", "")) for part in body.get("content", []) if isinstance(part, dict)]
                return [self._line(f"> {one_line(' '.join(texts), 400)}")]
            case ev.RESPONSE_FAILED:
                return [self._line(f"[response] failed{_error_text(body)}")]
            case ev.RESPONSE_SUPERSEDED:
                return [self._line("[response] superseded by a takeover")]
            case ev.RECOVERY if body.get("stream"):
                return [self._line(f"[stream] {one_line(body['stream'])}")]
            case _:
                return []


def _error_text(error: Any) -> str:
    if not isinstance(error, dict):
        return ""
    return f": {one_line(error.get('code', ''))} {one_line(error.get('detail', ''), 400)}".rstrip()


def _gap_line(first: int | None, last: int | None, reason: str, detail: str = "") -> str:
    which = "events" if first is None else f"event {first}" if first == last else f"events {first} to {last}"
    return f"[gap] {which} are not to be had: {reason}" + (f" ({one_line(detail)})" if detail else "")


def _recovered_line(why: str, rows: int, *, partial: bool) -> str:
    part = ", in part" if partial else ""
    known = {"not_found": "its earlier session is lost; ", "cut": "its turn was cut too early to be resumed; "}
    lost = known.get(why, "")
    return f"[session] {lost}it is given the conversation's history ({rows} rows{part})"


def _model_line(body: dict[str, Any]) -> str:
    if body.get("state") == "failed":
        return "[model] the request failed" + _model_facts(body)
    attempt, most = body.get("attempt"), body.get("attempts_max")
    which = "" if attempt is None else f" (attempt {attempt}" + (f" of {most})" if most else ")")
    wait = body.get("delay_ms")
    return f"[model] the request is made again{which}{_model_facts(body)}" + (f", in {wait / 1000:g} s" if wait else "")


def _model_facts(body: dict[str, Any]) -> str:
    facts = [f"HTTP {body['http_status']}" if body.get("http_status") else "", one_line(body.get("detail") or "")]
    told = ", ".join(fact for fact in facts if fact)
    return f": {told}" if told else ""


def item_value(item: Item) -> dict[str, Any]:
    """An item as JSON, for `--json`."""
    base: dict[str, Any] = {"conversation": item.conversation, "cursor": item.cursor, "replay": item.replay}
    match item:
        case ExecutionItem():
            event = item.event.model_dump(mode="json", exclude_none=True)
            return {"kind": "event", "execution": item.execution, **event, **base}
        case ConversationItem():
            return {"kind": "event", **item.event.model_dump(mode="json", exclude={"v"}), **base}
        case SnapshotItem():
            states = {key: state.model_dump(mode="json", exclude_none=True) for key, state in item.executions.items()}
            return {"kind": "snapshot", "executions": states, **base}
        case GapItem():
            gap = {"execution": item.execution, "first": item.first, "last": item.last, "reason": item.reason}
            return {"kind": "gap", **gap, "detail": item.detail, **base}
        case PositionChanged():
            return {"kind": "position_changed", "detail": item.detail, **base}
        case CaughtUp():
            return {"kind": "caught_up", **base}


def money(cost_usd: float | None) -> str:
    if cost_usd is None:
        return "cost unknown"
    return f"${cost_usd:.2f}" if cost_usd >= 1 else f"${cost_usd:.6f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
