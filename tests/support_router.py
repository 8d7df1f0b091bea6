"""Routers under test: a world on any bus, a small sandbox that behaves by the contract, buses that crash and freeze."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, cast

from tether import ids, subjects, topology
from tether.control import ControlReply, ControlRequest, StartCommand, decode_command, decode_request
from tether.errors import Code, Problem, ProblemError, WrongLastSequenceError, problem
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position, decode, encode
from tether.kv import Bucket
from tether.owner import Accepted, OwnerInput, OwnerRecord, decide
from tether.ports import Bus, Job, Message, PubAck, StoredMessage
from tether.prompt import AgentSpec, Mode, Prompt, RequestRecord, TextContent
from tether.sandbox import CAN_SNAPSHOT, CAN_STOP_TARGET, Registration, SandboxRecord
from tether.subjects import EventAddress
from tether.testing import VirtualTimeLoop
from tether_collector.stop_authority import check_takeover
from tether_router.admitter import Admitter
from tether_router.config import RouterSettings
from tether_router.log import Log
from tether_router.records import Records
from tether_router.service import route

TENANT = "acme"
P = ParamSpec("P")


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition, with a deadline."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - the other side is another process or the bus
                await asyncio.sleep(0.05)  # the pace of looking
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {timeout_s:g} s") from None


def a_prompt(
    request: str = "r1",
    text: str = "hello",
    *,
    tenant: str = TENANT,
    conversation: str = "c1",
    workspace: str = "w1",
    mode: Mode = "auto",
    attempt: int = 1,
) -> Prompt:
    return Prompt(
        tenant=tenant,
        workspace=workspace,
        conversation=conversation,
        request_id=request,
        attempt=attempt,
        content=(TextContent(text=text),),
        agent=AgentSpec(kind="scripted"),
        mode=mode,
    )


@dataclass
class World:
    """What stands on a bus, read as an outsider would read it."""

    bus: Bus
    tenant: str = TENANT

    async def send(self, prompt: Prompt, *, again: str = "") -> PubAck:
        """`again` makes the message id another's, as when the duplicate window has passed."""
        subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
        return await self.bus.publish(subject, prompt.encode(), msg_id=prompt.message_id + again)

    async def request(self, request: str = "r1") -> RequestRecord | None:
        entry = await Bucket(self.bus, subjects.REQUESTS).get(subjects.request_key(self.tenant, request))
        return None if entry is None else RequestRecord.model_validate(entry.value)

    async def owner(self, conversation: str = "c1", workspace: str = "w1") -> OwnerRecord:
        key = subjects.owner_key(self.tenant, workspace, conversation)
        entry = await Bucket(self.bus, subjects.OWNERS).get(key)
        return OwnerRecord() if entry is None else OwnerRecord.model_validate(entry.value)

    async def stored(self, stream: str, filter_subject: str) -> Sequence[StoredMessage]:
        return await self.bus.read(stream, 0, filter_subject)

    async def told(self, conversation: str = "c1", workspace: str = "w1") -> list[ConversationEvent]:
        """The conversation's `_` events in order."""
        subject = subjects.event(self.tenant, workspace, conversation, "_")
        messages = await self.stored(subjects.events_stream(self.tenant), subject)
        return [cast(ConversationEvent, decode(message.subject, message.data)) for message in messages]

    async def waiting(self) -> int:
        state = await self.bus.state(subjects.PROMPTS_STREAM)
        assert state is not None
        return state.messages

    async def settled(self, count: int = 1, timeout_s: float = 300.0) -> None:
        """No prompt is stored any more, and `count` requests have an outcome."""

        async def done() -> bool:
            if await self.waiting() > 0:
                return False
            entries = [entry async for entry in Bucket(self.bus, subjects.REQUESTS).keys(f"{self.tenant}.>")]
            return sum(bool(entry.value["state"] != "open") for entry in entries) >= count

        await until(done, f"{count} settled requests", timeout_s)

    async def state_is(self, state: str, conversation: str = "c1", timeout_s: float = 100.0) -> None:
        async def reached() -> bool:
            return (await self.owner(conversation)).state == state

        await until(reached, f"owner {state}", timeout_s)


async def world(bus: Bus, tenant: str = TENANT) -> World:
    await bus.ensure(topology.base())
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    return World(bus, tenant)


def now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000) + 1_700_000_000_000


def admitter(bus: Bus) -> Admitter:
    return Admitter(bus, Log(bus), Records(bus), now_ms)


@asynccontextmanager
async def routing(bus: Bus, **settings_fields: Any) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A whole router on `bus`; what is yielded shuts it down in order."""
    stop = asyncio.Event()
    settings = RouterSettings(tenants=TENANT, router_sweep_s=60.0, **settings_fields)
    task = asyncio.create_task(route(bus, settings, stop, clock=now_ms), name="router-under-test")

    async def shut_down() -> None:
        stop.set()
        await task

    try:
        yield shut_down
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- a sandbox that behaves ---


@dataclass
class Sandbox:
    """Takes commands as the contract says (only what the owner record names in `starting`, claimed at base 0; what is
    taken over before ends there) and answers `interject`, `stop` and `receipt` from a journal. It is registered.

    `refuse`: what interjections get; `unknown`: they are written in part; `lose_replies`: so many answers are lost
    after their effect; `refuse_stop`: what stops get; `deaf`: so many controls never arrive; `hold_stops`: stops are
    taken, and nothing ends; `stopped`: which executions a stop has ended."""

    bus: Bus
    tenant: str = TENANT
    workspace: str = "w1"
    claimed: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    interjected: list[str] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    journal: dict[str, ControlReply] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    refuse: Problem | None = None
    unknown: bool = False
    lose_replies: int = 0
    active: int = 0
    most_active: int = 0
    hold_claims: bool = False
    await_state: str | None = None  # the first command is given back until the owner record says this
    claims_late: bool = False  # a start that was let in before its takeover is claimed after it
    refuse_stop: Problem | None = None
    deaf: int = 0
    hold_stops: bool = False
    stopped: list[str] = field(default_factory=list)
    commands: list[StartCommand] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    boot: str = "b1"
    capabilities: tuple[str, ...] = (CAN_SNAPSHOT, CAN_STOP_TARGET)
    _frames: dict[str, tuple[EventAddress, int, int]] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Sandbox]:
        control = subjects.control_all(self.tenant, self.workspace)
        await self.register()
        async with self.bus.serve(control, self._answer, name="sandbox"):
            task = asyncio.create_task(self._take_commands(), name="sandbox-commands")
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def register(self, **changes: Any) -> None:
        """What the collector and the provider say of it; `changes` to the registration."""
        name = ids.sandbox_id(self.tenant, self.workspace)
        who: dict[str, Any] = {"tenant": self.tenant, "workspace": self.workspace, "sandbox": name}
        facts = {"pid": 7}
        said = {**who, "boot": self.boot, "instance": "i1", "capabilities": self.capabilities, "facts": facts}
        registration = Registration.model_validate({**said, **changes})
        record = SandboxRecord.model_validate({**who, "state": "active", "provider": "test", "facts": facts})
        await self.put(subjects.registration_key(self.tenant, self.workspace, registration.sandbox), registration)
        await self.put(subjects.sandbox_key(self.tenant, self.workspace), record)

    async def put(self, key: str, record: Registration | SandboxRecord) -> None:
        bucket = Bucket(self.bus, subjects.SANDBOXES)
        entry = await bucket.get(key)
        if entry is None:
            await bucket.create(key, record.value(), op=ids.new_id("op"))
        else:
            await bucket.update(key, record.value(), op=ids.new_id("op"), revision=entry.revision)

    async def unregister(self) -> None:
        bucket = Bucket(self.bus, subjects.SANDBOXES)
        entry = await bucket.get(
            subjects.registration_key(self.tenant, self.workspace, ids.sandbox_id(self.tenant, self.workspace))
        )
        assert entry is not None
        await bucket.delete(entry.key, revision=entry.revision)

    async def _take_commands(self) -> None:
        async for job in self.bus.jobs(subjects.COMMANDS_STREAM, subjects.AGENT_DURABLE):
            if self.hold_claims or not await self._is_awaited(job):
                await job.nak(0.5)
                continue
            await self._start(job)

    async def _is_awaited(self, job: Job) -> bool:
        if self.await_state is None:
            return True
        target = decode_command(job.message.data).target
        key = subjects.owner_key(target.tenant, target.workspace, target.conversation)
        entry = await Bucket(self.bus, subjects.OWNERS).get(key)
        awaited = entry is not None and entry.value["state"] == self.await_state
        if awaited:
            self.await_state = None
        return awaited

    async def _start(self, job: Job) -> None:
        command = decode_command(job.message.data)
        self.commands.append(command)
        target = command.target
        key = subjects.owner_key(target.tenant, target.workspace, target.conversation)
        entry = await Bucket(self.bus, subjects.OWNERS).get(key)
        record = OwnerRecord() if entry is None else OwnerRecord.model_validate(entry.value)
        named = record.target is not None and record.target.execution == target.execution
        address = EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
        if record.state == "stopping" and named and not self.claims_late:
            ends = [
                Event(ordinal=1, at=now_ms(), type="response.ended", body={"outcome": "never_started"}),
                Event(
                    ordinal=2,
                    at=now_ms(),
                    type="execution.ended",
                    body={"outcome": "never_started", "proof": {"method": "never_spawned", "at": now_ms()}},
                ),
            ]
            frame = Frame(first=1, last=2, pos=Position(record=0, index=0), events=ends)
            with contextlib.suppress(WrongLastSequenceError):
                await self.bus.publish(address.subject, encode(frame), expect_last=0)
        elif record.state not in ("starting", "stopping") or not named:
            self.stale.append(target.execution)
        else:
            body = {
                "boot": "b1",
                "instance": "i1",
                "process": 1,
                "target": target.model_copy(update={"boot": "b1", "process_generation": 1}).model_dump(mode="json"),
                "agent": command.agent.kind,
                "request": command.request_id,
                "adapter_version": "1",
            }
            self._frames[target.execution] = (address, 0, 0)
            try:
                await self.tell(target.execution, "execution.started", body)
            except WrongLastSequenceError:
                self.stale.append(target.execution)
            else:
                self.claimed.append(target.execution)
                self.active += 1
                self.most_active = max(self.most_active, self.active)
        await job.ack(confirm=True)

    async def tell(self, execution: str, kind: str, body: Mapping[str, Any]) -> None:
        """One event of the execution, as a frame of its own."""
        address, ordinal, base = self._frames[execution]
        ordinal += 1
        event = Event(ordinal=ordinal, at=now_ms(), type=kind, body=dict(body))
        frame = Frame(first=ordinal, last=ordinal, pos=Position(record=ordinal, index=0), events=[event])
        ack = await self.bus.publish(address.subject, encode(frame), expect_last=base)
        self._frames[execution] = (address, ordinal, ack.sequence)

    async def end_response(self, execution: str) -> None:
        await self.tell(execution, "response.ended", {"outcome": "completed"})

    async def end(self, execution: str, outcome: str = "completed") -> None:
        proof = {"method": "pid_namespace", "at": now_ms()}
        self.active -= 1
        self.ended.add(execution)
        await self.tell(execution, "execution.ended", {"outcome": outcome, "proof": proof})

    async def finish(self, execution: str) -> None:
        await self.end_response(execution)
        await self.end(execution)

    async def claims(self, count: int, timeout_s: float = 300.0) -> None:
        async def reached() -> bool:
            return len(self.claimed) >= count

        await until(reached, f"{count} claims", timeout_s)

    async def _answer(self, message: Message) -> bytes | None:
        request = decode_request(message.data)
        if self.deaf > 0:
            self.deaf -= 1
            return None
        self.asked.append((request.verb, request.control))
        if request.verb == "receipt":
            reply = self.journal.get(request.control) or ControlReply(
                control=request.control,
                verb="receipt",
                status="unknown",
                problem=problem(Code.NOT_FOUND, "no such control"),
            )
        elif request.control in self.journal:
            reply = self.journal[request.control]
            assert self.digests[request.control] == request.digest, "the same control id with another payload"
        elif request.verb == "stop":
            reply = await self._stop(request)
        else:
            reply = ControlReply(control=request.control, verb=request.verb, status="delivered")
            if self.refuse is not None:
                reply = reply.model_copy(update={"status": "rejected", "problem": self.refuse})
            elif self.unknown:
                reply = reply.model_copy(update={"status": "unknown"})
            else:
                self.interjected.append(request.payload["content"][0]["text"])
            if reply.status != "rejected":  # a refusal did nothing, and is no receipt
                self.journal[request.control] = reply
                self.digests[request.control] = request.digest
        if self.lose_replies > 0:
            self.lose_replies -= 1
            return None
        return reply.encode()

    async def _stop(self, request: ControlRequest) -> ControlReply:
        """As a collector does: only for the owner record, journaled, its receipts in the log, the proof last."""
        assert request.target is not None and request.target.boot and request.target.process_generation
        execution = request.target.execution
        refusal = self.refuse_stop
        if refusal is None and (execution not in self.claimed or execution in self.ended):
            refusal = problem(Code.SESSION_STREAM_NOT_ACTIVE, "the execution has ended", ended=True)
        if refusal is None:
            try:
                await check_takeover(self.bus, request, request.target)
            except ProblemError as error:
                refusal = error.problem
        if refusal is not None:
            return ControlReply(control=request.control, verb="stop", status="rejected", problem=refusal)
        self.journal[request.control] = ControlReply(control=request.control, verb="stop", status="accepted")
        self.digests[request.control] = request.digest
        await self.tell(
            execution, "control.receipt", {"control": request.control, "verb": "stop", "status": "accepted"}
        )
        if not self.hold_stops:
            self.journal[request.control] = ControlReply(control=request.control, verb="stop", status="settled")
            await self.end_stopped(execution)
        return self.journal[request.control]

    async def end_stopped(self, execution: str) -> None:
        """The proof that a stop was waiting for."""
        self.stopped.append(execution)
        await self.tell(execution, "response.ended", {"outcome": "stopped"})
        await self.end(execution, "stopped")


# --- a bus that goes wrong at a chosen write ---


class Crash(BaseException):
    """The process is gone: nothing of it runs on."""


class FaultyJob:
    def __init__(self, job: Job, bus: FaultyBus) -> None:
        self._job = job
        self._bus = bus

    @property
    def message(self) -> StoredMessage:
        return self._job.message

    @property
    def deliveries(self) -> int:
        return self._job.deliveries

    async def ack(self, *, confirm: bool = False) -> bool:
        return bool(await self._bus.write("ack", lambda: self._job.ack(confirm=confirm)))

    async def nak(self, delay_s: float) -> None:
        await self._bus.thaw()
        await self._job.nak(delay_s)

    async def in_progress(self) -> None:
        await self._bus.thaw()
        await self._job.in_progress()

    async def term(self, reason: str) -> None:
        await self._bus.write("term", lambda: self._job.term(reason))


class FaultyBus:
    """A connection of one router. Writes (publish, request, ack, term) are counted from 1 and noted in `writes`.

    `crash_at`: the process dies there, before its effect or `after` it. `freeze_at`: it stops there, and everything
    else it does with the bus stops too, until `thawed` is set. `twice`: every write is sent twice.
    """

    def __init__(
        self, inner: Bus, *, crash_at: int = 0, after: bool = False, freeze_at: int = 0, twice: bool = False
    ) -> None:
        self._inner = inner
        self._crash_at = crash_at
        self._after = after
        self._freeze_at = freeze_at
        self._twice = twice
        self.writes: list[str] = []
        self.frozen = asyncio.Event()
        self.thawed = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def thaw(self) -> None:
        if self.frozen.is_set():
            await self.thawed.wait()

    async def write(self, name: str, effect: Callable[[], Awaitable[Any]]) -> Any:
        await self.thaw()
        self.writes.append(name)
        here = len(self.writes)
        if here == self._crash_at and not self._after:
            raise Crash(name)
        if here == self._freeze_at:
            self.frozen.set()
            await self.thawed.wait()
        if self._twice:
            await effect()
        result = await effect()
        if here == self._crash_at:
            raise Crash(name)
        return result

    async def publish(self, subject: str, data: bytes, **options: Any) -> PubAck:
        return cast(PubAck, await self.write(subject, lambda: self._inner.publish(subject, data, **options)))

    async def request(self, subject: str, data: bytes, **options: Any) -> Message:
        return cast(Message, await self.write(subject, lambda: self._inner.request(subject, data, **options)))

    async def last(self, stream: str, subject: str, **options: Any) -> StoredMessage | None:
        await self.thaw()
        return await self._inner.last(stream, subject, **options)

    async def jobs(self, stream: str, durable: str, *, in_flight_max: int = 256) -> AsyncIterator[Job]:
        async for job in self._inner.jobs(stream, durable, in_flight_max=in_flight_max):
            await self.thaw()
            yield FaultyJob(job, self)


def derived(request: str = "r1", attempt: int = 1, tenant: str = TENANT) -> tuple[str, str]:
    """(response, execution) of a request's attempt."""
    return ids.response_id(tenant, request, attempt), ids.execution_id(tenant, request, attempt)


def after(event: OwnerInput, *, record: OwnerRecord) -> OwnerRecord:
    """The record that `event` makes, which must be accepted."""
    decision = decide(record, event)
    assert isinstance(decision, Accepted)
    return decision.record
