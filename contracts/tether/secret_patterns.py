"""Patterns of secrets: a small language that takes linear time by its form, and the built-in ones.

    corp_[A-Za-z0-9]{20,64}        fixed characters, then characters and classes, each with a bounded count
    ^^^^^ at least 2               {m}  {m,n}  ?     classes: [...], \\d, \\w; a dot and any other sign after \\

There are no groups, no alternatives (write one entry for each), no `*`, no `+`, no `.`: a text can neither make a match
run back nor hold it open for longer than the pattern's own bound. A count takes all that it can and gives nothing back,
so that what is matched is the same whether a text comes whole or in pieces. A pattern whose fixed beginning is short,
and a letter or a digit, matches at the beginning of a word only: `task-…` is no `sk-…`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

PREFIX_CHARS_MIN: Final = 2
PREFIX_CHARS_MAX: Final = 64
SHORT_PREFIX_CHARS: Final = 6  # up to so many occur within words
COUNT_MAX: Final = 20_000
WIDTH_CHARS_MAX: Final = 24_000  # of one match; what may be held back of a stream
SOURCE_CHARS_MAX: Final = 1000
RUNS_MAX: Final = 64
_CLASSES: Final = {"d": "[0-9]", "w": "[A-Za-z0-9_]", "s": r"[ \t\r\n]"}
_COUNT: Final = re.compile(r"\{(\d{1,6})(?:,(\d{1,6}))?\}")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_ANYTHING_BUT: Final = frozenset(".^$*+?{}[]|()\\")


class PatternError(ValueError):
    """What is wrong with a pattern and what to write in its place; never the text of a secret."""


@dataclass(frozen=True, slots=True)
class Run:
    """Characters of one class, `least` to `most` of them."""

    chars: str  # a class of `re`
    least: int
    most: int

    @property
    def source(self) -> str:
        return f"{self.chars}{{{self.least},{self.most}}}+"


@dataclass(frozen=True)
class Pattern:
    """`prefix` is literal. `width`: of the longest match."""

    name: str
    source: str
    prefix: str
    runs: tuple[Run, ...]

    @cached_property
    def at_word(self) -> bool:
        """Whether it matches at the beginning of a word only."""
        return len(self.prefix) <= SHORT_PREFIX_CHARS and self.prefix[0].isalnum()

    @cached_property
    def width(self) -> int:
        return len(self.prefix) + sum(run.most for run in self.runs)

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.prefix) + "".join(run.source for run in self.runs))

    @cached_property
    def _runs(self) -> tuple[tuple[re.Pattern[str], int, int], ...]:
        return tuple((re.compile(f"{run.chars}{{0,{run.most}}}+"), run.least, run.most) for run in self.runs)

    def end(self, text: str, at: int) -> int | None:
        """Where a match from `at` on ends, as if nothing followed the text; None where there is none."""
        found = self._whole.match(text, at)
        return None if found is None else found.end()

    def undecided(self, text: str, at: int) -> bool:
        """Whether what follows the text may make, undo or lengthen a match from `at` on, where the prefix stands."""
        if at + self.width <= len(text):
            return False
        place = at + len(self.prefix)
        for run, least, most in self._runs:
            found = run.match(text, place)
            count = 0 if found is None else found.end() - place
            place += count
            if place == len(text) and count < most:
                return True
            if count < least:
                return False
        return False


def parse(name: str, source: str) -> Pattern:
    """Raises PatternError."""
    if not _NAME.fullmatch(name):
        raise PatternError("a name has letters, digits, '_' and '-', 64 at most, and begins with a letter")
    if not source or len(source) > SOURCE_CHARS_MAX:
        raise PatternError(f"{name}: must have 1 to {SOURCE_CHARS_MAX} characters")
    prefix, runs, place = "", list[Run](), 0
    while place < len(source):
        chars, literal, place = _item(name, source, place)
        least, most, place = _count(name, source, place)
        if literal and not runs and least == most == 1:
            prefix += literal
        else:
            runs.append(Run(chars, least, most))
    if len(prefix) < PREFIX_CHARS_MIN or len(prefix) > PREFIX_CHARS_MAX:
        detail = "so that streamed text is not held back for every word"
        raise PatternError(
            f"{name}: must begin with {PREFIX_CHARS_MIN} to {PREFIX_CHARS_MAX} fixed characters, {detail}"
        )
    pattern = Pattern(name, source, prefix, tuple(runs))
    if len(runs) > RUNS_MAX or pattern.width > WIDTH_CHARS_MAX:
        raise PatternError(
            f"{name}: may match {WIDTH_CHARS_MAX} characters in {RUNS_MAX} parts at most; lower its counts"
        )
    return pattern


def _item(name: str, source: str, place: int) -> tuple[str, str, int]:
    """(class of `re`, the literal character or nothing, where it ends)."""
    char = source[place]
    if char == "[":
        return _class(name, source, place)
    if char == "\\":
        escaped = source[place + 1 : place + 2]
        if escaped in _CLASSES:
            return _CLASSES[escaped], "", place + 2
        if escaped == "n":
            return r"[\n]", "\n", place + 2
        if not escaped or escaped.isalnum():
            raise PatternError(f"{name}: \\{escaped} at {place} is not known; \\d, \\w, \\s, \\n, or a sign, are")
        return f"[{re.escape(escaped)}]", escaped, place + 2
    if char in _ANYTHING_BUT:
        remedies = {
            "(": "write one entry for each alternative",
            "|": "write one entry for each alternative",
            "*": "give a bound: {0,64}",
            "+": "give a bound: {1,64}",
            ".": "name the characters: [A-Za-z0-9]",
            "^": "a short beginning matches at the beginning of a word already",
        }
        remedy = remedies.get(char, f"write \\{char} for the character itself")
        raise PatternError(f"{name}: {char} at {place} is not allowed; {remedy}")
    return f"[{re.escape(char)}]", char, place + 1


def _class(name: str, source: str, place: int) -> tuple[str, str, int]:
    end = place + 1
    while end < len(source) and (source[end] != "]" or end == place + 1):
        end += 2 if source[end] == "\\" else 1
    chars = source[place : end + 1]
    inner = chars[1:-1]
    if end >= len(source) or inner.startswith("^") or "[" in inner or "&&" in inner or "--" in inner or "~~" in inner:
        raise PatternError(f"{name}: the class at {place} must be closed, and list what belongs to it: [A-Za-z0-9_-]")
    try:
        re.compile(chars)
    except re.error as error:
        raise PatternError(f"{name}: the class at {place}: {error.msg}") from None
    return chars, "", end + 1


def _count(name: str, source: str, place: int) -> tuple[int, int, int]:
    """(least, most, where it ends) of what stands before."""
    if source[place : place + 1] == "?":
        least, most, end = 0, 1, place + 1
    elif source[place : place + 1] == "{":
        found = _COUNT.match(source, place)
        if found is None:
            raise PatternError(f"{name}: the count at {place} must be {{m}} or {{m,n}}")
        least = int(found[1])
        most, end = int(found[2] or found[1]), found.end()
    else:
        return 1, 1, place
    if not least <= most <= COUNT_MAX or not most:
        raise PatternError(f"{name}: the count at {place} must be from 0 to {COUNT_MAX}, the lower bound first")
    if source[end : end + 1] in ("?", "+", "*", "{"):
        raise PatternError(f"{name}: {source[end]} at {end} is not allowed after a count")
    return least, most, end


_TOKEN: Final = "[A-Za-z0-9_-]"
# Behind the head of a private key: base64, and its last line. One that has a passphrase says so first.
_BODY: Final = r"[A-Za-z0-9+/=\s:,\\]{40,16000}-{0,5}[A-Z ]{0,40}-{0,5}"
_LOCKED: Final = r"\s{1,2}Proc-Type: 4,ENCRYPTED\s{1,2}DEK-Info: [A-Z0-9-]{3,32},"
_HEADS: Final = (
    *("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "DSA PRIVATE KEY", "ENCRYPTED PRIVATE KEY"),
    *("OPENSSH PRIVATE KEY", "PGP PRIVATE KEY BLOCK", "USER NKEY SEED"),
)
_BUILTIN: Final = (
    ("anthropic_key", f"sk-ant-{_TOKEN}{{16,512}}"),
    ("openai_key", f"sk-proj-{_TOKEN}{{16,512}}"),
    ("openai_key", f"sk-svcacct-{_TOKEN}{{16,512}}"),
    ("openai_key", f"sk-admin-{_TOKEN}{{16,512}}"),
    ("openrouter_key", "sk-or-v1-[A-Za-z0-9]{16,128}"),
    ("api_key", "sk-[A-Za-z0-9]{20,256}"),
    ("github_token", "ghp_[A-Za-z0-9]{20,255}"),
    ("github_token", "gho_[A-Za-z0-9]{20,255}"),
    ("github_token", "ghu_[A-Za-z0-9]{20,255}"),
    ("github_token", "ghs_[A-Za-z0-9]{20,255}"),
    ("github_token", "ghr_[A-Za-z0-9]{20,255}"),
    ("github_token", "github_pat_[A-Za-z0-9_]{20,255}"),
    ("gitlab_token", f"glpat-{_TOKEN}{{20,255}}"),
    ("aws_access_key", "AKIA[A-Z0-9]{16}"),
    ("aws_access_key", "ASIA[A-Z0-9]{16}"),
    ("google_key", f"AIza{_TOKEN}{{35}}"),
    ("slack_token", "xox[abeoprs]-[A-Za-z0-9-]{10,255}"),
    ("npm_token", "npm_[A-Za-z0-9]{36}"),
    ("huggingface_token", "hf_[A-Za-z0-9]{30,64}"),
    ("jwt", rf"eyJ{_TOKEN}{{10,4096}}\.eyJ{_TOKEN}{{10,4096}}\.{_TOKEN}{{10,1024}}"),
    *(("private_key", f"-----BEGIN {head}-----{_BODY}") for head in _HEADS),
    *(("private_key", f"-----BEGIN {head}-----{_LOCKED}{_BODY}") for head in _HEADS[1:4]),
)
BUILTIN: Final = tuple(parse(name, source) for name, source in _BUILTIN)
