"""A kill at each failpoint, one after the other, in one set that restarts what dies; then the oracle on all of it.

    for each case   its conversation begins, readers with it ─▶ the failpoint is armed (a file) ─▶ somebody passes it,
                    removes the file and dies ─▶ the next case, while this one recovers
    at the end      everything is over, and judged as in a round: nothing lost, doubled, run twice

A failpoint that nobody passes in ATTEMPTS conversations, FIRE_S each, is a violation: it is in the code, and this run
does not come by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tether import subjects
from tether.bus import connect
from tether.errors import BusError, TetherError
from tether.events import EXECUTION_ENDED, RESPONSE_ENDED, Event
from tether.failpoints import FOLDER_VARIABLE
from tether.frames import Frame, decode, encode
from tether.processes import send_signal
from tether.subjects import EventAddress
from tether_chaos import judge
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.failpoint_cases import ELSEWHERE, SCENARIOS, Act, Scenario, conversation, scenario_of
from tether_chaos.failpoints import scan
from tether_chaos.faults import victims
from tether_chaos.load import Clients, Talk
from tether_chaos.plan import ConversationPlan, Operation, Plan
from tether_chaos.reader_process import got_of
from tether_chaos.readers import Got, read_bare
from tether_chaos.round import CATCH_UP_S, Result, Round, until
from tether_cli.set import SetOptions
from tether_cli.state import SetState
from tether_oracle import load_truth

FIRE_S: Final = 40.0  # longer than an unanswered command or prompt waits for its next delivery
ATTEMPTS: Final = 3
SETTLE_S: Final = 120.0
EVICT_EVENTS: Final = 30
IDLE_S: Final = 15.0  # then a sandbox is suspended
_LOST: Final[dict[str, Any]] = {"outcome": "lost", "tail": "unknown"}
_SECRET: Final = "whsec_" + "dGV0aGVyLXRlc3Qtc2VjcmV0LW9mLWZhaWxwb2ludHM="
_NOBODY: Final = "http://127.0.0.1:9/"  # the discard port: a receiver that is never there


@dataclass(frozen=True, slots=True)
class Case:
    """A failpoint, its scenario and its conversation."""

    number: int
    failpoint: str
    scenario: Scenario
    plan: ConversationPlan


def cases(names: Sequence[str]) -> list[Case]:
    """Raises KeyError for a failpoint that the table has no scenario for."""
    found = []
    for number, name in enumerate(names):
        scenario = SCENARIOS[scenario_of(name) or name]
        found.append(Case(number, name, scenario, conversation(number, name, scenario)))
    return found


class FailpointRun(Round):
    """A round whose faults are failpoints. `fired_s`: how long each took to be passed; a missing one never was."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        told: Callable[[str, float], None] = lambda _name, _spent_s: None,
        keep: Path | None = None,
    ) -> None:
        self.cases = cases(names)
        super().__init__(Plan(0, tuple(case.plan for case in self.cases), (), ()), folder, keep)
        self.fired_s: dict[str, float] = {}
        self._told = told
        self._armed = folder / "failpoints"
        self._evicted: set[str] = set()
        self._operated: dict[str, asyncio.Event] = {}  # by conversation: what is done to its sandbox is done
        self._outs: dict[str, Path] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._up: SetState | None = None
        self._group: asyncio.TaskGroup | None = None

    def _options(self) -> SetOptions:
        self._armed.mkdir()
        hooks = self._folder / "webhooks.json"
        kinds = ["interaction.requested", "response.ended"]
        entry = {"name": "nobody", "url": _NOBODY, "secret": _SECRET, "tenant": "default", "kinds": kinds}
        hooks.write_text(json.dumps([entry]), encoding="utf-8")
        hooks.chmod(0o600)
        self._backend_environment["TETHER_WEBHOOKS_FILE"] = str(hooks)
        variables = ((FOLDER_VARIABLE, str(self._armed)),)
        return replace(super()._options(), test_environment=variables, idle_s=IDLE_S)

    def _start_readers(self, group: asyncio.TaskGroup, up: SetState, clients: Clients) -> list[asyncio.Task[None]]:
        self._up, self._group = up, group
        return self._keepers  # filled case by case

    async def _load(self, services: ChaosSet, clients: Clients) -> None:
        assert self._group is not None and self._up is not None
        try:
            async with asyncio.TaskGroup() as talking:
                for case in self.cases:
                    await self._case(services, clients, case, talking)
                await self._all_over()
            assert self._operators is not None
            async with asyncio.timeout(SETTLE_S):
                await self._operators.settle(talk.plan.workspace for talk in self._talks)
        except* TimeoutError:
            self.result.violations.append("it was not over in time")
            for talk in self._talks:
                self.result.violations += [f"{talk.plan.name}: {line}" for line in talk.open()]
        self.result.faults_done = [f"{name} passed after {spent:.1f} s" for name, spent in self.fired_s.items()]

    async def _case(self, services: ChaosSet, clients: Clients, case: Case, talking: asyncio.TaskGroup) -> None:
        """Up to ATTEMPTS conversations: what recovers from the cases before may use up what a case has prepared."""
        assert self._group is not None and self._up is not None
        began_s = time.time()
        for attempt in range(ATTEMPTS):
            plan = case.plan if attempt == 0 else conversation(case.number, case.failpoint, case.scenario, attempt)
            case = replace(case, plan=plan)
            talk = self._talk(case, clients)
            self._talks.append(talk)
            self._keepers += self._read(self._group, self._up, clients, plan, random.Random(case.number))
            armed = [self._armed / name for name in (*case.scenario.also, case.failpoint)]
            for path in armed:
                path.touch()
            talking.create_task(talk.run(), name=f"talk-{plan.name}")
            if case.scenario.deeds and not case.scenario.at_rest:
                talking.create_task(self._operate(case), name=f"operate-{plan.name}")
            with contextlib.suppress(TimeoutError):
                await self._act(services, case)
            fired = await self._fired(case, began_s)
            for path in armed:
                path.unlink(missing_ok=True)
            if fired:
                return
        self.result.violations.append(f"{case.failpoint}: nobody passed it ({case.plan.name})")

    def _talk(self, case: Case, clients: Clients) -> Talk:
        assert self._operators is not None
        done = self._operated[case.plan.name] = asyncio.Event()

        async def before(_turn: int) -> None:
            if case.scenario.at_rest:
                await self._operate(case)
            elif case.scenario.deeds:
                await done.wait()
            elif case.scenario.until_idle:
                await self._suspended(clients, case.plan.workspace)

        return Talk(case.plan, clients, self._operators.doors[case.plan.workspace].passed, before)

    async def _operate(self, case: Case) -> None:
        """What is done to the case's sandbox; while the first turn runs as soon as something of it was read."""
        assert self._operators is not None
        plan, scenario = case.plan, case.scenario
        try:
            if not scenario.at_rest:
                await self._begun(self._readers[plan.name][-1], 5, SETTLE_S)
            for place, deed in enumerate(scenario.deeds):
                drain = f"{deed.replace('_', '-')}-{plan.name}-{place}"
                operation = Operation(drain, plan.workspace, deed, 0.0, scenario.grace_s, scenario.store)
                await self._operators.perform(operation, insist=scenario.at_rest)
        except TimeoutError:
            self.result.violations.append(f"{case.failpoint}: nothing of {plan.name} began")
        finally:
            self._operated[plan.name].set()

    async def _suspended(self, clients: Clients, workspace: str) -> None:
        async def suspended() -> bool:
            with contextlib.suppress(TetherError):
                return (await clients.http.sandbox(workspace)).state == "suspended"
            return False

        if not await until(suspended, SETTLE_S):
            self.result.violations.append(f"{workspace}: it was idle, and was not suspended")

    async def _all_over(self) -> None:
        async def over() -> bool:
            return not any(talk.open() for talk in self._talks)

        if not await until(over, SETTLE_S):
            raise TimeoutError

    async def _fired(self, case: Case, began_s: float) -> bool:
        async def gone() -> bool:
            return not (self._armed / case.failpoint).exists()

        if not await until(gone, FIRE_S):
            return False
        now_s = time.time()
        self.fired_s[case.failpoint] = now_s - began_s
        self._told(case.failpoint, now_s - began_s)
        tier = case.failpoint.partition(".")[0]
        tier = "reader" if tier == "attach" else tier
        self._done.kills[tier] += 1
        return True

    # --- what happens meanwhile ---

    async def _act(self, services: ChaosSet, case: Case) -> None:
        act: Act = case.scenario.act
        if act == "none":
            return
        reader = self._readers[case.plan.name][-1]
        least = EVICT_EVENTS if act.startswith("evict") else 5
        await self._begun(reader, least)
        match act:
            case "kill_agent" | "kill_collector" | "kill_backend":
                self._kill(services, act.removeprefix("kill_"), case.plan.workspace)
            case "lose_database":
                self._lose_database(services)
            case "restart_collector":
                await self._ask(subjects.agent("restart-collector"), self._where(case.plan.workspace))
            case "evict" | "evict_and_lose":
                await self._evict(case, reader)
                if act == "evict_and_lose":
                    self._lose_database(services)
                self._come_late(case)
            case "close":
                await self._close(services, case, reader)
            case "read" | "read_durable":
                self._keep_reader(case, durable="late" if act == "read_durable" else None)

    async def _begun(self, reader: Got, least: int, within_s: float = FIRE_S) -> None:
        async def begun() -> bool:
            return len(reader.receipts) >= least

        if not await until(begun, within_s):
            raise TimeoutError

    def _kill(self, services: ChaosSet, tier: str, workspace: str) -> None:
        for victim in victims(services.paths.root, tier):
            if victim.scope in ("", workspace):
                send_signal(victim.process, signal.SIGKILL)

    def _lose_database(self, services: ChaosSet) -> None:
        for path in services.paths.backend.glob("tether.sqlite3*"):
            path.unlink(missing_ok=True)
        self._kill(services, "backend", "")

    def _where(self, workspace: str) -> bytes:
        assert self._up is not None
        return json.dumps({"tenant": self._up.tenant, "workspace": workspace}).encode()

    async def _ask(self, subject: str, data: bytes) -> None:
        up = self._up
        assert up is not None
        async with await connect(up.nats_url, name="chaos", creds_file=up.nats_creds_file) as bus:
            with contextlib.suppress(BusError):  # who should answer may have died in the failpoint
                await bus.request(subject, data, timeout_s=20.0)

    async def _evict(self, case: Case, reader: Got) -> None:
        """Everything of the execution but its last message."""
        assert self._up is not None
        self._evicted.add(case.plan.name)
        execution = next(iter(reader.executions))
        subject = subjects.event(self._up.tenant, case.plan.workspace, case.plan.name, execution)
        stream = subjects.events_stream(self._up.tenant)
        await self._ask(f"$JS.API.STREAM.PURGE.{stream}", json.dumps({"filter": subject, "keep": 1}).encode())

    async def _close(self, services: ChaosSet, case: Case, reader: Got) -> None:
        """What is said of an execution whose sandbox is gone with its volume, though it is only frozen."""
        up = self._up
        assert up is not None
        self._evicted.add(case.plan.name)
        address = EventAddress(up.tenant, case.plan.workspace, case.plan.name, next(iter(reader.executions)))
        frozen = [one.process for one in victims(services.paths.root, "collector") if one.scope == case.plan.workspace]
        for process in frozen:
            send_signal(process, signal.SIGSTOP)
        try:
            async with await connect(up.nats_url, name="chaos", creds_file=up.nats_creds_file) as bus:
                last = await bus.last(subjects.events_stream(up.tenant), address.subject)
                if last is None:
                    return
                told = decode(last.subject, last.data)
                assert isinstance(told, Frame)
                at = time.time_ns() // 1_000_000
                proof = {"method": "provider", "at": at}
                ends = [
                    Event(ordinal=told.last + 1, at=at, type=RESPONSE_ENDED, body={"outcome": "lost"}),
                    Event(ordinal=told.last + 2, at=at, type=EXECUTION_ENDED, body=_LOST | {"proof": proof}),
                ]
                frame = Frame(first=told.last + 1, last=told.last + 2, pos=told.pos, events=ends)
                await bus.publish(address.subject, encode(frame), expect_last=last.sequence)
        finally:
            for process in frozen:
                send_signal(process, signal.SIGCONT)

    def _come_late(self, case: Case) -> None:
        """Readers of what is gone: a bare event stream with a cursor there, a process by the SDK from the beginning."""
        assert self._up is not None and self._group is not None
        cursor = self._readers[case.plan.name][-1].first_cursor
        got = Got(f"{case.plan.name} late", "sse", cursor=cursor)
        work = read_bare(got, self._up, case.plan.name, random.Random(1))
        self._keepers.append(self._group.create_task(work, name=f"reader {got.name}"))
        self._keep_reader(case, durable=None)

    def _keep_reader(self, case: Case, *, durable: str | None) -> None:
        assert self._group is not None
        out = self._folder / f"{case.plan.name}-reader.ndjson"
        self._outs[case.plan.name] = out
        work = self._reader(out, case.plan.name, durable)
        self._keepers.append(self._group.create_task(work, name=f"reader-process-{case.plan.name}"))

    async def _reader(self, out: Path, conversation: str, durable: str | None) -> None:
        """The reader process, started again whenever it dies."""
        up = self._up
        assert up is not None
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TETHER_")}
        environment = kept | {
            "TETHER_CLIENT_URL": up.nats_url,
            "TETHER_CLIENT_NATS_CREDS_FILE": up.nats_creds_file,
            "TETHER_CLIENT_TENANT": up.tenant,
            FOLDER_VARIABLE: str(self._armed),
        }
        arguments = [str(out), conversation, *([durable] if durable is not None else [])]
        while True:
            with (self._folder / "reader.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "tether_chaos.reader_process", *arguments),
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    # --- the verdict ---

    async def _judge(self, up: SetState, clients: Clients, talk: Talk) -> None:
        if talk.plan.name in self._evicted:
            return  # its log has a hole, made here; side effects and writers are judged over the whole run
        await super()._judge(up, clients, talk)
        out = self._outs.get(talk.plan.name)
        if out is None:
            return
        log = self._logs[talk.plan.name]
        got = Got(f"{talk.plan.name} process")

        async def has_all() -> bool:
            nonlocal got
            got = got_of(out, got.name)
            return got.has(log.ends()) and len(got.conversation) >= len(log.conversation)

        await until(has_all, CATCH_UP_S)
        # At least once: what was given when the process died is given again, and its identity is the same.
        self.result.violations += judge.reader_faults(_once(got), log)
        processes = judge.processes_of(load_truth(self.truth), log)
        self.result.violations += judge.agent_faults(got.name, load_truth(self.truth), processes, _once(got).executions)


def _once(got: Got) -> Got:
    """What came again by identity is dropped, as the SDK's documentation says of a durable reader."""
    made = Got(got.name, got.kind, trouble=got.trouble)
    for execution, events in got.executions.items():
        for event in events:
            mine = made.executions.setdefault(execution, [])
            if not mine or event.ordinal > mine[-1].end:
                mine.append(event)
    made.conversation = list(dict.fromkeys(got.conversation))
    return made


def run(
    names: Sequence[str], keep: Path | None = None, told: Callable[[str, float], None] = lambda _name, _spent_s: None
) -> tuple[Result, dict[str, float]]:
    """Kill at each of these failpoints. Also says how long each took to be passed."""
    folder = Path(tempfile.mkdtemp(prefix="tether-failpoints-"))
    try:
        made = FailpointRun(names, folder, told, keep)
        result = asyncio.run(made.run())
        return result, made.fired_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(only: str, keep: Path | None) -> int:
    names = [point.name for point in scan() if only in point.name and point.name not in ELSEWHERE]
    result, fired_s = run(names, keep, lambda name, spent_s: print(f"{name:44} {spent_s:6.1f} s", flush=True))
    for name in sorted(set(names) - set(fired_s)):
        print(f"{name:44} NOT PASSED")
    for line in result.violations[:40]:
        print(f"  ! {line}")
    clean = not result.violations
    print(
        f"failpoints: {len(fired_s)} of {len(names)} passed and died in, {result.executions} executions, "
        f"{result.events} events: {'nothing lost, nothing doubled, nothing ran twice' if clean else 'FAILED'}"
    )
    return 0 if clean else 1
