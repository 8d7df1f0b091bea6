"""What `/openapi.json` says of taking a conversation along, and of deleting it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tether.deletion import DeletionView
from tether.errors import Code, problem
from tether.export_format import (
    ConversationExport,
    ExportedExecution,
    ExportedItem,
    ExportedMessage,
    ExportedResponse,
)
from tether.fold import TextItem
from tether.ids import TOKEN_REMEDY
from tether.limits import REQUEST_MEMORY_S
from tether_backend.core import markdown
from tether_backend.http import openapi_examples as ex
from tether_backend.http import openapi_refusals as no
from tether_backend.http.openapi import Answer, Parameter, Refusal, Route

_DELETION: Final = "del_5f0c7d1e2a3b"
_RUNNING: Final = DeletionView(
    conversation=ex.CONVERSATION,
    workspace=ex.WORKSPACE,
    deletion=_DELETION,
    state="running",
    step="log",
    erased={"executions": 1, "files": 3, "blobs": 2},
    began_at=ex.AT,
)
_DONE: Final = _RUNNING.model_copy(
    update={
        "state": "done",
        "step": "projections",
        "erased": {"executions": 1, "files": 3, "blobs": 2, "events": 41},
        "ended_at": ex.AT + 900,
        "free_at": ex.AT + 900 + int(REQUEST_MEMORY_S * 1000),
    }
)
_WAITS: Final = _RUNNING.model_copy(
    update={
        "step": "volume",
        "pending_on": ("workspace volume: it is deleted when the workspace's sandbox runs next",),
    }
)
_FAILED: Final = _RUNNING.model_copy(
    update={
        "state": "failed",
        "step": "marking",
        "erased": {},
        "problem": problem(
            Code.SESSION_BUSY,
            f"execution {ex.EXECUTION} is active; wait for its end, or delete with force",
            retryable=True,
            execution=ex.EXECUTION,
        ),
    }
)
_EXPORT: Final = ConversationExport(
    conversation=ex.CONVERSATION,
    workspace=ex.WORKSPACE,
    exported_at=ex.AT + 60_000,
    version="0.1.0",
    entries=[
        ExportedMessage(at=ex.AT, request=ex.REQUEST, content=[{"type": "text", "text": "Say hello."}]),
        ExportedResponse(
            at=ex.AT,
            response="rsp_1",
            request=ex.REQUEST,
            state="created",
            execution=ExportedExecution(
                execution=ex.EXECUTION,
                state="ended",
                agent="scripted",
                outcome="completed",
                started_at=ex.AT,
                ended_at=ex.AT + 400,
                items=[ExportedItem(position=0, item=TextItem(id="s1", state="completed", text="Hello."))],
            ),
        ),
    ],
)


def _as_markdown(export: ConversationExport) -> str:
    told = markdown.head(export)
    for entry in export.entries:
        if isinstance(entry, ExportedMessage):
            told += markdown.message(entry)
        elif isinstance(entry, ExportedResponse):
            told += markdown.response(entry)
            told += "".join(markdown.item(one) for one in (entry.execution.items if entry.execution else ()))
    return told + "\n" + markdown.END


BUSY: Final = Refusal.of(
    "deletion_busy",
    Code.SESSION_BUSY,
    "an execution is active; wait for its end, or delete with force",
    execution=ex.EXECUTION,
    state="running",
)
NO_DELETION: Final = Refusal.of("no_deletion", Code.NOT_FOUND, "conversation: no deletion of it is known")
BAD_DELETION: Final = Refusal.of(
    "bad_deletion", Code.INVALID, f"query.deletion_id: {TOKEN_REMEDY}", field="query.deletion_id"
)
BAD_FORMAT: Final = Refusal.of(
    "bad_format", Code.INVALID, "query.format: must be one of json or markdown", field="query.format"
)
_CONVERSATION: Final = Parameter("The conversation's id.", ex.CONVERSATION)

DELETION_ROUTES: Final[Mapping[str, Route]] = {
    "DELETE /v1/conversations/{conversation}": Route(
        "Conversations",
        "deleteConversation",
        "Delete a conversation",
        "For good, wherever it is stored: log, blobs, checkpoints of its workspace, rows, records, recovery material "
        "and the agents' own session files. The files of the workspace are the user's and stay. Answered at once; it "
        "goes on by itself, and a repetition joins it. From then on the conversation is refused with "
        f"CONVERSATION_DELETED; its id is free again {REQUEST_MEMORY_S // 3600:g} h after the end. Export it first: "
        "nothing brings it back.",
        {202: Answer("It runs, or is done", DeletionView, {"begun": ex.json_of(_RUNNING), "over": ex.json_of(_DONE)})},
        (*no.EDGE, no.BAD_ID, BAD_DELETION, no.NO_CONVERSATION, BUSY, no.NO_BUS),
        {
            "conversation": _CONVERSATION,
            "deletion_id": Parameter("The operation's id; drawn where it is left out.", _DELETION),
            "force": Parameter("Stop what runs first, exactly, and wait for the proof of its end.", True),
        },
    ),
    "GET /v1/conversations/{conversation}/deletion": Route(
        "Conversations",
        "getDeletion",
        "Read how a deletion stands",
        "The step that is taken, what was erased so far, and what it waits for. Known for eight days after its end.",
        {
            200: Answer(
                "The deletion",
                DeletionView,
                {
                    "running": ex.json_of(_RUNNING),
                    "waits": ex.json_of(_WAITS),
                    "over": ex.json_of(_DONE),
                    "failed": ex.json_of(_FAILED),
                },
            )
        },
        (*no.EDGE, no.BAD_ID, NO_DELETION, no.NO_BUS),
        {"conversation": _CONVERSATION},
    ),
    "GET /v1/conversations/{conversation}/export": Route(
        "Conversations",
        "exportConversation",
        "Export a conversation",
        "Messages, responses, tools, approvals, gaps, recoveries and usage in order, as one document that is written "
        "in pieces: `json` as its schema says, `markdown` for people. What was too large for an event is whole in it. "
        "A connection that breaks off means that the document is not whole.",
        {
            200: Answer(
                "The document",
                ConversationExport,
                {"json": ex.json_of(_EXPORT)},
                others={"text/markdown": _as_markdown(_EXPORT)},
            )
        },
        (*no.EDGE, no.BAD_ID, BAD_FORMAT, no.NO_CONVERSATION, no.DELETED, no.NOT_BOUND, no.NO_BUS, no.NO_DATABASE),
        {"conversation": _CONVERSATION, "format": Parameter("What is given.", "markdown")},
    ),
}
