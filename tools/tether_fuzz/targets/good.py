"""Good examples of what travels, to be broken: a log with every kind of event, and what addresses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tether import events as ev
from tether import frames, subjects
from tether.events import Event
from tether.frames import Position
from tether.ids import ExecutionTarget

TENANT, WORKSPACE, CONVERSATION, EXECUTION = "acme", "w1", "c1", "exe_1"
SUBJECT: Final = subjects.event(TENANT, WORKSPACE, CONVERSATION, EXECUTION)
NOTE_SUBJECT: Final = subjects.event(TENANT, WORKSPACE, CONVERSATION, "_")
DIGEST: Final = "0123456789abcdef" * 4
TARGET: Final = ExecutionTarget(
    tenant=TENANT,
    workspace=WORKSPACE,
    conversation=CONVERSATION,
    response="rsp_1",
    response_generation=1,
    execution=EXECUTION,
    execution_generation=1,
    sandbox="sbx_1",
    boot="boot1",
    process_generation=1,
)
TARGET_JSON: Final[dict[str, Any]] = TARGET.model_dump(mode="json", exclude_none=True)
CLAIM: Final[dict[str, Any]] = {
    "boot": "boot1",
    "instance": "ins1",
    "process": 1,
    "target": TARGET_JSON,
    "agent": "scripted",
    "request": "req_1",
    "adapter_version": "1",
}
_BLOB: Final = {"digest": DIGEST, "bytes": 70_000, "kind": "artifact"}
_ERROR: Final = {"code": "AGENT_FAILED", "detail": "it failed"}
_PROOF: Final = {"method": "pid_namespace", "at": 1}
BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (ev.EXECUTION_STARTED, CLAIM),
    (ev.SESSION_BOUND, {"native_session": "s", "resumable": True, "model": "m", "cli_version": "1"}),
    (ev.SESSION_RECOVERED, {"process": 2, "why": "not_found", "source": "export", "rows": 3, "from": "lost"}),
    (ev.TEXT_DELTA, {"segment": "a", "text": "hel", "offset": 0}),
    (ev.TEXT_DELTA, {"segment": "a", "text": "lo", "offset": 3}),
    (ev.REASONING_DELTA, {"segment": "r", "text": "hm", "offset": 0, "parent": "t"}),
    (ev.TEXT_COMPLETED, {"segment": "a", "text": "hello"}),
    (ev.REASONING_COMPLETED, {"segment": "r", "text": "hm", "partial": True, "blob": _BLOB, "chars": 9}),
    (ev.TEXT_DELTA, {"segment": "b", "text": "x", "offset": 0}),
    (ev.TEXT_DISCARDED, {"segment": "b"}),
    (ev.TOOL_STARTED, {"tool": "t", "name": "Bash", "input": {"command": "ls"}, "parent": "p"}),
    (ev.TOOL_PROGRESS, {"tool": "t", "text": "out", "offset": 0}),
    (ev.TOOL_COMPLETED, {"tool": "t", "status": "ok", "output": {"a": [1]}, "blob": _BLOB}),
    (ev.INTERACTION_REQUESTED, {"interaction": "i", "kind": "approval", "name": "Bash", "input": {}, "tool": "t"}),
    (
        ev.INTERACTION_REQUESTED,
        {
            "interaction": "q",
            "kind": "question",
            "questions": [{"id": "q1", "question": "?", "options": [{"label": "a"}]}],
        },
    ),
    (ev.INTERACTION_RESOLVED, {"interaction": "i", "outcome": "answered", "control": "k"}),
    (ev.CONTROL_RECEIPT, {"control": "k", "verb": "answer", "status": "settled", "interaction": "i"}),
    (ev.MODEL_REQUEST, {"state": "retrying", "attempt": 2, "attempts_max": 10, "delay_ms": 500}),
    (ev.USAGE, {"turn": "t1", "input_tokens": 3, "output_tokens": 4, "cost_usd": 0.25}),
    (ev.BACKGROUND, {"id": "j", "state": "started"}),
    (ev.BACKGROUND, {"id": "j", "state": "completed"}),
    (ev.GAP, {"from": 3, "to": 4, "reason": "corrupt", "detail": "d"}),
    (ev.RAW, {"stream": "stderr", "preview": "p", "bytes": 1, "why": "stderr"}),
    ("some.future.type", {"anything": [1, {"x": None}]}),
    (ev.TURN_COMPLETED, {"turn": "t1", "outcome": "completed"}),
    (ev.RESPONSE_ENDED, {"outcome": "failed", "error": _ERROR}),
    (ev.EXECUTION_ENDED, {"outcome": "failed", "proof": _PROOF, "exit": 1, "tail": "unknown", "error": _ERROR}),
)
NOTES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    (
        "req_1/prompt.admitted",
        ev.PROMPT_ADMITTED,
        {"request": "req_1", "prompt_sequence": 1, "content": [{"type": "text", "text": "hi"}]},
    ),
    (
        "req_1/response.created",
        ev.RESPONSE_CREATED,
        {
            "request": "req_1",
            "response": "rsp_1",
            "response_generation": 1,
            "execution": EXECUTION,
            "execution_generation": 1,
            "agent": "scripted",
        },
    ),
    (
        "req_2/response.failed",
        ev.RESPONSE_FAILED,
        {"request": "req_2", "code": "SESSION_BUSY", "detail": "d", "retryable": True},
    ),
    ("req_3/response.superseded", ev.RESPONSE_SUPERSEDED, {"request": "req_1", "response": "rsp_1", "by": "req_3"}),
    ("k9", ev.CONTROL_RECEIPT, {"control": "k9", "verb": "stop", "status": "rejected", "reason": "TARGET_STALE"}),
    ("req_4/recovery", ev.RECOVERY, {"kind": "salvaged", "execution": EXECUTION, "artifacts": []}),
)


def log() -> list[Event]:
    return [
        Event(ordinal=number, at=1_000 + number, type=kind, body=body) for number, (kind, body) in enumerate(BODIES, 1)
    ]


def frame(events: list[Event], record: int = 1) -> bytes:
    whole = frames.Frame(
        first=events[0].ordinal, last=events[-1].end, pos=Position(record=record, index=0), events=events
    )
    return frames.encode(whole)


def notes() -> Iterator[bytes]:
    for identity, kind, body in NOTES:
        yield frames.encode_event(ev.ConversationEvent(id=identity, generation=1, at=5, type=kind, body=body))


def frames_of(width: int) -> list[bytes]:
    """The whole log in frames of so many events."""
    events = log()
    return [frame(events[at : at + width], at) for at in range(0, len(events), width)]
