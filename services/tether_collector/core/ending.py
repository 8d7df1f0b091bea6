"""How a process leaves once its response is over: asked, then told, then killed, then proven gone.

    open ──finish──▶ closing ──Timer(watchdog)──▶ terminating ──Timer(watchdog.kill)──▶ killing
      │                 │                             │                                    │
      └────────────────┴──────────── Exited ─────────┴────────────────────────────────────┘
                                        ▼
                                     exited ──Proved──▶ proven

`open` lasts until the agent's own terminal line counts as the end (`execution.py` decides that); a process that exits
by itself goes to `exited` from any stage. What is wanted in each stage:

    closing      stdin closed; the watchdog's deadline, 10 s after the terminal line
    terminating  SIGTERM; 5 s more
    killing      everything killed
    exited       everything killed: children of a CLI outlive it, and there is no proof while one does
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tether.limits import STOP_TERM_S, WATCHDOG_AFTER_TERMINAL_S
from tether_collector.core.inputs import CloseStdin, Deadline, KillAll, SendSignal, Want

WATCHDOG: Final = "watchdog"
WATCHDOG_KILL: Final = "watchdog.kill"

Stage = Literal["open", "closing", "terminating", "killing", "exited", "proven"]


@dataclass(slots=True)
class Ending:
    """The natural end. `since_ms`: when the stage began. `rc` is None while unknown."""

    stage: Stage = "open"
    since_ms: int = 0
    rc: int | None = None

    def finish(self, at: int) -> None:
        """The response is over; the process may go."""
        if self.stage == "open":
            self.stage, self.since_ms = "closing", at

    def hurry(self, at: int) -> None:
        """Nothing that the process may still do is wanted: it is told to go at once."""
        if self.stage in ("open", "closing"):
            self.stage, self.since_ms = "terminating", at

    def timer(self, name: str, at: int) -> None:
        """A deadline passed; one of an earlier stage changes nothing."""
        if name == WATCHDOG and self.stage == "closing":
            self.stage, self.since_ms = "terminating", at
        elif name == WATCHDOG_KILL and self.stage == "terminating":
            self.stage, self.since_ms = "killing", at

    def exited(self, rc: int | None, at: int) -> None:
        if self.stage not in ("exited", "proven"):
            self.stage, self.since_ms, self.rc = "exited", at, rc

    def proven(self, at: int) -> None:
        self.stage, self.since_ms = "proven", at

    @property
    def alive(self) -> bool:
        """As far as is known, the CLI's process runs."""
        return self.stage not in ("exited", "proven")

    def wants(self) -> list[Want]:
        match self.stage:
            case "open" | "proven":
                return []
            case "closing":
                return [CloseStdin(), Deadline(WATCHDOG, self.since_ms + int(WATCHDOG_AFTER_TERMINAL_S * 1000))]
            case "terminating":
                return [
                    CloseStdin(),
                    SendSignal(WATCHDOG, "SIGTERM"),
                    Deadline(WATCHDOG_KILL, self.since_ms + int(STOP_TERM_S * 1000)),
                ]
            case "killing" | "exited":
                return [KillAll()]
