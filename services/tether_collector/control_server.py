"""The verbs of `tether.control.{tenant}.{workspace}.>`: decode, find the whole target, check authority, journal, act.

    same control id, same payload ─▶ the receipt as it now stands, no effect
    same control id, other payload ─▶ rejected REQUEST_CONFLICT
    refused by the machine ─▶ rejected, nothing journaled
    ── journal (fsync) ─▶ note in the spool ─▶ the machine ─▶ receipts as events ─▶ the reply

A reply is a hint: what counts is the receipt in the log. It waits until the verb's point of interest or almost as long
as a caller waits, then says how things stand. `drain` answers at once (see `draining.py`).
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from typing import Any, Final, TypeGuard

import structlog

from tether import subjects, tracing
from tether.control import ControlReply, ControlRequest, decode_request
from tether.control_lease import USER_VERBS, is_behind
from tether.control_lease import check as check_lease
from tether.errors import BusError, Code, InvalidError, Problem, ProblemError, problem
from tether.events import GapReason
from tether.ids import TOKEN_PATTERN, ExecutionTarget, check_token
from tether.kv import Bucket
from tether.limits import CONTROL_REPLY_S, SNAPSHOT_MEMORY_BYTES_MAX
from tether.ports import Bus, Message
from tether.snapshot import Snapshot
from tether_collector import metrics
from tether_collector.blobs import blob_of_text
from tether_collector.core.discovery import page
from tether_collector.draining import Drainer
from tether_collector.execution_shell import ExecutionShell
from tether_collector.executions import Executions
from tether_collector.journal import Control
from tether_collector.starting import Starter
from tether_collector.stop_authority import check_deletion, check_takeover, forget_payload
from tether_collector.surroundings import now_ms

REPLY_WAIT_S: Final = CONTROL_REPLY_S - 1.0
REPLY_ROOM_BYTES: Final = 16 * 1024  # of a reply's payload for everything but the snapshot
LAG_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2, 0.0)  # between reads of a lease whose write the replica may not have yet
QUESTIONS: Final = frozenset({"receipt", "discover", "snapshot"})  # change nothing, and are not news
# Until when a reply waits; final statuses always end it.
ENOUGH: Final = {
    "answer": frozenset({"delivered"}),
    "interject": frozenset({"delivered"}),
    "interrupt": frozenset({"delivered"}),
    "stop": frozenset[str](),
}


class ControlServer:
    """`bus` here is only asked to carry replies; everything else goes through the executions."""

    def __init__(self, executions: Executions, starter: Starter, drainer: Drainer) -> None:
        self._drainer = drainer
        self._executions = executions
        self._around = executions.around
        self._starter = starter

    def serving(self, bus: Bus) -> Any:
        """The context in which controls are answered."""
        settings = self._around.settings
        subject = subjects.control_all(settings.tenant, settings.workspace)
        return bus.serve(subject, self.handle, name="tether-collector")

    async def handle(self, message: Message) -> bytes:
        verb = metrics.known_verb(message.subject.rpartition(".")[2])
        with tracing.scope(f"control {verb}", kind="server", headers=message.headers) as span:
            reply = await self._handle(message, span)
            span.set(status=reply.status)
            metrics.controls.labels(verb, reply.status).inc()
            return reply.encode()

    async def _handle(self, message: Message, span: tracing.Span) -> ControlReply:
        verb = message.subject.rpartition(".")[2]
        control = ""
        try:
            request = decode_request(message.data)
            control = request.control
            if request.verb != verb:
                raise InvalidError("verb", f"must be {verb}, as the subject says")
            with tracing.identified(span, **identity_of(request)):
                reply = await self._serve(request)
                if request.verb not in QUESTIONS:
                    structlog.get_logger("tether.collector").info("control_answered", verb=verb, status=reply.status)
        except ProblemError as error:
            structlog.get_logger("tether.collector").info(
                "control_rejected", verb=verb, control=control, code=error.problem.code
            )
            reply = rejected(control, verb, error.problem)
        except BusError as error:
            reply = rejected(control, verb, problem(Code.RUNTIME_UNAVAILABLE, error.detail))
        return reply

    async def _serve(self, request: ControlRequest) -> ControlReply:
        match request.verb:
            case "start":
                return await self._starter.start(request, REPLY_WAIT_S)
            case "receipt":
                return self._receipt(request)
            case "discover":
                return self._discover(request)
            case "snapshot":
                return await self._snapshot(request)
            case "drain":
                return await self._drainer.serve(request)
            case "forget":
                return await self._forget(request)
            case _:
                return await self._control(request)

    # --- questions ---

    def _receipt(self, request: ControlRequest) -> ControlReply:
        """Of `payload.control`, or of the request's own id."""
        control = check_token(request.payload.get("control", request.control), "payload.control")
        entry = self._around.journal.control(control)
        if entry is None:
            why = problem(Code.NOT_FOUND, "no control of this id was accepted here", control=control)
            return ControlReply(control=control, verb="receipt", status="unknown", problem=why)
        return entry.reply()

    def _discover(self, request: ControlRequest) -> ControlReply:
        """`payload.conversation` limits it to one conversation, `native_session` to that session; `after` (the `next`
        of the page before) continues."""
        payload = request.payload
        found = self._executions.summaries()
        if (conversation := payload.get("conversation")) is not None:
            check_token(conversation, "payload.conversation")
            found = [entry for entry in found if entry.target.conversation == conversation]
        if (session := payload.get("native_session")) is not None:
            if not isinstance(session, str) or not session:
                raise InvalidError("payload.native_session", "must be a native session's id")
            found = [entry for entry in found if entry.target.native_session == session]
        shown = page(found, payload.get("after"))
        result = {
            "boot": self._around.settings.boot,
            "executions": [entry.model_dump(mode="json", exclude_none=True) for entry in shown.entries],
            "omitted": shown.omitted,
        }
        if shown.next is not None:
            result["next"] = shown.next
        return ControlReply(control=request.control, verb="discover", status="settled", result=result)

    async def _snapshot(self, request: ControlRequest) -> ControlReply:
        target = request.target
        if target is None:
            raise InvalidError("target", "is required for snapshot")
        shell = self._executions.get(target.execution)
        snapshot: Snapshot | GapReason | None
        if shell is None:
            snapshot = await self._executions.final(target)
        else:
            current = shell.summary().target
            if (field := current.differs(target)) is not None:
                raise ProblemError(problem(Code.TARGET_STALE, f"{field} is not that of the execution"))
            snapshot = await shell.snapshot()
        if not isinstance(snapshot, Snapshot):
            raise ProblemError(_no_snapshot(snapshot))
        data = snapshot.model_dump_json(exclude_none=True)
        result: dict[str, Any] = {"snapshot": snapshot.model_dump(mode="json", exclude_none=True)}
        if len(data) > self._around.bus.payload_bytes_max - REPLY_ROOM_BYTES:
            # The blob store keeps it, the reply names it.
            if len(data) > SNAPSHOT_MEMORY_BYTES_MAX:
                raise ProblemError(problem(Code.QUOTA_EXCEEDED, "the snapshot is larger than may be kept"))
            blob, reference = blob_of_text(data, "json")
            await self._around.blobs.put(blob)
            result = {"blob": reference}
        return ControlReply(
            control=request.control, verb="snapshot", status="settled", target=snapshot.target, result=result
        )

    # --- deleting a conversation ---

    async def _forget(self, request: ControlRequest) -> ControlReply:
        """For a deletion that the owner record names. Idempotent: what is gone is found gone. Nothing is journaled."""
        payload = forget_payload(request)
        if self._executions.draining is not None:
            # Its checkpoint may hold the conversation: it is made, and then deleted.
            raise ProblemError(problem(Code.DRAINING, "the sandbox is draining", drain=self._executions.draining))
        settings = self._around.settings
        await check_deletion(self._around.bus, request, payload, settings.tenant, settings.workspace)
        try:
            done = await self._executions.forget_conversation(payload.conversation, payload.sessions)
        except (OSError, sqlite3.Error) as error:
            detail = f"the volume takes nothing: {error}"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail)) from None
        return ControlReply(
            control=request.control, verb="forget", status="settled", result=done.model_dump(mode="json")
        )

    # --- controls of one execution ---

    async def _control(self, request: ControlRequest) -> ControlReply:
        journal = self._around.journal
        known = self._known(request)
        target = request.target
        if target is None:
            raise InvalidError("target", f"is required for {request.verb}")
        shell = self._executions.get(target.execution)
        if known is None and shell is not None:
            await self._check_authority(request, target)
            known = self._known(request)  # the same control may have come twice at once
        if known is None:
            if shell is None:
                return self._of_ended(request)
            if request.verb == "interject" and self._executions.draining is not None:
                # The turn that it would join may be cut: it waits in its stream, and is run after the wake.
                raise ProblemError(problem(Code.DRAINING, "the sandbox is draining", drain=self._executions.draining))
            machine = shell.judging
            if machine is None:
                detail = "the execution is being recovered"
                raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, recovering=True))
            rejection = machine.check_control(request.verb, target, request.payload)
            if rejection is not None:
                return self._refused(request, shell, rejection.problem)
            token = (shell.start.conversation, request.authority.kind, request.authority.token)
            known = journal.add_control(request, shell.start.execution, now_ms(), token=token)
            self._around.step("control_journaled")
            shell.accept(known)
        if shell is not None:
            known = await shell.receipt(request.control, ENOUGH[request.verb], REPLY_WAIT_S) or known
        known = journal.control(request.control) or known
        return known.reply(None if shell is None else shell.summary().target)

    def _known(self, request: ControlRequest) -> Control | None:
        """The control that the journal has under this id. Raises ProblemError where it has another payload."""
        known = self._around.journal.control(request.control)
        if known is not None and known.digest != request.digest:
            raise ProblemError(problem(Code.REQUEST_CONFLICT, "this control id was used with another payload"))
        return known

    async def _check_authority(self, request: ControlRequest, target: ExecutionTarget) -> None:
        """A token is never lower than one seen before; a user's control carries the lease that is stored now."""
        authority = request.authority
        seen = self._around.journal.token(target.conversation, authority.kind)
        if authority.token and authority.token < seen:
            why = "authority: a newer holder has sent controls already"
            raise ProblemError(problem(Code.LEASE_NOT_READY, why, token=seen))
        if request.verb == "stop" and authority.kind == "owner":
            await check_takeover(self._around.bus, request, target)
        if request.verb not in USER_VERBS or authority.kind in ("owner", "sandbox"):
            return
        key = subjects.lease_key(target.tenant, target.workspace, target.conversation)
        bucket = Bucket(self._around.bus, subjects.LEASES, leader=False)
        for pause_s in LAG_PAUSES_S:
            entry = await bucket.get(key)
            if not is_behind(entry, authority):
                break
            await asyncio.sleep(pause_s)
        refusal = check_lease(entry, authority, target.execution)
        if refusal is not None:
            raise ProblemError(refusal)

    def _refused(self, request: ControlRequest, shell: ExecutionShell, why: Problem) -> ControlReply:
        """With the current target where it was stale, with the winner's receipt where an answer came too late."""
        reply = rejected(request.control, request.verb, why)
        update: dict[str, Any] = {}
        if why.code == Code.TARGET_STALE:
            update["target"] = shell.summary().target
        winner = why.context.get("control")
        entry = self._around.journal.control(winner) if isinstance(winner, str) else None
        if entry is not None:
            update["result"] = {"winner": entry.reply().model_dump(mode="json", exclude_none=True)}
        return reply.model_copy(update=update)

    def _of_ended(self, request: ControlRequest) -> ControlReply:
        """A control of an execution that does not live here: it has ended, or it is not known."""
        target = request.target
        assert target is not None
        summary = self._executions.known_ended(target.execution)
        if summary is not None:
            if (field := summary.target.differs(target)) is not None:
                why = problem(Code.TARGET_STALE, f"{field} is not that of the execution")
            else:
                why = problem(Code.SESSION_STREAM_NOT_ACTIVE, "the execution has ended", ended=True)
            return rejected(request.control, request.verb, why).model_copy(update={"target": summary.target})
        living = self._executions.of_conversation(target.conversation)
        if living is not None:
            why = problem(Code.TARGET_STALE, "another execution of the conversation runs")
            return rejected(request.control, request.verb, why).model_copy(update={"target": living.summary().target})
        raise ProblemError(problem(Code.TARGET_UNKNOWN, "this execution is not known here"))


def _no_snapshot(gap: GapReason | None) -> Problem:
    """Why there is none of an execution that does not live here."""
    match gap:
        case None:
            return problem(Code.TARGET_UNKNOWN, "no snapshot of this target is kept here")
        case "durability_gap":
            return problem(Code.EXECUTION_DURABILITY_GAP, "its final snapshot could not be written to the volume")
        case _:
            detail = "its final snapshot was deleted before its time, for a quota of the volume"
            return problem(Code.RETENTION_GAP, detail)


def rejected(control: str, verb: str, why: Problem) -> ControlReply:
    return ControlReply(control=control, verb=verb, status="rejected", problem=why)


def identity_of(request: ControlRequest) -> dict[str, str]:
    """What log lines and spans of a control say of it. A start names its execution in the payload."""
    target: Any = request.payload.get("target") if request.target is None else request.target.model_dump()
    named = target if isinstance(target, dict) else {}
    where = {key: name for key in ("conversation", "execution") if is_token(name := named.get(key))}
    return {"control": request.control, **where}


def is_token(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and re.fullmatch(TOKEN_PATTERN, value) is not None
