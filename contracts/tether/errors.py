"""One error tree: whose fault, retry or not, ids as fields.

    TetherError                         everything that Tether raises on purpose
    ├── ProblemError                    an outcome with a wire code (RFC 9457 problem document)
    │   ├── InvalidError                INVALID: the sender's fault, names the field and the remedy
    │   └── QuotaExceededError          QUOTA_EXCEEDED: names the limit and when it resets (see `tether.quotas`)
    └── BusError                        JetStream or the connection
        ├── UndecidedError              the effect is unknown: send the same bytes again, or read and judge
        ├── WrongLastSequenceError      compare-and-set lost, names the actual last sequence
        ├── BusUnavailableError         stream missing or full, no responders: nak and retry, never a failure
        ├── NoReplyError                a question was not answered in time: reads as `unknown`
        ├── UnreadableRecordError       a stored record is none, or of an unknown version
        ├── MessageTooLargeError        the payload limit
        ├── PermissionDeniedError       the connection's user may not
        └── SlowReaderError             a bounded buffer overflowed: attach again

Codes are translated to HTTP in `Problem.status` and nowhere else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Code(StrEnum):
    """Every error code on the wire (protocol: "Errors and the HTTP edge")."""

    RUNTIME_UNAVAILABLE = "RUNTIME_UNAVAILABLE"
    SESSION_STREAM_NOT_ACTIVE = "SESSION_STREAM_NOT_ACTIVE"
    SESSION_BUSY = "SESSION_BUSY"
    REQUEST_CONFLICT = "REQUEST_CONFLICT"
    REQUEST_SUPERSEDED = "REQUEST_SUPERSEDED"
    LEASE_NOT_READY = "LEASE_NOT_READY"
    TARGET_STALE = "TARGET_STALE"
    TARGET_UNKNOWN = "TARGET_UNKNOWN"
    STOP_UNCONFIRMED = "STOP_UNCONFIRMED"
    CAPABILITY_MISSING = "CAPABILITY_MISSING"
    INTERACTION_SETTLED = "INTERACTION_SETTLED"
    EXECUTION_DURABILITY_GAP = "EXECUTION_DURABILITY_GAP"
    RETENTION_GAP = "RETENTION_GAP"
    CONVERSATION_DELETED = "CONVERSATION_DELETED"
    CURSOR_POSITION_CHANGED = "CURSOR_POSITION_CHANGED"
    DRAINING = "DRAINING"
    CHECKPOINT_FAILED = "CHECKPOINT_FAILED"
    RESUME_FAILED = "RESUME_FAILED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    NOT_FOUND = "NOT_FOUND"
    INVALID = "INVALID"


# code → (HTTP status, retryable by default, title)
_CODES: dict[Code, tuple[int, bool, str]] = {
    Code.RUNTIME_UNAVAILABLE: (503, True, "The runtime cannot be reached for now"),
    Code.SESSION_STREAM_NOT_ACTIVE: (409, True, "The conversation has no active execution"),
    Code.SESSION_BUSY: (409, True, "An execution is active and cannot take this"),
    Code.REQUEST_CONFLICT: (409, False, "This request id was used with another payload"),
    Code.REQUEST_SUPERSEDED: (409, False, "The request was superseded by a takeover"),
    Code.LEASE_NOT_READY: (409, True, "The control lease is held by another or not yet acquired"),
    Code.TARGET_STALE: (409, False, "The target has been replaced"),
    Code.TARGET_UNKNOWN: (404, True, "The target is not known here"),
    Code.STOP_UNCONFIRMED: (504, True, "No proof yet that the process has ended"),
    Code.CAPABILITY_MISSING: (501, False, "The peer lacks a needed capability"),
    Code.INTERACTION_SETTLED: (409, False, "The interaction has been settled"),
    Code.EXECUTION_DURABILITY_GAP: (410, False, "A part of the execution was never stored durably"),
    Code.RETENTION_GAP: (410, False, "A part of the execution is no longer retained"),
    Code.CONVERSATION_DELETED: (410, False, "The conversation was deleted"),
    Code.CURSOR_POSITION_CHANGED: (409, False, "The cursor does not name this stream's message"),
    Code.DRAINING: (503, True, "The sandbox is draining"),
    Code.CHECKPOINT_FAILED: (500, True, "The checkpoint failed"),
    Code.RESUME_FAILED: (409, False, "The native session could not be resumed"),
    Code.QUOTA_EXCEEDED: (429, True, "A quota is exceeded"),
    Code.UNAUTHENTICATED: (401, False, "No valid credentials were given"),
    Code.FORBIDDEN: (403, False, "These credentials do not allow this"),
    Code.NOT_FOUND: (404, False, "There is no such thing"),
    Code.INVALID: (422, False, "The input is not valid"),
}


class FieldProblem(BaseModel):
    """One offending field: `field` is a path such as `agent.kind`, `remedy` says what would be accepted."""

    model_config = ConfigDict(frozen=True)

    field: str
    remedy: str


class Problem(BaseModel):
    """An RFC 9457 problem document with Tether's members. `retry_after_s` is in seconds."""

    model_config = ConfigDict(frozen=True)

    code: Code
    title: str
    detail: str
    status: int
    retryable: bool
    retry_after_s: float | None = None
    fields: tuple[FieldProblem, ...] = ()
    context: dict[str, Any] = Field(default_factory=dict)

    @property
    def type(self) -> str:
        return f"urn:tether:problem:{self.code.value.lower()}"


def problem(
    code: Code,
    detail: str,
    *,
    retryable: bool | None = None,
    retry_after_s: float | None = None,
    fields: tuple[FieldProblem, ...] = (),
    **context: Any,
) -> Problem:
    """Build a problem; status, title and the default of `retryable` come from the code."""
    status, by_default, title = _CODES[code]
    return Problem(
        code=code,
        title=title,
        detail=detail,
        status=status,
        retryable=by_default if retryable is None else retryable,
        retry_after_s=retry_after_s,
        fields=fields,
        context=context,
    )


class TetherError(Exception):
    """Root of everything that Tether raises on purpose."""


class ProblemError(TetherError):
    """An outcome that has a wire code. `problem` is what a caller is shown."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.code}: {problem.detail}")
        self.problem = problem


class InvalidError(ProblemError):
    """Bad input: names the field and the remedy. `more`: further fields of the same input, each with its own."""

    def __init__(
        self, field: str, remedy: str, *, detail: str | None = None, more: tuple[FieldProblem, ...] = ()
    ) -> None:
        fields = (FieldProblem(field=field, remedy=remedy), *more)
        told = detail or "; ".join(f"{each.field}: {each.remedy}" for each in fields)
        super().__init__(problem(Code.INVALID, told, fields=fields))
        self.field = field
        self.remedy = remedy


class QuotaExceededError(ProblemError):
    """A quota is used up. `limit` is its name, `value` what it allows, `scope` of what (tenant, workspace, …);
    `reset_at_ms` (unix) where time alone ends it. Nothing of the request was done."""

    @property
    def limit(self) -> str:
        return str(self.problem.context.get("limit", ""))

    @property
    def value(self) -> int | None:
        found = self.problem.context.get("value")
        return found if isinstance(found, int) else None

    @property
    def scope(self) -> str:
        return str(self.problem.context.get("scope", ""))

    @property
    def reset_at_ms(self) -> int | None:
        found = self.problem.context.get("reset_at")
        return found if isinstance(found, int) else None


def error_of(what: Problem) -> ProblemError:
    """The exception of a problem that came over the wire."""
    return QuotaExceededError(what) if what.code is Code.QUOTA_EXCEEDED else ProblemError(what)


class BusError(TetherError):
    """JetStream or the connection to it. `subject` is the subject or API that was used."""

    def __init__(self, detail: str, *, subject: str | None = None, code: int | None = None) -> None:
        super().__init__(f"{detail}" + (f" (subject {subject})" if subject else "") + (f" [{code}]" if code else ""))
        self.detail = detail
        self.subject = subject
        self.code = code


class UndecidedError(BusError):
    """Timeout, lost connection, 10158, 10164: stored or not is not known."""


class WrongLastSequenceError(BusError):
    """10071: the subject's last sequence is `actual`, not the expected one."""

    def __init__(self, actual: int, *, subject: str) -> None:
        super().__init__(f"wrong last sequence: {actual}", subject=subject, code=10071)
        self.actual = actual


class BusUnavailableError(BusError):
    """A stream is missing or full (10059, 10047, 10077) or nobody answers: retry later, lose nothing."""


class NoReplyError(BusError):
    """No reply in time to a core request: the outcome is unknown. `no_responders` is true where nobody listens."""

    def __init__(self, detail: str, *, subject: str, no_responders: bool) -> None:
        super().__init__(detail, subject=subject)
        self.no_responders = no_responders


class UnreadableRecordError(BusError):
    """A stored record that is none, or of a version that is not known here: nothing is decided by it. `revision` is
    that of the value, for who owns the key and may replace it."""

    def __init__(self, detail: str, *, bucket: str, key: str, revision: int) -> None:
        super().__init__(f"a record cannot be read: {detail}", subject=f"{bucket}/{key}")
        self.revision = revision


class MessageTooLargeError(BusError):
    """The payload exceeds the bus's limit."""


class PermissionDeniedError(BusError):
    """The connection's user may not publish or subscribe there."""


class SlowReaderError(BusError):
    """A bounded buffer overflowed; what was in it is lost to this reader, who must attach again."""
