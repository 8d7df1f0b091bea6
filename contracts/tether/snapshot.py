"""A snapshot: the folded state of an execution at a watermark. It corrects meaning; it is no token log."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tether.fold import ExecutionState, GapItem
from tether.ids import ExecutionTarget


class Watermark(BaseModel):
    """What the state holds: every ordinal up to `ordinal`, whose frame has stream sequence `sequence` and the tag
    (`cursor.tag_of`) of its stored time. Ordinal 0: nothing yet."""

    model_config = ConfigDict(frozen=True)

    ordinal: int
    sequence: int
    tag: int


class Snapshot(BaseModel):
    """Taken by the collector from acked frames only. `captured_at` is unix milliseconds."""

    model_config = ConfigDict(extra="ignore")

    v: Literal[1] = 1
    target: ExecutionTarget
    state: ExecutionState
    watermark: Watermark
    completeness: Literal["complete", "partial"]
    captured_at: int
    terminal: bool

    @property
    def gaps(self) -> list[GapItem]:
        return [item for item in self.state.items if isinstance(item, GapItem)]


def take(target: ExecutionTarget, state: ExecutionState, watermark: Watermark, *, captured_at: int) -> Snapshot:
    """Make a snapshot of a frozen state; completeness and terminal follow from it."""
    return Snapshot(
        target=target,
        state=state,
        watermark=watermark,
        completeness="partial" if state.partial else "complete",
        captured_at=captured_at,
        terminal=state.outcome is not None,
    )
