"""Compare what was printed with what a reader got: lost, doubled, foreign, out of order.

Both sides are brought to facts `(kind, key, text)`. The kinds are those of the log:

    printed line      fact kind                key        text
    session           session.bound            –          the session's id
    delta             text.delta               segment    the delta
    text              text.completed           segment    the text
    discard           text.discarded           segment    –
    reasoning         reasoning.completed      –          the text
    tool.start        tool.started             tool       the tool's name
    tool.progress     tool.progress            tool       the text
    tool.end          tool.completed           tool       ok | error | interrupted
    ask               interaction.requested    request    approval | question
    ask.resolved      interaction.resolved     request    answered | denied
    ask.cancelled     interaction.resolved     request    cancelled
    model             model.request            –          the state
    usage             usage                    –          input_tokens/output_tokens
    background        background               job        started | completed
    result            turn.completed           –          completed | failed | interrupted

`turn.started`, `prompt.accepted`, `interrupted` and `error` have no event of their own and are not
compared; garbage is counted apart. Deltas may be merged by the product, so each segment's deltas are compared by
what they say together; where that differs, the text is cut into the printed deltas again to count what is missing
and what came twice. A reader that holds only settled things (a projection) is judged with `COMPLETED_KINDS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple

from tether_oracle.truth import ProcessTruth, Truth

DELTA: Final = "text.delta"
COMPLETED_KINDS: Final = frozenset({"text.completed", "tool.completed", "turn.completed", "usage"})
KINDS: Final = COMPLETED_KINDS | {
    "session.bound",
    DELTA,
    "text.discarded",
    "reasoning.completed",
    "tool.started",
    "tool.progress",
    "interaction.requested",
    "interaction.resolved",
    "model.request",
    "background",
}
DETAILS_MAX: Final = 20
_DETAIL_CHARS_MAX: Final = 80
_FOREIGN: Final = "\0foreign"


class Fact(NamedTuple):
    """One thing that was said or done, in the log's words."""

    kind: str
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures count facts, deltas one by one. `printed` leaves out what may have been cut by a kill."""

    printed: int
    got: int
    lost: int
    doubled: int
    foreign: int
    out_of_order: int
    ledger_duplicates: int
    garbage: int
    details: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.foreign or self.out_of_order or self.ledger_duplicates)

    def __str__(self) -> str:
        figures = f"printed {self.printed}, got {self.got}, lost {self.lost}, doubled {self.doubled}"
        more = f"foreign {self.foreign}, out of order {self.out_of_order}"
        return f"{figures}, {more}, side effects done twice {self.ledger_duplicates}"


# --- facts ------------------------------------------------------------------------------------------------------

# message type: fact kind, field of the key, field of the text
_PRINTED: Final[Mapping[str, tuple[str, str, str]]] = {
    "session": ("session.bound", "", "session_id"),
    "delta": (DELTA, "segment", "text"),
    "text": ("text.completed", "segment", "text"),
    "discard": ("text.discarded", "segment", ""),
    "reasoning": ("reasoning.completed", "", "text"),
    "tool.start": ("tool.started", "id", "name"),
    "tool.progress": ("tool.progress", "id", "text"),
    "tool.end": ("tool.completed", "id", "status"),
    "ask": ("interaction.requested", "request", "kind"),
    "ask.resolved": ("interaction.resolved", "request", "decision"),
    "ask.cancelled": ("interaction.resolved", "request", ""),
    "model": ("model.request", "", "state"),
    "background": ("background", "id", "state"),
    "result": ("turn.completed", "", "status"),
}
_WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "ask.resolved": {"allow": "answered", "deny": "denied"},
    "result": {"ok": "completed", "error": "failed"},
    "background": {"done": "completed"},
}

# event type: field of the key, field of the text
_EVENT: Final[Mapping[str, tuple[str, str]]] = {
    "session.bound": ("", "native_session"),
    DELTA: ("segment", "text"),
    "text.completed": ("segment", "text"),
    "text.discarded": ("segment", ""),
    "reasoning.completed": ("", "text"),
    "tool.started": ("tool", "name"),
    "tool.progress": ("tool", "text"),
    "tool.completed": ("tool", "status"),
    "interaction.requested": ("interaction", "kind"),
    "interaction.resolved": ("interaction", "outcome"),
    "model.request": ("", "state"),
    "background": ("id", "state"),
    "turn.completed": ("", "outcome"),
}
_CLOSED_BY_AGENT: Final = frozenset({"text.completed", "text.discarded", "tool.completed"})
# Longer texts are compared by digest: the product may keep them outside the event.
TEXT_CHARS_MAX: Final = 1024


def fact_of_message(message: Mapping[str, Any]) -> Fact | None:
    """The fact that a printed line stands for, or None where it has no event."""
    kind = str(message["type"])
    if kind == "usage":
        return Fact("usage", "", f"{message['input_tokens']}/{message['output_tokens']}")
    if kind not in _PRINTED:
        return None
    fact_kind, key_field, text_field = _PRINTED[kind]
    text = "cancelled" if kind == "ask.cancelled" else str(message.get(text_field, ""))
    text = _WORDS.get(kind, {}).get(text, text)
    return Fact(fact_kind, str(message.get(key_field, "")), _short(fact_kind, text))


def fact_of_event(event: Mapping[str, Any]) -> Fact | None:
    """The fact that an event of the log `{"type", "body": {…}}` stands for.

    None for what the agent does not print: other types, and asks that expired with their process.
    """
    kind, body = str(event.get("type")), event.get("body") or {}
    if kind == "usage":
        return Fact("usage", "", f"{body['input_tokens']}/{body['output_tokens']}")
    if kind not in _EVENT or (kind == "interaction.resolved" and body.get("outcome") == "expired"):
        return None
    key_field, text_field = _EVENT[kind]
    blob = body.get("blob")
    if kind == "text.completed" and blob:
        return Fact(kind, str(body.get(key_field, "")), f"sha256:{blob['digest']}")
    return Fact(kind, str(body.get(key_field, "")), _short(kind, str(body.get(text_field, ""))))


def _short(kind: str, text: str) -> str:
    if kind == DELTA or len(text) <= TEXT_CHARS_MAX:
        return text
    return f"sha256:{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


class _Expected(NamedTuple):
    """`certain`: a reader must have it. `place`: what has the same one may come in any order."""

    fact: Fact
    certain: bool
    place: int


def expected_facts(processes: Iterable[ProcessTruth]) -> list[tuple[Fact, bool]]:
    """Facts printed by these processes in order, each with whether a reader must have it.

    It need not where the process was killed at the line, nor for what is only a closing of things left open.
    """
    return [(expected.fact, expected.certain) for expected in _expected(processes)]


def _expected(processes: Iterable[ProcessTruth]) -> list[_Expected]:
    expected: list[_Expected] = []
    for process in processes:
        unanswered = _unanswered(process)
        facts = (
            (_withdrawn(fact_of_message(line.message), unanswered), line.certain)
            for line in process.printed
            if line.message is not None
        )
        printed = [(fact, certain) for fact, certain in facts if fact is not None]
        begin = len(expected)
        expected += [_Expected(fact, certain, begin + index) for index, (fact, certain) in enumerate(printed)]
        # In which order the product closes what was left open is its own affair.
        closing = begin + len(printed)
        expected += [_Expected(fact, False, closing) for fact in _closings(printed)]
    return expected


def _unanswered(process: ProcessTruth) -> frozenset[str]:
    """Asks that the process resolved by itself (at the end of stdin it counts them as denied)."""
    got = (line.message() for line in process.stdin)
    answered = {str(message["request"]) for message in got if message is not None and message["type"] == "answer"}
    resolved = (line.message for line in process.printed if line.message is not None)
    return frozenset(str(m["request"]) for m in resolved if m["type"] == "ask.resolved") - answered


def _withdrawn(fact: Fact | None, unanswered: frozenset[str]) -> Fact | None:
    """What nobody answered was withdrawn, in the log's words."""
    if fact is not None and fact.kind == "interaction.resolved" and fact.key in unanswered:
        return fact._replace(text="cancelled")
    return fact


def _closings(printed: Iterable[tuple[Fact, bool]]) -> list[Fact]:
    """What a product may say of a process that was cut off: its tools interrupted, its text as far as it came."""
    segments: dict[str, list[tuple[str, bool]]] = {}
    others: dict[tuple[str, str], Fact] = {}
    for fact, certain in printed:
        if not certain and fact.kind in _CLOSED_BY_AGENT:
            continue  # it may not have come out: then the product closes what the line would have closed
        match fact.kind, fact.text:
            case ("text.delta", _):
                segments.setdefault(fact.key, []).append((fact.text, certain))
            case ("text.completed" | "text.discarded", _):
                segments.pop(fact.key, None)
            case ("tool.started", _):
                others["tool", fact.key] = Fact("tool.completed", fact.key, "interrupted")
            case ("background", "started"):
                others["background", fact.key] = fact._replace(text="completed")
            case ("tool.completed" | "background", _):
                others.pop((fact.kind.partition(".")[0], fact.key), None)
    closings = list(others.values())
    for key, deltas in segments.items():
        whole = "".join(text for text, _ in deltas)
        closings.append(Fact("text.completed", key, _short("text.completed", whole)))
        last, is_certain = deltas[-1]
        if not is_certain:  # it may not have come out
            closings.append(Fact("text.completed", key, _short("text.completed", whole.removesuffix(last))))
    return closings


def ledger_duplicates(truth: Truth) -> int:
    """Side effects that were done more than once, each repeat counted."""
    return sum(count - 1 for count in Counter(line.id for line in truth.ledger).values())


# --- the comparison ---------------------------------------------------------------------------------------------


def judge(
    truth: Truth,
    got: Iterable[Fact | None],
    *,
    processes: Sequence[ProcessTruth] | None = None,
    kinds: frozenset[str] = KINDS,
    match_keys: bool = True,
) -> Verdict:
    """Judge what one reader got from `processes` (default: all of the folder) as far as it is of `kinds`.

    Without `match_keys` the agent's own ids need not have reached the reader. The ledger is judged as a whole.
    """
    chosen = truth.processes if processes is None else processes
    wanted = [expected for expected in _expected(chosen) if expected.fact.kind in kinds]
    seen: list[Fact] = []
    for fact in got:
        # `session.bound` is said again when the session becomes resumable: the same fact, not a second one.
        is_repeat = fact is not None and fact.kind == "session.bound" and fact in seen
        if fact is not None and fact.kind in kinds and not is_repeat:
            seen.append(fact)
    units = _units([expected.fact for expected in wanted], match_keys)
    got_units = _cut(seen, wanted, match_keys)
    return _count(units, wanted, got_units, truth, chosen)


def _units(facts: Sequence[Fact], match_keys: bool) -> list[Fact]:
    return [fact if match_keys else fact._replace(key="") for fact in facts]


def _cut(seen: Sequence[Fact], wanted: Sequence[_Expected], match_keys: bool) -> list[Fact]:
    """The reader's facts with merged deltas cut into the printed ones, at the place of their segment's first."""
    vocabulary: dict[str, list[str]] = {}
    for fact in (expected.fact for expected in wanted):
        if fact.kind == DELTA:
            vocabulary.setdefault(fact.key if match_keys else "", []).append(fact.text)
    texts: dict[str, list[str]] = {}
    for fact in seen:
        if fact.kind == DELTA:
            texts.setdefault(fact.key, []).append(fact.text)
    units: list[Fact] = []
    for fact in seen:
        if fact.kind != DELTA:
            units.append(fact if match_keys else fact._replace(key=""))
        elif fact.key in texts:
            key = fact.key if match_keys else ""
            tokens = _tokens("".join(texts.pop(fact.key)), vocabulary.get(key, []))
            units.extend(Fact(DELTA, key, token) for token in tokens)
    return units


def _tokens(text: str, printed: Sequence[str]) -> list[str]:
    """Cut a text into printed deltas: the next in order where it fits, else the longest that fits."""
    known = set(printed)
    lengths = sorted({len(token) for token in known if token}, reverse=True)
    following: dict[str, int] = {}
    for index, token in enumerate(printed):
        following.setdefault(token, index + 1)
    tokens: list[str] = []
    position, index = 0, 0
    while position < len(text):
        if index < len(printed) and printed[index] and text.startswith(printed[index], position):
            token = printed[index]
            index += 1
        else:
            found = (text[position : position + length] for length in lengths)
            token = next((piece for piece in found if piece in known), "")
            index = following.get(token, index)
        tokens.append(token or _FOREIGN + text[position])
        position += len(token) or 1
    # Empty deltas say nothing and leave no trace in the text: they count as got.
    return tokens + [token for token in printed if not token]


def _count(
    units: Sequence[Fact],
    wanted: Sequence[_Expected],
    got: Sequence[Fact],
    truth: Truth,
    processes: Sequence[ProcessTruth],
) -> Verdict:
    needed = Counter(unit for unit, expected in zip(units, wanted, strict=True) if expected.certain)
    allowed = Counter(units)
    had = Counter(got)
    lost = needed - had
    surplus = had - allowed
    doubled = Counter({unit: count for unit, count in surplus.items() if unit in allowed})
    foreign = surplus - doubled
    details = [f"{name} {_show(unit, count)}" for name, unit, count in _named(lost, doubled, foreign)]
    return Verdict(
        printed=needed.total(),
        got=(had & allowed).total(),
        lost=lost.total(),
        doubled=doubled.total(),
        foreign=foreign.total(),
        out_of_order=_out_of_order(units, [expected.place for expected in wanted], got),
        ledger_duplicates=ledger_duplicates(truth),
        garbage=sum(line.garbage is not None for process in processes for line in process.printed),
        details=tuple(details[:DETAILS_MAX]),
    )


def _named(lost: Counter[Fact], doubled: Counter[Fact], foreign: Counter[Fact]) -> Iterable[tuple[str, Fact, int]]:
    for name, units in (("lost", lost), ("doubled", doubled), ("foreign", foreign)):
        for unit, count in units.items():
            yield name, unit, count


def _show(unit: Fact, count: int) -> str:
    text = unit.text.replace(_FOREIGN, "")
    times = f" ×{count}" if count > 1 else ""
    return f"{unit.kind} {unit.key} {text[:_DETAIL_CHARS_MAX]!r}{times}"


def _out_of_order(units: Sequence[Fact], order: Sequence[int], got: Sequence[Fact]) -> int:
    """How often a fact came before one that was printed earlier; repeats are doubled, not out of order.

    Deltas of a segment are taken as one at the place of the first, so they are ordered among themselves only.
    """
    places: dict[Fact, list[int]] = {}
    for index in range(len(units) - 1, -1, -1):
        places.setdefault(units[index], []).append(order[index])
    last = -1
    last_of_segment: dict[str, int] = {}
    descents = 0
    for unit in got:
        indices = places.get(unit)
        if not indices:
            continue
        index = indices.pop()
        if unit.kind == DELTA:
            descents += index < last_of_segment.get(unit.key, -1)
            last_of_segment[unit.key] = index
        else:
            descents += index < last
            last = index
    return descents
