"""One round: a set, its load, its faults; then the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
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
from tether_chaos import judge
from tether_chaos.faults import Saboteur
from tether_chaos.load import Clients, Talk
from tether_chaos.plan import Plan
from tether_chaos.readers import Got, read_on
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState
from tether_oracle import load_truth

SETTLE_S: Final = 120.0  # after the last fault: everything that was begun is over, or it never will be
CATCH_UP_S: Final = 45.0
_LOOK_S: Final = 0.1


@dataclass(slots=True)
class Result:
    """Figures of a round and every violation found."""

    seed: int
    faults_done: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    prompts: int = 0
    executions: int = 0
    events: int = 0
    breaks: int = 0
    seconds: float = 0.0
    recovery_s: float = 0.0


class Round:
    """See the module. `folder` keeps data and truth; whoever made it removes it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.truth = folder / "truth"
        self.data = folder / "data"
        self._agents = folder / "agents.toml"
        self.result = Result(plan.seed)
        self._talks: list[Talk] = []
        self._readers: dict[str, list[Got]] = {}

    async def run(self) -> Result:
        began_s = time.monotonic()
        self.truth.mkdir(parents=True)
        self._agents.write_text(
            f"[agents.scripted]\nenv = {{ TETHER_SCRIPTED_TRUTH = {json.dumps(str(self.truth))} }}\n"
        )
        options = SetOptions(data=self.data, agents_file=self._agents, log="quiet", log_level="info", ephemeral=True)
        async with ServiceSet(options) as services:
            failing = asyncio.create_task(services.failed(), name="set-failed")
            try:
                work = asyncio.create_task(self._work(services.state), name="round")
                await asyncio.wait({failing, work}, return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    self.result.violations.append(f"the set failed: {failing.exception()}")
                else:
                    work.result()
            finally:
                failing.cancel()
                await asyncio.gather(failing, return_exceptions=True)
        self.result.seconds = time.monotonic() - began_s
        return self.result

    async def _work(self, up: SetState) -> None:
        clients = Clients(
            Client.http(up.http_url, up.token),
            Client.nats(up.nats_url, NatsCredentials(user=up.nats_user, password=up.nats_password), tenant=up.tenant),
        )
        async with contextlib.aclosing(_closing(clients)) as closing:
            await anext(closing)
            async with asyncio.TaskGroup() as readers:
                tasks = self._start_readers(readers, clients)
                try:
                    await self._load(clients)
                    await self._judge(up, clients)
                finally:
                    for task in tasks:
                        task.cancel()

    def _start_readers(self, group: asyncio.TaskGroup, clients: Clients) -> list[asyncio.Task[None]]:
        rng = random.Random(self.plan.seed)
        tasks = []
        for conversation in self.plan.conversations:
            readers = [
                (Got(f"{conversation.name} SSE"), clients.http),
                (Got(f"{conversation.name} NATS"), clients.nats),
            ]
            self._readers[conversation.name] = [got for got, _ in readers]
            for got, client in readers:
                own = random.Random(rng.random())
                work = read_on(got, client, conversation.name, own, asyncio.Event())
                tasks.append(group.create_task(work, name=f"reader {got.name}"))
        return tasks

    async def _load(self, clients: Clients) -> None:
        self._talks = [Talk(conversation, clients) for conversation in self.plan.conversations]
        saboteur = Saboteur(self.data, self.plan.services)
        self.result.faults_done = saboteur.done
        seconds = sum(fault.after_s for fault in self.plan.faults)
        try:
            async with asyncio.timeout(seconds + SETTLE_S), asyncio.TaskGroup() as group:
                sabotage = group.create_task(saboteur.run(self.plan.faults), name="saboteur")
                for talk in self._talks:
                    group.create_task(talk.run(), name=f"talk-{talk.plan.name}")
                await sabotage
                calm_s = time.monotonic()
        except TimeoutError:
            for talk in self._talks:
                self.result.violations += [f"{talk.plan.name}: {line}" for line in talk.open()]
        else:
            self.result.recovery_s = time.monotonic() - calm_s

    # --- the verdict ---

    async def _judge(self, up: SetState, clients: Clients) -> None:
        add = self.result.violations
        async with await connect(up.nats_url, name="chaos", user=up.nats_user, password=up.nats_password) as bus:
            for talk in self._talks:
                log = await self._log(bus, up, talk)
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
                add += judge.prompt_faults(truth, talk.outcomes, log, talk.cut)
                add += judge.outcome_faults(talk.outcomes, log, talk.cut)
                await self._projection(up, clients, talk, log)
                self.result.prompts += len(talk.outcomes)
                self.result.executions += len(log.executions)
                self.result.events += sum(log.ends().values())

    async def _log(self, bus: Any, up: SetState, talk: Talk) -> judge.Log:
        """Read until every execution in it is over; what is not by then is a violation that the judge finds."""
        subject = subjects.conversation_events(up.tenant, talk.plan.workspace, talk.plan.name)

        async def read() -> judge.Log:
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
                log = await read()
                return bool(log.executions) and log.over()
            return False

        await _until(whole, CATCH_UP_S)
        return log

    async def _readers_at_end(self, conversation: str, log: judge.Log) -> None:
        ends, ids = log.ends(), len(log.conversation)

        async def all_there() -> bool:
            return all(got.has(ends) and len(got.conversation) >= ids for got in self._readers[conversation])

        await _until(all_there, CATCH_UP_S)

    async def _projection(self, up: SetState, clients: Clients, talk: Talk, log: judge.Log) -> None:
        async def projected() -> bool:
            try:
                found = (await clients.http.executions(conversation=talk.plan.name, limit=200)).executions
            except TetherError:
                return False
            over = {one.execution for one in found if one.outcome is not None}
            return set(log.executions) <= over

        if not await _until(projected, CATCH_UP_S):
            self.result.violations.append(f"{talk.plan.name}: the projection does not have every execution's end")
            return
        items = {execution: await _items(up, execution) for execution in log.executions}
        usage = [one.model_dump() for one in (await clients.http.conversation(talk.plan.name, limit=200)).usage]
        truth = load_truth(self.truth)
        processes = judge.processes_of(truth, log)
        who = f"{talk.plan.name} projection"
        self.result.violations += judge.projection_faults(who, truth, processes, items, usage, log)


async def _until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


async def _closing(clients: Clients) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await clients.http.close()
        await clients.nats.close()


async def _items(up: SetState, execution: str) -> list[dict[str, Any]]:
    """Every item of the projection, page by page over plain HTTP."""
    events: list[dict[str, Any]] = []
    after: int | None = None
    headers = {"authorization": f"Bearer {up.token}"}
    async with httpx2.AsyncClient(base_url=up.http_url, headers=headers, timeout=30.0) as raw:
        while True:
            params = {"limit": 500} | ({} if after is None else {"after": after})
            reply = await raw.get(f"/v1/executions/{execution}/items", params=params)
            page = ItemList.model_validate_json(reply.raise_for_status().content)
            events += [event for view in page.items for event in judge.settled_of_item(view.state)]
            after = page.after
            if after is None:
                return events
