"""Secrets leave a text before it becomes an event: what is found is replaced by `[redacted:NAME]`, and counted.

    text of a whole (completed text, a tool's input and output, …)   scanned at once
    text that streams (deltas)                                       scanned as it comes; what may be the beginning of a
                                                                     secret is held back until that is decided
    cut text (previews, details, an end that broke off)              what may be the beginning of a secret counts as one

A stream is cut anywhere, and yet its deltas, joined, are the redacted whole: matches are found from left to right,
none begins before the end of the one before, and none is told before no further character can change it. What is held
back is at most the width of one pattern. Offsets count the characters that were told (ADR 0002), so the fold's
arithmetic holds. A delta that is held back whole is told with an empty text: redaction changes no event's ordinal, but
where a stream ends without a whole text behind it (`flush`).

Two kinds of rules. Patterns (`tether.secret_patterns`). And the secrets that the CLI was given: not they, but their
first characters, their length and a keyed digest are known here, so the rules of an execution can lie beside its spool,
and a replay, by another collector that has no key, finds the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

from tether import events as ev
from tether.secret_patterns import PREFIX_CHARS_MIN, Pattern, parse

RULES_VERSION: Final = 1
LITERAL_CHARS_MIN: Final = 8  # a shorter value says nothing: it would be found in every text
TEXT_CHARS_MIN: Final = 8  # a shorter text holds no secret
LITERAL_PREFIX_MAX: Final = 8
LITERALS_MAX: Final = 256
STREAMS_MAX: Final = 4096  # open segments that are remembered; the oldest are forgotten
CUT_CHARS_MIN: Final = 8  # of a given secret that the end of a cut text begins
SHORT_CHARS: Final = 64  # in a longer text each of the prefixes is looked for by itself, which is faster
CORE_CHARS: Final = 8
ELLIPSIS: Final = "…"
_UNDECIDED: Final = -1
_NO_MATCH: Final = -2
_STREAM_OF: Final = {ev.TEXT_COMPLETED: ev.TEXT_DELTA, ev.REASONING_COMPLETED: ev.REASONING_DELTA}
# What may hold the CLI's words. Ids are none: they name things in the log.
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    ev.TEXT_COMPLETED: ("text",),
    ev.REASONING_COMPLETED: ("text",),
    ev.TOOL_STARTED: ("input", "name"),
    ev.TOOL_COMPLETED: ("output", "detail"),
    ev.INTERACTION_REQUESTED: ("input", "description", "questions", "options", "name"),
    ev.INTERACTION_RESOLVED: ("detail",),
    ev.CONTROL_RECEIPT: ("detail",),
    ev.MODEL_REQUEST: ("detail",),
    ev.BACKGROUND: ("description",),
    ev.TURN_COMPLETED: ("reason", "detail"),
    ev.RESPONSE_ENDED: ("error",),
    ev.EXECUTION_ENDED: ("error", "proof"),
    ev.SESSION_BOUND: ("model", "cwd", "cli_version"),
    ev.SESSION_RECOVERED: ("detail",),
    ev.GAP: ("detail",),
    ev.RAW: ("preview", "why"),
}
# Fields that were cut somewhere, by the adapter or by the CLI.
_CUT: Final = frozenset({"preview", "detail", "description", "reason", "error"})


@dataclass(frozen=True, slots=True)
class Literal:
    """A secret that the CLI was given, without the secret. `solid`: it has no blank."""

    name: str
    prefix: str
    chars: int
    solid: bool
    salt: str
    digest: str

    @classmethod
    def of(cls, name: str, value: str, salt: str) -> Literal:
        prefix = value[: max(2, min(LITERAL_PREFIX_MAX, len(value) // 4))]
        return cls(name, prefix, len(value), value.isprintable() and " " not in value, salt, _digest(value, salt))

    def judge(self, text: str, at: int, *, cut: bool) -> int:
        end = at + self.chars
        here = text[at:end]
        if len(here) == self.chars:
            return end if _digest(here, self.salt) == self.digest else _NO_MATCH
        if self.solid and (" " in here or not here.isprintable()):
            return _NO_MATCH
        if not cut:
            return _UNDECIDED
        return len(text) if len(here) >= CUT_CHARS_MIN else _NO_MATCH


def _digest(value: str, salt: str) -> str:
    data = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, key=salt.encode()).hexdigest()


@dataclass(frozen=True)
class Rules:
    """What is looked for in one execution."""

    patterns: tuple[Pattern, ...] = ()
    literals: tuple[Literal, ...] = ()

    def dump(self) -> dict[str, Any]:
        """As it lies beside the spool. No secret is in it."""
        literals = [
            {"name": one.name, "prefix": one.prefix, "chars": one.chars, "solid": one.solid}
            | {"salt": one.salt, "digest": one.digest}
            for one in self.literals
        ]
        return {"v": RULES_VERSION, "patterns": [[one.name, one.source] for one in self.patterns], "literals": literals}

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Rules:
        """Raises ValueError, KeyError, TypeError for what `dump` did not make."""
        if value["v"] != RULES_VERSION:
            raise ValueError("of another version")
        patterns = _parsed(tuple((str(name), str(source)) for name, source in value["patterns"]))
        return cls(patterns, tuple(Literal(**one) for one in value["literals"]))

    def knows(self, value: str) -> bool:
        """Whether this secret is one of the literals."""
        return any(one.chars == len(value) and one.digest == _digest(value, one.salt) for one in self.literals)

    def with_literals(self, literals: Sequence[Literal]) -> Rules:
        """With those of a further process; one that is known is not added again."""
        return Rules(self.patterns, (*self.literals, *literals)[-LITERALS_MAX:])

    @cached_property
    def _prefixes(self) -> tuple[str, ...]:
        return (*(one.prefix for one in self.literals), *(one.prefix for one in self.patterns))

    @cached_property
    def active(self) -> bool:
        """Whether anything is looked for."""
        return bool(self._prefixes)

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        return re.compile(_trie(set(self._prefixes)))

    @cached_property
    def _by_beginning(self) -> dict[str, tuple[Pattern, ...]]:
        found: dict[str, tuple[Pattern, ...]] = {}
        for pattern in self.patterns:
            beginning = pattern.prefix[:PREFIX_CHARS_MIN]
            found[beginning] = (*found.get(beginning, ()), pattern)
        return found

    @cached_property
    def _cores(self) -> tuple[str, ...]:
        """One of them stands wherever a prefix does."""
        cut = {prefix[:CORE_CHARS] for prefix in self._prefixes}
        return tuple(sorted(core for core in cut if not any(core.startswith(one) for one in cut if one != core)))

    def finder(self, text: str) -> re.Pattern[str] | None:
        """Finds where a prefix stands in this text; None where none does."""
        if len(text) <= SHORT_CHARS:
            return self._starts if self._starts.search(text) is not None else None
        present = tuple(core for core in self._cores if core in text)
        return _finder(tuple(one for one in self._prefixes if one.startswith(present))) if present else None

    @cached_property
    def tails(self) -> dict[str, tuple[str, ...]]:
        """By the last character: beginnings of prefixes that end with it, the longest first."""
        found: dict[str, set[str]] = {}
        for prefix in self._prefixes:
            for count in range(1, len(prefix)):
                found.setdefault(prefix[count - 1], set()).add(prefix[:count])
        return {last: tuple(sorted(some, key=len, reverse=True)) for last, some in found.items()}

    @cached_property
    def _inside(self) -> frozenset[str]:
        """Beginnings that count inside of a word, too."""
        free = [one.prefix for one in self.literals] + [one.prefix for one in self.patterns if not one.at_word]
        return frozenset(prefix[:count] for prefix in free for count in range(1, len(prefix)))

    def tail(self, text: str, begin: int, before: str) -> int:
        """Where the text's end may be the beginning of a prefix, not before `begin`; its length where it is none."""
        tails = self.tails.get(text[-1:])
        if tails is None or not text.endswith(tails):
            return len(text)
        for tail in tails:
            at = len(text) - len(tail)
            if at < begin or not text.endswith(tail):
                continue
            if tail in self._inside or not _in_word(text, at, before):
                return at
        return len(text)

    def judge(self, text: str, at: int, before: str, *, final: bool, cut: bool) -> tuple[int, str]:
        """(where the match ends, or _UNDECIDED, or _NO_MATCH; its name)."""
        for literal in self.literals:
            if text.startswith(literal.prefix, at):
                end = literal.judge(text, at, cut=cut)
                if end >= 0 or (end == _UNDECIDED and not final):
                    return end, literal.name
        inside = _in_word(text, at, before)
        for pattern in self._by_beginning.get(text[at : at + PREFIX_CHARS_MIN], ()):
            if (inside and pattern.at_word) or not text.startswith(pattern.prefix, at):
                continue
            if not final and pattern.undecided(text, at):
                return _UNDECIDED, pattern.name
            found = pattern.end(text, at)
            if found is not None:
                return found, pattern.name
            if cut and pattern.undecided(text, at):
                return len(text), pattern.name
        return _NO_MATCH, ""

    def scan(self, text: str, before: str = "", *, final: bool = True, cut: bool = False) -> tuple[str, int, int]:
        """(the text without secrets, how many were replaced, from where on it is held back: its length where nothing
        is). `before`: the two characters in front of it."""
        if not self.active:
            return text, 0, len(text)
        if cut and text.endswith(ELLIPSIS):  # it was cut in front of that
            told, count, _ = self.scan(text[:-1], before, cut=True)
            return told + ELLIPSIS, count, len(text)
        pieces: list[str] = []
        done = at = count = 0
        limit = len(text) if final else self.tail(text, 0, before)
        starts = self.finder(text)
        while starts is not None and (hit := starts.search(text, at)) is not None and hit.start() < limit:
            start = hit.start()
            end, name = self.judge(text, start, before, final=final, cut=cut)
            if end == _UNDECIDED:
                limit = start
                break
            if end < 0:
                at = start + 1
                continue
            pieces += (text[done:start], f"[redacted:{name}]")
            count += 1
            done = at = end
            limit = len(text) if final else self.tail(text, end, before)
        if not count:
            return (text if limit == len(text) else text[:limit]), 0, limit
        pieces.append(text[done:limit])
        return "".join(pieces), count, limit


def _in_word(text: str, at: int, before: str) -> bool:
    """Whether a word goes on at this place. The letter of an escaped line end begins none: `\\nsk-…`."""
    context = text[at - 2 : at] if at >= 2 else (before + text[:at])[-2:]
    return context[-1:].isalnum() and not (context[0] == "\\" and context[1] in "nrt")


@lru_cache(maxsize=64)
def _finder(prefixes: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(_trie(set(prefixes)))


@lru_cache(maxsize=8)
def _parsed(sources: tuple[tuple[str, str], ...]) -> tuple[Pattern, ...]:
    return tuple(parse(name, source) for name, source in sources)


def _trie(words: set[str]) -> str:
    """An expression that matches each of the words, and looks at each character of a text about once."""
    if "" in words:
        return ""  # one of them ends here: longer ones begin with it
    by_first: dict[str, set[str]] = {}
    for word in words:
        by_first.setdefault(word[0], set()).add(word[1:])
    branches = [re.escape(first) + _trie(rest) for first, rest in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


@dataclass(slots=True)
class _Stream:
    """One segment's. `held`: not told yet, and `at` where it begins in what came. `last`: the last two characters that
    were told. `shift`: by how many characters what was told is shorter than what came."""

    held: str = ""
    last: str = ""
    shift: int = 0
    at: int = 0
    parent: str | None = None


@dataclass(slots=True)
class Redactor:
    """One execution's, part of its machine's state: `dump` and `load` go on exactly where it was."""

    rules: Rules = field(default_factory=Rules)
    _streams: dict[str, dict[str, _Stream]] = field(default_factory=lambda: {kind: {} for kind in ev.DELTAS})

    def dump(self) -> dict[str, Any]:
        return {
            kind: {name: [one.held, one.last, one.shift, one.at, one.parent] for name, one in streams.items()}
            for kind, streams in self._streams.items()
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        for kind, streams in saved.items():
            self._streams[kind] = {name: _Stream(*one) for name, one in streams.items()}

    def delta(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """The delta as it is told."""
        rules, text = self.rules, body["text"]
        if not rules.active:
            return body
        name = body["tool"] if kind == ev.TOOL_PROGRESS else body["segment"]
        streams = self._streams[kind]
        stream = streams.get(name)
        if stream is None:
            stream = streams[name] = _Stream(parent=body.get("parent"))
            if len(streams) > STREAMS_MAX:
                del streams[next(iter(streams))]
        if not stream.held:
            tails = rules.tails.get(text[-1:])
            if (tails is None or not text.endswith(tails)) and rules.finder(text) is None:
                stream.last = text[-2:] if len(text) > 1 else (stream.last + text)[-2:]
                return {**body, "offset": body["offset"] - stream.shift} if stream.shift else body
        return self._held_back(stream, body)

    def _held_back(self, stream: _Stream, body: dict[str, Any]) -> dict[str, Any]:
        whole = stream.held + body["text"]
        out, count, kept = self.rules.scan(whole, stream.last, final=False)
        told = {**body, "text": out, "offset": body["offset"] - len(stream.held) - stream.shift}
        if count:
            told["redacted"] = count
        stream.shift += kept - len(out)
        stream.last = whole[kept - 2 : kept] if kept > 1 else (stream.last + whole[:kept])[-2:]
        stream.at = body["offset"] + len(body["text"]) - (len(whole) - kept)
        stream.held = whole[kept:]
        return told

    def body(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Any other event's body as it is told; `redacted` says how many secrets it had."""
        fields = _FIELDS.get(kind, ())
        changed: dict[str, Any] = {}
        count = 0
        for name in fields:
            value = body.get(name)
            if value is None:
                continue
            told, found = self._walk(value, cut=name in _CUT or (name == "text" and body.get("partial") is True))
            if found:
                changed[name] = told
                count += found
        if kind in _STREAM_OF:
            self._streams[_STREAM_OF[kind]].pop(body["segment"], None)
        elif kind == ev.TEXT_DISCARDED:
            for stream in (ev.TEXT_DELTA, ev.REASONING_DELTA):
                self._streams[stream].pop(body["segment"], None)
        elif kind == ev.TOOL_COMPLETED:
            self._streams[ev.TOOL_PROGRESS].pop(body["tool"], None)
        elif kind == ev.INTERACTION_REQUESTED and "offered" in body and self._walk(body["offered"], cut=False)[1]:
            changed["offered"] = None  # an answer without its secret is another answer, and would be given as it stands
            count += 1
        return {**body, **changed, "redacted": count} if count else body

    def _walk(self, value: Any, *, cut: bool) -> tuple[Any, int]:
        """The value without secrets, the same object where it has none."""
        if isinstance(value, str):
            if len(value) < TEXT_CHARS_MIN or not self.rules.active or self.rules.finder(value) is None:
                return value, 0
            text, count, _ = self.rules.scan(value, cut=cut)
            return text, count
        total = 0
        if isinstance(value, dict):
            told: dict[Any, Any] = {}
            for key, item in value.items():
                name, found = self._walk(key, cut=False)
                told[name], more = self._walk(item, cut=cut or key in _CUT)
                total += found + more
            return (told, total) if total else (value, 0)
        if isinstance(value, list | tuple):
            items = []
            for item in value:
                one, found = self._walk(item, cut=cut)
                items.append(one)
                total += found
            return (items, total) if total else (value, 0)
        return value, 0

    def flush(self, kind: str = "", body: Mapping[str, Any] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Deltas (type, body) that must be told before this event, as no whole text follows: of a tool that completes
        without output; of everything, where the process is gone (no `kind`)."""
        if kind == ev.TOOL_COMPLETED and body is not None:
            if body.get("output") in (None, ""):
                yield from self._rest(ev.TOOL_PROGRESS, str(body["tool"]))
        elif not kind:
            for stream, names in self._streams.items():
                for name in list(names):
                    yield from self._rest(stream, name)

    def _rest(self, kind: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        stream = self._streams[kind].get(name)
        if stream is None or not stream.held:
            return
        text, count, _ = self.rules.scan(stream.held, stream.last, cut=True)
        body: dict[str, Any] = {"text": text, "offset": stream.at - stream.shift}
        body["tool" if kind == ev.TOOL_PROGRESS else "segment"] = name
        if stream.parent is not None:
            body["parent"] = stream.parent
        if count:
            body["redacted"] = count
        stream.shift += len(stream.held) - len(text)
        stream.held = ""
        yield kind, body
