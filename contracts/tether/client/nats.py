"""The client over NATS: prompts to PROMPTS, the log by attach, controls by request; no HTTP, no database.

A submission is published under the prompt's message id, so an undecided publish is sent again with the same bytes; the
router's request record alone says what became of it. Controls name the whole target as the owner record has it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from pydantic import ValidationError

from tether import sandbox_asking, subjects, tracing
from tether.api import (
    ControlAnswer,
    ConversationHistory,
    ConversationList,
    ConversationView,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
)
from tether.api_sandboxes import DrainRequest, DrainView, Purpose, ResumeView, SandboxList, SandboxView
from tether.client.backoff import of_connection
from tether.client.durable import DurableFollower
from tether.client.follow import Follower, Where, decode_cursor
from tether.client.items import ConversationItem, Item
from tether.client.nats_records import Records
from tether.client.transport import FollowOptions
from tether.client.types import Answer, Message, Submission
from tether.client.views import active_view, answer_control, execution_view, history_of
from tether.control import AnswerPayload, ControlReply, ControlRequest, Verb
from tether.control_lease import ControlLeases
from tether.cursor import Cursor
from tether.deletion import DeletionRecord, DeletionView, begin_deletion, check_not_deleted, deletion_of
from tether.errors import (
    BusError,
    BusUnavailableError,
    Code,
    InvalidError,
    MessageTooLargeError,
    PermissionDeniedError,
    ProblemError,
    UndecidedError,
    error_of,
    problem,
)
from tether.events import CONVERSATION_DELETED
from tether.export_format import ExportFormat
from tether.ids import check_token, default_workspace
from tether.limits import ADMISSION_WAIT_S
from tether.ports import Bus
from tether.prompt import Prompt, invalid
from tether.quarantine import QuarantineList, read_page
from tether.quotas import waiting_full
from tether.snapshots import Absence, Absent
from tether.subjects import EventAddress
from tether.submission import Admitted, Publish, Refuse, Wait, decide

SANDBOX_PATIENCE_S: Final = 10.0  # how long an agent service that does not answer is asked again
_LOOK_MIN_S: Final = 0.005
_LOOK_MAX_S: Final = 0.25
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NatsCredentials:
    """At most one way: user and password, token, a `.creds` file, an nkey seed. `inbox_prefix` None: the one that the
    `.creds` file permits, else `_INBOX`."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    creds_file: str | None = None
    nkey_seed: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    inbox_prefix: str | None = None


class NatsTransport:
    """`bus`: a connected one (the caller closes it), or the URL to connect to at the first call."""

    def __init__(self, bus: Bus | str, tenant: str, credentials: NatsCredentials | None = None) -> None:
        self.tenant = check_token(tenant, "tenant")
        self._given = bus
        self._credentials = credentials or NatsCredentials()
        self._connected: Bus | None = None if isinstance(bus, str) else bus
        self._connecting = asyncio.Lock()
        self._leases: ControlLeases | None = None

    async def _bus(self) -> Bus:
        async with self._connecting:
            if self._connected is None:
                from tether.bus import connect

                assert isinstance(self._given, str)
                named = self._credentials
                self._connected = await connect(
                    self._given,
                    name="tether-client",
                    user=named.user,
                    password=named.password,
                    token=named.token,
                    creds_file=named.creds_file,
                    nkey_seed=named.nkey_seed,
                    tls=named.tls,
                    inbox_prefix=named.inbox_prefix,
                )
            return self._connected

    async def _records(self) -> Records:
        bus = await self._bus()
        self._leases = self._leases or ControlLeases(bus, "client")
        return Records(bus, self.tenant, self._leases)

    async def close(self) -> None:
        if self._leases is not None:
            await self._leases.close()
        if isinstance(self._given, str) and self._connected is not None:
            await self._connected.close()

    # --- messages ---

    async def submit(self, message: Message, patience_s: float) -> Submission:
        return await _told(self._submit(message, patience_s))

    async def _submit(self, message: Message, patience_s: float) -> Submission:
        records = await self._records()
        deadline_s = _now_s() + patience_s
        await _patient(lambda: check_not_deleted(records.bus, self.tenant, message.conversation), deadline_s)
        known = await _patient(lambda: records.workspace(message.conversation), deadline_s)
        before = await _patient(records.end, deadline_s)
        prompt = self._prompt(message, known)
        published, attempt, delay_s = 0, 1, _LOOK_MIN_S
        answer_by_s = _now_s() + ADMISSION_WAIT_S
        while True:
            record = await _patient(lambda: records.request(prompt.request_id), deadline_s)
            match decide(record, prompt, published=published):
                case Refuse(what):
                    raise error_of(what)
                case Admitted(done, attempt):
                    at = before
                    if done.cursor_sequence:
                        at = Cursor.after(done.cursor_sequence, done.cursor_stored_at_ns)
                    status: Literal["admitted", "interjected"]
                    status = "interjected" if done.status == "interjected" else "admitted"
                    return self._submission(prompt, status, attempt, at, done.response, done.execution)
                case Publish(attempt):
                    await self._publish(prompt.model_copy(update={"attempt": attempt}), deadline_s)
                    published, delay_s = attempt, _LOOK_MIN_S
                    answer_by_s = _now_s() + ADMISSION_WAIT_S
                case Wait(attempt):
                    pass
            if _now_s() >= answer_by_s:
                return self._submission(prompt, "pending", attempt, before, None, None)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LOOK_MAX_S)

    def _prompt(self, message: Message, known: str | None) -> Prompt:
        if known is not None and message.workspace is not None and message.workspace != known:
            raise InvalidError("workspace", "must be the conversation's own: it is fixed by the first message")
        try:
            return Prompt(
                tenant=self.tenant,
                workspace=message.workspace or known or default_workspace(message.conversation),
                conversation=message.conversation,
                request_id=message.request_id,
                content=message.content,
                agent=message.agent,
                mode=message.mode,
                resume=message.resume,
                continuation=message.continuation,
            )
        except ValidationError as error:
            raise invalid(error) from None

    def _submission(
        self,
        prompt: Prompt,
        status: Literal["admitted", "interjected", "pending"],
        attempt: int,
        at: Cursor,
        response: str | None,
        execution: str | None,
    ) -> Submission:
        cursor = at.encode(prompt.tenant, prompt.conversation)
        return Submission(prompt.conversation, prompt.request_id, status, response, execution, cursor, attempt)

    async def _publish(self, prompt: Prompt, deadline_s: float) -> None:
        """Store the prompt; in doubt the same bytes again under the same id. Raises BusError at the deadline."""
        bus = await self._bus()
        subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
        data = prompt.encode()
        backoff = of_connection()
        while True:
            try:
                await bus.publish(subject, data, msg_id=prompt.message_id, headers=tracing.outgoing())
                return
            except (UndecidedError, BusUnavailableError) as error:
                full = waiting_full(error)
                if full is not None:
                    raise full from None
                wait_s = backoff.next_s()
                if _now_s() + wait_s >= deadline_s:
                    raise
                await asyncio.sleep(wait_s)

    # --- following ---

    async def follow(self, conversation: str, options: FollowOptions) -> AsyncGenerator[Item, None]:
        records = await _told(self._records())
        deadline_s = _deadline_s(options.patience_s)
        await _told(_patient(lambda: check_not_deleted(records.bus, self.tenant, conversation), deadline_s))
        workspace = await _told(_patient(lambda: records.workspace(conversation), deadline_s))
        # Before the first prompt is admitted nobody knows the workspace; the conversation's id is the tenant's.
        where = Where(self.tenant, workspace or subjects.ANY_WORKSPACE, conversation)
        cursor = decode_cursor(options.cursor, where)
        if options.durable is not None:
            items = DurableFollower(records.bus, where, options.durable, cursor, patience_s=options.patience_s).run()
        else:
            items = Follower(records.bus, where, cursor, records.beyond_log, patience_s=options.patience_s).run()
        try:
            async for item in items:
                if isinstance(item, ConversationItem) and item.event.type == CONVERSATION_DELETED:
                    # A sandbox may write that, too: the record counts.
                    await check_not_deleted(records.bus, self.tenant, conversation)
                    continue
                yield item
        except BusError as error:
            raise of_bus(error) from None
        finally:
            await items.aclose()

    # --- controls ---

    async def answer(
        self, conversation: str, interaction: str, answer: Answer, execution: str | None, control: str | None
    ) -> ControlAnswer:
        return await _told(self._answer(conversation, interaction, answer, execution, control))

    async def _answer(
        self, conversation: str, interaction: str, answer: Answer, execution: str | None, control: str | None
    ) -> ControlAnswer:
        payload = AnswerPayload(
            interaction=interaction,
            decision=answer.decision,
            text=answer.text,
            input=answer.input,
            answers={key: tuple(value) for key, value in answer.answers.items()},
        ).model_dump(mode="json", exclude_none=True)
        records = await self._records()
        workspace = await records.workspace(conversation)
        owner = None if workspace is None else await records.owner(workspace, conversation)
        target = None if owner is None else owner.target
        if workspace is None or target is None:
            detail = "interaction: the conversation has no active execution that could wait for it"
            raise ProblemError(problem(Code.NOT_FOUND, detail))
        named = execution or target.execution
        address = EventAddress(self.tenant, workspace, conversation, named)
        control = control or answer_control(self.tenant, named, payload)
        return await self._control(records, address, "answer", control, payload)

    async def control(self, execution: str, verb: Literal["interrupt", "stop"], control: str) -> ControlAnswer:
        return await _told(self._of_execution(execution, verb, control, {}))

    async def receipt(self, control: str, execution: str | None) -> ControlAnswer:
        if execution is None:
            raise InvalidError("execution", "must be named: over NATS a receipt is asked of the execution's collector")
        return await _told(self._of_execution(execution, "receipt", control, {"control": control}))

    async def _of_execution(self, execution: str, verb: Verb, control: str, payload: dict[str, Any]) -> ControlAnswer:
        records = await self._records()
        address = await self._address(records, execution)
        return await self._control(records, address, verb, control, payload)

    async def _address(self, records: Records, execution: str) -> EventAddress:
        address = await records.address(check_token(execution, "execution"))
        if address is None:
            raise ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))
        return address

    async def _control(
        self, records: Records, address: EventAddress, verb: Verb, control: str, payload: dict[str, Any]
    ) -> ControlAnswer:
        target = await records.target(address)
        if target is None:
            logged = await self._logged_receipt(records, address, control)
            if logged is not None:
                return logged
            raise ProblemError(
                problem(Code.TARGET_STALE, "the execution does not own its conversation any more", retryable=False)
            )
        request = ControlRequest(control=control, verb=verb, target=target, payload=payload)
        return _answer_of(await records.control(request, address.workspace), address.execution)

    async def _logged_receipt(self, records: Records, address: EventAddress, control: str) -> ControlAnswer | None:
        fold = (await records.fold(address.subject)).folds.get(address.execution)
        receipt = None if fold is None else fold.freeze().receipts.get(control)
        if receipt is None:
            return None
        reply = ControlReply(control=control, verb=str(receipt["verb"]), status=receipt["status"])
        return _answer_of(reply, address.execution)

    # --- reading ---

    async def conversations(self, limit: int, page: str | None) -> ConversationList:
        return await _told(self._conversations(limit, page))

    async def _conversations(self, limit: int, page: str | None) -> ConversationList:
        records = await self._records()
        owners = {conversation: record for _, conversation, record in await records.owners()}
        views = []
        for conversation, workspace, created_ms in await records.conversations():
            owner = owners.get(conversation)
            active = owner.target.execution if owner is not None and owner.target is not None else None
            updated_ms = created_ms if owner is None else max(created_ms, owner.updated_at)
            views.append(
                ConversationView(
                    conversation=conversation,
                    workspace=workspace,
                    created_at=created_ms,
                    updated_at=updated_ms,
                    active_execution=active,
                )
            )
        views.sort(key=lambda view: (view.updated_at, view.conversation), reverse=True)
        shown, following = _page(views, limit, page)
        return ConversationList(conversations=shown, next_page=following)

    async def conversation(self, conversation: str, limit: int, before: int | None) -> ConversationHistory:
        return await _told(self._conversation(conversation, before))

    async def _conversation(self, conversation: str, before: int | None) -> ConversationHistory:
        if before is not None:
            raise InvalidError("before", "is for HTTP: over NATS the whole log is folded into one page")
        records = await self._records()
        workspace = await records.workspace(conversation)
        if workspace is None:
            raise ProblemError(problem(Code.NOT_FOUND, "conversation: there is none of this id"))
        log = await records.fold(subjects.conversation_events(self.tenant, workspace, conversation))
        owner = await records.owner(workspace, conversation)
        states = {execution: fold.freeze() for execution, fold in log.folds.items()}
        cursor = log.cursor.encode(self.tenant, conversation)
        return history_of(conversation, workspace, cursor, log.told.freeze(), states, owner)

    async def executions(self, conversation: str | None, active: bool, limit: int, page: str | None) -> ExecutionList:
        return await _told(self._executions(conversation, active, limit, page))

    async def _executions(self, conversation: str | None, active: bool, limit: int, page: str | None) -> ExecutionList:
        if conversation is not None:
            views = await self._executions_of(conversation)
            views = [view for view in views if view.state != "ended"] if active else views
        else:
            views = await self._known_executions(active)
        shown, following = _page(views, limit, page)
        return ExecutionList(executions=shown, next_page=following)

    async def _executions_of(self, conversation: str) -> list[ExecutionView]:
        """Newest first; one that has logged nothing yet is known from the owner record."""
        records = await self._records()
        workspace = await records.workspace(conversation)
        if workspace is None:
            return []
        views = list(reversed((await self._conversation(conversation, None)).executions))
        owner = await records.owner(workspace, conversation)
        owning = None if owner is None else active_view(owner)
        if owning is not None and owning.execution not in {view.execution for view in views}:
            views.insert(0, owning)
        return views

    async def _known_executions(self, active: bool) -> list[ExecutionView]:
        """Of all conversations, from the owner records: those that own one, and the last that have ended."""
        records = await self._records()
        views: list[tuple[int, ExecutionView]] = []
        for workspace, conversation, record in await records.owners():
            owning = active_view(record)
            if owning is not None:
                views.append((record.updated_at, owning))
            for stone in () if active else record.tombstones:
                view = ExecutionView(
                    execution=stone.execution,
                    conversation=conversation,
                    workspace=workspace,
                    state="ended",
                    ended_at=stone.at,
                )
                views.append((stone.at, view))
        return [view for _, view in sorted(views, key=lambda entry: entry[0], reverse=True)]

    async def execution(self, execution: str) -> ExecutionView:
        return await _told(self._execution(execution))

    async def _execution(self, execution: str) -> ExecutionView:
        records = await self._records()
        address = await self._address(records, execution)
        owner = await records.owner(address.workspace, address.conversation)
        owned = owner is not None and owner.target is not None and owner.target.execution == execution
        target = owner.target if owner is not None and owned else None
        fold = (await records.fold(address.subject)).folds.get(execution)
        if fold is None:
            view = active_view(owner) if owner is not None and owned else None
            if view is None:
                raise ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))
            return view
        return execution_view(fold.freeze(), address.conversation, address.workspace, execution, target)

    async def snapshot(self, execution: str) -> ExecutionSnapshot:
        return await _told(self._snapshot(execution))

    async def _snapshot(self, execution: str) -> ExecutionSnapshot:
        records = await self._records()
        address = await self._address(records, execution)
        found = await records.snapshot(address)
        if isinstance(found, Absent):
            if found.why is Absence.CAPABILITY_MISSING:
                raise ProblemError(problem(Code.CAPABILITY_MISSING, found.detail))
            raise ProblemError(
                problem(Code.TARGET_UNKNOWN, "nothing of the execution is logged yet", retry_after_s=1.0)
            )
        source, snapshot = found
        mark = snapshot.watermark
        cursor = Cursor(mark.sequence, tag=mark.tag) if mark.sequence else Cursor.beginning()
        return ExecutionSnapshot(
            execution=execution,
            source="collector" if source == "collector" else "log",
            snapshot=snapshot.model_dump(mode="json", exclude_none=True),
            cursor=cursor.encode(self.tenant, address.conversation),
        )

    async def quarantine(self, limit: int, before: int | None) -> QuarantineList:
        return await _told(self._quarantine(limit, before))

    async def _quarantine(self, limit: int, before: int | None) -> QuarantineList:
        entries, following = await read_page(await self._bus(), self.tenant, before=before, limit=limit)
        return QuarantineList(entries=entries, next_page=following)

    async def sandboxes(self) -> SandboxList:
        return await _told(self._sandboxes())

    async def _sandboxes(self) -> SandboxList:
        return SandboxList(sandboxes=await sandbox_asking.list_sandboxes(await self._bus(), self.tenant))

    async def sandbox(self, workspace: str) -> SandboxView:
        return await self._of_sandbox(lambda bus: sandbox_asking.read_sandbox(bus, self.tenant, workspace))

    async def begin_drain(self, verb: Purpose, workspace: str, drain: str, request: DrainRequest) -> DrainView:
        return await self._of_sandbox(
            lambda bus: sandbox_asking.begin_drain(bus, verb, self.tenant, workspace, drain, request)
        )

    async def drain_status(self, workspace: str, drain: str) -> DrainView:
        return await self._of_sandbox(lambda bus: sandbox_asking.read_drain(bus, self.tenant, workspace, drain))

    async def resume(self, workspace: str) -> ResumeView:
        return await self._of_sandbox(lambda bus: sandbox_asking.resume(bus, self.tenant, workspace))

    async def begin_deletion(self, conversation: str, deletion: str, force: bool) -> DeletionView:
        async def begin() -> DeletionView:
            record = await begin_deletion(
                await self._bus(),
                self.tenant,
                conversation,
                deletion=deletion,
                force=force,
                by="",
                now_ms=time.time_ns() // 1_000_000,
            )
            return DeletionView.of(record)

        return await _told(begin())

    async def deletion(self, conversation: str) -> DeletionView:
        record = await _told(self._deletion(conversation))
        if record is None:
            raise ProblemError(problem(Code.NOT_FOUND, "conversation: no deletion of it is known"))
        return DeletionView.of(record)

    async def _deletion(self, conversation: str) -> DeletionRecord | None:
        return await deletion_of(await self._bus(), self.tenant, conversation)

    async def export(self, conversation: str, kind: ExportFormat) -> AsyncGenerator[bytes, None]:
        raise InvalidError("format", "exports are made of a backend's rows: use a client over HTTP")
        yield b""

    async def _of_sandbox(self, ask: Callable[[Bus], Awaitable[T]]) -> T:
        """Asked again while no agent service answers, as over HTTP: the same id joins."""
        bus = await _told(self._bus())
        deadline_s = _now_s() + SANDBOX_PATIENCE_S
        backoff = of_connection()
        while True:
            try:
                return await _told(ask(bus))
            except ProblemError as error:
                what = error.problem
                wait_s = backoff.next_s(what.retry_after_s)
                if what.status != 503 or not what.retryable or _now_s() + wait_s > deadline_s:
                    raise
            await asyncio.sleep(wait_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _deadline_s(patience_s: float | None) -> float:
    return float("inf") if patience_s is None else _now_s() + patience_s


async def _patient(ask: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """A question again while the bus is away, until the deadline."""
    backoff = of_connection()
    while True:
        try:
            return await ask()
        except BusUnavailableError:
            wait_s = backoff.next_s()
            if _now_s() + wait_s >= deadline_s:
                raise
            await asyncio.sleep(wait_s)


def of_bus(error: BusError) -> ProblemError:
    """The one place where a bus failure becomes what a caller of the client is told."""
    if isinstance(error, MessageTooLargeError):
        return InvalidError("content", error.detail)
    if isinstance(error, PermissionDeniedError):
        return ProblemError(problem(Code.FORBIDDEN, f"these credentials do not allow this: {error.detail}"))
    return ProblemError(problem(Code.RUNTIME_UNAVAILABLE, f"the message bus does not answer: {error.detail}"))


async def _told(call: Awaitable[T]) -> T:
    try:
        return await call
    except BusError as error:
        raise of_bus(error) from None


def _answer_of(reply: ControlReply, execution: str) -> ControlAnswer:
    """The receipt as it stands. Raises ProblemError where the collector refused."""
    if reply.status == "rejected" and reply.problem is not None:
        context = {**reply.problem.context, "control_id": reply.control, "execution": execution}
        if reply.target is not None:
            context["current"] = reply.target.model_dump(mode="json", exclude_none=True)
        raise ProblemError(reply.problem.model_copy(update={"context": context}))
    return ControlAnswer(
        control_id=reply.control,
        execution=execution,
        verb=reply.verb,
        status=reply.status,
        problem=reply.problem,
        target=reply.target,
    )


def _page(views: list[T], limit: int, page: str | None) -> tuple[list[T], str | None]:
    """`page`: an offset. Lists over NATS are made anew each time, so a page may shift by what happened between."""
    if page is not None and not (page.isascii() and page.isdigit() and len(page) <= 9):
        raise InvalidError("page", "must be a next_page that this list gave, unchanged")
    start = int(page or 0)
    end = start + max(1, limit)
    return views[start:end], str(end) if end < len(views) else None
