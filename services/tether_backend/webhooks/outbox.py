"""The outbox: one record per endpoint and event in `tether_notifications`, each write a compare-and-set."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from tether import subjects
from tether.kv import Bucket, Conflict, Entry
from tether.limits import NOTIFICATION_MEMORY_S
from tether.ports import Bus, StreamState
from tether_backend.core.notices import Notice, Notification, notification_id
from tether_backend.webhooks.config import Endpoint


class Outbox:
    """One tenant's. Each call raises BusError; an unreadable record is left out of lists."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, subjects.NOTIFICATIONS)
        self.tenant = tenant

    async def add(self, notice: Notice, endpoint: Endpoint, now_ms: int) -> bool:
        """True where it is new. The event's body is fixed here: every attempt sends the same bytes."""
        id_ = notification_id(notice, endpoint.name)
        body: dict[str, Any] = {
            "type": notice.kind,
            "id": id_,
            "timestamp": notice.at,
            "data": {
                "tenant": notice.tenant,
                "workspace": notice.workspace,
                "conversation": notice.conversation,
                **({} if notice.execution is None else {"execution": notice.execution}),
                **notice.data,
            },
        }
        note = Notification(
            id=id_,
            endpoint=endpoint.name,
            kind=notice.kind,
            conversation=notice.conversation,
            execution=notice.execution,
            body=json.dumps(body, separators=(",", ":"), ensure_ascii=False),
            due_at=now_ms,
            created_at=now_ms,
        )
        try:
            await self._bucket.create(self._key(note), note.value(), op=id_, ttl_s=NOTIFICATION_MEMORY_S)
        except Conflict:
            return False
        return True

    async def since_ms(self, endpoint: str, now_ms: int) -> int:
        """From when on this endpoint is notified (unix ms): from its first start, whoever made it. What the log holds
        of the time before is nobody's news."""
        key = subjects.webhook_start_key(self.tenant, endpoint)
        try:
            entry = await self._bucket.create(key, {"since": now_ms}, op=uuid.uuid4().hex)
        except Conflict as found:
            if found.current is None:
                return now_ms
            entry = found.current
        since = entry.value.get("since")
        return since if isinstance(since, int) else 0

    async def get(self, endpoint: str, notification: str) -> tuple[Entry, Notification] | None:
        entry = await self._bucket.get(subjects.notification_key(self.tenant, endpoint, notification))
        return None if entry is None else (entry, self._bucket.parse(entry, Notification))

    async def put(self, entry: Entry, note: Notification) -> Entry:
        """Replace exactly `entry`. Raises Conflict where another was there."""
        return await self._bucket.update(
            entry.key, note.value(), op=uuid.uuid4().hex, revision=entry.revision, ttl_s=NOTIFICATION_MEMORY_S
        )

    async def written_after(
        self, revision: int, endpoint: str | None = None
    ) -> AsyncIterator[tuple[Entry, Notification]]:
        """Every record as it is now whose last write is past `revision`, in order of writing; of one endpoint, or all.
        One that lies where it does not belong is left out."""
        keys = f"{self.tenant}.*.*" if endpoint is None else f"{self.tenant}.{endpoint}.>"
        async for entry, note in self._bucket.records(Notification, keys, after=revision):
            if entry.key == f"{self.tenant}.{note.endpoint}.{note.id}":
                yield entry, note

    async def state(self) -> StreamState | None:
        """The bucket's stream; None where there is none."""
        return await self._bus.state(f"KV_{subjects.NOTIFICATIONS}")

    def _key(self, note: Notification) -> str:
        return subjects.notification_key(self.tenant, note.endpoint, note.id)
