"""A process that was of no use is followed by another one of the same execution: decided here, once each, and pure.

    running ──session busy, tries left, nothing shown──────▶ leaving{again}
       │    ──session not found, allowed, nothing shown────▶ leaving{history}
       │                                                        │ SIGTERM, kill: nothing of it is worth waiting for
       │                                                        ▼
       │                                         Exited, Proved ─▶ wanted        (Want: NextProcess)
       │                                            stop ──▶ stopped ◀── stop ──┤
       │                                                                        ├─ Note process_refused ─▶ refused
       ◀──────────────── the next process's generation, its events ─────────────┴─ Note process

    again    the CLI said that the session has another writer: an old process lives. What is left of the conversation's
             ended executions is swept, and the same session resumed again, after AGAIN_MS; never another session.
    history  the CLI said that the session does not exist. The next process begins with a session of its own and with
             the conversation's history. Once in an execution, and only where the start allowed it.

Nothing shown: no text, reasoning, tool or interaction of this execution is in the log, so nothing that a person read
is contradicted. The proof comes first: while something of the old process may live, nothing is wanted. The note is the
journal entry: it holds everything that the next process is launched with, so a replay launches the very same.

A session that the CLI took, and of which it then says that nothing of it is there (another id, `resumed: false`), is no
"not found": what the prompt would do in it is nothing that the user asked for. The process is ended at once, and the
response fails with RESUME_FAILED. So it does wherever a fallback is not allowed, or was refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tether import events as ev
from tether.errors import Code
from tether_collector.core.adapters.base import Launch
from tether_collector.core.inputs import NextProcess

PROCESS: Final = "process"  # kinds of notes
REFUSED: Final = "process_refused"
CHOICES: Final = ("fresh", "history")
AGAIN_MS: Final = (250, 500, 1000, 2000, 4000)  # pauses before a busy session is tried again; as many tries
SHOWN: Final = frozenset(
    {
        *(ev.TEXT_DELTA, ev.TEXT_COMPLETED, ev.REASONING_DELTA, ev.REASONING_COMPLETED),
        *(ev.TOOL_STARTED, ev.TOOL_PROGRESS, ev.TOOL_COMPLETED, ev.INTERACTION_REQUESTED),
    }
)

Reason = Literal["not_found", "not_resumed", "busy"]
Stage = Literal["running", "leaving", "wanted", "refused"]
Why = Literal["again", "history"]


@dataclass(slots=True)
class Fallback:
    """`shown`: the log has something of the agent's. `tries`: how often a busy session was tried again. `used`: the
    history has stood in once. `proof`: of the process that left."""

    stage: Stage = "running"
    why: Why = "again"
    detail: str = ""
    shown: bool = False
    used: bool = False
    tries: int = 0
    since_ms: int = 0
    proof: dict[str, Any] | None = None

    def begin(self, reason: Reason, detail: str, launch: Launch, at: int) -> bool:
        """Whether the refusal of the session leads to another process."""
        if self.shown or self.stage != "running" or not launch.resume:
            return False
        if reason == "busy" and self.tries < len(AGAIN_MS):
            self.why = "again"
        elif reason == "not_found" and launch.fallback and not self.used:
            self.why = "history"
        else:
            return False
        self.stage, self.detail, self.since_ms = "leaving", detail, at
        return True

    @property
    def under_way(self) -> bool:
        return self.stage in ("leaving", "wanted")

    def proven(self, proof: dict[str, Any], at: int) -> None:
        self.stage, self.proof, self.since_ms = "wanted", proof, at

    def over(self) -> None:
        self.stage = "refused"

    def want(self, process: int) -> NextProcess | None:
        """What the shell is to prepare; `not_before` in unix ms."""
        if self.stage != "wanted":
            return None
        pause_ms = AGAIN_MS[self.tries] if self.why == "again" else 0
        return NextProcess(process + 1, self.why, self.since_ms + pause_ms)

    def taken(self) -> None:
        """The next process is noted."""
        if self.why == "again":
            self.tries += 1
        else:
            self.used = True
        self.stage, self.proof = "running", None


def failure_code(reason: Reason) -> Code:
    return Code.SESSION_BUSY if reason == "busy" else Code.RESUME_FAILED


def next_launch(launch: Launch, note: Mapping[str, Any]) -> Launch:
    """How the noted process is launched."""
    history = note.get("history")
    return replace(
        launch,
        session=str(note.get("session") or launch.session),
        resume=note.get("resume") is True,
        history=dict(history) if isinstance(history, Mapping) else None,
    )


def told(note: Mapping[str, Any], lost: str | None) -> dict[str, Any] | None:
    """The body of `session.recovered`; None for a process that begins with no history."""
    given = note.get("recovered")
    if not isinstance(given, Mapping):
        return None
    body = {"process": note.get("process"), **given}
    return {"from": lost, **body} if lost is not None else body
