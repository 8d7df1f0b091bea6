"""What callers, services and sandboxes send: prompts, controls, commands, records of the buckets, headers.

Laws: what decodes encodes to what decodes equally, and within its size; a digest is of the payload alone; the owner's
machine answers every input to every record that can be read, and what it accepts can be read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from tether import owner, submission
from tether.checkpoint import CheckpointReference
from tether.control import AnswerPayload, ControlReply, InterjectPayload, decode_command, decode_request
from tether.errors import Code, InvalidError, problem
from tether.history import History, HistoryRequest
from tether.jsonsafe import loads_object
from tether.limits import MIB
from tether.natsheaders import live_message, parse
from tether.prompt import ConversationRecord, RequestRecord, decode_prompt, invalid
from tether.sandbox import DrainOrder, DrainReport, Registration, SandboxRecord
from tether.snapshot import Snapshot, Watermark, take
from tether_fuzz.target import Features, Target, law, refusal
from tether_fuzz.targets import good

PROMPT: Final[dict[str, Any]] = {
    "v": 1,
    "tenant": good.TENANT,
    "workspace": good.WORKSPACE,
    "conversation": good.CONVERSATION,
    "request_id": "req_1",
    "attempt": 1,
    "content": [{"type": "text", "text": "hi"}],
    "agent": {"kind": "scripted", "model": "m", "permission_mode": "plan", "args": ["a"]},
    "mode": "auto",
    "resume": "fresh",
    "continuation": "wait",
}
COMMAND: Final[dict[str, Any]] = {
    "v": 1,
    "kind": "start",
    "control": "ctl_1",
    "target": good.TARGET_JSON,
    "owner_revision": 3,
    "request_id": "req_1",
    "attempt": 1,
    "content": PROMPT["content"],
    "agent": PROMPT["agent"],
    "resume_session": "s",
    "resume": "history",
    "fallback": True,
    "history_cut": 5,
    "checkpoint_revision": 2,
    "continuation": "continue",
}
CONTROL: Final[dict[str, Any]] = {
    "v": 1,
    "control": "ctl_2",
    "verb": "answer",
    "target": good.TARGET_JSON,
    "authority": {"kind": "lease", "holder": "h", "token": 5},
    "payload": {"interaction": "i", "decision": "allow", "text": "t", "input": {"a": 1}, "answers": {"q": ["a"]}},
}


def run_prompt(data: bytes) -> Features:
    try:
        prompt = decode_prompt(data)
    except InvalidError as error:
        return refusal(error)
    law(decode_prompt(prompt.encode()) == prompt, "a prompt decodes to itself")
    other = prompt.model_copy(update={"attempt": prompt.attempt + 1})
    law(other.digest == prompt.digest and other.message_id != prompt.message_id, "an attempt is no other payload")
    told = submission.decide(None, prompt)
    return [type(told).__name__, prompt.mode, prompt.agent.kind == "scripted"]


def run_control(data: bytes) -> Features:
    try:
        request = decode_request(data)
    except InvalidError as error:
        return refusal(error)
    law(decode_request(request.model_dump_json().encode()) == request, "a control decodes to itself")
    law(len(request.digest) == 64, "a control has a digest")
    found: list[Hashable] = [request.verb, request.authority.kind]
    for model in (AnswerPayload, InterjectPayload, DrainOrder):
        try:
            model.model_validate(request.payload)
        except ValidationError as error:
            found.append((model.__name__, len(invalid(error, "payload").problem.fields)))
        else:
            found.append(model.__name__)
    return found


def run_command(data: bytes) -> Features:
    try:
        command = decode_command(data)
    except InvalidError as error:
        return refusal(error)
    law(decode_command(command.encode()) == command, "a command decodes to itself")
    return ["accepted"]


_AT: Final = 1_000
_OWNER_INPUTS: Final[tuple[owner.OwnerInput, ...]] = (
    owner.Started(good.EXECUTION, "boot1", 1, _AT),
    owner.SessionBound(good.EXECUTION, "s", "scripted"),
    owner.ResponseEnded(good.EXECUTION, _AT),
    owner.Ended(good.EXECUTION, "completed", proved=True, at=_AT),
    owner.Ended(good.EXECUTION, "lost", proved=False, at=_AT),
    owner.TakeOver(good.EXECUTION, "ctl_s", "req_2", _AT),
    owner.StopRefused("ctl_s", _AT),
    owner.StopUnconfirmed("ctl_s", _AT),
    owner.Repair(5, good.TARGET, "req_1", 1, _AT),
    owner.Admit(
        *(good.TENANT, good.WORKSPACE, good.CONVERSATION, "req_2", 1, "rsp_2", "exe_2", "sbx_1", 7, 7, {}, _AT)
    ),
)


def run_owner(data: bytes) -> Features:
    try:
        record = owner.OwnerRecord.model_validate(loads_object(data, "record", bytes_max=MIB))
    except InvalidError as error:
        return refusal(error)
    except ValidationError as error:
        return refusal(invalid(error))
    found = set[Hashable]()
    for event in _OWNER_INPUTS:
        told = owner.decide(record, event)
        found.add((record.state, type(event).__name__, type(told).__name__))
        if isinstance(told, owner.Accepted):
            again = owner.OwnerRecord.model_validate(json.loads(json.dumps(told.record.value())))
            law(again == told.record.model_copy(update={"op": ""}), "a record can be read again")
            law(told.record.generation >= record.generation, "a generation never goes back")
            if record.state == "stopping" and told.record.state == "starting":
                law(isinstance(event, owner.Ended | owner.Repair), "only an end lets the next one start")
    return found


_RECORDS: Final[tuple[type[BaseModel], ...]] = (
    *(RequestRecord, ConversationRecord, SandboxRecord, Registration, DrainReport, CheckpointReference, Snapshot),
    *(History, HistoryRequest, ControlReply),
)


def run_record(data: bytes) -> Features:
    """A line with the record's name, then its value."""
    name, _, text = data.partition(b"\n")
    models = {model.__name__.encode(): model for model in _RECORDS}
    model = models.get(name.strip()) or _RECORDS[len(data) % len(_RECORDS)]
    try:
        record = model.model_validate(loads_object(text or data, "record", bytes_max=MIB))
    except InvalidError as error:
        return refusal(error)
    except ValidationError as error:
        return [model.__name__, *refusal(invalid(error))]
    value = record.value() if hasattr(record, "value") else record.model_dump(mode="json", exclude_none=True)
    again = model.model_validate(json.loads(json.dumps(value)))
    before = record.model_copy(update={"op": ""}) if hasattr(record, "op") else record
    law(again == before, "a record can be read again")
    return [model.__name__]


def run_headers(data: bytes) -> Features:
    """What a server or, on a live subject, anybody may have put beside a message."""
    status, _, headers = parse(data)
    message = live_message(good.SUBJECT, b"", headers)
    law(message.sequence >= 0 and message.previous >= 0 and message.stored_at_ns >= 0, "a copy has a place, or none")
    return [bool(status), bool(message.sequence), bool(message.previous), bool(message.stored_at_ns)]


def _encoded(*values: Any) -> Callable[[], Iterable[bytes]]:
    return lambda: [json.dumps(value).encode() for value in values]


def _owner_seeds() -> Iterable[bytes]:
    for state in ("idle", "starting", "running", "stopping", "exiting"):
        record = owner.OwnerRecord(
            state=state,
            target=None if state == "idle" else good.TARGET,
            generation=4,
            request="req_1",
            stop_control="ctl_s" if state == "stopping" else None,
            pending_request="req_2" if state == "stopping" else None,
            native_session="s",
            native_agent="scripted",
            superseded=owner.Superseded(request="req_0", response="rsp_0"),
            tombstones=(owner.Tombstone(execution="exe_0", outcome="lost", at=1),),
        )
        yield json.dumps(record.value()).encode()


def _record_seeds() -> Iterable[bytes]:
    reference = {
        "v": 1,
        "checkpoint": "cp1",
        "drain": "d1",
        "tenant": "acme",
        "workspace": "w1",
        "sandbox": "sbx_1",
        "boot": "boot1",
        "manifest": good.DIGEST,
        "manifest_bytes": 9,
        "stored": "both",
        "include": "sessions",
        "clean": True,
        "may_use": {"c1": 3},
        "executions": [{"target": good.TARGET_JSON, "outcome": "forced", "unheard": [{"request": "req_1"}]}],
    }
    report = {"drain": "d1", "state": "done", "phase": "over", "checkpoint": reference, "purpose": "suspend"}
    order = {"drain": "d1", "purpose": "delete", "reason": "r", "grace_s": 1.5, "store": "both", "include": "workspace"}
    place = {"v": 1, "tenant": "acme", "workspace": "w1", "sandbox": "sbx_1"}
    summary = {"target": good.TARGET_JSON, "state": "waiting", "pending_interactions": 1, "gap": "retention_gap"}
    told = problem(Code.SESSION_BUSY, "busy").model_dump(mode="json", exclude_none=True)
    done = {"status": "failed", "problem": told}
    request = {"v": 1, "digest": good.DIGEST, "workspace": "w1", "conversation": "c1", "attempt": 1}
    fold = _state()
    values: tuple[tuple[str, Any], ...] = (
        ("CheckpointReference", reference),
        ("DrainReport", {**report, "problem": told}),
        ("SandboxRecord", {**place, "state": "draining", "provider": "local", "drain": order, "drained": report}),
        ("Registration", {**place, "boot": "b", "instance": "i", "executions": [summary], "capabilities": ["x"]}),
        ("RequestRecord", {**request, "prompt_sequence": 1, "state": "done", "done": done}),
        ("ConversationRecord", {"v": 1, "workspace": "w1"}),
        ("Snapshot", fold),
        ("History", {"v": 1, "conversation": "c1", "cut": 1, "rows": [{"role": "tool", "name": "n", "input": {}}]}),
        ("HistoryRequest", {"v": 1, "tenant": "acme", "workspace": "w1", "conversation": "c1", "cut": 1}),
        ("ControlReply", {"v": 1, "control": "k", "verb": "stop", "status": "rejected", "problem": told}),
    )
    for name, value in values:
        yield f"{name}\n{json.dumps(value)}".encode()


def _state() -> Any:
    from tether.fold import ExecutionFold

    fold = ExecutionFold()
    for event in good.log():
        fold.apply(event)
    snapshot = take(good.TARGET, fold.freeze(), Watermark(ordinal=fold.applied, sequence=9, tag=1), captured_at=1)
    return snapshot.model_dump(mode="json", exclude_none=True)


_HEADERS: Final = (
    b"NATS/1.0\r\nNats-Sequence: 5\r\nNats-Last-Sequence: 3\r\nNats-Time-Stamp: 2026-01-02T03:04:05.678901Z\r\n\r\n",
    b"NATS/1.0 404 No Messages\r\n\r\n",
    b"NATS/1.0\r\nNats-Time-Stamp: 2026-01-02T03:04:05+01:00\r\n\r\n",
)

TARGETS: Final = (
    Target("prompt", "contract", "json", run_prompt, _encoded(PROMPT)),
    Target(
        "control", "contract", "json", run_control, _encoded(CONTROL, {**CONTROL, "verb": "start", "payload": COMMAND})
    ),
    Target("command", "contract", "json", run_command, _encoded(COMMAND)),
    Target("owner", "contract", "json", run_owner, _owner_seeds),
    Target("record", "contract", "lines", run_record, _record_seeds),
    Target("headers", "contract", "bytes", run_headers, lambda: _HEADERS, bytes_max=4096),
)
