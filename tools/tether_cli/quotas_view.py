"""What `tether top` shows of quotas: use beside limit, of the set's tenant.

the backend's /metrics   what is enforced at the edge, as of its last look
the bus                  places for running executions, which routers keep there
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import httpx2

from tether import subjects
from tether.errors import UnreadableRecordError
from tether.kv import Bucket
from tether.ports import Bus
from tether.quotas import RunningRecord
from tether_cli.state import SetState

ASK_S: Final = 1.0
_LINE: Final = re.compile(r'^tether_quota_(used|limit)\{limit="(\w+)",tenant="([\w-]+)"\} ([0-9.e+]+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Quota:
    """`used` of `limit`; `stored_bytes` in bytes, everything else in pieces."""

    name: str
    used: int
    limit: int


async def quotas(up: SetState, bus: Bus) -> tuple[Quota, ...]:
    """Those that are limited and used. Raises BusError; a backend that does not answer is left out."""
    found = [*await _of_edge(up), *await _places(bus, up.tenant)]
    return tuple(one for one in found if one.used)


async def _of_edge(up: SetState) -> list[Quota]:
    try:
        async with httpx2.AsyncClient(timeout=ASK_S, trust_env=False) as client:
            answer = await client.get(f"{up.http_url}/metrics", headers={"Authorization": f"Bearer {up.token}"})
    except (httpx2.HTTPError, OSError):
        return []
    return of_metrics(answer.text, up.tenant)


def of_metrics(text: str, tenant: str) -> list[Quota]:
    """From an exposition in Prometheus' text format."""
    values: dict[str, dict[str, int]] = {"used": {}, "limit": {}}
    for kind, limit, of, value in _LINE.findall(text):
        if of == tenant:
            values[kind][limit] = round(float(value))
    return [Quota(name, values["used"].get(name, 0), limit) for name, limit in sorted(values["limit"].items())]


async def _places(bus: Bus, tenant: str) -> list[Quota]:
    found = []
    for name, key in (
        ("running_executions", subjects.running_key(tenant)),
        ("running_total", subjects.running_key(None)),
    ):
        try:
            record = await Bucket(bus, subjects.QUOTAS).record(key, RunningRecord)
        except UnreadableRecordError:
            continue
        if record is not None and record.limit:
            found.append(Quota(name, len(record.held), record.limit))
    return found
