"""Who can stop an execution: its sandbox's registration, or the one that is found by the full identity. Pure.

    target ─▶ its sandbox's registration ──same boot──▶ Found, or without the capability: refused
                │none, another boot, or the boot is not known
                ▼
              every registration of the workspace, at most DISCOVERY_SANDBOXES_MAX of them
                one lists the identity, or says so when asked, and the provider's facts confirm it ──▶ Found
                none, several, a part of the identity only ──▶ refused: to be tried again

Capabilities are bound to an instance of a collector, so each is read from the registration that is there now. An
execution that nobody registers has not ended by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tether.errors import Code, Problem, problem
from tether.ids import ExecutionTarget
from tether.limits import DISCOVERY_SANDBOXES_MAX
from tether.sandbox import CAN_STOP_TARGET, Registration, SandboxRecord


@dataclass(frozen=True, slots=True)
class Found:
    """The target as it is registered: boot, process generation and native session filled in."""

    target: ExecutionTarget


@dataclass(frozen=True, slots=True)
class Search:
    """The target's own registration does not settle it."""


def look(target: ExecutionTarget, registration: Registration | None) -> Found | Search | Problem:
    """By the registration of the target's sandbox alone."""
    if registration is None or not target.boot or registration.boot != target.boot:
        return Search()
    return _capable(target, registration)


def choose(
    target: ExecutionTarget,
    registrations: Sequence[Registration],
    told: Sequence[tuple[str, ExecutionTarget]],
    sandbox: SandboxRecord | None,
) -> Found | Problem:
    """`told`: what collectors answered when asked, each with the boot id of who answered."""
    if not registrations:
        detail = "no collector is registered for the workspace; its sandbox is away or being restarted"
        return problem(Code.RUNTIME_UNAVAILABLE, detail)
    if len(registrations) > DISCOVERY_SANDBOXES_MAX:
        detail = f"more than {DISCOVERY_SANDBOXES_MAX} sandboxes are registered for the workspace"
        return problem(Code.TARGET_UNKNOWN, detail)
    found: list[tuple[Registration, ExecutionTarget]] = []
    near: str | None = None
    for registration in registrations:
        listed = [entry.target for entry in registration.executions]
        listed += [one for boot, one in told if boot == registration.boot]
        for one in listed:
            if one.execution != target.execution:
                continue
            if (field := target.differs(one)) is not None:
                near = field
            elif (registration, one) not in found and not any(has is registration for has, _ in found):
                found.append((registration, one))
    if len(found) > 1:
        return problem(Code.TARGET_UNKNOWN, f"{len(found)} sandboxes say that they have the execution")
    if not found:
        if near is not None:
            detail = f"{near} of the execution that is registered is not that of the owner record"
            return problem(Code.TARGET_STALE, detail, retryable=True)
        return problem(Code.TARGET_UNKNOWN, "no registered sandbox says that it has the execution")
    registration, one = found[0]
    if not _confirmed(registration, sandbox):
        detail = "the registration and the provider's facts name different sandboxes"
        return problem(Code.TARGET_STALE, detail, retryable=True)
    return _capable(one, registration)


def _confirmed(registration: Registration, sandbox: SandboxRecord | None) -> bool:
    """The provider's own record names this sandbox, and what both know of it is the same."""
    if sandbox is None or sandbox.sandbox != registration.sandbox:
        return False
    return _agree(registration.facts, sandbox.facts)


def _agree(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def _capable(target: ExecutionTarget, registration: Registration) -> Found | Problem:
    if CAN_STOP_TARGET not in registration.capabilities:
        detail = f"the sandbox's collector cannot stop one execution exactly ({CAN_STOP_TARGET}); interrupt it, or wait"
        return problem(Code.CAPABILITY_MISSING, detail, retryable=True)
    return Found(target)
