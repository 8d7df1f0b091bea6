"""Restarts every service again and again, and looks at what should not grow: `python -m tether_chaos --flatness N`.

    warm up ─▶ measure ─▶ N times for each of router, agent service, backend, collector, nats-server: SIGKILL, ready
    again ─▶ wait until what the dead left behind has timed out ─▶ measure

Measured from outside: consumers of every stream and subscriptions and connections as nats-server counts them; open
files, threads and memory of each process as the kernel does (whoever restarts another must not grow by it); tasks as
each service's own figure tells them; temporary files in the data directory and in the system's temporary folder. A
prompt is asked now and then: it all has to work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from tether import Client
from tether.bus import NatsBus, connect
from tether.client import NatsCredentials
from tether.kv import Bucket
from tether.nats_authority import Keys
from tether.sandbox import Registration
from tether.service import write_whole
from tether.subjects import SANDBOXES
from tether.walking import entries_below
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.faults import Kill, Victim, victims
from tether_chaos.plan import SERVICES
from tether_chaos.round import until
from tether_cli.nats_server import EmbeddedServer
from tether_cli.output import CliError
from tether_cli.set import SetOptions
from tether_cli.supervise import ChildSpec

WARM_UP: Final = 3  # restarts of each before the first measurement: caches are full, lazily made things are made
SETTLE_S: Final = 120.0  # within which what the dead left behind has to be gone
ASK_EVERY: Final = 10
TOLERANCE: Final[Mapping[str, float]] = {"fds": 12, "threads": 4, "tasks": 6, "rss_mib": 48}
# The server's own, once: it loads an account, with what that imports, when its user first comes back after a restart.
# What a service's restart left behind would be as many as there were restarts.
ACCOUNTS: Final[Mapping[str, int]] = {"subscriptions": 3}
_BACK_OFF_S: Final = 0.2
_LOOK_S: Final = 1.0
WRITING_S: Final = 2.0  # no write of a file takes so long, on a machine that is not overloaded
_ANY_PORT: Final = "127.0.0.1:0"
_TASKS: Final = re.compile(r"^tether_tasks (\S+)$", re.MULTILINE)


class _MonitoredServer(EmbeddedServer):
    """With the monitoring endpoint, on loopback."""

    monitor = 0

    def write_config(self) -> None:
        super().write_config()
        if not self.monitor:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.monitor = int(probe.getsockname()[1])
        text = self.config.read_text(encoding="utf-8") + f'http: "127.0.0.1:{self.monitor}"\n'
        write_whole(self.config, text.encode())


class FlatSet(ChaosSet):
    """`monitor`: the address of nats-server's monitoring endpoint."""

    monitor = ""

    async def _start_bus(self, own: Keys) -> EmbeddedServer:
        server = _MonitoredServer(self.paths, own, self.bus_tenants)
        self._server = server
        server.prepare()
        await self._run(self._nats_spec(server))
        self.monitor = f"http://127.0.0.1:{server.monitor}"
        return server

    def _service_spec(self, name: str, server: EmbeddedServer, own: Keys) -> ChildSpec:
        spec = super()._service_spec(name, server, own)
        spec.env["TETHER_METRICS_LISTEN"] = _ANY_PORT
        if name == "agent":
            spec.env["TETHER_AGENT_COLLECTOR_METRICS_LISTEN"] = _ANY_PORT
        return spec


@dataclass(slots=True)
class Measured:
    """`counts`: what must be the same, or less. `processes`: by service: open files, threads, memory, tasks."""

    counts: dict[str, int] = field(default_factory=dict)
    processes: dict[str, dict[str, float]] = field(default_factory=dict)


class Flatness:
    """One run. `growth`: one sentence for each thing that is not flat."""

    def __init__(self, services: FlatSet, restarts: int) -> None:
        self._set = services
        self._restarts = restarts
        up = services.state
        password = NatsCredentials(creds_file=up.nats_creds_file)
        self._client = Client.nats(up.nats_url, password, tenant=up.tenant)
        self._asked = 0
        self.before = Measured()
        self.after = Measured()
        self.growth: list[str] = []
        self.done = 0

    async def run(self) -> None:
        async with self._client:
            await self._ask()
            for tier in SERVICES:
                for _ in range(WARM_UP):
                    await self._restart(tier)
            await self._ask()
            self.before = await settled(self._set, None)
            for tier in SERVICES:
                for number in range(self._restarts):
                    await self._restart(tier)
                    if number % ASK_EVERY == 0:
                        await self._ask()
            await self._ask()
            self.after = await settled(self._set, self.before)
        self.growth = compare(self.before, self.after)

    async def _ask(self) -> None:
        self._asked += 1
        request = f"flat-{self._asked}"
        async with asyncio.timeout(SETTLE_S):
            response = await self._client.ask("flat", "!say flat", agent="scripted", request_id=request)
        if response.outcome != "completed":
            raise CliError(f"prompt {request} ended {response.outcome}")

    async def _restart(self, tier: str) -> None:
        kill = Kill(self._set, await _victim(self._set, tier))
        kill.strike()
        if await kill.up() is None:
            raise CliError(f"the {tier} did not come back after restart {self.done}")
        self.done += 1


async def _victim(services: FlatSet, tier: str) -> Victim:
    found: list[Victim] = []

    async def lives() -> bool:
        found.extend(await asyncio.to_thread(victims, services.paths.root, tier))
        return bool(found)

    if not await until(lives, SETTLE_S):
        raise CliError(f"no {tier} lives")
    return found[0]


# --- measuring ---


async def settled(services: FlatSet, before: Measured | None) -> Measured:
    """Once two looks agree (or are no more than before); the last look where that never comes."""
    deadline_s = time.monotonic() + SETTLE_S
    last = Measured()
    while True:
        await asyncio.sleep(_LOOK_S)
        now = await measure_now(services)
        enough = now.counts == last.counts if before is None else not compare(before, now)
        if enough or time.monotonic() > deadline_s:
            return now
        last = now


async def measure_now(services: FlatSet) -> Measured:
    """One look."""
    up = services.state
    async with await connect(up.nats_url, name="flat", creds_file=up.nats_creds_file) as bus:
        consumers = await _consumers(bus)
        addresses = await _figures(services, bus)
    async with httpx2.AsyncClient(trust_env=False) as http:
        server = (await http.get(f"{services.monitor}/varz")).json()
        tasks = {tier: await _tasks(http, address) for tier, address in addresses.items()}
    counts = {
        "consumers": consumers,
        "subscriptions": int(server["subscriptions"]),
        "connections": int(server["connections"]),
        "temporary_files": await asyncio.to_thread(_temporary_files, services.paths.root),
    }
    processes = {}
    for tier in SERVICES:
        found = await asyncio.to_thread(victims, services.paths.root, tier)
        if found:  # a collector comes with the first prompt
            processes[tier] = await asyncio.to_thread(_of_process, found[0].process.pid)
        if tier in tasks:
            processes[tier]["tasks"] = tasks[tier]
    processes["supervisor"] = await asyncio.to_thread(_of_process, os.getpid())
    processes["supervisor"]["tasks"] = len(asyncio.all_tasks())
    return Measured(counts, processes)


async def _figures(services: FlatSet, bus: NatsBus) -> dict[str, str]:
    """Where each service tells its figures; of a collector, its registration says it."""
    found = {}
    for name in ("router", "agent", "backend"):
        ready = await asyncio.to_thread((services.paths.ready / f"{name}.json").read_bytes)
        found[name] = str(json.loads(ready)["metrics"])
    async for _, one in Bucket(bus, SANDBOXES).records(Registration, f"{services.options.tenant}.>"):
        found["collector"] = str(one.facts["metrics"])
    return found


async def _tasks(http: httpx2.AsyncClient, address: str) -> float:
    """Raises CliError where the figure is missing."""
    told = _TASKS.search((await http.get(f"http://{address}/metrics")).text)
    if told is None:
        raise CliError(f"http://{address}/metrics does not tell tether_tasks")
    return float(told[1])


async def _consumers(bus: NatsBus) -> int:
    """Over all streams."""

    async def ask(subject: str) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads((await bus.request(subject, b"", timeout_s=5.0)).data)
        return reply

    streams = (await ask("$JS.API.STREAM.NAMES"))["streams"]
    return sum([(await ask(f"$JS.API.CONSUMER.NAMES.{stream}"))["total"] for stream in streams])


def _temporary_files(data: Path) -> int:
    """Unfinished files below the data directory that nobody has touched for WRITING_S."""
    old_s, found = time.time() - WRITING_S, 0
    for entry in entries_below(data):
        if entry.name.endswith((".tmp", ".part")) and "/store/" not in entry.path:
            with contextlib.suppress(FileNotFoundError):
                found += entry.stat(follow_symlinks=False).st_mtime < old_s
    return found


def _of_process(pid: int) -> dict[str, float]:
    folder = Path("/proc") / str(pid)
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text(encoding="utf-8").splitlines() if ":" in line
    )
    return {
        "fds": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
    }


def compare(before: Measured, after: Measured, tolerance: Mapping[str, float] = TOLERANCE) -> list[str]:
    """What grew. Counts may not; open files, threads and memory of a process only within the tolerance."""
    growth = []
    for name, count in after.counts.items():
        if count > before.counts[name] + ACCOUNTS.get(name, 0):
            growth.append(f"{name}: {before.counts[name]} → {count}")
    for tier, figures in after.processes.items():
        for name, value in figures.items():
            had = before.processes[tier][name]
            if value > had + tolerance[name]:
                growth.append(f"{tier} {name}: {had:g} → {value:g}")
    return growth


def table(found: Flatness) -> str:
    lines = [f"{'':24}{'before':>10}{'after':>10}"]
    lines += [f"{name:24}{had:>10}{found.after.counts[name]:>10}" for name, had in found.before.counts.items()]
    for tier, figures in found.before.processes.items():
        for name, had in figures.items():
            lines.append(f"{f'{tier} {name}':24}{had:>10g}{found.after.processes[tier][name]:>10g}")
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def running_set() -> AsyncIterator[FlatSet]:
    """A set with data of its own, gone afterwards. Raises CliError where it fails meanwhile."""
    root = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tether-flat-"))
    options = SetOptions(data=root / "data", log="quiet", ephemeral=True, back_off_max_s=_BACK_OFF_S)
    try:
        async with FlatSet(options) as services:
            failing = asyncio.create_task(services.failed(), name="set-failed")
            try:
                yield services
            finally:
                failing.cancel()
                with contextlib.suppress(asyncio.CancelledError, CliError):
                    await failing
    finally:
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


async def measure(restarts: int) -> Flatness:
    """Restart each service so many times."""
    async with running_set() as services:
        found = Flatness(services, restarts)
        await found.run()
        return found


def command(restarts: int) -> int:
    found = asyncio.run(measure(restarts))
    print(f"flatness: {restarts} restarts of each of {', '.join(SERVICES)}")
    print(table(found))
    for line in found.growth:
        print(f"  ! {line}")
    Path("reports").mkdir(exist_ok=True)
    value = {
        "verdict": "fail" if found.growth else "pass",
        "figures": {
            "restarts_each": restarts,
            **{f"{name}_before": count for name, count in found.before.counts.items()},
            **{f"{name}_after": count for name, count in found.after.counts.items()},
            "processes_before": found.before.processes,
            "processes_after": found.after.processes,
        },
    }
    Path("reports/flatness.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print("flatness: flat" if not found.growth else "flatness: FAILED")
    return 1 if found.growth else 0
