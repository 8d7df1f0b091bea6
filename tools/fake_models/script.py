"""From a conversation to what the model says next. Pure but for the counters of `flaky` and `droponce`.

The newest user text that holds a directive chooses the script; the number of rounds of tool results after it is the
step. So a tool's result leads to the next step, and a retried request gets the same answer again.

    [[text:T]]              T (default: a greeting)      [[slow:N]] [[slow:N,MS]]  N tokens, MS apart (100)
    [[bash:CMD]]            one Bash call                 [[bash2:A||B]]   two, one after the other
    [[par:A||B]]            two at once                   [[bashesc:CMD]]  (Codex) outside its sandbox
    [[write:PATH]]          writes a file                 [[ask]]          AskUserQuestion, Red or Blue
    [[exitplan]]            leaves plan mode              [[task]]         a subagent
    [[tool:NAME|JSON]]      any tool                      [[badtool]]      a tool that does not exist
    [[think:T]]             thinking, then a text         [[http:STATUS]]  an HTTP error, always
    [[flaky:N]]             529 N times, then an answer   [[drop:N]]       N tokens, then the connection drops
    [[droponce:N]]          that once, then an answer     [[sseerror:N]]   N tokens, then an error event
    [[hang]]                no answer
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

_DIRECTIVE: Final = re.compile(r"\[\[([a-z0-9_]+)(?::(.*?))?\]\]", re.DOTALL)
_WORD: Final = re.compile(r"\S+\s*|\s+")
SLOW_MS: Final = 100
PART_DELAY_S: Final = 0.05
TOKENS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Text:
    """Text in tokens, `delay_s` after each."""

    tokens: tuple[str, ...]
    delay_s: float = 0.0
    is_thinking: bool = False

    @property
    def whole(self) -> str:
        return "".join(self.tokens)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool call under the name that Claude Code has for it; other protocols rename it."""

    name: str
    input: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """Blocks, and how the stream ends: whole, by a dropped connection or by an error event."""

    blocks: tuple[Text | Tool, ...]
    ending: Literal["whole", "drop", "error"] = "whole"

    @property
    def calls_tools(self) -> bool:
        return any(isinstance(block, Tool) for block in self.blocks)

    def text(self) -> str:
        return "".join(b.whole for b in self.blocks if isinstance(b, Text) and not b.is_thinking)


@dataclass(frozen=True, slots=True)
class HttpError:
    """An HTTP status in place of a reply."""

    status: int


@dataclass(frozen=True, slots=True)
class Hang:
    """No reply: the connection stays open until the client closes it."""


Plan = Reply | HttpError | Hang
# What a conversation is reduced to: user texts and rounds of tool results, in order.
Turn = tuple[Literal["user", "tool"], str]


@dataclass(slots=True)
class Counters:
    """How often the directives that change their answer were asked. One per server, used by its threads."""

    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, name: str) -> int:
        with self.lock:
            self.counts[name] += 1
            return self.counts[name]


@dataclass(frozen=True, slots=True)
class Directive:
    """A directive and the step of its script that the conversation has reached."""

    name: str
    argument: str | None
    step: int


class DirectiveError(ValueError):
    """The directive in the prompt cannot be understood: an HTTP 400 that says why."""


def choose(turns: Iterable[Turn]) -> Directive:
    """The directive in force; a conversation without one gets a plain answer."""
    name, argument, step = "text", None, 0
    for kind, text in turns:
        if kind == "tool":
            step += 1
            continue
        found = list(_DIRECTIVE.finditer(text))
        if found:
            name, argument, step = found[-1].group(1), found[-1].group(2), 0
    return Directive(name, argument, step)


def plan(directive: Directive, counters: Counters) -> Plan:
    """What to answer; raises DirectiveError."""
    make = _PLANS.get(directive.name)
    if make is None:
        raise DirectiveError(f"unknown directive [[{directive.name}]]")
    try:
        return make(directive, counters)
    except ValueError as error:
        raise DirectiveError(f"[[{directive.name}]]: {error}") from None


def words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text))


def say(text: str, *, is_thinking: bool = False) -> Text:
    return Text(words(text), is_thinking=is_thinking)


def _number(text: str | None, default: int) -> int:
    value = default if not text else int(text)
    if not 0 <= value <= TOKENS_MAX:
        raise ValueError(f"{value} is not between 0 and {TOKENS_MAX}")
    return value


def _parts(count: int) -> Text:
    return Text(tuple(f"part{number} " for number in range(count)), PART_DELAY_S)


def _bash(command: str, description: str = "run it") -> Tool:
    return Tool("Bash", {"command": command, "description": description})


def _call(tool: Tool, before: str, after: str) -> Callable[[Directive, Counters], Reply]:
    """A script of two steps: the call, and what is said when its result is there."""

    def make(directive: Directive, _counters: Counters) -> Reply:
        if directive.step > 0:
            return Reply((say(after),))
        return Reply((say(before), tool) if before else (tool,))

    return make


def _argument(directive: Directive) -> str:
    if not directive.argument:
        raise ValueError("needs an argument")
    return directive.argument


def _two(directive: Directive) -> tuple[str, str]:
    first, separator, second = _argument(directive).partition("||")
    if not separator:
        raise ValueError("needs two commands with || between them")
    return first, second


def _text(directive: Directive, _counters: Counters) -> Plan:
    return Reply((say(directive.argument or "Hello from the fake model."),))


def _slow(directive: Directive, _counters: Counters) -> Plan:
    count, _, milliseconds = (directive.argument or "").partition(",")
    tokens = tuple(f"tok{number} " for number in range(_number(count, 50)))
    return Reply((Text(tokens, _number(milliseconds, SLOW_MS) / 1000),))


def _think(directive: Directive, _counters: Counters) -> Plan:
    return Reply((say(directive.argument or "Let me think.", is_thinking=True), say("I have thought.")))


def _bash_plan(directive: Directive, counters: Counters) -> Plan:
    return _call(_bash(_argument(directive)), "I will run a command. ", "The command is done.")(directive, counters)


def _bash_escalated(directive: Directive, counters: Counters) -> Plan:
    tool = Tool("BashEsc", {"command": _argument(directive)})
    return _call(tool, "I will run a command. ", "The command is done.")(directive, counters)


def _bash_twice(directive: Directive, _counters: Counters) -> Plan:
    first, second = _two(directive)
    if directive.step < 2:
        return Reply((_bash(first, "first") if directive.step == 0 else _bash(second, "second"),))
    return Reply((say("Both commands are done."),))


def _parallel(directive: Directive, _counters: Counters) -> Plan:
    first, second = _two(directive)
    if directive.step == 0:
        return Reply((_bash(first, "first"), _bash(second, "second")))
    return Reply((say("Both parallel commands are done."),))


def _write(directive: Directive, counters: Counters) -> Plan:
    tool = Tool("Write", {"file_path": _argument(directive), "content": "written by the fake model\n"})
    return _call(tool, "", "The file is written.")(directive, counters)


def _any_tool(directive: Directive, counters: Counters) -> Plan:
    name, separator, text = _argument(directive).partition("|")
    tool_input = json.loads(text or "{}")
    if not separator or not isinstance(tool_input, dict):
        raise ValueError("needs NAME|{…}")
    return _call(Tool(name, tool_input), "", "The tool is done.")(directive, counters)


def _http(directive: Directive, _counters: Counters) -> Plan:
    status = int(_argument(directive))
    if not 400 <= status <= 599:
        raise ValueError(f"{status} is not an error status")
    return HttpError(status)


def _flaky(directive: Directive, counters: Counters) -> Plan:
    is_failing = counters.next("flaky") <= _number(directive.argument, 2)
    return HttpError(529) if is_failing else Reply((say("Recovered."),))


def _drop(directive: Directive, _counters: Counters) -> Plan:
    return Reply((_parts(_number(directive.argument, 3)),), "drop")


def _drop_once(directive: Directive, counters: Counters) -> Plan:
    if counters.next("droponce") == 1:
        return Reply((_parts(_number(directive.argument, 3)),), "drop")
    return Reply((say("Recovered after a drop."),))


def _sse_error(directive: Directive, _counters: Counters) -> Plan:
    return Reply((_parts(_number(directive.argument, 3)),), "error")


_COLOURS: Final = [{"label": "Red", "description": "warm"}, {"label": "Blue", "description": "cold"}]
_QUESTION: Final = {"question": "Which colour?", "header": "Colour", "multiSelect": False, "options": _COLOURS}
_SUBAGENT: Final = {
    "description": "sub",
    "prompt": "[[text:subagent says hi]]",
    "subagent_type": "general-purpose",
}

_PLANS: Final[Mapping[str, Callable[[Directive, Counters], Plan]]] = {
    "text": _text,
    "slow": _slow,
    "think": _think,
    "bash": _bash_plan,
    "bashesc": _bash_escalated,
    "bash2": _bash_twice,
    "par": _parallel,
    "write": _write,
    "ask": _call(Tool("AskUserQuestion", {"questions": [_QUESTION]}), "", "Thanks for the answer."),
    "exitplan": _call(Tool("ExitPlanMode", {"plan": "1. do it"}), "", "Plan step over."),
    "task": _call(Tool("Agent", _SUBAGENT), "", "Subagent is done."),
    "tool": _any_tool,
    "badtool": _call(Tool("NoSuchTool", {"x": 1}), "", "Bad tool is over."),
    "http": _http,
    "flaky": _flaky,
    "drop": _drop,
    "droponce": _drop_once,
    "sseerror": _sse_error,
    "hang": lambda _directive, _counters: Hang(),
}


# --- what the protocols share -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sse:
    """One server-sent event; the server waits `delay_s` after it."""

    name: str | None
    data: Mapping[str, Any] | str
    delay_s: float = 0.0

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


def texts_of(content: object, kinds: Sequence[str]) -> list[str]:
    """The texts in a message's content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return [content]
    blocks = content if isinstance(content, list) else []
    return [str(b.get("text", "")) for b in blocks if isinstance(b, dict) and b.get("type") in kinds]


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of a list; anything else is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
