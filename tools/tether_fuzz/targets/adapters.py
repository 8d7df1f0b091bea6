"""What agent CLIs print, and what happens around it: each adapter with the execution machine over it.

An input is a line each: what the CLI says on stdout (`#…` on stderr), or `!` and something else that happens (a control
that was accepted, an exit, a timer). `flood-…` targets repeat the input's lines under ids that are always new, and
look at the machine's state: whatever a CLI prints, it is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from tether.errors import InvalidError
from tether_collector.core import inputs as i
from tether_fuzz.target import Features, Target, law
from tether_fuzz.targets import machine as m

KINDS: Final = ("claude", "codex", "scripted", "acp:opencode", "acp:claude-agent-acp", "acp:codex-acp")
GOLDEN: Final = Path(__file__).parents[3] / "tests" / "golden"
TRACED: Final = ("tether_collector.core.",)
RELOAD_EVERY: Final = 5
FLOOD_ROUNDS: Final = (1600, 2400)  # nothing that is kept has more entries than the first
FLOOD_FIRST: Final = 10_000  # so that names are as long at the end as at the beginning
FLOOD_LINES_MAX: Final = 8
FLOOD_BYTES_MAX: Final = 4096
FLOOD_CPU_S: Final = 30.0
GROWTH_BYTES_MAX: Final = 4096  # between the two: counters that have grown longer
_SAID: Final = ("stdout", "stderr")
_SEED_BYTES_MAX: Final = 24 * 1024


def run(kind: str, data: bytes) -> Features:
    driven = m.Driven(m.start(kind, resume=data.startswith(b"!resume")))
    record, at = 1, 1_000
    for number, line in enumerate(data.split(b"\n")):
        at += 100
        for input_ in m.of_line(at, line):
            if isinstance(input_, i.Note) and input_.kind == "control" and not _may(driven, input_.body):
                continue
            driven.apply(input_, record, reload=number % RELOAD_EVERY == 0)
            record += 1
        if number % 3 == 0:
            record = m.handed(driven, at, record)
    driven.finish()
    return driven.features


def _may(driven: m.Driven, body: dict[str, Any]) -> bool:
    """As the shell does: a control is judged before it is journaled."""
    verb, payload, control = body.get("verb"), body.get("payload"), body.get("control")
    if not (isinstance(verb, str) and isinstance(payload, dict) and isinstance(control, str)):
        return False
    try:
        return driven.machine.check_control(verb, driven.machine.target, payload) is None
    except InvalidError:
        return False


def flood(kind: str, data: bytes) -> Features:
    """The state after many rounds of lines that name something new each time."""
    machine = m.start(kind)
    record = 0
    lines = [line for line in data.split(b"\n")[:FLOOD_LINES_MAX] if not line.startswith(b"!")]
    values = [value for line in lines if (value := _parsed(line)) is not None]
    sizes: list[int] = []
    for until in FLOOD_ROUNDS:
        for number in range(until - 800, until) if sizes else range(until):
            for value in values:
                line = json.dumps(_renamed(value, FLOOD_FIRST + number)).encode()
                record += 1
                machine.apply(i.OutputLine(1_000 + record, "stdout", line, len(line)), record)
        sizes.append(len(machine.dump()))
    grown = sizes[1] - sizes[0]
    law(grown < GROWTH_BYTES_MAX, f"a machine's state is bounded: it grew by {grown} bytes to {sizes[1]}")
    return [sizes[1].bit_length()]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and len(line) < 4096 else None


_WORDS: Final = frozenset({"type", "subtype", "method", "sessionUpdate", "status", "kind", "state", "jsonrpc", "role"})
_KEPT: Final = ("threadId", "sessionId", "session_id", "turnId", "thread", "turn", "model")


def _renamed(value: Any, number: int, name: str = "") -> Any:
    """With every id of it another one: a string that is no word of the protocol, a number that is an id."""
    if isinstance(value, dict):
        return {key: one if key in _KEPT else _renamed(one, number, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, number, name) for one in value]
    if isinstance(value, str) and name not in _WORDS and not value.startswith(("reply:", "opening:")):
        return f"{value[:64]}-{number}"
    if name in ("id", "index", "request_id") and isinstance(value, int) and not isinstance(value, bool):
        return value + number
    return value


# --- seeds: the recordings of the real CLIs, and the scripted agent's words -------------------------------------------

_SCRIPTED: Final[tuple[dict[str, Any], ...]] = (
    {"type": "session", "session_id": "s1", "version": "1"},
    {"type": "prompt.accepted", "id": m.PROMPT_ID},
    {"type": "turn.started", "prompt": m.PROMPT_ID},
    {"type": "model", "state": "retrying", "attempt": 1, "attempts_max": 3, "delay_ms": 5, "error": "e"},
    {"type": "delta", "segment": "a", "text": "hel"},
    {"type": "reasoning", "text": "hm"},
    {"type": "text", "segment": "a", "text": "hello", "aborted": True},
    {"type": "discard", "segment": "b"},
    {"type": "tool.start", "id": "t1", "name": "look", "input": {"a": 1}},
    {"type": "tool.progress", "id": "t1", "text": "out"},
    {"type": "ask", "request": "i1", "kind": "approval", "tool": "look", "tool_id": "t1", "input": {}},
    {"type": "ask", "request": "i2", "kind": "question", "questions": [{"id": "q", "question": "?", "options": ["a"]}]},
    {"type": "ask.resolved", "request": "i1", "decision": "allow"},
    {"type": "ask.cancelled", "request": "i2"},
    {"type": "tool.end", "id": "t1", "status": "ok", "output": "x"},
    {"type": "prompt.accepted", "id": "k2", "mode": "steered"},
    {"type": "background", "id": "j1", "state": "started"},
    {"type": "background", "id": "j1", "state": "done"},
    {"type": "interrupted", "id": "k3"},
    {"type": "usage", "prompt": m.PROMPT_ID, "input_tokens": 3, "output_tokens": 4, "cost_usd": 0.1},
    {"type": "result", "status": "completed", "prompt": m.PROMPT_ID},
    {"type": "error", "code": "session_not_found", "message": "none"},
)
_END: Final = b"!exit 0\n!prove"


def _control(verb: str, **payload: Any) -> bytes:
    return b"!control " + json.dumps({"control": f"k-{verb}", "verb": verb, "payload": payload}).encode()


CONTROLS: Final = (
    _control("answer", interaction="i1", decision="allow"),
    _control("answer", interaction="i1", decision="deny", text="no"),
    _control("interject", request="r2", content=[{"type": "text", "text": "more"}]),
    _control("interrupt"),
    _control("stop"),
    _control("drain", drain="d1"),
    b"!timer first_event\n!timer settle\n!timer watchdog",
    b'!gap {"reason": "corrupt", "from": 3}',
)


def _recorded(kind: str) -> Iterable[bytes]:
    """What a CLI said on the day of a recording; of long ones the beginning."""
    prefix = kind.replace(":", "-")
    for path in sorted(GOLDEN.glob(f"{prefix}-[0-9]*/*.ndjson")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [("#" if row["ch"] == "stderr" else "") + row["line"] for row in rows if row["ch"] in _SAID]
        text = "\n".join(lines).encode()[:_SEED_BYTES_MAX]
        yield text + b"\n" + _END


def _opened(kind: str) -> bytes:
    """The replies to the adapter's own first requests, so that what follows them means something."""
    if kind == "codex":
        messages: list[dict[str, Any]] = [
            {"id": "opening:initialize", "result": {}},
            {"id": "reply:thread", "result": {"thread": {"id": "th-1"}}},
            {"id": "reply:turn", "result": {"turn": {"id": "tu-1"}}},
            {"method": "turn/started", "params": {"threadId": "th-1", "turn": {"id": "tu-1"}}},
        ]
    elif kind.startswith("acp:"):
        version: dict[str, Any] = {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}}
        messages = [
            {"jsonrpc": "2.0", "id": "opening:initialize", "result": version},
            {"jsonrpc": "2.0", "id": "reply:session", "result": {"sessionId": "ses-1"}},
        ]
    else:
        return b""
    return b"\n".join(json.dumps(message).encode() for message in messages) + b"\n"


def _seeds(kind: str) -> Iterable[bytes]:
    if kind == "scripted":
        lines = [json.dumps(line).encode() for line in _SCRIPTED]
        yield b"\n".join([*lines[:-1], _END])
        yield b"\n".join([*lines, _END])
        yield b"\n".join([*lines[:12], *CONTROLS, _END])
        return
    opened = _opened(kind)
    for text in _recorded(kind):
        yield opened + text
        yield b"\n".join([opened + text.removesuffix(_END), *CONTROLS, _END])


def _flood_seeds(kind: str) -> Iterable[bytes]:
    """Single lines of the recordings: each kind of message once."""
    if kind == "scripted":
        yield from (json.dumps(line).encode() for line in _SCRIPTED)
        return
    opened = _opened(kind)
    known: set[str] = set()
    for text in _recorded(kind):
        for line in text.split(b"\n"):
            value = _parsed(line)
            if value is None:
                continue
            params = value.get("params") if isinstance(value.get("params"), dict) else {}
            inner = value.get("event") or params.get("update") or params.get("item") or {}  # type: ignore[union-attr]
            told = [value.get(name) for name in ("type", "subtype", "method")]
            shape = str([*told, *(sorted(inner) if isinstance(inner, dict) else ())])
            if shape not in known:
                known.add(shape)
                yield opened + line


def _named(kind: str) -> str:
    return kind.replace(":", "-")


def _run_of(kind: str) -> Target:
    seeds = partial(_seeds, kind)
    return Target(f"adapter-{_named(kind)}", "collector", "lines", partial(run, kind), seeds, traced=TRACED)


def _flood_of(kind: str) -> Target:
    what, seeds = partial(flood, kind), partial(_flood_seeds, kind)
    return Target(f"flood-{_named(kind)}", "collector", "lines", what, seeds, FLOOD_BYTES_MAX, (), FLOOD_CPU_S)


TARGETS: Final = (*map(_run_of, KINDS), *map(_flood_of, KINDS[:4]))
