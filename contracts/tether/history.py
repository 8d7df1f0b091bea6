"""A conversation's history as material for an agent whose own session is lost: asked of a backend, on the bus.

    collector ─ HistoryRequest on `tether.history.{tenant}.{workspace}` ─▶ a backend ─ rows up to the cut ─▶ History

The cut is a sequence of the tenant's log that the admission fixed before the new message: nothing after it is told.
A backend whose projection has not applied the log up to the cut yet answers RUNTIME_UNAVAILABLE, to be asked again. At
most HISTORY_ROWS_MAX rows, the latest, within HISTORY_BYTES_MAX; long fields are cut and marked; `partial` says that
rows are left out, cut, or missing in the projection itself. The subject's workspace is the one that may be told of:
another one in the request, or a conversation of another, is answered as one that does not exist.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.errors import Problem
from tether.ids import Token
from tether.limits import HISTORY_ROWS_MAX


class HistoryRequest(BaseModel):
    """`cut`: the log's last sequence that may be told."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    tenant: Token
    workspace: Token
    conversation: Token
    cut: Annotated[int, Field(ge=0)]


class HistoryRow(BaseModel):
    """One row, oldest first. `user`, `assistant`: `text`. `tool`: `name`, `input`, `output`, `status`. `cut`: a field
    was shortened."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    name: str | None = None
    input: Any = None
    output: str | None = None
    status: str | None = None
    cut: bool = False
    at: int = 0


class History(BaseModel):
    """`rows` oldest first. `through`: the sequence up to which the projection had applied the log (≥ the cut).
    `problem` instead of rows."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    conversation: Token
    cut: int
    through: int = 0
    rows: Annotated[tuple[HistoryRow, ...], Field(max_length=HISTORY_ROWS_MAX)] = ()
    partial: bool = False
    problem: Problem | None = None

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()
