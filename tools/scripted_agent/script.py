"""The script language: a prompt's text → steps. Pure; the whole script is checked before anything runs.

One line is one step. A line that begins with `!` is a directive, any other line that is not blank is said as
text. `!repeat N` … `!end` encloses a loop, in which `{i}` stands for the pass, counted from 1.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCRIPT_LINES_MAX = 10_000
LOOP_DEPTH_MAX = 8
COUNT_MAX = 10_000_000
SECONDS_MAX = 86_400.0

GARBAGE_KINDS = (
    "invalid_json",
    "not_object",
    "empty",
    "nul",
    "half_utf8",
    "huge",
    "no_newline",
    "deep",
    "unknown_type",
    "nan",
)
RESULT_STATUSES = ("ok", "error")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


class ScriptError(ValueError):
    """The script cannot be run; the message names the line."""


class Step:
    """One line of a script: the directive's name, its checked arguments, the body of a loop."""

    __slots__ = ("args", "body", "line", "name")

    def __init__(self, line: int, name: str, args: tuple[object, ...], body: tuple[Step, ...] = ()) -> None:
        self.line = line
        self.name = name
        self.args = args
        self.body = body

    def __repr__(self) -> str:
        return f"Step({self.line}, {self.name!r}, {self.args!r}, {self.body!r})"

    def text(self, index: int) -> str:
        value = self.args[index]
        assert isinstance(value, str)
        return value

    def number(self, index: int, default: float = 0) -> float:
        value = self.args[index] if index < len(self.args) else default
        assert isinstance(value, int | float)
        return value

    def count(self, index: int, default: int = 0) -> int:
        return int(self.number(index, default))


def parse(text: str) -> tuple[Step, ...]:
    """The steps of a prompt; raises ScriptError. A text without a directive gives the friendly answer."""
    lines = text.split("\n")
    if len(lines) > SCRIPT_LINES_MAX:
        raise ScriptError(f"a script has at most {SCRIPT_LINES_MAX} lines, this one has {len(lines)}")
    if not any(line.startswith("!") for line in lines):
        return (Step(0, "friendly", (text,)),)
    # Each open loop: its line, its count, its steps so far; the outermost is the script itself.
    open_loops: list[tuple[int, int, list[Step]]] = [(0, 1, [])]
    for number, raw in enumerate(lines, start=1):
        line = raw.rstrip()
        if not line:
            continue
        if not line.startswith("!"):
            open_loops[-1][2].append(Step(number, "say", (line,)))
            continue
        name, _, rest = line[1:].partition(" ")
        if name == "end":
            if len(open_loops) == 1:
                raise ScriptError(f"line {number}: !end without !repeat")
            start, count, body = open_loops.pop()
            open_loops[-1][2].append(Step(start, "repeat", (count,), tuple(body)))
            continue
        step = _step(number, name, rest.strip())
        if name == "repeat":
            if len(open_loops) > LOOP_DEPTH_MAX:
                raise ScriptError(f"line {number}: loops are nested deeper than {LOOP_DEPTH_MAX}")
            open_loops.append((number, step.count(0), []))
        else:
            open_loops[-1][2].append(step)
    if len(open_loops) > 1:
        raise ScriptError(f"line {open_loops[-1][0]}: !repeat without !end")
    return tuple(open_loops[0][2])


def _step(line: int, name: str, rest: str) -> Step:
    spec = _DIRECTIVES.get(name)
    if spec is None:
        raise ScriptError(f"line {line}: unknown directive !{name}")
    required, readers, takes_rest = spec
    words = [rest] if takes_rest and rest else rest.split()
    if len(words) < required or (len(words) > len(readers) and not takes_rest):
        raise ScriptError(f"line {line}: !{name} takes {_arity(required, len(readers))}, got {len(words)}")
    try:
        return Step(line, name, tuple(read(word) for read, word in zip(readers, words, strict=False)))
    except ValueError as error:
        raise ScriptError(f"line {line}: !{name}: {error}") from None


def _arity(required: int, most: int) -> str:
    return f"{most} argument(s)" if required == most else f"{required} to {most} arguments"


def _count(word: str) -> int:
    if not word.isdecimal() or not word.isascii() or len(word) > 8 or int(word) > COUNT_MAX:
        raise ValueError(f"{word[:20]!r} is not a whole number from 0 to {COUNT_MAX}")
    return int(word)


def _seconds(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= SECONDS_MAX:
        raise ValueError(f"{word[:20]!r} is not a number from 0 to {SECONDS_MAX:g}")
    return value


def _milliseconds(word: str) -> float:
    return float(_count(word))


def _name(word: str) -> str:
    if not _NAME.match(word):
        raise ValueError(f"{word[:80]!r} is not a name")
    return word


def _names(words: str) -> str:
    for word in words.split():
        _name(word)
    return words


def _exit_code(word: str) -> int:
    if _count(word) > 255:
        raise ValueError(f"{word!r} is not an exit code")
    return int(word)


def _signal(word: str) -> str:
    import signal

    if not word.startswith("SIG") or word.startswith("SIG_") or not hasattr(signal, word):
        raise ValueError(f"{word[:20]!r} is not a signal's name")
    return word


def _garbage(word: str) -> str:
    kind, _, size = word.partition("=")
    if kind not in GARBAGE_KINDS or (size and kind != "huge"):
        raise ValueError(f"{word[:40]!r} is not one of {', '.join(GARBAGE_KINDS)}")
    if size and not 1 <= _count(size) <= 256:
        raise ValueError("huge takes 1 to 256 MiB")
    return word


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in allowed:
            raise ValueError(f"{word[:20]!r} is not one of {', '.join(allowed)}")
        return word

    return read


def _question(text: str) -> str:
    questions(text)
    return text


def questions(text: str) -> list[dict[str, object]]:
    """`[multi] Q | A | B ;; Q2 | C` as the list that the ask carries."""
    asked: list[dict[str, object]] = []
    for number, part in enumerate(text.split(";;"), start=1):
        sentence, *options = [word.strip() for word in part.split("|")]
        is_multi = sentence.startswith("[multi]")
        sentence = sentence.removeprefix("[multi]").strip()
        if not sentence:
            raise ValueError(f"question {number} is empty")
        asked.append({"id": f"q{number}", "question": sentence, "options": options, "multi": is_multi})
    return asked


if TYPE_CHECKING:
    _Spec = tuple[int, Sequence[Callable[[str], object]], bool]

# name: arguments needed, how each is read, whether the one argument is the rest of the line
_DIRECTIVES: dict[str, _Spec] = {
    "say": (1, (str,), True),
    "reasoning": (1, (str,), True),
    "deltas": (1, (_count, _milliseconds), False),
    "lines": (1, (_count, _milliseconds), False),
    "flood": (1, (_count,), False),
    "tool": (1, (_name, _milliseconds, _count), False),
    "ask": (1, (_names,), True),
    "question": (1, (_question,), True),
    "steer": (0, (), False),
    "sleep": (1, (_seconds,), False),
    "hang": (0, (), False),
    "stay": (0, (), False),
    "wait_file": (1, (str,), True),
    "touch": (1, (str,), True),
    "garbage": (1, (_garbage,), False),
    "stderr": (1, (_count,), False),
    "exit": (1, (_exit_code,), False),
    "crash": (1, (_signal,), False),
    "result": (0, (_one_of(*RESULT_STATUSES),), False),
    "background": (1, (_seconds,), False),
    "ignore": (1, (_signal,), False),
    "fork2": (0, (_seconds,), False),
    "child": (0, (_seconds,), False),
    "close_stdout": (0, (), False),
    "retry": (1, (_count,), False),
    "fail": (1, (_name,), False),
    "usage": (2, (_count, _count, _seconds), False),
    "env": (1, (_name,), False),
    "recall": (0, (), False),
    "forget": (0, (_one_of("hard", "soft"),), False),
    "repeat": (1, (_count,), False),
}
