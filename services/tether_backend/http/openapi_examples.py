"""What the examples in `/openapi.json` show: one small conversation, with a tool that waited for its approval.

Made of the same models, ids and frames as real answers, so an example cannot be of another shape than the code's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel

from tether import events as ev
from tether.api import (
    FRAME_END,
    FRAME_EVENT,
    FRAME_HEARTBEAT,
    FRAME_LIVE,
    FRAME_OPEN,
    FRAME_PROBLEM,
    FRAME_REPLY,
    FRAME_SNAPSHOT,
    ControlAnswer,
    ConversationHistory,
    ConversationList,
    ConversationView,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
    Health,
    InteractionView,
    ItemList,
    ItemView,
    MessageAccepted,
    MessageView,
    ResponseView,
    StreamEnd,
    StreamEvent,
    StreamLive,
    StreamOpen,
    StreamSnapshot,
    StreamTicket,
    UsageView,
    WsReply,
)
from tether.cursor import Cursor, tag_of
from tether.errors import Code, problem
from tether.fold import ExecutionState, InteractionItem, Item, TextItem, ToolItem
from tether.ids import ExecutionTarget, control_id, default_workspace, execution_id, response_id, sandbox_id
from tether.snapshot import Watermark, take

TENANT: Final = "default"
CONVERSATION: Final = "garden-42"
REQUEST: Final = "req-1"
WORKSPACE: Final = default_workspace(CONVERSATION)
SANDBOX: Final = sandbox_id(TENANT, WORKSPACE)
RESPONSE: Final = response_id(TENANT, REQUEST, 1)
EXECUTION: Final = execution_id(TENANT, REQUEST, 1)
CONTROL: Final = control_id(TENANT, REQUEST, "answer")
INTERACTION: Final = "r1-9f3a2c1b"
AT: Final = 1_767_225_600_000  # unix milliseconds
NEXT_PAGE: Final = "WzE3NjcyMjU2MDAwMDAsImdhcmRlbi00MiJd"
PROOF: Final = {"method": "pid_namespace", "at": AT + 4_000}

Json = dict[str, Any]


def cursor(sequence: int) -> str:
    return Cursor.after(sequence, AT * 1_000_000 + sequence).encode(TENANT, CONVERSATION)


def json_of(model: BaseModel) -> Json:
    """As answers are written: what is not known is left out."""
    found: Json = model.model_dump(mode="json", exclude_none=True)
    return found


TARGET: Final = ExecutionTarget(
    tenant=TENANT,
    workspace=WORKSPACE,
    conversation=CONVERSATION,
    response=RESPONSE,
    response_generation=1,
    execution=EXECUTION,
    execution_generation=1,
    sandbox=SANDBOX,
    boot="boot_5f0c7d1e",
    process_generation=1,
    native_session="0b6e1f0e-7c53-4a53-9a43-0c1f2f3b7a11",
)
RUNNING: Final = ExecutionView(
    execution=EXECUTION,
    conversation=CONVERSATION,
    workspace=WORKSPACE,
    response=RESPONSE,
    generation=1,
    state="waiting",
    applied=6,
    agent="scripted",
    native_session=TARGET.native_session,
    started_at=AT + 100,
    items=2,
    pending_interactions=1,
)
ENDED: Final = RUNNING.model_copy(
    update={
        "state": "ended",
        "applied": 14,
        "outcome": "completed",
        "ended_at": AT + 4_000,
        "proof": PROOF,
        "exit": 0,
        "items": 3,
        "pending_interactions": 0,
    }
)
TOOL: Final = ToolItem(id="t1", state="ok", name="look", input={"what": "the garden"}, output="done")
ASKED: Final = InteractionItem(id=INTERACTION, state="answered", name="look", tool="t1", control=CONTROL)
TEXT: Final = TextItem(id="s1", state="completed", text="The roses need water.")
_SHOWN: Final[tuple[Item, ...]] = (TOOL, ASKED, TEXT)
ITEMS: Final = [
    ItemView(execution=EXECUTION, item=item.id, position=at, kind=item.kind, state=json_of(item))
    for at, item in enumerate(_SHOWN)
]
HISTORY: Final = ConversationHistory(
    conversation=CONVERSATION,
    workspace=WORKSPACE,
    cursor=cursor(212),
    messages=[
        MessageView(
            request=REQUEST,
            place=201,
            at=AT,
            content=[{"type": "text", "text": "look after the garden"}],
            response=RESPONSE,
            author="me",
        )
    ],
    responses=[
        ResponseView(
            response=RESPONSE,
            request=REQUEST,
            place=202,
            generation=1,
            execution=EXECUTION,
            agent="scripted",
            at=AT + 20,
            outcome="completed",
            ended_at=AT + 3_900,
        )
    ],
    failures=[],
    executions=[ENDED],
    items=ITEMS,
    interactions=[
        InteractionView(
            execution=EXECUTION,
            interaction=INTERACTION,
            asks="approval",
            state="answered",
            name="look",
            tool="t1",
            input={"what": "the garden"},
            control=CONTROL,
        )
    ],
    gaps=[],
    usage=[UsageView(execution=EXECUTION, turn="turn-1", input_tokens=120, output_tokens=18, cost_usd=0.0007)],
)
CONVERSATIONS: Final = ConversationList(
    conversations=[
        ConversationView(
            conversation=CONVERSATION,
            workspace=WORKSPACE,
            created_at=AT,
            updated_at=AT + 4_000,
            messages=1,
            active_execution=EXECUTION,
            pending_interactions=1,
        )
    ],
    next_page=NEXT_PAGE,
)
EXECUTIONS: Final = ExecutionList(executions=[RUNNING], next_page=NEXT_PAGE)
ITEM_LIST: Final = ItemList(execution=EXECUTION, applied=14, items=ITEMS)
SNAPSHOT: Final = ExecutionSnapshot(
    execution=EXECUTION,
    source="collector",
    snapshot=json_of(
        take(
            TARGET,
            ExecutionState(
                applied=6,
                phase="waiting",
                agent="scripted",
                request=REQUEST,
                started_at=AT + 100,
                items=[
                    ToolItem(id="t1", state="running", name="look", input={"what": "the garden"}),
                    InteractionItem(id=INTERACTION, name="look", tool="t1"),
                ],
            ),
            Watermark(ordinal=6, sequence=207, tag=tag_of(AT)),
            captured_at=AT + 1_000,
        )
    ),
    cursor=cursor(207),
)
ACCEPTED: Final = MessageAccepted(
    request_id=REQUEST, status="admitted", response_id=RESPONSE, execution_id=EXECUTION, cursor=cursor(200)
)
INTERJECTED: Final = MessageAccepted(
    request_id="req-2", status="interjected", response_id=RESPONSE, execution_id=EXECUTION, cursor=cursor(206)
)
PENDING: Final = MessageAccepted(request_id="req-3", status="pending", cursor=cursor(206))
DELIVERED: Final = ControlAnswer(control_id=CONTROL, execution=EXECUTION, verb="answer", status="delivered")
STOPPED: Final = ControlAnswer(control_id="ctl-7", execution=EXECUTION, verb="stop", status="settled")
UNKNOWN: Final = ControlAnswer(control_id="ctl-7", execution=EXECUTION, verb="stop", status="unknown")
ALIVE: Final = Health(status="ok")
READY: Final = Health(
    status="ok", checks={"bus": True, "database": True, "log.default": True, "projection.default": True}
)
NOT_READY: Final = Health(
    status="unavailable", checks={"bus": False, "database": True, "log.default": False, "projection.default": True}
)

TICKET: Final = StreamTicket(ticket="AQAAAZu4z4dgZ3JlZW4tZXhhbXBsZS10aWNrZXQtb2YtMzItYnl0ZXM", expires_at=AT + 60_000)
MESSAGE: Final[Json] = {
    "request_id": REQUEST,
    "content": [{"type": "text", "text": "look after the garden"}],
    "agent": {"kind": "scripted"},
}
METRICS: Final = (
    "# HELP tether_sse_readers Event streams that are open\n# TYPE tether_sse_readers gauge\ntether_sse_readers 2.0\n"
)


def _event(ordinal: int, kind: str, body: Json, *, replay: bool) -> StreamEvent:
    at = AT + 100 * ordinal
    return StreamEvent(execution=EXECUTION, ordinal=ordinal, at=at, type=kind, body=body, replay=replay)


_ADMITTED: Final = StreamEvent(
    id=f"{REQUEST}/{ev.PROMPT_ADMITTED}",
    generation=1,
    at=AT,
    type=ev.PROMPT_ADMITTED,
    body={"request": REQUEST, "prompt_sequence": 1, "content": MESSAGE["content"], "author": "me"},
    replay=True,
)
_ASKS: Final[Json] = {"interaction": INTERACTION, "kind": "approval", "name": "look", "tool": "t1"}
_SAYS: Final[Json] = {"segment": "s1", "text": "The roses", "offset": 0}
_ENDS: Final = StreamEnd(
    until=f"response:{RESPONSE}", cursor=cursor(211), response=RESPONSE, outcome="completed"
)  # its id is where the reader stands

Framed = tuple[str, BaseModel, str | None]  # the frame's name, its data, the cursor after it
STREAM: Final[Sequence[Framed]] = (
    (FRAME_OPEN, StreamOpen(conversation=CONVERSATION, cursor=cursor(200)), cursor(200)),
    (FRAME_EVENT, _ADMITTED, cursor(201)),
    (FRAME_EVENT, _event(5, ev.INTERACTION_REQUESTED, _ASKS, replay=True), cursor(207)),
    (FRAME_LIVE, StreamLive(cursor=cursor(207)), cursor(207)),
    (
        FRAME_EVENT,
        _event(9, ev.TEXT_DELTA, {"segment": "s1", "text": "The roses", "offset": 0}, replay=False),
        cursor(209),
    ),
    (FRAME_EVENT, _event(13, ev.RESPONSE_ENDED, {"outcome": "completed"}, replay=False), cursor(211)),
    (FRAME_END, _ENDS, cursor(211)),
)
CHANGED: Final[Sequence[Framed]] = (
    (FRAME_OPEN, StreamOpen(conversation=CONVERSATION, cursor=cursor(900)), cursor(900)),
    (
        FRAME_PROBLEM,
        problem(Code.CURSOR_POSITION_CHANGED, "the log was made anew or put back; a snapshot follows"),
        None,
    ),
    (FRAME_SNAPSHOT, StreamSnapshot(history=HISTORY), HISTORY.cursor),
    (FRAME_LIVE, StreamLive(cursor=HISTORY.cursor), HISTORY.cursor),
)


def stream_text(framed: Sequence[Framed]) -> str:
    """The frames as an event stream, with `retry` at its head and a heartbeat after the replay."""
    parts = ["retry: 604\n\n"]
    for name, data, at in framed:
        head = ("" if at is None else f"id: {at}\n") + ("" if name == FRAME_EVENT else f"event: {name}\n")
        parts.append(f"{head}data: {json.dumps(json_of(data), separators=(',', ':'))}\n\n")
        if name == FRAME_LIVE:
            parts.append(": hb\n\n")
    return "".join(parts)


def websocket_messages() -> dict[str, Json]:
    """One message of each frame, by its name."""
    found: dict[str, Json] = {}
    for name, data, at in (*STREAM, *CHANGED):
        found.setdefault(name, {"frame": name, "id": at, "data": json_of(data)})
    reply = WsReply(ask="a1", status=200, body=json_of(STOPPED))
    return {
        **found,
        FRAME_HEARTBEAT: {"frame": FRAME_HEARTBEAT, "id": None, "data": {}},
        FRAME_REPLY: {"frame": FRAME_REPLY, "id": None, "data": json_of(reply)},
    }
