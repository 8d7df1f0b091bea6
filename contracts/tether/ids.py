"""Identities: tokens, derived ids and the execution's full target.

A token is what may stand in a subject or a key. Response and execution ids are derived from
`(tenant, request_id, attempt)`, so that a replayed admission cannot make a second one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, StringConstraints

from tether.errors import InvalidError

TOKEN_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
TOKEN_REMEDY: Final = "must be 1 to 64 of the characters A-Z a-z 0-9 _ -"
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

Token = Annotated[str, StringConstraints(pattern=TOKEN_PATTERN)]


def check_token(value: object, field: str) -> str:
    """Return `value` if it may stand in a subject, else raise `InvalidError` naming `field`."""
    if isinstance(value, str) and _TOKEN.fullmatch(value):
        return value
    raise InvalidError(field, TOKEN_REMEDY)


def new_id(prefix: str) -> str:
    """A random id such as `req_3f…` (96 bits)."""
    return f"{prefix}_{secrets.token_hex(12)}"


def _derive(kind: str, *parts: str | int) -> str:
    # The separator cannot occur in a token, so distinct part lists never collide.
    text = "\x1f".join([kind, *(str(part) for part in parts)])
    return f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def response_id(tenant: str, request_id: str, attempt: int) -> str:
    return _derive("rsp", tenant, request_id, attempt)


def execution_id(tenant: str, request_id: str, attempt: int) -> str:
    return _derive("exe", tenant, request_id, attempt)


def control_id(tenant: str, request_id: str, verb: str, attempt: int = 1) -> str:
    """The control id of what a router does for a request (interject, stop): the same after a crash."""
    return _derive("ctl", tenant, request_id, verb, attempt)


def default_workspace(conversation: str) -> str:
    """The workspace of a conversation that names none: one of its own, the same for every caller."""
    return _derive("ws", conversation)


def continuation_id(checkpoint: str, conversation: str) -> str:
    """The request id of what goes on with a turn that a drain has cut: one for each checkpoint."""
    return _derive("req", "continuation", checkpoint, conversation)


def drain_control_id(tenant: str, workspace: str, drain: str) -> str:
    """The control id of a drain: the same for every agent service that asks for it, and after a crash."""
    return _derive("ctl", tenant, workspace, "drain", drain)


def sandbox_id(tenant: str, workspace: str) -> str:
    """The sandbox over a workspace: one at a time, so its id follows from the workspace."""
    return _derive("sbx", tenant, workspace)


class ExecutionTarget(BaseModel):
    """The full identity of one execution. All but `native_session` are required for a control;
    `native_session` must match if either side knows it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tenant: Token
    workspace: Token
    conversation: Token
    response: Token
    response_generation: int
    execution: Token
    execution_generation: int
    sandbox: Token
    boot: str = ""
    process_generation: int = 0
    native_session: str | None = None

    def differs(self, other: ExecutionTarget) -> str | None:
        """Name the first field in which `other` is another target, or None where both name the same one.

        An unset boot id or process generation (the router issues targets before a process exists) matches any;
        a native session is compared only if both sides know it.
        """
        for name in (
            "tenant",
            "workspace",
            "conversation",
            "response",
            "response_generation",
            "execution",
            "execution_generation",
            "sandbox",
        ):
            if getattr(self, name) != getattr(other, name):
                return name
        for name in ("boot", "process_generation", "native_session"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                return name
        return None
