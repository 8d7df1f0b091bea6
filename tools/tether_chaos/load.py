"""The users of a round: prompts, the same request again, races, interjections, takeovers, answers,
interrupts, stops. Each retries as a user of
the SDK would, always with the same ids, until it knows what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tether import Client
from tether import events as ev
from tether.client import Answer, Submission
from tether.client.items import CaughtUp, ExecutionItem, Item
from tether.errors import BusError, Code, ProblemError
from tether_chaos.plan import ConversationPlan, Over, PromptPlan

T = TypeVar("T")
AGENT: Final = "scripted"
PATIENCE_S: Final = 20.0  # of one call; the whole is bounded by the round's deadline
_PAUSE_S: Final = 0.3
# Retryable, and an answer all the same: there was nobody to say it to.
FINAL: Final[dict[str, frozenset[Code]]] = {
    "interject": frozenset({Code.SESSION_STREAM_NOT_ACTIVE, Code.SESSION_BUSY}),
}
_SETTLED: Final = frozenset({Code.INTERACTION_SETTLED, Code.TARGET_STALE, Code.SESSION_STREAM_NOT_ACTIVE})


@dataclass(slots=True)
class Outcome:
    """What the caller was told of one request, in the end. `answers`: (status, response, execution) of every answer."""

    prompt: PromptPlan
    submission: Submission | None = None
    refused: Code | None = None
    answers: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    sent_s: float = 0.0  # unix seconds


@dataclass(slots=True)
class Clients:
    """One client for each transport."""

    http: Client
    nats: Client

    def of(self, over: Over) -> Client:
        return self.http if over == "http" else self.nats

    def other(self, over: Over) -> Client:
        return self.nats if over == "http" else self.http


class Talk:
    """One conversation's users. `entry`: what each request goes through until it is answered. `before`: awaited before
    each turn but the first, with its number."""

    def __init__(
        self,
        plan: ConversationPlan,
        clients: Clients,
        entry: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
        before: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        self.plan = plan
        self._entry = entry
        self._before = before
        self.outcomes: list[Outcome] = []
        self.cut: set[str] = set()  # executions that a user interrupted, stopped or took over
        self.failing: set[str] = set()  # executions that got a prompt whose model fails
        self.answered = 0
        self._clients = clients
        self._ended: dict[str, bool] = {}  # execution → over, as the answering reader sees it
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Until every request has its final answer and everything that it began is over."""
        answerer = asyncio.create_task(self._answer(), name=f"answerer-{self.plan.name}")
        try:
            talking = asyncio.create_task(self._talk(), name=f"talk-{self.plan.name}")
            done, _ = await asyncio.wait({answerer, talking}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (answerer, talking):
                task.cancel()
            await asyncio.gather(answerer, talking, return_exceptions=True)

    async def _talk(self) -> None:
        for number, turn in enumerate(self.plan.turns):
            if number and self._before is not None:
                await self._before(number)
            async with asyncio.TaskGroup() as group:
                for prompt in turn:
                    group.create_task(self._submit(prompt), name=f"submit-{prompt.request}")
            if not turn[0].next_at_once:
                await self._all_over()
        await self._all_over()

    async def _all_over(self) -> None:
        wanted = {o.submission.execution for o in self.outcomes if o.submission is not None and o.submission.execution}
        async with self._changed:
            await self._changed.wait_for(lambda: all(self._ended.get(execution, False) for execution in wanted))

    def open(self) -> list[str]:
        """What is not over, one sentence each."""
        lines = [
            f"request {one.prompt.request} has no final answer"
            for one in self.outcomes
            if one.submission is None and one.refused is None
        ]
        planned = sum(len(turn) for turn in self.plan.turns)
        if len(self.outcomes) < planned:
            lines.append(f"only {len(self.outcomes)} of {planned} prompts were sent")
        return lines + [f"execution {execution} is not over" for execution, over in self._ended.items() if not over]

    # --- prompts ---

    async def _submit(self, prompt: PromptPlan) -> None:
        await asyncio.sleep(prompt.after_s)
        outcome = Outcome(prompt, sent_s=time.time())
        self.outcomes.append(outcome)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(outcome, self._clients.of(prompt.over), 0.0))
            if prompt.again_after_s is not None:
                group.create_task(self._send(outcome, self._clients.other(prompt.over), prompt.again_after_s))
        submission = outcome.submission
        if submission is not None and submission.execution is not None and prompt.fate != "run":
            await self._cut(prompt, submission.execution)

    async def _send(self, outcome: Outcome, client: Client, after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with self._entry():
            await self._until_answered(outcome, client)

    async def _until_answered(self, outcome: Outcome, client: Client) -> None:
        prompt = outcome.prompt
        while True:
            try:
                got = await client.prompt(
                    self.plan.name,
                    prompt.text,
                    agent=prompt.agent,
                    workspace=self.plan.workspace,
                    mode=prompt.mode,
                    resume="history" if prompt.from_history else None,
                    continuation="continue" if prompt.goes_on else None,
                    request_id=prompt.request,
                    patience_s=PATIENCE_S,
                )
            except ProblemError as error:
                if not error.problem.retryable or error.problem.code in FINAL.get(prompt.mode, frozenset()):
                    outcome.refused = error.problem.code
                    outcome.answers.append((error.problem.code, None, None))
                    return
            except BusError:
                pass
            else:
                if got.status != "pending":
                    if prompt.fails and got.execution is not None:
                        self.failing.add(got.execution)
                    if prompt.agent != AGENT and got.execution is not None:
                        self.cut.add(got.execution)  # it never starts
                    outcome.submission = got
                    outcome.answers.append((got.status, got.response_id, got.execution))
                    return
            await asyncio.sleep(_PAUSE_S)

    async def _cut(self, prompt: PromptPlan, execution: str) -> None:
        await asyncio.sleep(prompt.fate_after_s)
        client = self._clients.other(prompt.over)
        self.cut.add(execution)
        control = f"cut-{prompt.request}"

        async def act() -> object:
            if prompt.fate == "stop":
                return await client.stop(execution, control_id=control)
            return await client.interrupt(execution, control_id=control)

        await self._until_known(act, _SETTLED | {Code.TARGET_UNKNOWN, Code.NOT_FOUND})

    # --- answers ---

    async def _answer(self) -> None:
        """Follows over NATS; answers every interaction, each by a task of its own that repeats one control id. Where
        nobody answers for long (nats-server is frozen) it follows again from its cursor."""
        pending: dict[str, str] = {}
        asked: set[str] = set()
        cursor: str | None = None
        caught_up = False
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    async with contextlib.aclosing(self._clients.nats.follow(self.plan.name, cursor)) as items:
                        async for item in items:
                            cursor = item.cursor
                            caught_up = caught_up or isinstance(item, CaughtUp)
                            await self._notice(item, pending)
                            for interaction in [one for one in pending if caught_up and one not in asked]:
                                asked.add(interaction)
                                work = self._answer_one(interaction, pending[interaction])
                                group.create_task(work, name=f"answer-{interaction}")
                except (ProblemError, BusError):
                    await asyncio.sleep(_PAUSE_S)

    async def _notice(self, item: Item, pending: dict[str, str]) -> None:
        match item:
            case ExecutionItem(type=ev.INTERACTION_REQUESTED):
                pending[str(item.event.body["interaction"])] = item.execution
            case ExecutionItem(type=ev.INTERACTION_RESOLVED):
                pending.pop(str(item.event.body["interaction"]), None)
            case ExecutionItem():
                await self._note(item.execution, over=item.type == ev.EXECUTION_ENDED)
            case _:
                pass

    async def _note(self, execution: str, *, over: bool) -> None:
        if over or execution not in self._ended:
            self._ended[execution] = over
            async with self._changed:
                self._changed.notify_all()

    async def _answer_one(self, interaction: str, execution: str) -> None:
        client = self._clients.http if self.answered % 2 else self._clients.nats
        self.answered += 1

        async def act() -> object:
            return await client.answer(
                self.plan.name,
                interaction,
                Answer.allow(),
                execution=execution,
                control_id=f"answer-{interaction}",
            )

        await self._until_known(act, _SETTLED | {Code.INVALID, Code.NOT_FOUND})

    async def _until_known(self, act: Callable[[], Awaitable[object]], final: frozenset[Code]) -> None:
        while True:
            try:
                answer = await act()
            except ProblemError as error:
                if error.problem.code in final:
                    return
            except BusError:
                pass
            else:
                if getattr(answer, "status", None) != "unknown":
                    return
            await asyncio.sleep(_PAUSE_S)
