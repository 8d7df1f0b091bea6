"""One round of the chaos run with faults that a test chooses: real services, readers of several kinds, the oracle.

A test gives conversations (each begins when the test says so) and a coroutine that does the harm. Everything is judged
as in a seeded round: log, readers, projection, prompts, side effects, writers.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import support_hasty_service
from tether.bus import NatsBus, connect
from tether.nats_authority import Keys
from tether.processes import send_signal
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.faults import Kill, Victim, victims
from tether_chaos.load import Clients, Talk
from tether_chaos.plan import ConversationPlan, Mode, Plan, PromptPlan
from tether_chaos.readers import Got
from tether_chaos.round import Result, Round, until
from tether_cli.nats_server import EmbeddedServer
from tether_cli.set import SetOptions
from tether_cli.state import SetState
from tether_cli.supervise import ChildSpec

DEADLINE_S: Final = 40.0
SETTLE_S: Final = 90.0


def talk(name: str, *texts: str, workspace: str = "w0", mode: Mode = "auto", after_s: float = 0.0) -> ConversationPlan:
    """A conversation; its prompts race. The first lines mark each prompt and leave a side effect."""
    prompts = tuple(
        PromptPlan(
            request=f"{name}-{number}",
            marker=f"<{name}-{number}>",
            text=f"!say <{name}-{number}>\n!tool first\n{text}\n!tool last\n!usage 3 4",
            over="nats" if number % 2 else "http",
            again_after_s=0.5,
            fate="run",
            fate_after_s=0.0,
            next_at_once=False,
            mode=mode,
            after_s=after_s,
        )
        for number, text in enumerate(texts)
    )
    return ConversationPlan(name, workspace, (prompts,), ("sse", "ws", "nats"))


class HastySet(ChaosSet):
    """Its services' leases are those of `support_hasty_service`."""

    def _service_spec(self, name: str, server: EmbeddedServer, own: Keys) -> ChildSpec:
        spec = super()._service_spec(name, server, own)
        package = spec.argv[-1]
        script = str(Path(support_hasty_service.__file__).resolve())
        return replace(spec, argv=(sys.executable, "-P", script, package))


Harm = Callable[["FaultRound"], Awaitable[None]]


class FaultRound(Round):
    """`harm` runs with the set up and readers attached; `begin` starts a conversation's users. `made`: the set."""

    def __init__(
        self,
        conversations: Sequence[ConversationPlan],
        folder: Path,
        harm: Harm,
        *,
        nodes: int = 1,
        made: type[ChaosSet] = ChaosSet,
    ) -> None:
        super().__init__(Plan(0, tuple(conversations), (), (), nodes), folder)
        self._harm = harm
        self._made = made
        self.options: dict[str, Any] = {}  # of the set, in place of a round's
        self._services: ChaosSet | None = None
        self._talking: asyncio.TaskGroup | None = None
        self._clients: Clients | None = None

    def _set(self, options: SetOptions) -> ChaosSet:
        return self._made(
            replace(options, **self.options), nodes=self.plan.nodes, backend_environment=self._backend_environment
        )

    @property
    def services(self) -> ChaosSet:
        assert self._services is not None
        return self._services

    @property
    def up(self) -> SetState:
        return self.services.state

    async def judged(self) -> Result:
        """Runs it; fails where anything was lost, doubled, reordered, or ran twice."""
        result = await self.run()
        assert result.violations == [], result.violations
        assert result.executions > 0 and result.looks > 0
        return result

    async def _load(self, services: ChaosSet, clients: Clients) -> None:
        self._services, self._clients = services, clients
        try:
            async with asyncio.timeout(SETTLE_S), asyncio.TaskGroup() as talking:
                self._talking = talking
                await self._harm(self)
        except TimeoutError:
            for one in self._talks:
                self.result.violations += [f"{one.plan.name}: {line}" for line in one.open()]
            self.result.violations.append("not everything was over in time")

    def begin(self, name: str) -> asyncio.Task[None]:
        """The users of this conversation begin; done when all that they said is over."""
        assert self._talking is not None and self._clients is not None
        [plan] = [one for one in self.plan.conversations if one.name == name]
        users = Talk(plan, self._clients)
        self._talks.append(users)
        return self._talking.create_task(users.run(), name=f"talk-{name}")

    def reader(self, name: str, kind: str) -> Got:
        return next(got for got in self._readers[name] if got.kind == kind)

    async def reads(self, name: str, events: int) -> None:
        """Until readers of every kind have so many events of the conversation."""

        async def there() -> bool:
            return all(len(got.receipts) >= events for got in self._readers[name])

        await self.until(there, f"{events} events of {name} at its readers")

    def count(self, name: str) -> int:
        """Events that the slowest reader has of the conversation."""
        return min(len(got.receipts) for got in self._readers[name])

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = DEADLINE_S) -> None:
        assert await until(condition, timeout_s), f"not within {timeout_s:g} s: {what}"

    def victim(self, service: str, workspace: str = "") -> Victim:
        """The living process of a service; of a workspace, its collector."""
        found = [one for one in victims(self.services.paths.root, service) if one.scope == workspace]
        assert found, f"no {service} {workspace} lives"
        return found[0]

    async def kill(self, service: str, workspace: str = "") -> None:
        """SIGKILL, and until its successor is ready."""
        kill = Kill(self.services, self.victim(service, workspace))
        assert kill.strike()
        self._done.kills[service] += 1
        assert await kill.up() is not None, f"no successor of the {service}"

    @asynccontextmanager
    async def frozen(self, service: str, workspace: str = "") -> AsyncIterator[Victim]:
        victim = self.victim(service, workspace)
        assert send_signal(victim.process, signal.SIGSTOP)
        try:
            yield victim
        finally:
            assert send_signal(victim.process, signal.SIGCONT), f"the {service} did not live through its freeze"

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        up = self.up
        async with await connect(up.nats_url, name="harm", creds_file=up.nats_creds_file) as bus:
            yield bus

    async def api(self, subject: str, **body: Any) -> dict[str, Any]:
        """A question to the server's JetStream API."""
        async with self.bus() as bus:
            answer = await bus.request(f"$JS.API.{subject}", json.dumps(body).encode() if body else b"", timeout_s=5.0)
        found: dict[str, Any] = json.loads(answer.data)
        return found
