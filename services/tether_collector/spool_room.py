"""Keeping one execution's spool within its bounds, and the CLI at work, whether the log takes what it says or not.

    the log takes it        every so many bytes a segment begins with the state, and what was stored is released:
                            the keeper deletes released segments first when the quota is used up
    the log is away, and the spool comes near its quota
                            the spool is read to its end without offering what need not be kept, a segment begins with
                            the state at that point, and everything before it is released: `gap{spool_evicted}`

What nobody may miss is offered even then: sessions, interactions, receipts, usage, ends. A gap stays open while one
follows on another, so that hours of output are one event. After a crash in that time the log ends before the state:
the next collector tells that as a gap (`Pipeline.lead`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from tether import events as ev
from tether.events import Event
from tether.frames import Position
from tether_collector.keeper_link import KeeperRefusedError, LinkLost
from tether_collector.log_writer import LogWriter
from tether_collector.pipeline import Pipeline
from tether_collector.process import AgentProcess

ROTATE_SETTLE_S: Final = 1.0  # of the 2 s that a keeper pauses for a rotation
ROTATE_LAG_RECORDS: Final = 8192  # between the spool's end and what was read
LOOK_S: Final = 0.5  # at the spool's size, while the log takes nothing
CROWDED: Final = 0.6  # of the quota; what is shed while the log is away comes down to half of it
KEPT: Final = frozenset(
    {
        *(ev.EXECUTION_STARTED, ev.EXECUTION_ENDED, ev.RESPONSE_ENDED, ev.TURN_COMPLETED, ev.SESSION_BOUND),
        ev.SESSION_RECOVERED,
        *(ev.INTERACTION_REQUESTED, ev.INTERACTION_RESOLVED, ev.CONTROL_RECEIPT, ev.USAGE, ev.GAP),
    }
)
_log = structlog.get_logger("tether.collector")


class Limits(Protocol):
    @property
    def spool_segment_bytes(self) -> int: ...

    @property
    def spool_bytes_max(self) -> int: ...


class SpoolRoom:
    """One execution's. `step`: one read of the spool; `stale`: the reading is about to be replaced."""

    def __init__(
        self,
        limits: Limits,
        connected: Callable[[], bool],
        process: AgentProcess,
        writer: LogWriter,
        step: Callable[[], Awaitable[bool]],
        stale: Callable[[], bool],
    ) -> None:
        self._limits = limits
        self._connected = connected
        self._process = process
        self._writer = writer
        self._step = step
        self._stale = stale
        self._since_state_bytes = 0
        self._busy = False  # within a rotation: none begins in it
        self._gap: tuple[int, int, Event, Position] | None = None  # first, last, the newest event shed, its place

    def begin(self) -> None:
        """The reading begins anew."""
        self._since_state_bytes = 0
        self._gap = None

    # --- offering ---

    def offer(self, events: Sequence[tuple[Event, Position]], size_bytes: int) -> None:
        """Events to the writer, as far as it has room; without it only what nobody may miss."""
        if self._writer.has_room:
            kept = [*self._close_gap(), *events]
        else:
            kept = []
            for event, place in events:
                if event.type in KEPT:
                    kept += [*self._close_gap(), (event, place)]
                else:
                    self.shed(event, place)
        if kept:
            self._writer.offer(kept, size_bytes)

    def shed(self, event: Event, place: Position) -> None:
        """This event will not be told."""
        first = event.ordinal if self._gap is None else self._gap[0]
        self._gap = (first, event.end, event, place)

    def _close_gap(self) -> list[tuple[Event, Position]]:
        if self._gap is None:
            return []
        first, last, newest, place = self._gap
        self._gap = None
        body = {"reason": "spool_evicted", "from": first, "to": last}
        _log.warning("events_shed", first=first, last=last)
        return [(Event(ordinal=first, last=last, at=newest.at, type=ev.GAP, body=body), place)]

    @property
    def owes(self) -> bool:
        """A gap is open."""
        return self._gap is not None

    def flush(self) -> None:
        """Tell an open gap, once the writer has room."""
        if self._gap is not None and self._writer.has_room and not self._busy:
            self._writer.offer(self._close_gap(), 0)

    async def wait(self, pipeline: Pipeline) -> None:
        """Until the writer has room for more; meanwhile the spool stays within its quota."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._writer.room()
                break
            except TimeoutError:
                if not self._writer.based or self._stale() or not self.crowded():
                    continue
                await self._begin_segment(pipeline, shed=True)
        self.flush()

    # --- bounds ---

    def crowded(self) -> bool:
        """The spool is near its quota, and the log takes nothing now."""
        if self._connected() and (self._writer.has_room or self._writer.paced):
            return False  # of a CLI that is only too fast nothing is shed: at the quota it has to wait
        return _size(self._process.directory / "spool") >= CROWDED * self._limits.spool_bytes_max

    async def after(self, pipeline: Pipeline, size_bytes: int) -> None:
        """So many bytes were read."""
        self._since_state_bytes += size_bytes
        if self._busy or self._process.live is None:
            return
        if not self._connected():
            if self.crowded():
                await self._begin_segment(pipeline, shed=True)
            return
        threshold = max(self._limits.spool_segment_bytes, 2 * pipeline.fold_bytes)
        if self._since_state_bytes >= threshold:
            self._since_state_bytes -= threshold // 4  # where it fails: again after a quarter
            await self._begin_segment(pipeline, shed=False)

    async def look(self, pipeline: Pipeline) -> None:
        """Nothing is read now: the spool may have been full before."""
        if not self._busy and self._process.live is not None and self.crowded():
            await self._begin_segment(pipeline, shed=True)
        elif not self._busy and self._writer.paced and self._writer.idle and self._full(pipeline):
            await self._begin_segment(pipeline, shed=False)  # all is told: the CLI may write again

    def _full(self, pipeline: Pipeline) -> bool:
        """Everything was read, and the spool has no room for much more."""
        link = self._process.live
        if link is None or pipeline.after < link.last_record:
            return False
        return _size(self._process.directory / "spool") >= CROWDED * self._limits.spool_bytes_max

    async def _begin_segment(self, pipeline: Pipeline, *, shed: bool) -> None:
        """Begin a segment with the state: never less bytes apart than what the state itself takes."""
        link = self._process.live
        if link is None:
            return
        if not shed and link.last_record - pipeline.after > ROTATE_LAG_RECORDS:
            return  # far behind: the pause would not do, and what is drained would not fit in memory
        self._busy = True
        try:
            if shed:  # first without a pause: there may be much
                while pipeline.after < link.last_record and not self._stale() and await self._step():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            last = await link.pause()
            until_s = asyncio.get_running_loop().time() + ROTATE_SETTLE_S
            while pipeline.after < last and not self._stale():
                if not shed:  # what a step reads without room for it would be shed
                    async with asyncio.timeout_at(until_s):
                        await self._writer.room()
                if not await self._step():
                    return
            if not shed:
                async with asyncio.timeout_at(until_s):
                    await self._writer.settled()
            if self._stale() or pipeline.after != last:
                return
            state = pipeline.save(last, untold=shed and (self.owes or not self._writer.idle))
            if state is None:
                _log.warning("state_too_large")
                return
            await link.rotate(state, last)
            await link.release(last, self._limits.spool_bytes_max // 2 if shed else None)
        except (LinkLost, KeeperRefusedError, TimeoutError) as error:
            _log.info("rotation_put_off", reason=str(error) or "the log is behind")
        else:
            self._since_state_bytes = 0
            if shed:
                _log.warning("spool_released_untold", through_record=last)
        finally:
            self._busy = False


def _size(folder: Path) -> int:
    size = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # the keeper deletes what was released
                    size += entry.stat().st_size
    except FileNotFoundError:
        pass  # nothing was spawned yet
    return size
