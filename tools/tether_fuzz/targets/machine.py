"""An execution machine that is driven by inputs, with what must hold for each event that it makes.

Laws: every event is one that readers accept, in a frame of its own within the limits; ordinals have no holes; a machine
that is dumped and loaded anywhere goes on as the other does; nothing follows the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable
from typing import Any, Final

from tether import events as ev
from tether import frames
from tether.events import Event, body_of
from tether.fold import ExecutionFold
from tether.frames import Position
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters.base import Launch
from tether_collector.core.execution import Execution
from tether_fuzz.target import law
from tether_fuzz.targets import good

PROMPT_ID: Final = "11111111-1111-4111-8111-111111111111"
SESSION: Final = "22222222-2222-4222-8222-222222222222"
_FIRST: Final = 2  # 1 is the claim
_DIGITS: Final = re.compile(r"[0-9]+")


def start(kind: str, *, resume: bool = False) -> Execution:
    launch = Launch(
        execution=good.EXECUTION,
        prompt_id=PROMPT_ID,
        content=[{"type": "text", "text": "hello"}],
        cwd="/sandbox/ws",
        session=SESSION,
        resume=resume,
        fallback=resume,
    )
    return Execution.start(launch, adapter_for(kind), good.TARGET, {**good.CLAIM, "agent": kind})


class Driven:
    """`apply` gives the input to the machine, and to a second one that is dumped and loaded now and then."""

    def __init__(self, machine: Execution) -> None:
        self.machine = machine
        self._twin = Execution.load(machine.dump())
        self._next = _FIRST
        self._fold = ExecutionFold()
        self._fold.apply(Event(ordinal=1, at=1, type=ev.EXECUTION_STARTED, body=good.CLAIM))
        self._was: Event | None = None
        self.features: set[Hashable] = set()

    def apply(self, input_: i.Input, record: int, *, reload: bool = False) -> list[tuple[Event, Position]]:
        made = self.machine.apply(input_, record)
        if reload:
            self._twin = Execution.load(self._twin.dump())
        law(self._twin.apply(input_, record) == made, "a machine that was dumped and loaded goes on as the other does")
        for event, position in made:
            self._check(event, position)
        return made

    def finish(self) -> None:
        """What both know at the end is the same."""
        law(self.machine.dump() == self._twin.dump(), "two machines that did the same are in the same state")
        law(repr(self.machine.wants()) == repr(self._twin.wants()), "two machines that did the same want the same")
        self._fold.freeze().model_dump_json()

    def _check(self, event: Event, position: Position) -> None:
        law(event.ordinal == self._next, "ordinals have no holes")
        law(self._was is None or self._was.type != ev.EXECUTION_ENDED, "nothing follows the end")
        body_of(event)  # raises for a body that lies
        self._fold.apply(event)
        cut = frames.cut([(event, position)])
        frames.decode(good.SUBJECT, cut.data)
        self._next, self._was = event.end + 1, event
        self.features.add((event.type, *(_kind(event.body.get(name)) for name in _TELLING)))


_TELLING: Final = ("kind", "status", "state", "outcome", "reason", "why", "code")


def _kind(value: Any) -> Hashable:
    return _DIGITS.sub("0", value)[:48] if isinstance(value, str) else None


def handed(driven: Driven, at: int, record: int) -> int:
    """Write what the machine wants written, as a shell does; the next record's number."""
    for want in [want for want in driven.machine.wants() if isinstance(want, i.WriteStdin)][:8]:
        driven.apply(i.StdinLine(at, want.control, want.data), record)
        driven.apply(i.StdinDone(at, want.control, "written"), record + 1)
        record += 2
    return record


def of_line(at: int, line: bytes) -> Iterable[i.Input]:
    """A line of an adapter's input: what the CLI says; or, where it begins with `!`, something else that happens."""
    if not line.startswith(b"!"):
        stream: i.Stream = "stderr" if line.startswith(b"#") else "stdout"
        cut = line.endswith(b"~")
        data = line.removeprefix(b"#")
        return [i.OutputLine(at, stream, data, len(data) + cut, not line.endswith(b"$"))]
    word, _, rest = line[1:].decode("utf-8", "replace").partition(" ")
    match word:
        case "exit":
            return [i.StreamClosed(at, "stdout"), i.Exited(at, int(rest) if rest.isascii() and rest.isdigit() else -9)]
        case "prove":
            return [i.Proved(at, "pid_namespace")]
        case "close":
            return [i.StreamClosed(at, "stdin")]
        case "timer":
            return [i.Timer(at, rest)]
        case _:
            try:
                body = json.loads(rest or "{}")
            except (ValueError, RecursionError):
                return []
            return [i.Note(at, word, body)] if isinstance(body, dict) else []
