"""Doing what the machine wants, through the keeper: level-triggered, so a restarted collector simply looks again.

    journaled controls → notes in the spool    (before anything that they cause)
    WriteStdin         → the keeper, under its control id: it ignores an id that it knows
    CloseStdin, SendSignal, KillAll            once per link; a repetition changes nothing
    Deadline           → a timer record when its time has come

Nothing is done before the spool has been read up to where the link found it: what an old state wanted is history.
What the keeper refuses shows in the spool (a closed stdin, an exit) and so in what is wanted next.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, assert_never

import structlog

from tether_collector.core.inputs import CloseStdin, Deadline, KillAll, SendSignal, Want, WriteStdin
from tether_collector.keeper_link import KeeperLink, KeeperRefusedError, LinkLost
from tether_collector.process import AgentProcess

RETRY_S: Final = 0.25  # after a refusal that passes: a full stdin queue, a blocked spool
DEADLINE_AGAIN_S: Final = 1.0
PASSING: Final = frozenset({"stdin_full", "spool_blocked"})


class Hands:
    """One execution's. `look` gives the wants (none while history is replayed), `notes` the controls that are
    journaled and not in the spool, as (control id, body)."""

    def __init__(
        self,
        process: AgentProcess,
        look: Callable[[], Sequence[Want]],
        notes: Callable[[], Sequence[tuple[str, dict[str, Any]]]],
    ) -> None:
        self._process = process
        self._look = look
        self._notes = notes
        self._wake = asyncio.Event()
        self._link: KeeperLink | None = None
        self._done: set[object] = set()  # on this link
        self._fired: dict[tuple[str, int], float] = {}  # deadlines recorded on this link, when
        self._log = structlog.get_logger("tether.collector")

    def poke(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            pause_s = await self._pass()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _pass(self) -> float | None:
        """Do everything that is due; seconds until the next thing is, None where nothing is."""
        link = self._process.live
        if link is None:
            return None  # adopted again, or gone: whoever sees to that pokes
        if link is not self._link:
            self._link = link
            self._done.clear()
            self._fired.clear()
        pause_s: float | None = None
        try:
            for control, body in self._notes():
                pause_s = _sooner(pause_s, await self._once(("note", control), link, body))
            for want in self._look():
                pause_s = _sooner(pause_s, await self._do(link, want))
        except LinkLost:
            return RETRY_S  # the same ids again on the next link
        except KeeperRefusedError as error:  # of a timer: the spool takes nothing now
            self._log.info("timer_delayed", code=error.code)
            return RETRY_S
        return pause_s

    async def _do(self, link: KeeperLink, want: Want) -> float | None:
        if not isinstance(want, Deadline):
            return await self._once(_key(want), link, want)
        left_s = want.at / 1000 - time.time()
        if left_s > 0:
            return left_s
        # Still wanted after it was recorded: the clock was set back, so it is recorded again, not at every look.
        fired_s = self._fired.get((want.name, want.at))
        now_s = time.monotonic()
        if fired_s is not None and now_s - fired_s < DEADLINE_AGAIN_S:
            return DEADLINE_AGAIN_S - (now_s - fired_s)
        await link.append("timer", {"name": want.name})
        self._fired[want.name, want.at] = now_s
        return DEADLINE_AGAIN_S

    async def _once(self, key: object, link: KeeperLink, what: Want | dict[str, Any]) -> float | None:
        if key in self._done:
            return None
        try:
            await self._ask(link, what)
        except KeeperRefusedError as error:
            if error.code in PASSING:
                return RETRY_S
            self._log.info("keeper_refused", what=str(key), code=error.code)
        self._done.add(key)
        return None

    @staticmethod
    async def _ask(link: KeeperLink, what: Want | dict[str, Any]) -> None:
        match what:
            case WriteStdin(control, data):
                await link.stdin(control, data)
            case CloseStdin():
                await link.close_stdin()
            case SendSignal(_, name):
                await link.signal(name)
            case KillAll():
                await link.kill()
            case Deadline():
                raise AssertionError("a deadline is recorded, not performed")
            case dict():
                await link.append("note", {"kind": "control"}, _encode(what))
            case _:
                assert_never(what)


def _key(want: Want) -> object:
    match want:
        case WriteStdin(control, _):
            return ("stdin", control)
        case SendSignal(control, name):
            return ("signal", control, name)
        case _:
            return type(want)


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _sooner(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
