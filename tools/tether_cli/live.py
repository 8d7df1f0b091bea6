"""A command that follows a conversation on the terminal: `tether run`, `tether attach`.

reader     follows, shows, tells the approver; ends with the response
approver   answers what waits, one at a time
signals    run:    first Ctrl-C interrupts the turn (a control, once the execution is known), the second detaches
           attach: Ctrl-C leaves; nothing is interrupted by watching
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tether.client import Client
from tether.client.items import CaughtUp, ExecutionItem, Item
from tether.client.tracking import ResponseTracker
from tether.errors import ProblemError
from tether.events import RESPONSE_ENDED
from tether_cli.approvals import Approver, Policy
from tether_cli.output import CliError, Exit, Output
from tether_cli.render import Renderer, item_value
from tether_cli.terminal import Keyboard, Screen

PATIENCE_S = 60.0  # how long a set that does not answer is waited for in mid-stream


@dataclass(slots=True)
class Live:
    """One followed conversation. `interrupts`: Ctrl-C ends the turn first; else it leaves at once."""

    client: Client
    screen: Screen
    output: Output
    conversation: str
    tracker: ResponseTracker
    policy: Policy
    interrupts: bool
    cursor: str | None = None
    durable: str | None = None
    stay: bool = False
    renderer: Renderer = field(default_factory=Renderer)
    keyboard: Keyboard | None = None
    started_s: float = field(default_factory=time.monotonic)
    signals: int = 0
    detached: bool = False
    last_outcome: str | None = None  # of the last response that was seen to end
    last_error: dict[str, Any] | None = None  # and its error
    _interrupting: asyncio.Event = field(default_factory=asyncio.Event)
    _leave: asyncio.Event = field(default_factory=asyncio.Event)
    _execution_known: asyncio.Event = field(default_factory=asyncio.Event)

    def know(self) -> None:
        """The tracker may know its execution from the start."""
        if self.tracker.execution is not None:
            self._execution_known.set()

    async def follow(self) -> None:
        """Until the response has ended, the conversation has nothing to wait for, or the user leaves."""
        quiet = self.output.as_json
        approver = Approver(self.client, self.screen, self.policy, self.keyboard, quiet=quiet)
        with self._signals():
            try:
                async with asyncio.TaskGroup() as group:
                    reader = group.create_task(self._read(approver), name="live-reader")
                    helpers = [
                        group.create_task(approver.run(), name="live-approver"),
                        group.create_task(self._interrupt(), name="live-interrupt"),
                        group.create_task(self._leaving(reader), name="live-leaving"),
                    ]
                    await asyncio.wait((reader,))
                    for helper in helpers:
                        helper.cancel()
            except ExceptionGroup as failures:
                raise _first(failures) from None
            finally:
                if self.keyboard is not None:
                    self.keyboard.close()
        self.screen.end_line()

    async def _read(self, approver: Approver) -> None:
        items = self.client.follow(self.conversation, self.cursor, durable=self.durable, patience_s=PATIENCE_S)
        async with aclosing(items):
            async for item in items:
                self._show(item)
                self.cursor = item.cursor or self.cursor
                self.tracker.take(item)
                if isinstance(item, ExecutionItem) and item.type == RESPONSE_ENDED:
                    self.last_outcome = str(item.event.body.get("outcome"))
                    self.last_error = item.event.body.get("error")
                self.know()
                approver.take(item)
                if not self.stay and (self.tracker.ended or (isinstance(item, CaughtUp) and await self._idle())):
                    return

    def _show(self, item: Item) -> None:
        if self.output.as_json:
            self.output.value(item_value(item))
        else:
            self.screen.write(self.renderer.render(item))

    async def _idle(self) -> bool:
        """Everything stored has been shown: is there something to wait for?"""
        if self.tracker.request is not None or self.tracker.response is not None:
            return False
        active = (await self.client.executions(conversation=self.conversation, active=True, limit=1)).executions
        if not active or active[0].response is None:
            return not await self._starts()
        view = active[0]
        state = await self.client.state(view.execution)
        if state.response_outcome is not None:
            return True
        self.tracker.response, self.tracker.execution = view.response, view.execution
        self.tracker.begin_from(state)
        self.know()
        return False

    async def _starts(self) -> bool:
        """The newest response has no execution in the log yet: its sandbox is being made, or woken."""
        newest = (await self.client.conversation(self.conversation, limit=1)).responses[-1:]
        if not newest or newest[0].outcome is not None:
            return False
        self.tracker.response, self.tracker.execution = newest[0].response, newest[0].execution
        self.know()
        return True

    # --- signals ---

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal)
        loop.add_signal_handler(signal.SIGTERM, self._leave.set)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    def _on_signal(self) -> None:
        self.signals += 1
        if self.interrupts and self.signals == 1:
            if not self.output.as_json:
                self.screen.line("interrupting the turn; Ctrl-C again detaches and lets it go on")
            self._interrupting.set()
        else:
            self._leave.set()

    async def _interrupt(self) -> None:
        await self._interrupting.wait()
        await self._execution_known.wait()  # a prompt that still waits is interrupted as soon as it runs
        assert self.tracker.execution is not None
        try:
            receipt = await self.client.interrupt(self.tracker.execution)
        except ProblemError as error:
            self.screen.line(f"not interrupted: {error.problem.detail}")
            return
        if receipt.status == "unknown":
            self.screen.line("no reply to the interrupt yet; the stream tells whether it came")

    async def _leaving(self, reader: asyncio.Task[None]) -> None:
        await self._leave.wait()
        self.detached = True
        reader.cancel()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to tell: the first that is ours."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [failures]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        else:
            flat.append(one)
    return next((one for one in flat if isinstance(one, (ProblemError, CliError))), flat[0])


def exit_code(live: Live) -> Exit:
    """Of the response that was followed; of a conversation in which nothing ran, of the last that was shown."""
    if live.detached:
        return Exit.INTERRUPTED
    tracker = live.tracker
    interrupted = live.interrupts and live.signals > 0
    match tracker.outcome or live.last_outcome:
        case None:
            return Exit.OK
        case "completed":
            return Exit.LOST if tracker.partial else Exit.OK
        case "lost" | "drained":
            return Exit.LOST
        case "cancelled" | "stopped" if interrupted:
            return Exit.INTERRUPTED
        case _:
            return Exit.FAILED
