"""An execution in traces and log lines: one span for as long as this collector tells of it.

Its parent is the start that was asked for. A collector that goes on with the execution after a restart finds that in a
file beside the spool, so its span is in the same trace, beside the first one's (which is lost where the collector was
killed: a span leaves when it ends). The file is there only where a `traceparent` came with the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from tether import events as ev
from tether import tracing
from tether.events import Event
from tether_collector.journal import Start

FILE: Final = "traceparent"
_BYTES_MAX: Final = 128
# What the span says of the execution's course.
TOLD: Final = frozenset({ev.SESSION_BOUND, ev.RESPONSE_ENDED, ev.EXECUTION_ENDED, ev.RECOVERY, ev.GAP})


@contextlib.contextmanager
def execution(state_dir: Path, start: Start) -> Iterator[tracing.Span]:
    """The work of one execution; the task that opens this has no other work."""
    structlog.contextvars.unbind_contextvars("control")  # the start's: what follows is not its doing
    path = state_dir / "executions" / start.execution / FILE
    parent = tracing.current()
    headers = None
    if parent is None:
        parent = _recall(path)
        headers = None if parent is None else {tracing.HEADER: parent}
    else:
        _remember(path, parent)
    target = start.target
    with tracing.scope(
        "execution",
        headers=headers,
        facts={"agent": start.command.agent.kind, "recovered": start.phase != "journaled"},
        tenant=target.tenant,
        workspace=target.workspace,
        conversation=start.conversation,
        execution=start.execution,
        request_id=start.command.request_id,
    ) as span:
        yield span


def tell(span: tracing.Span, event: Event) -> None:
    """One of TOLD, as a moment of the span."""
    body = event.body
    outcome, reason = body.get("outcome"), body.get("reason")
    span.event(
        event.type,
        ordinal=event.ordinal,
        outcome=outcome if isinstance(outcome, str) else None,
        reason=reason if isinstance(reason, str) else None,
    )


def _remember(path: Path, parent: str) -> None:
    with contextlib.suppress(OSError):  # a full disk has worse to tell than a trace that ends here
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(parent, encoding="ascii")


def _recall(path: Path) -> str | None:
    try:
        with path.open(encoding="ascii") as file:
            return tracing.parse(file.read(_BYTES_MAX).strip())
    except (OSError, UnicodeDecodeError):
        return None
