"""How approvals and questions are answered while a command follows a response.

policy   terminal   an approval                         a question
all      any        allowed                             asked; without a terminal denied, and told
deny     any        denied, told                        denied, told
ask      yes        asked in place                      asked in place
ask      no         denied, told on stderr              denied, told on stderr
leave    no         left to whoever answers it          left
"""

from __future__ import annotations

import asyncio
from typing import Literal

from tether import events as ev
from tether.client import Answer, Client, Interaction
from tether.client.items import CaughtUp, ExecutionItem, Item, SnapshotItem
from tether.errors import Code, ProblemError
from tether.events import InteractionRequested
from tether_cli.asks import ask
from tether_cli.render import tool_label
from tether_cli.terminal import Keyboard, Screen

Policy = Literal["ask", "deny", "all", "leave"]
_SETTLED = frozenset({Code.INTERACTION_SETTLED, Code.TARGET_STALE, Code.SESSION_STREAM_NOT_ACTIVE})


class Approver:
    """Takes items, answers what waits. `run` is its task: it asks one thing at a time."""

    def __init__(
        self, client: Client, screen: Screen, policy: Policy, keyboard: Keyboard | None, *, quiet: bool = False
    ) -> None:
        self._client = client
        self._screen = screen
        self._policy = policy
        self._keyboard = keyboard
        self._quiet = quiet
        self._pending: dict[tuple[str, str], Interaction] = {}
        self._asked: set[tuple[str, str]] = set()
        self._changed = asyncio.Event()
        self._caught_up = False
        self._asking: tuple[tuple[str, str], asyncio.Task[Answer | None]] | None = None
        self.denied = 0

    def take(self, item: Item) -> None:
        """Nothing replayed is answered: what still waits once the reader has caught up is."""
        match item:
            case ExecutionItem(type=ev.INTERACTION_REQUESTED):
                body = InteractionRequested.model_validate(item.event.body)
                found = Interaction.of_event(item.conversation, item.execution, body)
                self._pending[item.execution, found.id] = found
            case ExecutionItem(type=ev.INTERACTION_RESOLVED):
                self._settled((item.execution, str(item.event.body.get("interaction"))))
            case ExecutionItem(type=ev.RESPONSE_ENDED | ev.EXECUTION_ENDED):
                for key in [key for key in self._pending if key[0] == item.execution]:
                    self._settled(key)
            case SnapshotItem():
                for execution, state in item.executions.items():
                    for one in state.pending():
                        interaction = Interaction.of_state(item.conversation, execution, one)
                        self._pending.setdefault((execution, one.id), interaction)
            case CaughtUp():
                self._caught_up = True
            case _:
                return
        self._changed.set()

    def _settled(self, key: tuple[str, str]) -> None:
        self._pending.pop(key, None)
        if self._asking is not None and self._asking[0] == key:
            self._asking[1].cancel()

    async def run(self) -> None:
        """For ever; cancel it when the response has ended."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._caught_up and (key := self._next()) is not None:
                self._asked.add(key)
                await self._handle(key, self._pending[key])

    def _next(self) -> tuple[str, str] | None:
        return next((key for key in self._pending if key not in self._asked), None)

    async def _handle(self, key: tuple[str, str], interaction: Interaction) -> None:
        task = asyncio.create_task(self._decide(interaction), name=f"ask-{interaction.id}")
        self._asking = (key, task)
        try:
            answer = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                raise
            self._screen.line("  answered elsewhere")
            return
        finally:
            self._asking = None
        if answer is not None:
            await self._send(interaction, answer)

    async def _decide(self, interaction: Interaction) -> Answer | None:
        approval = interaction.kind == "approval"
        if self._policy == "all" and approval:
            return Answer.allow()
        if self._policy in ("ask", "all") and self._keyboard is not None:
            return await ask(self._screen, self._keyboard, interaction)
        if self._policy == "leave":
            return None
        self.denied += 1
        if self._policy == "deny":
            why = "--approve deny"
        elif approval:
            why = "there is no terminal to ask on; --approve all allows everything"
        else:
            why = "there is no terminal to ask on"
        if not self._quiet:
            what = tool_label(interaction.name, interaction.input) if approval else "a question"
            self._screen.line(f"  denied {what}: {why}")
        return Answer.deny(f"denied: {why}")

    async def _send(self, interaction: Interaction, answer: Answer) -> None:
        try:
            receipt = await self._client.answer(
                interaction.conversation, interaction.id, answer, execution=interaction.execution
            )
        except ProblemError as error:
            if error.problem.code not in _SETTLED:
                raise
            self._screen.line(f"  not taken: {error.problem.detail}")
            return
        if receipt.status == "unknown":
            self._screen.line("  no reply yet: whether the answer was taken shows below, or `tether show` tells")
