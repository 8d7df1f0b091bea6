"""A conversation's export: everything of it that is readable, in order, in one document.

`GET /v1/conversations/{c}/export?format=json` gives a `ConversationExport`, written in pieces: a reader of a large one
takes it piece by piece as well. `format=markdown` gives the same for people. What was too large for an event is in
`content`, whole, where it is still stored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.api import UsageView
from tether.events import Outcome
from tether.fold_state import Item

ExportFormat = Literal["json", "markdown"]
FORMATS: Final[tuple[ExportFormat, ...]] = ("json", "markdown")
MEDIA: Final[dict[str, str]] = {"json": "application/json", "markdown": "text/markdown; charset=utf-8"}
VERSION: Final = 1


class _Out(BaseModel):
    model_config = ConfigDict(extra="ignore")


class ExportedItem(_Out):
    """What an agent said, did, asked or lost, at its position. `content`: the text of what was too large for an event
    (`item` has its beginning); `content_missing`: that is not stored any more."""

    position: int
    item: Item
    content: str | None = None
    content_missing: bool = False


class ExportedExecution(_Out):
    """One run of an agent. `partial`: something of it is missing, which items of kind `gap` name. `receipts`: what
    became of answers, interrupts and stops, by control id. Times in unix milliseconds."""

    execution: str
    state: str
    agent: str | None = None
    model: str | None = None
    cli_version: str | None = None
    native_session: str | None = None
    started_at: int | None = None
    ended_at: int | None = None
    outcome: Outcome | None = None
    exit: int | None = None
    error: dict[str, Any] | None = None
    proof: dict[str, Any] | None = None
    partial: bool = False
    receipts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    usage: list[UsageView] = Field(default_factory=list)
    items: list[ExportedItem] = Field(default_factory=list)


class ExportedMessage(_Out):
    """A message of a user. `into`: the response that was running and took it."""

    kind: Literal["message"] = "message"
    at: int
    request: str
    author: str | None = None
    content: list[dict[str, Any]] = Field(default_factory=list)
    into: str | None = None


class ExportedResponse(_Out):
    """What answered a message. `state`: created, failed or superseded; how it ended is its execution's outcome.
    `response` is absent for an execution whose response is no longer known."""

    kind: Literal["response"] = "response"
    at: int
    response: str | None = None
    request: str | None = None
    state: str
    error: dict[str, Any] | None = None
    superseded_by: str | None = None
    execution: ExportedExecution | None = None


class ExportedNote(_Out):
    """Anything else that the conversation's log tells, a recovery for instance, as its event has it."""

    kind: Literal["note"] = "note"
    at: int
    type: str
    body: dict[str, Any] = Field(default_factory=dict)


ExportedEntry = Annotated[ExportedMessage | ExportedResponse | ExportedNote, Field(discriminator="kind")]


class ConversationExport(_Out):
    """See the module. `entries` in order of the log. A document that breaks off is not whole, and is no JSON."""

    v: Literal[1] = 1
    conversation: str
    workspace: str
    exported_at: int
    version: str
    entries: list[ExportedEntry] = Field(default_factory=list)
