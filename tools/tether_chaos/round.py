"""One round: a set, its load, its faults; then the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from tether import Client, subjects
from tether.api import ItemList
from tether.bus import connect
from tether.client import NatsCredentials
from tether.errors import BusError, TetherError
from tether.events import ConversationEvent
from tether.frames import decode
from tether.ports import Bus
from tether_chaos import judge
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.drains import Allowed, drain_faults, drained, references_of
from tether_chaos.faults import Done, Saboteur
from tether_chaos.load import Clients, Talk
from tether_chaos.operators import Operators
from tether_chaos.outages import Chain, Wait, failover_samples, start_sample, stream_samples, waits
from tether_chaos.plan import ConversationPlan, Plan
from tether_chaos.readers import Got, read_bare, read_on
from tether_chaos.writers import WriterWatch
from tether_cli.set import SetOptions
from tether_cli.state import SetState
from tether_oracle import load_truth

SETTLE_S: Final = 120.0  # after the last fault: everything that was begun is over, or it never will be
CATCH_UP_S: Final = 45.0
SLOW_S: Final = 1.0  # a re-attach that is told apart
BACK_OFF_MAX_S: Final = 0.5  # of the set's supervisor: who is killed again and again is started again soon
DISK_BYTES: Final = 512 << 20
_LOOK_S: Final = 0.1
_HTTP_TIERS: Final = frozenset({"backend", "nats", "collector"})
_NATS_TIERS: Final = frozenset({"nats", "collector"})


@dataclass(slots=True)
class Result:
    """Figures of a round and every violation found. `reattach_s`: samples by tier. `restart_s`: from a kill until its
    successor was ready. `start_s`: what prompts waited to begin, by the tier that was the last to be up. `failover_s`:
    of a cluster's readers while one of its servers was away. `operations`: what was done to sandboxes. `drained`:
    executions that a drain cut."""

    seed: int
    faults_done: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    reattach_s: dict[str, list[float]] = field(default_factory=dict)
    restart_s: dict[str, list[float]] = field(default_factory=dict)
    failover_s: list[float] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    drained: int = 0
    start_s: dict[str, list[float]] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    prompts: int = 0
    executions: int = 0
    events: int = 0
    breaks: int = 0
    looks: int = 0
    seconds: float = 0.0
    recovery_s: float = 0.0


class Round:
    """See the module. `folder` has data and truth; whoever made it removes it. `keep`: where all of it is copied to if
    there is a violation."""

    def __init__(self, plan: Plan, folder: Path, keep: Path | None = None) -> None:
        self.plan = plan
        self._folder = folder
        self._keep = keep
        self.truth = folder / "truth"
        self.data = folder / "data"
        self._agents = folder / "agents.toml"
        self.result = Result(plan.seed)
        self._talks: list[Talk] = []
        self._readers: dict[str, list[Got]] = {}
        self._pulse = asyncio.Event()
        self._done = Done()
        self._operators: Operators | None = None
        self._watch = WriterWatch(self.truth)
        self._conversations: dict[str, str] = {}
        self._began_s = 0.0  # of the faults, unix seconds
        self._logs: dict[str, judge.Log] = {}
        self._backend_environment: dict[str, str] = {}

    async def run(self) -> Result:
        began_s = time.monotonic()
        self.truth.mkdir(parents=True)
        self._agents.write_text(
            f"[agents.scripted]\nenv = {{ TETHER_SCRIPTED_TRUTH = {json.dumps(str(self.truth))} }}\n"
        )
        options = self._options()
        with _own_disk(self.data / "workspaces", wanted=any(fault.how == "disk" for fault in self.plan.faults)):
            async with self._set(options) as services:
                await self._guarded(services)
            if self.result.violations and self._keep is not None:
                await asyncio.to_thread(self._copy, self._keep)
        self.result.seconds = time.monotonic() - began_s
        return self.result

    def _set(self, options: SetOptions) -> ChaosSet:
        return ChaosSet(options, nodes=self.plan.nodes, backend_environment=self._backend_environment)

    def _copy(self, keep: Path) -> None:
        """Before the workspaces' own disk goes."""
        ignored = shutil.ignore_patterns("*.sock", ".ballast")
        shutil.copytree(self._folder, keep, dirs_exist_ok=True, ignore=ignored, symlinks=True)

    def _options(self) -> SetOptions:
        return SetOptions(
            data=self.data,
            agents_file=self._agents,
            log="quiet",
            log_level="info",
            ephemeral=True,
            back_off_max_s=BACK_OFF_MAX_S,
        )

    async def _guarded(self, services: ChaosSet) -> None:
        failing = asyncio.create_task(services.failed(), name="set-failed")
        watching = asyncio.create_task(self._watch.run(), name="writer-watch")
        try:
            work = asyncio.create_task(self._work(services), name="round")
            await asyncio.wait({failing, work, watching}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                failed = failing if failing.done() else watching
                self.result.violations.append(f"{failed.get_name()}: {failed.exception()}")
        finally:
            for task in (failing, watching):
                task.cancel()
            await asyncio.gather(failing, watching, return_exceptions=True)

    async def _work(self, services: ChaosSet) -> None:
        up = services.state
        clients = Clients(
            Client.http(up.http_url, up.token),
            Client.nats(up.nats_url, NatsCredentials(creds_file=up.nats_creds_file), tenant=up.tenant),
        )
        self._operators = Operators(clients, services.paths.root, services.paths.workspaces)
        async with contextlib.aclosing(_closing(clients)) as closing:
            await anext(closing)
            async with asyncio.TaskGroup() as readers:
                tasks = self._start_readers(readers, up, clients)
                try:
                    await self._load(services, clients)
                    for talk in self._talks:
                        await self._judge(up, clients, talk)
                finally:
                    for task in tasks:
                        task.cancel()
            self._measure()

    def _start_readers(self, group: asyncio.TaskGroup, up: SetState, clients: Clients) -> list[asyncio.Task[None]]:
        rng = random.Random(self.plan.seed)
        return [
            task
            for conversation in self.plan.conversations
            for task in self._read(group, up, clients, conversation, random.Random(rng.random()))
        ]

    def _read(
        self,
        group: asyncio.TaskGroup,
        up: SetState,
        clients: Clients,
        conversation: ConversationPlan,
        rng: random.Random,
    ) -> list[asyncio.Task[None]]:
        """The readers of one conversation."""
        tasks = []
        found = [Got(f"{conversation.name} {kind}", kind, pulse=self._pulse) for kind in conversation.readers]
        self._readers[conversation.name] = found
        for got in found:
            own = random.Random(rng.random())
            if got.kind in ("sse", "ws"):
                work = read_bare(got, up, conversation.name, own)
            else:
                client = clients.http if got.kind == "http" else clients.nats
                work = read_on(got, client, conversation.name, own)
            tasks.append(group.create_task(work, name=f"reader {got.name}"))
        return tasks

    async def _next_event(self) -> None:
        self._pulse.clear()
        await self._pulse.wait()

    async def _load(self, services: ChaosSet, clients: Clients) -> None:
        assert self._operators is not None
        operators = self._operators
        self._talks = [
            Talk(conversation, clients, operators.doors[conversation.workspace].passed)
            for conversation in self.plan.conversations
        ]
        saboteur = Saboteur(services, self._next_event, self.plan.services)
        self._done = saboteur.done
        self.result.faults_done = saboteur.done.faults
        seconds = sum(fault.after_s for fault in self.plan.faults)
        self._began_s = time.time()
        try:
            async with asyncio.timeout(seconds + SETTLE_S), asyncio.TaskGroup() as group:
                sabotage = group.create_task(saboteur.run(self.plan.faults), name="saboteur")
                for talk in self._talks:
                    group.create_task(talk.run(), name=f"talk-{talk.plan.name}")
                group.create_task(operators.run(self.plan.operations), name="operators")
                await sabotage
                calm_s = time.monotonic()
            async with asyncio.timeout(SETTLE_S):
                await operators.settle(one.workspace for one in self.plan.conversations)
        except TimeoutError:
            for talk in self._talks:
                self.result.violations += [f"{talk.plan.name}: {line}" for line in talk.open()]
            self.result.violations.append("it was not over in time")
        else:
            self.result.recovery_s = time.monotonic() - calm_s

    def _measure(self) -> None:
        """Kills by tier, re-attach samples, two writers: what was seen from outside."""
        self.result.kills = dict(self._done.kills)
        self.result.restart_s = self._done.restart_s
        self.result.looks = self._watch.looks
        if self._operators is not None:
            self.result.operations = self._operators.done
            self.result.violations += self._operators.violations
            full = any(fault.how == "disk" for fault in self.plan.faults)
            for report in self._operators.failed:
                told = None if report.problem is None else report.problem.detail
                self.result.violations += [] if full else [f"the drain {report.drain} failed: {told}"]
        conflicts = self._watch.conflicts(self._conversations)
        self.result.violations += [judge.Fault(line, two_writers=1) for line in conflicts]
        self.result.violations += judge.effect_faults(load_truth(self.truth))
        for talk in self._talks:
            for got in self._readers[talk.plan.name]:
                tiers = _NATS_TIERS if got.kind in ("nats", "durable") else _HTTP_TIERS
                chain = Chain(tiers, talk.plan.workspace, got.receipts)
                samples = stream_samples(self._done.outages, chain)
                if self.plan.nodes > 1:
                    samples.pop("nats", None)  # its return says nothing: the others went on without it, or elect
                    failover = failover_samples(self._done.outages, chain)
                    self.result.failover_s.extend(round(sample, 3) for sample in failover)
                self._add(samples)
                self._note_slow(got, waits(self._done.outages, chain))
            self._measure_starts(talk)

    def _note_slow(self, got: Got, found: Sequence[Wait]) -> None:
        for wait in found:
            if wait.seconds > SLOW_S:
                outage, receipt = wait.outage, wait.receipt
                times = [outage.begin_s, outage.end_s or 0.0, receipt.at_s, receipt.received_s]
                begin, end, said, came = (f"{time_s - self._began_s:.1f}" for time_s in times)
                self.result.slow.append(
                    f"{got.name}: {wait.seconds:.1f} s after {outage.tier} (out {begin} to {end} s): "
                    f"said at {said} s, came at {came} s"
                )

    def _measure_starts(self, talk: Talk) -> None:
        """Router and agent service: from when a prompt could begin to the first event of its execution."""
        reader = next((g for g in self._readers[talk.plan.name] if g.kind == "nats"), self._readers[talk.plan.name][0])
        order = sorted(reader.begins, key=lambda execution: reader.begins[execution])
        for outcome in talk.outcomes:
            execution = None if outcome.submission is None else outcome.submission.execution
            if execution is None or outcome.prompt.mode != "auto" or execution not in reader.begins:
                continue
            place = order.index(execution)
            before_s = reader.ends[order[place - 1]] if place else 0.0
            if self._was_operated(talk.plan.workspace, before_s, reader.begins[execution]):
                continue  # it waited for a drain, or woke its sandbox: none of it is an outage's
            tiers = _HTTP_TIERS | {"router", "agent"}
            due_s, began_s = max(outcome.sent_s, before_s), reader.begins[execution]
            sample = start_sample(self._done.outages, Chain(tiers, talk.plan.workspace), due_s, began_s)
            if sample is not None:
                tier, seconds = sample
                if tier in ("router", "agent"):
                    self._add({tier: [seconds]})
                self.result.start_s.setdefault(tier, []).append(round(seconds, 3))
                if seconds > SLOW_S:
                    due, began = (f"{time_s - self._began_s:.1f}" for time_s in (due_s, began_s))
                    self.result.slow.append(
                        f"{outcome.prompt.request}: {seconds:.1f} s after {tier}: due at {due} s, began at {began} s"
                    )

    def _was_operated(self, workspace: str, from_s: float, to_s: float) -> bool:
        spans = [] if self._operators is None else self._operators.spans
        return any(where == workspace and begin_s < to_s and end_s > from_s for where, begin_s, end_s in spans)

    def _add(self, samples: Mapping[str, Sequence[float]]) -> None:
        for tier, found in samples.items():
            self.result.reattach_s.setdefault(tier, []).extend(round(sample, 3) for sample in found)

    # --- the verdict ---

    async def _judge(self, up: SetState, clients: Clients, talk: Talk) -> None:
        add = self.result.violations
        log = await self._log(up, talk)
        self._logs[talk.plan.name] = log
        await self._readers_at_end(talk.plan.name, log)
        truth = load_truth(self.truth)
        processes = judge.processes_of(truth, log)
        add += judge.log_faults(log)
        add += judge.agent_faults(f"{talk.plan.name} log", truth, processes, log.executions)
        for got in self._readers[talk.plan.name]:
            add += judge.reader_faults(got, log)
            add += judge.agent_faults(got.name, truth, processes, got.executions)
            self.result.breaks += got.breaks
        add += judge.overlap_faults(talk.plan.name, [one for found in processes.values() for one in found])
        add += await self._drains(up, talk, log)
        cut = talk.cut | judge.taken_over(talk.outcomes, log) | drained(log)
        if any(fault.how == "disk" for fault in self.plan.faults):
            cut |= judge.starved(log)
        add += judge.prompt_faults(truth, talk.outcomes, log, cut)
        add += judge.outcome_faults(talk.outcomes, log, cut, talk.failing)
        await self._projection(up, clients, talk, log)
        self._conversations |= dict.fromkeys(log.executions, talk.plan.name)
        self.result.prompts += len(talk.outcomes)
        self.result.executions += len(log.executions)
        self.result.events += sum(log.ends().values())

    async def _drains(self, up: SetState, talk: Talk, log: judge.Log) -> list[str]:
        """Of executions that drains have cut. Raises BusError."""
        assert self._operators is not None
        workspace = talk.plan.workspace
        async with await connect(up.nats_url, name="chaos", creds_file=up.nats_creds_file) as bus:
            references = await references_of(bus, up.tenant, workspace)
        self.result.drained += len(drained(log))
        full = any(fault.how == "disk" for fault in self.plan.faults)
        by_machine = workspace in self._operators.terminated
        return drain_faults(log, references, Allowed(self._operators.orders[workspace], by_machine, full))

    async def _log(self, up: SetState, talk: Talk) -> judge.Log:
        """Read until every execution in it is over; what is not by then is a violation that the judge finds."""
        subject = subjects.conversation_events(up.tenant, talk.plan.workspace, talk.plan.name)

        async def read(bus: Bus) -> judge.Log:
            log, after = judge.Log(), 0
            while messages := await bus.read(subjects.events_stream(up.tenant), after, subject):
                for message in messages:
                    content = decode(message.subject, message.data)
                    if isinstance(content, ConversationEvent):
                        log.conversation.append(content)
                    else:
                        execution = subjects.parse_event(message.subject).execution
                        log.executions.setdefault(execution, []).extend(content.events)
                after = messages[-1].sequence
            return log

        log = judge.Log()

        async def whole() -> bool:
            nonlocal log
            with contextlib.suppress(BusError):
                async with await connect(up.nats_url, name="chaos", creds_file=up.nats_creds_file) as bus:
                    log = await read(bus)
                return bool(log.executions) and log.over()
            return False

        await until(whole, CATCH_UP_S)
        return log

    async def _readers_at_end(self, conversation: str, log: judge.Log) -> None:
        ends, ids = log.ends(), len(log.conversation)

        async def all_there() -> bool:
            return all(got.has(ends) and len(got.conversation) >= ids for got in self._readers[conversation])

        await until(all_there, CATCH_UP_S)

    async def _projection(self, up: SetState, clients: Clients, talk: Talk, log: judge.Log) -> None:
        async def projected() -> bool:
            try:
                found = (await clients.http.executions(conversation=talk.plan.name, limit=200)).executions
            except TetherError:
                return False
            over = {one.execution for one in found if one.outcome is not None}
            return set(log.executions) <= over

        if not await until(projected, CATCH_UP_S):
            self.result.violations.append(f"{talk.plan.name}: the projection does not have every execution's end")
            return
        headers = {"authorization": f"Bearer {up.token}"}
        async with httpx2.AsyncClient(base_url=up.http_url, headers=headers, timeout=30.0, trust_env=False) as raw:
            items = {execution: await _items(raw, execution) for execution in log.executions}
        usage = [one.model_dump() for one in (await clients.http.conversation(talk.plan.name, limit=200)).usage]
        truth = load_truth(self.truth)
        processes = judge.processes_of(truth, log)
        who = f"{talk.plan.name} projection"
        self.result.violations += judge.projection_faults(who, truth, processes, items, usage, log)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Whether it came to hold in time."""
    until_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


@contextlib.contextmanager
def _own_disk(folder: Path, *, wanted: bool) -> Iterator[None]:
    """A small file system for the workspaces, so that it can be filled; without the right to mount there is none, and
    faults of the disk do nothing."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tether-chaos", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


async def _closing(clients: Clients) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await clients.http.close()
        await clients.nats.close()


async def _items(raw: httpx2.AsyncClient, execution: str) -> list[dict[str, Any]]:
    """Every item of the projection, page by page over plain HTTP."""
    events: list[dict[str, Any]] = []
    after: int | None = None
    while True:
        params = {"limit": 500} | ({} if after is None else {"after": after})
        reply = await raw.get(f"/v1/executions/{execution}/items", params=params)
        page = ItemList.model_validate_json(reply.raise_for_status().content)
        events += [event for view in page.items for event in judge.settled_of_item(view.state)]
        after = page.after
        if after is None:
            return events
