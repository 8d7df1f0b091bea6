"""Exact stop: the escalation from a polite interrupt to a killed process tree, until there is proof.

    idle ──request──▶ interrupting ──Timer(stop.interrupt), 2 s──▶ terminating ──Timer(stop.term), 5 s──▶ killing
      │                        └──the turn is over, and another is queued or begins───▲
      └──request, response over already, or between two turns────────▲
    any ──Exited──▶ (`ending.py` kills what is left) ──Proved──▶ settled

    interrupting  the adapter's interrupt is written; stdin is closed as soon as the turn is over, so that a CLI that
                  obeys leaves by itself within the 2 s
    terminating   stdin closed, SIGTERM
    killing       everything of the process killed: namespace, cgroup or sweep

A drain leaves by a way of its own, in the time that it was given:

    idle ──drain──▶ leaving ──Timer(drain.stdin), 2 s──▶ left_alone ──Timer(drain.kill), the grace is over──▶ killing
                       └──────────────────── a stop is asked for: terminating ─────────────────────────────────▲

    leaving       SIGTERM, and nothing else: an agent that saves its session on it must not be told otherwise meanwhile
    left_alone    stdin closed: some leave by that alone

No turn counts after a stop was accepted but the one that ran: a CLI goes on with what was said into it (an interrupt
ends one turn, the end of stdin none), so it is told to go as soon as that turn is over. Such a stop has *cut* work:
the response ends `stopped` however its last turn ended.

A reply to a stop is a hint. What settles it is `Proved`: a signal to a group proves nothing, as CLIs run their tools
in sessions of their own. A second stop joins the first: both controls are settled by the same proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tether.limits import STOP_INTERRUPT_S, STOP_TERM_S
from tether_collector.core.inputs import CloseStdin, Deadline, KillAll, SendSignal, Want

STOP_INTERRUPT: Final = "stop.interrupt"
STOP_TERM: Final = "stop.term"
DRAIN_STDIN: Final = "drain.stdin"
DRAIN_KILL: Final = "drain.kill"

Stage = Literal["idle", "interrupting", "terminating", "killing", "leaving", "left_alone"]


@dataclass(slots=True)
class Stop:
    """`control` is the first stop's id; `since_ms` when the stage began. `cut`: a turn that would follow must not.
    `drain`: it is a drain that ends the process, killing what is left at `kill_at_ms`."""

    stage: Stage = "idle"
    since_ms: int = 0
    control: str = ""
    turn_over: bool = False
    cut: bool = False
    drain: bool = False
    kill_at_ms: int = 0

    @property
    def requested(self) -> bool:
        return self.stage != "idle"

    def request(self, control: str, at: int, *, response_over: bool) -> bool:
        """Begin, or join what runs. True where the interrupt is to be written under `control`."""
        if self.stage in ("leaving", "left_alone"):  # the user wants it sooner, and not to be gone on with
            self.stage, self.since_ms, self.control, self.drain = "terminating", at, control, False
        if self.stage != "idle":
            return False
        self.stage = "terminating" if response_over else "interrupting"
        self.control, self.since_ms = control, at
        return self.stage == "interrupting"

    def leave(self, control: str, at: int, kill_at_ms: int) -> None:
        """A drain: begin, or join what runs."""
        if self.stage == "idle":
            self.stage, self.drain = "leaving", True
            self.control, self.since_ms, self.kill_at_ms = control, at, kill_at_ms

    def turn_ended(self) -> None:
        """The CLI said its terminal line: nothing is left to interrupt."""
        self.turn_over = True

    def turn_began(self, at: int) -> None:
        """Behind the turn that a stop has ended none may run."""
        if self.requested and self.turn_over:
            self.cut_off(at)
        else:
            self.turn_over = False

    def cut_off(self, at: int) -> None:
        """Work is left behind the turn that has ended: do not wait for the CLI to get to it."""
        self.cut = True
        if self.stage == "interrupting":
            self.stage, self.since_ms = "terminating", at

    def timer(self, name: str, at: int) -> None:
        """A deadline passed; one of an earlier stage changes nothing."""
        if name == STOP_INTERRUPT and self.stage == "interrupting":
            self.stage, self.since_ms = "terminating", at
        elif name == STOP_TERM and self.stage == "terminating":
            self.stage, self.since_ms = "killing", at
        elif name == DRAIN_STDIN and self.stage == "leaving":
            self.stage = "left_alone"
        elif name == DRAIN_KILL and self.stage in ("leaving", "left_alone"):
            self.stage, self.since_ms = "killing", at

    def wants(self) -> list[Want]:
        """Asked for only while the process lives. The interrupt itself is wanted by the control's own record."""
        match self.stage:
            case "idle":
                return []
            case "interrupting":
                close: list[Want] = [CloseStdin()] if self.turn_over else []
                return [*close, Deadline(STOP_INTERRUPT, self.since_ms + int(STOP_INTERRUPT_S * 1000))]
            case "terminating":
                return [
                    CloseStdin(),
                    SendSignal(self.control, "SIGTERM"),
                    Deadline(STOP_TERM, self.since_ms + int(STOP_TERM_S * 1000)),
                ]
            case "leaving" | "left_alone":
                asked: Want = CloseStdin()
                if self.stage == "leaving":
                    asked = Deadline(DRAIN_STDIN, self.since_ms + int(STOP_INTERRUPT_S * 1000))
                return [SendSignal(self.control, "SIGTERM"), asked, Deadline(DRAIN_KILL, self.kill_at_ms)]
            case "killing":
                return [KillAll()]
