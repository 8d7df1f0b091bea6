"""A hostile collector beside honest workspaces: `python -m tether_chaos.beside --rounds 5 --output-mib 1024 --seed N`.

A set of its own. Rounds alternate: the honest ones alone, then beside a collector that writes all that
`hostile_collector` knows, on a conversation of its own, with its share of the output. Judged:

    no loss         every honest prompt is answered, whole; its rows have no gap
    latency         the median of the rounds' p99 beside is at most RATIO_MAX times the median of those alone;
                    `inconclusive` where the rounds alone differ by more than that among themselves
    no belief       whatever must be refused is in quarantine, with its reason, and nothing else is
    bounded         the backend's memory stays below BACKEND_BYTES_MAX

Exit code: 0 held, 1 a violation, 2 inconclusive.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from tether import Client, subjects
from tether.bus import NatsBus, connect
from tether.frame_rules import Refusal
from tether.kv import Bucket
from tether.limits import MIB, QUARANTINE_PAGE_MAX
from tether.owner import OwnerRecord, Tombstone
from tether.processes import stat_fields
from tether.prompt import ConversationRecord
from tether.quarantine import read_page
from tether.subjects import EventAddress
from tether_chaos.hostile_collector import HostileCollector
from tether_cli import state
from tether_cli.output import CliError
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState

RATIO_MAX: Final = 2.0
BACKEND_BYTES_MAX: Final = 768 * MIB
HONEST: Final = 3  # workspaces at work at the same time
ASKS: Final = 8  # of each, in a round
TOLD_S: Final = 120.0  # for the projection to have told all of a round
_RSS: Final = 21  # pages, of the fields behind the command in /proc/{pid}/stat
_PAGE: Final = 4096


@dataclass(slots=True)
class Report:
    """p99 in seconds, one for each round."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    refused: Counter[Refusal] = field(default_factory=Counter)
    sent: int = 0
    backend_bytes: int = 0

    @property
    def ratio(self) -> float:
        return _median(self.beside_s) / max(_median(self.alone_s), 1e-9)

    @property
    def conclusive(self) -> bool:
        return max(self.alone_s) <= RATIO_MAX * min(self.alone_s)

    def judged(self) -> int:
        if self.violations:
            return 1
        if self.ratio <= RATIO_MAX:
            return 0
        return 1 if self.conclusive else 2


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Beside:
    """One run against a set that is up."""

    def __init__(self, up: SetState, seed: int, output_bytes: int, rounds: int) -> None:
        self._up = up
        self._rng = random.Random(seed)
        self._output_bytes = output_bytes
        self._rounds = rounds
        self.report = Report()

    async def run(self) -> Report:
        up = self._up
        # A router's credentials, as the worst that a sandbox could get hold of: whatever is denied beyond them is not
        # what is measured here. Quarantine is read as a backend.
        mine, theirs = (str(Path(up.nats_creds_file).with_name(f"{role}.creds")) for role in ("router", "backend"))
        async with (
            await connect(up.nats_url, name="beside", creds_file=mine) as bus,
            await connect(up.nats_url, name="beside-look", creds_file=theirs) as looking,
            Client.http(up.http_url, up.token) as client,
        ):
            await self._honest(client, "warm", asks=1)
            for number in range(self._rounds):
                self.report.alone_s.append(await self._honest(client, f"alone-{number}"))
                self.report.beside_s.append(await self._beside(bus, client, number))
            await self._judge_quarantine(looking)
        return self.report

    async def _honest(self, client: Client, name: str, asks: int = ASKS) -> float:
        """The p99 of its answers."""
        taken_s: list[float] = []
        async with asyncio.TaskGroup() as group:
            for number in range(HONEST):
                group.create_task(self._work(client, f"honest-{number}", name, asks, taken_s), name=f"honest-{number}")
        return sorted(taken_s)[max(0, -(-len(taken_s) * 99 // 100) - 1)]

    async def _work(self, client: Client, conversation: str, name: str, asks: int, taken_s: list[float]) -> None:
        for number in range(asks):
            begun_s = time.monotonic()
            text = f"{name} {number}"
            response = await client.ask(conversation, f"!say {text}\n!tool look", agent="scripted")
            taken_s.append(time.monotonic() - begun_s)
            if response.outcome != "completed" or text not in response.text:
                self.report.violations.append(f"{conversation}, {text}: {response.outcome} {response.text!r}")

    async def _beside(self, bus: NatsBus, client: Client, number: int) -> float:
        tenant, workspace, conversation = self._up.tenant, "hostile", f"hostile-{number}"
        own = EventAddress(tenant, workspace, conversation, f"exe_hostile_{number}")
        key = subjects.conversation_key(tenant, conversation)
        place = ConversationRecord(workspace=workspace).model_dump(mode="json")
        await Bucket(bus, subjects.CONVERSATIONS).create(key, place, op="beside")
        owner = OwnerRecord(tombstones=(Tombstone(execution=own.execution, outcome="completed", at=1),))
        key = subjects.owner_key(tenant, workspace, conversation)
        await Bucket(bus, subjects.OWNERS).create(key, owner.value(), op="beside")
        listed = (await client.executions(conversation="honest-0", limit=1)).executions[0]
        victim = EventAddress(tenant, listed.workspace, listed.conversation, listed.execution)
        hostile = HostileCollector(bus, own, victim, random.Random(self._rng.getrandbits(64)))
        work = hostile.everything(interactions=10_000, output_bytes=self._output_bytes // self._rounds, strangers=200)
        task = asyncio.create_task(work, name="hostile-collector")
        try:
            p99_s = await self._honest(client, f"beside-{number}")
            await task
        finally:
            task.cancel()
        self.report.refused += hostile.expected
        self.report.sent += hostile.sent
        self._look_at_memory()
        for one in range(HONEST):
            history = await client.conversation(f"honest-{one}", limit=200)
            if history.gaps:
                self.report.violations.append(f"honest-{one} has gaps: {history.gaps[:3]}")
        return p99_s

    def _look_at_memory(self) -> None:
        now = state.read(state.Paths(Path(self._up.data)))
        child = None if now is None else now.children.get("backend")
        fields = None if child is None else stat_fields(child.pid)
        if not fields:
            self.report.violations.append("the backend has ended")
            return
        self.report.backend_bytes = max(self.report.backend_bytes, int(fields[_RSS]) * _PAGE)
        if self.report.backend_bytes > BACKEND_BYTES_MAX:
            self.report.violations.append(f"the backend has {self.report.backend_bytes // MIB} MiB")

    async def _judge_quarantine(self, bus: NatsBus) -> None:
        until_s = time.monotonic() + TOLD_S
        while True:
            told = await self._told(bus)
            if told == self.report.refused:
                return
            if time.monotonic() > until_s:
                missing, more = self.report.refused - told, told - self.report.refused
                self.report.violations.append(f"quarantine: missing {dict(missing)}, unexpected {dict(more)}")
                return
            await asyncio.sleep(0.5)

    async def _told(self, bus: NatsBus) -> Counter[Refusal]:
        told: Counter[Refusal] = Counter()
        before = None
        while True:
            page, before = await read_page(bus, self._up.tenant, before=before, limit=QUARANTINE_PAGE_MAX)
            for entry in page:
                if entry.reason is not Refusal.LIMIT:  # told of honest frames that exceed what is kept
                    told[entry.reason] += entry.count
            if before is None:
                return told


async def beside(seed: int, output_bytes: int, rounds: int, folder: Path) -> Report:
    """On a set of its own in `folder`."""
    options = SetOptions(data=folder / "data", log="quiet", ephemeral=True)
    async with ServiceSet(options) as services:
        return await Beside(services.state, seed, output_bytes, rounds).run()


def main() -> int:
    import logging

    parser = argparse.ArgumentParser(prog="tether_chaos.beside", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-mib", type=int, default=1024, help="of all rounds together")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="tether-beside-") as folder:
        try:
            report = asyncio.run(beside(options.seed, options.output_mib * MIB, options.rounds, Path(folder)))
        except CliError as error:
            print(f"beside: {error}", file=sys.stderr)
            return 1
    code = report.judged()
    alone, near = (" ".join(f"{one * 1000:.0f}" for one in part) for part in (report.alone_s, report.beside_s))
    print(f"seed {options.seed}: {report.sent} hostile messages, {report.refused.total()} refused by name")
    print(f"p99 alone (ms): {alone}; beside: {near}; medians {report.ratio:.2f}x (at most {RATIO_MAX:g}x)")
    print(f"backend: at most {report.backend_bytes // MIB} MiB; {('held', 'violated', 'inconclusive')[code]}")
    for line in report.violations[:40]:
        print(f"  ! {line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
