"""The snapshot of an execution that is being told: the fold of what the log has, and the mark of its last frame."""

from __future__ import annotations

from tether.cursor import tag_of
from tether.ports import Bus
from tether.snapshot import Snapshot, take
from tether.subjects import EventAddress, events_stream
from tether_collector.pipeline import Pipeline
from tether_collector.surroundings import now_ms


async def snapshot_of(pipeline: Pipeline, bus: Bus, address: EventAddress) -> Snapshot:
    """To be asked between two frames. Raises BusError."""
    state, mark = pipeline.fold.freeze(), pipeline.watermark()
    if not pipeline.tag_known:  # the ack carried no stored time
        message = await bus.last(events_stream(address.tenant), address.subject, leader=False)
        if message is not None and message.sequence == mark.sequence:
            mark = mark.model_copy(update={"tag": tag_of(message.stored_at_ns)})
    return take(pipeline.machine.target, state, mark, captured_at=now_ms())
