"""Controls of one execution and what became of each; every transition is a `control.receipt` event.

    (Note control) ──▶ accepted ──StdinDone written──▶ delivered ──seen in the CLI's output, or its end──▶ settled
                         │  │                              └──exit before it was seen──▶ unknown
                         │  └──lost a race, no room left, stdin closed──▶ rejected(reason)
                         └──part of the write went out──▶ unknown

`delivered` is the keeper's word that all bytes are in the pipe. An answer or an interjection is settled by the CLI's
own output alone; an interrupt also by the CLI's end, a stop and a drain only by the proof. Unknown is a value, never a
retry: nothing is written again under another id.

Settled controls are kept without their bytes, so that `receipt` can be answered and a repeated note has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tether.errors import Code
from tether.events import CONTROL_RECEIPT
from tether_collector.core.inputs import Draft, WriteStdin

Status = Literal["accepted", "delivered", "settled", "rejected", "unknown"]
_ENDS_A_TURN = ("interrupt", "stop")
FINAL: frozenset[str] = frozenset({"settled", "rejected", "unknown"})


@dataclass(slots=True)
class Control:
    """`data`: bytes for stdin as text, None where nothing is to be written. `begun`: the keeper recorded the write.
    `queued`: an interjection that the CLI has not taken up."""

    control: str
    verb: str
    status: Status = "accepted"
    data: str | None = None
    begun: bool = False
    queued: bool = False
    interaction: str | None = None
    reason: str | None = None
    detail: str | None = None

    @property
    def final(self) -> bool:
        return self.status in FINAL

    def event(self) -> Draft:
        body: dict[str, Any] = {"control": self.control, "verb": self.verb, "status": self.status}
        for name in ("reason", "detail", "interaction"):
            value = getattr(self, name)
            if value is not None:
                body[name] = value
        return Draft(CONTROL_RECEIPT, body)


class Receipts:
    """All controls, in the order of their acceptance. Methods return the events that they cause."""

    def __init__(self, controls: list[dict[str, Any]] | None = None) -> None:
        self._all: dict[str, Control] = {entry["control"]: Control(**entry) for entry in controls or ()}
        self._open: dict[str, Control] = {key: entry for key, entry in self._all.items() if not entry.final}
        self._queued: set[str] = {key for key, entry in self._all.items() if entry.queued}

    def dump(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self._all.values()]

    def get(self, control: str) -> Control | None:
        return self._all.get(control)

    def open(self, *verbs: str) -> list[Control]:
        """Not yet final, of these verbs (of all without)."""
        return [entry for entry in self._open.values() if not verbs or entry.verb in verbs]

    def queued(self) -> bool:
        """True while an interjection waits for the CLI, written or not."""
        return bool(self._queued)

    def unheard(self) -> list[str]:
        """Interjections that are in the CLI's hands, and that it has not taken up: its queue goes with it."""
        waiting = [entry for entry in self._all.values() if entry.queued]
        return [entry.control for entry in waiting if entry.status in ("delivered", "settled")]

    def accept(self, control: str, verb: str, **fields: Any) -> list[Draft]:
        entry = Control(control, verb, **fields)
        self._all[control] = self._open[control] = entry
        if entry.queued:
            self._queued.add(control)
        return [entry.event()]

    def refuse(self, control: str, verb: str, code: Code, detail: str, interaction: str | None = None) -> list[Draft]:
        """A control that the journal holds and that lost a race since."""
        entry = Control(control, verb, interaction=interaction)
        self._all[control] = entry
        return self._finish(entry, "rejected", code.value, detail)

    def wants(self, *verbs: str, turn: bool) -> Iterator[WriteStdin]:
        """What is still to be handed to the keeper. An interrupt waits for a turn to run (`turn`): a CLI that was told
        before acknowledges it, ends nothing, and begins the prompt that it had not taken up."""
        for entry in self._open.values():
            if entry.data is None or entry.begun or (verbs and entry.verb not in verbs):
                continue
            if turn or entry.verb not in _ENDS_A_TURN:
                yield WriteStdin(entry.control, entry.data.encode())

    def supply(self, control: str, data: bytes) -> None:
        """The bytes of a control that had to wait for them, unless it came to its end meanwhile."""
        if (entry := self._open.get(control)) is not None and not entry.begun:
            entry.data = data.decode()

    def written(self, control: str | None) -> bool:
        """The keeper has recorded the write of this one."""
        entry = None if control is None else self._all.get(control)
        return entry is not None and entry.begun

    def write_begun(self, control: str) -> None:
        if entry := self._open.get(control):
            entry.begun, entry.data = True, None

    def write_done(self, control: str, result: str) -> list[Draft]:
        entry = self._open.get(control)
        if entry is None or entry.status != "accepted":
            return []
        entry.begun = True
        if entry.verb == "stop":  # its interrupt is a courtesy; the escalation goes on whatever became of it
            return self.deliver(control)
        if result == "written":
            return self.deliver(control)
        if result == "partial":
            return self._finish(entry, "unknown", None, "only a part was written before stdin closed")
        return self._finish(entry, "rejected", Code.SESSION_STREAM_NOT_ACTIVE.value, "stdin was closed before it")

    def deliver(self, control: str) -> list[Draft]:
        entry = self._open.get(control)
        if entry is None or entry.status != "accepted":
            return []
        entry.status, entry.data = "delivered", None
        return [entry.event()]

    def settle(self, control: str, detail: str | None = None) -> list[Draft]:
        entry = self._open.get(control)
        return [] if entry is None else self._finish(entry, "settled", None, detail)

    def taken(self, control: str) -> None:
        """The CLI took the interjection up: no turn is owed to it any more."""
        if entry := self._all.get(control):
            entry.queued = False
            self._queued.discard(control)

    def reject(self, control: str, code: Code, detail: str) -> list[Draft]:
        entry = self._open.get(control)
        return [] if entry is None else self._finish(entry, "rejected", code.value, detail)

    def stdin_closed(self) -> list[Draft]:
        """Nothing can be written any more: what the keeper never got is refused."""
        drafts: list[Draft] = []
        for entry in self.open("answer", "interject", "interrupt"):
            if not entry.begun:
                drafts += self._finish(
                    entry, "rejected", Code.SESSION_STREAM_NOT_ACTIVE.value, "stdin was closed before it"
                )
        return drafts

    def process_gone(self) -> list[Draft]:
        """The CLI exited: what it did not show is not known, what its end fulfils is settled. Stops stay open."""
        drafts = self.stdin_closed()
        for entry in self.open("answer", "interject", "interrupt"):
            if entry.verb == "interrupt" and entry.status == "delivered":
                drafts += self._finish(entry, "settled", None, "the process ended")
            else:
                drafts += self._finish(entry, "unknown", None, "the process ended before it showed in its output")
        return drafts

    def _finish(self, entry: Control, status: Status, reason: str | None, detail: str | None) -> list[Draft]:
        entry.status, entry.reason, entry.detail, entry.data = status, reason, detail, None
        if status != "settled":
            self.taken(entry.control)
        self._open.pop(entry.control, None)
        return [entry.event()]
