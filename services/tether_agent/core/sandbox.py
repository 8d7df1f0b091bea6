"""The life cycle of a sandbox, as its record says it. One compare-and-set value per workspace.

    (none)       → provisioning   Wanted
    provisioning → active         Provisioned
    suspended    → resuming       Wanted
    resuming     → active         Provisioned
    active       → active         Provisioned (other facts), Forwarded (`starts` + 1)

`draining` and `deleting` are left alone here: a start that meets them waits. `active` says what is wanted, not what
lives: whether its compute is there is the provider's word, asked before each start. Each forwarded start bumps
`starts`, and with it the record's revision, before the start is sent: a drain that was decided on an older revision
loses its compare-and-set, and the revision is the authority that the collector is shown.

`decide(record, input)` is pure: Write(record) goes by compare-and-set before anything else happens, Keep means that
the record says so already, Wait names what has to end first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from tether.sandbox import SandboxRecord


@dataclass(frozen=True, slots=True)
class Wanted:
    """A start needs the sandbox of this workspace. `at` in unix milliseconds."""

    tenant: str
    workspace: str
    sandbox: str
    provider: str
    at: int


@dataclass(frozen=True, slots=True)
class Provisioned:
    """The provider says that the compute is there, with these facts."""

    facts: Mapping[str, Any]
    at: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A start is about to be sent to the collector."""

    at: int


SandboxInput = Wanted | Provisioned | Forwarded


@dataclass(frozen=True, slots=True)
class Write:
    record: SandboxRecord


@dataclass(frozen=True, slots=True)
class Keep:
    """The record says so already."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: the sandbox is on its way elsewhere."""

    reason: str


Decision = Write | Keep | Wait


def decide(record: SandboxRecord | None, event: SandboxInput) -> Decision:
    """What the record becomes. Pure."""
    match event:
        case Wanted():
            return _wanted(record, event)
        case Provisioned():
            return _provisioned(record, event)
        case Forwarded():
            return _forwarded(record, event)
        case _:
            assert_never(event)


def _wanted(record: SandboxRecord | None, event: Wanted) -> Decision:
    if record is None:
        return Write(
            SandboxRecord(
                tenant=event.tenant,
                workspace=event.workspace,
                sandbox=event.sandbox,
                state="provisioning",
                provider=event.provider,
                updated_at=event.at,
            )
        )
    if record.provider != event.provider:
        return Wait(f"the sandbox belongs to provider {record.provider}")
    match record.state:
        case "provisioning" | "resuming" | "active":
            return Keep()
        case "suspended":
            return Write(record.model_copy(update={"state": "resuming", "updated_at": event.at}))
        case "draining" | "deleting":
            return Wait(f"the sandbox is {record.state}")
        case _:
            assert_never(record.state)


def _provisioned(record: SandboxRecord | None, event: Provisioned) -> Decision:
    if record is None:
        return Wait("the sandbox's record is gone")
    facts = dict(event.facts)
    match record.state:
        case "provisioning" | "resuming":
            return Write(record.model_copy(update={"state": "active", "facts": facts, "updated_at": event.at}))
        case "active":
            if record.facts == facts:
                return Keep()
            return Write(record.model_copy(update={"facts": facts, "updated_at": event.at}))
        case "draining" | "suspended" | "deleting":
            return Wait(f"the sandbox is {record.state}")
        case _:
            assert_never(record.state)


def _forwarded(record: SandboxRecord | None, event: Forwarded) -> Decision:
    if record is None or record.state != "active":
        return Wait("the sandbox is gone" if record is None else f"the sandbox is {record.state}")
    return Write(record.model_copy(update={"starts": record.starts + 1, "updated_at": event.at}))
