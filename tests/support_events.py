"""Random, well-formed execution logs for properties: what an adapter could have said."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tether import events as ev
from tether.events import Event

CLAIM: dict[str, Any] = {
    "boot": "b",
    "instance": "i",
    "process": 1,
    "target": {"execution": "e"},
    "agent": "scripted",
    "request": "r",
    "adapter_version": "1",
}
TEXT = st.text(alphabet="ab é☃𝄞\n", min_size=0, max_size=5)


@st.composite
def logs(draw: st.DrawFn, *, max_steps: int = 40, ended: bool | None = None) -> list[Event]:
    """Unmerged events, ordinals from 1 without holes. `ended`: force or forbid the terminal events."""
    drafts: list[tuple[str, dict[str, Any]]] = [(ev.EXECUTION_STARTED, CLAIM)]
    lengths: dict[str, int] = {}
    for _ in range(draw(st.integers(0, max_steps))):
        drafts.append(_step(draw, lengths))
    if draw(st.booleans()) if ended is None else ended:
        drafts.append((ev.RESPONSE_ENDED, {"outcome": "completed"}))
        drafts.append((ev.EXECUTION_ENDED, {"outcome": "completed", "proof": {"method": "pid_namespace", "at": 1}}))
    return [
        Event(ordinal=number, at=1_000 + number, type=kind, body=body)
        for number, (kind, body) in enumerate(drafts, start=1)
    ]


def _delta(draw: st.DrawFn, kind: str, key: str, name: str, lengths: dict[str, int]) -> tuple[str, dict[str, Any]]:
    text = draw(TEXT)
    offset = lengths.get(f"{kind}/{name}", 0)
    lengths[f"{kind}/{name}"] = offset + len(text)
    return kind, {key: name, "text": text, "offset": offset}


def _step(draw: st.DrawFn, lengths: dict[str, int]) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(["s1", "s2", "s3"]))
    match draw(st.integers(0, 18)):
        case 0 | 1 | 2 | 3:
            return _delta(draw, ev.TEXT_DELTA, "segment", name, lengths)
        case 4:
            return _delta(draw, ev.REASONING_DELTA, "segment", name, lengths)
        case 5:
            return _delta(draw, ev.TOOL_PROGRESS, "tool", name, lengths)
        case 6:
            return ev.TEXT_COMPLETED, {"segment": name, "text": draw(TEXT), "partial": draw(st.booleans())}
        case 7:
            return ev.TEXT_DISCARDED, {"segment": name}
        case 8:
            return ev.TOOL_STARTED, {"tool": name, "name": "Bash", "input": {"command": draw(TEXT)}}
        case 9:
            return ev.TOOL_COMPLETED, {"tool": name, "status": draw(st.sampled_from(["ok", "error"])), "output": "x"}
        case 10:
            return ev.INTERACTION_REQUESTED, {"interaction": name, "kind": "approval", "name": "Bash"}
        case 11:
            outcome = draw(st.sampled_from(["answered", "denied", "expired", "cancelled"]))
            return ev.INTERACTION_RESOLVED, {"interaction": name, "outcome": outcome}
        case 12:
            return ev.USAGE, {"turn": name, "input_tokens": draw(st.integers(0, 9)), "cost_usd": 0.25}
        case 13:
            return ev.GAP, {"from": None, "to": None, "reason": "corrupt"}
        case 14:
            return ev.CONTROL_RECEIPT, {"control": name, "verb": "answer", "status": "settled"}
        case 15:
            asked = {"interaction": name, "kind": "approval", "name": "Bash"}
            return ev.INTERACTION_REQUESTED, {
                **asked,
                "offered": {"decision": "allow", "control": "c", "text": draw(TEXT)},
            }
        case 16:
            recovered = {"process": 2, "why": "not_found", "source": "export", "rows": draw(st.integers(0, 9))}
            return ev.SESSION_RECOVERED, {**recovered, "from": draw(st.none() | st.just("lost"))}
        case 17:  # the execution goes on in another process
            return ev.EXECUTION_STARTED, {**CLAIM, "process": 2, "target": {"execution": "e", "process_generation": 2}}
        case _:
            return "some.future.type", {"anything": [1, {"x": None}]}
