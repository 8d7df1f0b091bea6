"""Whether a sandbox has been idle for so long that its compute may go. Pure.

Idle is a sandbox without executions: its clock begins when the last one ended (the registration says when, the
collector's restarts do not move it) or when somebody last asked for it (the record's `wanted_at`), whichever is later.
One that waits for a person is not idle, unless that is configured: then its clock begins with the last event of the
executions that wait. A prompt or command that waits is activity: `lifecycle` looks for one once the clock has run out.

What is decided here is ordered on the revision that was read before, so whatever is forwarded in between wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.ids import ExecutionTarget
from tether.limits import REGISTRATION_TTL_S
from tether.sandbox import Registration, SandboxRecord


@dataclass(frozen=True, slots=True)
class Seen:
    """`quiet_since`: when the log of the executions that wait was last written (unix ms); None where not known."""

    registration: Registration | None
    now_ms: int
    quiet_since: int | None = None


def living(registration: Registration) -> list[tuple[ExecutionTarget, str]]:
    """Executions that have not ended, and where each stands."""
    return [(found.target, found.state) for found in registration.executions if found.state != "ended"]


def waits_only(registration: Registration | None) -> bool:
    """Whatever lives there waits for a person, and something does."""
    states = [] if registration is None else [state for _, state in living(registration)]
    cut = registration is not None and registration.executions_omitted > 0
    return bool(states) and not cut and set(states) == {"waiting"}


def is_idle(record: SandboxRecord, seen: Seen, *, idle_s: float, waiting: bool) -> bool:
    """The clock has run out. What cannot be known is not idle."""
    registration = seen.registration
    if record.state != "active" or registration is None:
        return False
    if seen.now_ms - registration.updated_at > REGISTRATION_TTL_S * 1000 or registration.draining is not None:
        return False
    if living(registration):
        since = seen.quiet_since if waiting and waits_only(registration) else None
    else:
        since = registration.idle_since
    return since is not None and max(since, record.wanted_at) + idle_s * 1000 < seen.now_ms
