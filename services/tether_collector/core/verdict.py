"""What a response came to: from the last terminal line that the agent said, or from an exit without one. Pure.

`draining`: a drain told the CLI to go. It may call the turn failed or interrupted then; it is neither, it was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tether.errors import Code

AGENT_START_FAILED: Final = "AGENT_START_FAILED"
DRAINED: Final = "DRAINED"
_DRAINED_DETAIL: Final = "the sandbox was drained before the turn was over"
_SIGNAL_CODES: Final = frozenset({129, 130, 137, 143})  # a shell's way to say "killed by a signal"


class Verdict(NamedTuple):
    """Of `response.ended`."""

    outcome: str
    code: str | None = None
    detail: str = ""
    choices: Sequence[str] | None = None


def as_said(terminal: Mapping[str, Any], *, stopping: bool, draining: bool = False) -> Verdict:
    """With the outcome of the last terminal line. A stop that lost the race leaves a finished result alone."""
    outcome = terminal.get("outcome")
    if draining and outcome in ("interrupted", "failed"):
        return Verdict("drained", DRAINED, _DRAINED_DETAIL)
    if outcome == "interrupted":
        return Verdict("stopped", "STOPPED") if stopping else Verdict("cancelled", "INTERRUPTED")
    if outcome == "failed":
        code, detail = terminal.get("code") or "AGENT_FAILED", terminal.get("detail") or ""
        return Verdict("failed", code, detail, terminal.get("choices"))
    return Verdict("completed")


def of_exit(
    rc: int | None, *, stopping: bool, session_known: bool, stderr: Sequence[str], draining: bool = False
) -> Verdict:
    """Of a process that ended and had not said that its turn was over."""
    if draining:
        return Verdict("drained", DRAINED, _DRAINED_DETAIL)
    how = "its end was not seen" if rc is None else f"killed by signal {-rc}" if rc < 0 else f"exit code {rc}"
    if stopping:
        return Verdict("stopped", "STOPPED")
    if rc is not None and rc > 0 and rc not in _SIGNAL_CODES and not session_known:
        tail = " / ".join(line for line in stderr if line.strip())
        return Verdict("failed", AGENT_START_FAILED, f"{how}{': ' + tail if tail else ''}")
    detail = f"the agent ended without its terminal line ({how})"
    return Verdict("lost", Code.EXECUTION_DURABILITY_GAP.value, detail)
