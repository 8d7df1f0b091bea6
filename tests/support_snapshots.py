"""A collector played by hand: it registers, as a new instance each time, and gives a snapshot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from support_backend import Log
from tether import subjects
from tether.control import ControlReply, decode_request
from tether.errors import Problem
from tether.events import Event
from tether.fold import ExecutionFold
from tether.kv import Bucket
from tether.ports import Bus, Message
from tether.sandbox import CAN_SNAPSHOT, ExecutionSummary, Registration
from tether.snapshot import Snapshot, Watermark, take


@dataclass
class Collector:
    """One that registers and answers for `log`; each registration is another instance of it."""

    bus: Bus
    log: Log
    can: bool = True
    replaced: int = 0  # so many times another instance registers while the question is answered
    older: bool = False  # and that one is of an older version
    answer: str = "settled"
    why: Problem | None = None  # of an answer that is none
    hangs: bool = False
    snapshot: Snapshot | None = None
    asked: list[str] = field(default_factory=list)
    instances: int = 0
    listed: tuple[ExecutionSummary, ...] = ()  # in its registration

    async def register(self) -> None:
        self.instances += 1
        record = Registration(
            tenant=self.log.tenant,
            workspace=self.log.workspace,
            sandbox="sbx",
            boot="boot1",
            instance=f"i{self.instances}",
            capabilities=(CAN_SNAPSHOT,) if self.can else (),
            executions=self.listed,
        )
        bucket = Bucket(self.bus, subjects.SANDBOXES)
        key = subjects.registration_key(self.log.tenant, self.log.workspace, "sbx")
        entry = await bucket.get(key)
        op = f"op{self.instances}"
        if entry is None:
            await bucket.create(key, record.value(), op=op)
        else:
            await bucket.update(key, record.value(), op=op, revision=entry.revision)

    async def __call__(self, message: Message) -> bytes:
        request = decode_request(message.data)
        self.asked.append(f"i{self.instances}")
        if self.hangs:
            await asyncio.Event().wait()
        if self.replaced:
            self.replaced -= 1
            self.can = self.can and not self.older
            await self.register()
        status = "settled" if self.answer == "settled" else "rejected"
        result = None if self.snapshot is None else {"snapshot": self.snapshot.model_dump(mode="json")}
        reply = ControlReply(control=request.control, verb="snapshot", status=status, result=result, problem=self.why)
        return reply.encode()


def snapshot_from(log: Log, execution: str, events: list[Event], *, captured_at: int = 7) -> Snapshot:
    """Of these events; nobody says where in the log they are."""
    fold = ExecutionFold()
    for one in events:
        fold.apply(one)
    mark = Watermark(ordinal=fold.applied, sequence=0, tag=0)
    return take(log.target(execution), fold.freeze(), mark, captured_at=captured_at)


@contextlib.asynccontextmanager
async def serving(collector: Collector) -> AsyncIterator[Collector]:
    subject = subjects.control(collector.log.tenant, collector.log.workspace, "snapshot")
    async with collector.bus.serve(subject, collector, name="collector"):
        await collector.bus.barrier()
        yield collector
