"""The controls that one execution has accepted and their receipts: in the journal first, then here, then to waiters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from tether.control import InterjectPayload
from tether.errors import Code, Problem, problem
from tether.events import ReceiptStatus
from tether_collector.core.execution import Execution
from tether_collector.journal import Control, Journal

FINAL: Final = frozenset({"settled", "rejected", "unknown"})


class AcceptedControls:
    """One execution's. `step` is called with the name of each step that is on disk."""

    def __init__(self, journal: Journal, execution: str, step: Callable[[str], None]) -> None:
        self._journal = journal
        self._step = step
        self._controls = {entry.control: entry for entry in journal.controls_of(execution)}
        self._moved = asyncio.Event()

    def add(self, control: Control) -> None:
        """A control that was journaled."""
        self._controls[control.control] = control

    async def wait(self, control: str, enough: frozenset[str], wait_s: float) -> Control | None:
        """The receipt once its status is one of `enough` or final, or as it stands when the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while (entry := self._controls.get(control)) and entry.status not in enough | FINAL:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            pass
        return self._controls.get(control)

    def wake(self) -> None:
        """Whoever waits looks again."""
        self._moved.set()

    def unnoted(self, machine: Execution) -> Sequence[tuple[str, dict[str, Any]]]:
        """Controls that are journaled and that the spool does not have, as (control id, body of the note)."""
        return [
            (entry.control, {"control": entry.control, "verb": entry.verb, "payload": entry.payload})
            for entry in self._controls.values()
            if entry.verb != "start" and entry.status not in FINAL and machine.receipt(entry.control) is None
        ]

    def interjections(self, controls: Sequence[str]) -> list[InterjectPayload]:
        """What these were to say."""
        known = [self._controls[name] for name in controls if name in self._controls]
        return [InterjectPayload.model_validate(entry.payload) for entry in known if entry.verb == "interject"]

    def take(self, body: dict[str, Any]) -> None:
        """A receipt that the machine made (the body of a `control.receipt`)."""
        status: ReceiptStatus = body["status"]
        why = None
        if body.get("reason"):
            code = Code(body["reason"])
            context = {"interaction": body["interaction"]} if body.get("interaction") else {}
            why = problem(code, str(body.get("detail") or ""), **context)
        self.set(body["control"], status, why)

    def set(self, control: str, status: ReceiptStatus, why: Problem | None, *, at_least: bool = False) -> None:
        """Journal a receipt's new status. `at_least`: only forward, for those that no event tells."""
        entry = self._controls.get(control)
        if entry is None or entry.status == status or entry.status in FINAL:
            return
        if at_least and status == "delivered" and entry.status != "accepted":
            return
        self._journal.set_receipt(control, status, why)
        self._step("receipt_journaled")
        self._controls[control] = Control(
            entry.control, entry.execution, entry.verb, entry.digest, entry.payload, status, why, entry.at
        )
        self._moved.set()

    def close(self) -> None:
        """The execution is over: what was journaled and never reached the spool had no effect; a stop has what it
        wanted."""
        gone = problem(Code.SESSION_STREAM_NOT_ACTIVE, "the execution ended before it", ended=True)
        for entry in list(self._controls.values()):
            if entry.status not in FINAL:
                settled = entry.verb in ("stop", "start", "drain")
                self.set(entry.control, "settled" if settled else "rejected", None if settled else gone)
