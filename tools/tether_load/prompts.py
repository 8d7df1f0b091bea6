"""Prompts of many tenants at the same moment.

Every tenant sends the same number of prompts, each into a conversation of its own, all in one workspace. A few tenants
have an allowance of fewer prompts a minute: what is beyond it must be refused by name. All others must be admitted and
run, however many of them wait for a place.

Judged: each request has one answer; what was refused is in no log and reached no agent; what was admitted ran exactly
once, completed, and its log is what its agent printed; never more than the limit ran at the same time, by the logs'
own times; the queue is empty in the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tether import Client, subjects
from tether.errors import BusError, Code, ProblemError
from tether.events import EXECUTION_ENDED, EXECUTION_STARTED, ConversationEvent
from tether.frames import decode
from tether.ids import new_id
from tether.ports import Bus
from tether_bench.processes import rss_mib
from tether_bench.stats import percentile
from tether_chaos import judge
from tether_collector.launching import derived_uuid
from tether_load.load_set import Plane, plane
from tether_load.report import Finding
from tether_oracle import Truth, ledger_duplicates, load_truth

WORKSPACE: Final = "work"
PATIENCE_S: Final = 8.0  # of one call; a pending request is asked for again
STALL_S: Final = 180.0  # nothing ends for so long: the load is given up
IDLE_S: Final = 20.0  # sandboxes in which nothing runs are suspended: two hundred of them fill the memory
ALLOWANCE: Final = 3  # prompts a minute, of the tenants that have less than they send
SCRIPT: Final = "!deltas 10 20\n!tool write 5 100"
_LOOK_S: Final = 0.5
_SUBMITTING_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Size:
    tenants: int
    each: int
    running: int
    starved: int  # tenants with a small allowance


FULL: Final = Size(tenants=200, each=5, running=40, starved=5)
SHORT: Final = Size(tenants=4, each=5, running=3, starved=1)


@dataclass(slots=True)
class Sent:
    """One prompt and what its sender was told. `answered_s`: after the start of all."""

    tenant: str
    conversation: str
    request: str
    marker: str
    execution: str = ""
    refused: str = ""
    error: str = ""
    answered_s: float = 0.0
    pending: int = 0


@dataclass(slots=True)
class _Logs:
    """By tenant and conversation. `spans`: (when an execution's claim was stored, when its end was), seconds."""

    of: dict[tuple[str, str], judge.Log] = field(default_factory=dict)
    spans: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)


async def run(size: Size, say: Callable[[str], None]) -> Finding:
    """Raises CliError where the set fails."""
    finding = Finding("prompts")
    tenants = [f"t{number:03d}" for number in range(size.tenants)]
    environment = {
        "router": {"TETHER_ROUTER_QUOTA_RUNNING_TOTAL": str(size.running)},
        "agent": {"TETHER_AGENT_READY_WAIT_S": "300"},
    }
    quotas = {"tenants": {name: {"prompts_per_minute": ALLOWANCE} for name in tenants[: size.starved]}}
    idle_s = IDLE_S if size.tenants > SHORT.tenants else None
    async with plane(tenants, environment, say, quotas=quotas, idle_s=idle_s) as up:
        finding.row("start_s", up.start_s, "s")
        await _work(up, size, tenants, finding)
    return finding


async def _work(up: Plane, size: Size, tenants: Sequence[str], finding: Finding) -> None:
    sent = [
        Sent(tenant, f"c{number}", new_id("req"), f"m-{tenant}-{number}")
        for tenant in tenants
        for number in range(size.each)
    ]
    begun_s = time.monotonic()
    peak = {"backend": 0.0, "router": 0.0, "agent": 0.0, "nats": 0.0}
    watching = asyncio.create_task(_watch_memory(up, peak), name="load-memory")
    clients = {tenant: Client.http(up.state.http_url, up.tokens[tenant], patience_s=PATIENCE_S) for tenant in tenants}
    try:
        async with up.bus() as bus:
            ends = asyncio.create_task(_until_over(bus, tenants, sent, up), name="load-ends")
            gate = asyncio.Semaphore(_SUBMITTING_MAX)
            async with asyncio.TaskGroup() as group:
                for one in sent:
                    group.create_task(_submit(one, clients[one.tenant], begun_s, gate), name=f"submit-{one.request}")
            submitted_s = time.monotonic() - begun_s
            up.say(f"all {len(sent)} prompts are answered after {submitted_s:.0f} s")
            over = await ends
            total_s = time.monotonic() - begun_s
            logs = await _read(bus, tenants)
            left = await bus.state(subjects.PROMPTS_STREAM)
    finally:
        watching.cancel()
        await asyncio.gather(watching, *(client.close() for client in clients.values()), return_exceptions=True)
    truth = await asyncio.to_thread(load_truth, up.truth)
    _judge(finding, size, sent, logs, truth)
    if not over:
        finding.faults.append(f"not all was over: nothing ended for {STALL_S:g} s")
    if left is None or left.messages:
        finding.faults.append(f"{'?' if left is None else left.messages} prompts are left in the queue")
    finding.row("all_over_s", total_s, "s")
    finding.row("answer_s_p50", percentile([one.answered_s for one in sent], 0.5), "s")
    finding.row("answer_s_max", max(one.answered_s for one in sent), "s")
    for name, mib in peak.items():
        finding.row(f"{name}_rss_mib_max", mib, "MiB")


async def _submit(one: Sent, client: Client, begun_s: float, gate: asyncio.Semaphore) -> None:
    """The same request again while it is pending, as a user would."""
    async with gate:
        while not one.execution:
            try:
                told = await client.prompt(
                    one.conversation,
                    f"{one.marker}\n{SCRIPT}",
                    agent="scripted",
                    workspace=WORKSPACE,
                    request_id=one.request,
                    patience_s=PATIENCE_S,
                )
            except ProblemError as error:
                if error.problem.code is Code.RUNTIME_UNAVAILABLE and error.problem.retryable:
                    one.pending += 1  # said by name, and to be asked again
                    continue
                one.refused = error.problem.code
                one.error = "" if error.problem.context.get("limit") else error.problem.detail
                break
            if told.status == "pending":
                one.pending += 1
                continue
            one.execution = told.execution or ""
    one.answered_s = time.monotonic() - begun_s


async def _until_over(bus: Bus, tenants: Sequence[str], sent: Sequence[Sent], up: Plane) -> bool:
    """Until each prompt is answered, and each execution that was begun is over; False once nothing moves any more."""
    ended, moved_s, told_s = 0, time.monotonic(), time.monotonic()
    ends = {tenant: _Ends() for tenant in tenants}
    while True:
        await asyncio.sleep(_LOOK_S)
        answered = sum(bool(one.execution or one.refused) for one in sent)
        admitted = sum(bool(one.execution) for one in sent)
        found = 0
        try:
            for tenant in tenants:
                found += await ends[tenant].look(bus, tenant)
        except BusError:
            continue
        if found + answered != ended:
            ended, moved_s = found + answered, time.monotonic()
        if time.monotonic() - told_s > 20:
            told_s = time.monotonic()
            up.say(f"{answered} of {len(sent)} were answered, {found} executions over")
        if answered == len(sent) and found >= admitted:
            return True
        if time.monotonic() - moved_s > STALL_S:
            return False


@dataclass(slots=True)
class _Ends:
    """How many executions of a tenant are over; only what is new in its log is read."""

    after: int = 0
    count: int = 0

    async def look(self, bus: Bus, tenant: str) -> int:
        while messages := await bus.read(subjects.events_stream(tenant), self.after, f"tether.event.{tenant}.>"):
            self.after = messages[-1].sequence
            self.count += sum(b'"execution.ended"' in message.data for message in messages)
        return self.count


async def _watch_memory(up: Plane, peak: dict[str, float]) -> None:
    while True:
        for name in peak:
            peak[name] = max(peak[name], rss_mib(up.process(name).pid))
        await asyncio.sleep(1.0)


async def _read(bus: Bus, tenants: Sequence[str]) -> _Logs:
    logs = _Logs()
    for tenant in tenants:
        after = 0
        while messages := await bus.read(subjects.events_stream(tenant), after, f"tether.event.{tenant}.>"):
            after = messages[-1].sequence
            for message in messages:
                address = subjects.parse_event(message.subject)
                log = logs.of.setdefault((tenant, address.conversation), judge.Log())
                content = decode(message.subject, message.data)
                if isinstance(content, ConversationEvent):
                    log.conversation.append(content)
                    continue
                log.executions.setdefault(address.execution, []).extend(content.events)
                types = {event.type for event in content.events}
                key, at_s = (tenant, address.execution), message.stored_at_ns / 1e9
                if EXECUTION_STARTED in types:
                    logs.spans[key] = (at_s, float("inf"))
                if EXECUTION_ENDED in types and key in logs.spans:
                    logs.spans[key] = (logs.spans[key][0], at_s)
    return logs


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """How many of them overlap at most; one that ends where another begins does not."""
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def _judge(finding: Finding, size: Size, sent: Sequence[Sent], logs: _Logs, truth: Truth) -> None:
    add = finding.faults.append
    by_prompt = {prompt: process for process in truth.processes for prompt in process.prompts()[:1]}
    if repeats := ledger_duplicates(truth):
        add(f"{repeats} side effects were done more than once")
    reached = Counter(
        marker
        for process in truth.processes
        for line in process.stdin
        if (message := line.message()) is not None and message.get("type") == "prompt"
        for marker in [str(message["text"]).partition("\n")[0]]
    )
    lost = 0
    for one in sent:
        log = logs.of.get((one.tenant, one.conversation), judge.Log())
        who = f"{one.tenant}/{one.conversation}"
        if one.refused:
            if one.refused != Code.QUOTA_EXCEEDED or one.error:
                add(f"{who}: refused with {one.refused} {one.error}")
            if log.executions or reached[one.marker]:
                add(f"{who}: refused, and reached an agent {reached[one.marker]} times")
            continue
        if not one.execution:
            add(f"{who}: has no answer")
            continue
        if list(log.executions) != [one.execution] or reached[one.marker] != 1:
            add(
                f"{who}: executions {list(log.executions)}, told {one.execution}; reached agents {reached[one.marker]}×"
            )
            lost += not reached[one.marker]
            continue
        if log.outcome(one.execution) != "completed":
            add(f"{who}: {one.execution} is {log.outcome(one.execution)}")
        process = by_prompt.get(derived_uuid(one.execution, "prompt"))
        if process is None:
            add(f"{who}: no agent has the prompt of {one.execution}")
            continue
        own = Truth((process,), ())  # of all of them together, each comparison would read everything again
        finding.faults += [f"{who}: {fault}" for fault in judge.log_faults(log)]
        finding.faults += judge.agent_faults(who, own, {one.execution: [process]}, log.executions)
    refused = sum(bool(one.refused) for one in sent)
    admitted = sum(bool(one.execution) for one in sent)
    most = most_at_once(list(logs.spans.values()))
    wanted = size.starved * (size.each - ALLOWANCE)
    finding.row("prompts", len(sent), "")
    finding.row("admitted", admitted, "", f"= {len(sent) - refused}", admitted == len(sent) - refused)
    # The allowance refills while the prompts come in: one or two more may get in.
    finding.row("refused", refused, "", f"≤ {wanted}, > 0", 0 < refused <= wanted)
    finding.row("lost", lost, "", "= 0", lost == 0)
    finding.row("running_at_most", most, "", f"≤ {size.running}", most <= size.running)
