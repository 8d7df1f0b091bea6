"""One process of an execution as the collector holds it: its keeper while that lives, its folder afterwards.

unknown ──adopt──▶ connected ◀──adopt── lost (the link broke; the keeper may live)
   │                  │
   └──free lock──────▶└──▶ gone: nothing is spawned again; what must still be recorded is appended by us
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from tether_collector.keeper import records
from tether_collector.keeper_link import (
    Gone,
    KeeperLink,
    KeeperRefusedError,
    LaunchError,
    LaunchSpec,
    LinkLost,
    LinkTimeout,
    adopt,
    launch,
)
from tether_collector.spool_inputs import KeeperAliveError, append_to_dead
from tether_collector.sweep import sweep

ADOPT_AGAIN_S: Final = 1.0  # between attempts on a keeper that holds its lock and does not answer
LAUNCHES_MAX: Final = 3  # of one process, where nothing came of the ones before
ABANDON_S: Final = 10.0  # to see the proof of a process that was killed because its log is another's
_KINDS: Final = {"timer": records.TIMER, "adapter": records.ADAPTER, "note": records.NOTE}


class SupersededError(Exception):
    """Another collector owns the keeper: this one must not go on with the execution."""


class AgentProcess:
    """`kick` is called whenever there may be more to read, or the link changed. `before`: the provider's word on the
    end of all that ran before this collector, where it has one; a sweep sees no other container's processes."""

    def __init__(self, directory: Path, nonce: str, kick: Callable[[], None], before: str = "") -> None:
        self.directory = directory
        self.nonce = nonce
        self.link: KeeperLink | None = None
        self.gone = False
        self._kick = kick
        self._before = before
        self._connected = asyncio.Event()
        self._log = structlog.get_logger("tether.collector")

    @property
    def live(self) -> KeeperLink | None:
        """The link, if it can be asked now."""
        link = self.link
        return None if link is None or link.lost or link.superseded else link

    async def adopt(self) -> bool:
        """Connect to the keeper, however long it does not answer; False where it is gone. Then `spawned` tells."""
        if self.link is not None and self.link.superseded:
            raise SupersededError(str(self.directory))
        while True:
            try:
                found = await adopt(self.directory, self.nonce)
            except LinkTimeout:
                self._log.warning("keeper_silent", directory=str(self.directory))
                await asyncio.sleep(ADOPT_AGAIN_S)
                continue
            if isinstance(found, Gone):
                self.link, self.gone = None, True
                return False
            self._hold(found)
            return True

    @property
    def spawned(self) -> bool:
        """The spawn record is there: a CLI was started, or was about to be, and never is again."""
        return (self.directory / "spawn.json").exists()

    async def launch(self, spec: LaunchSpec) -> str | None:
        """Spawn, once for ever: a spawn record that is there already means adoption. The reason where no CLI runs and
        none will; the spool says it too.

        A launch that took too long is given up with its keeper (this collector may have stood still meanwhile). Where
        that left no spawn record nothing ran, and it is launched again: of two keepers one gets the lock."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(LAUNCHES_MAX):
            try:
                self._hold(await launch(self.directory, spec))
                return None
            except LaunchError as error:
                if error.code not in ("already_spawned", "locked"):
                    return self._never_spawned(str(error))
            except LinkLost as error:
                self._log.warning("launch_unknown", directory=str(self.directory), reason=str(error))
            if await self.adopt() or self.spawned:
                return None
        return self._never_spawned("the keeper did not start in time")

    def _never_spawned(self, detail: str) -> str:
        self.gone = True
        if not self.spawned:
            self.append_dead("note", {"kind": "spawn_failed"}, {"detail": detail}, unless="note")
        return detail

    def _hold(self, link: KeeperLink) -> None:
        self.link, self.gone = link, False
        self._connected.set()

    async def listen(self) -> None:
        """The task that turns pushes into kicks, over every link."""
        while True:
            await self._connected.wait()
            self._connected.clear()
            link = self.link
            if link is not None:
                async for _ in link.pushes():
                    self._kick()
            self._kick()

    async def append(
        self, kind: Literal["timer", "adapter", "note"], meta: Mapping[str, Any], body: Any = None
    ) -> None:
        """Record an input of our own. Raises LinkLost (unknown), KeeperRefusedError (not recorded)."""
        if self.gone:
            self.append_dead(kind, meta, body)
            return
        link = self.live
        if link is None:
            raise LinkLost("the keeper is not connected")
        await link.append(kind, meta, b"" if body is None else _encode(body))

    def append_dead(self, kind: str, meta: Mapping[str, Any], body: Any = None, *, unless: str = "") -> None:
        data = b"" if body is None else _encode(body)
        append_to_dead(self.directory, self.nonce, _KINDS[kind], meta, data, unless=unless)
        self._kick()

    async def prove_gone(self) -> bool:
        """The keeper died: kill what may be left and record the proof. False where there can be none yet."""
        method = "keeper_gone" if self.spawned else "never_spawned"
        if method == "keeper_gone" and not await sweep(self.nonce):
            self._log.error("sweep_incomplete", directory=str(self.directory))
            return False
        meta = {"method": method, "empty": True, "detail": f"the keeper is gone; {self._before or 'swept by marker'}"}
        if method == "never_spawned":
            del meta["detail"]
        try:
            return append_to_dead(self.directory, self.nonce, records.PROOF, meta, unless="proof")
        except KeeperAliveError:
            return False

    async def abandon(self) -> None:
        """Kill everything, wait for the proof, let the keeper go: the execution is another's or over."""
        if self.link is None and not self.gone and not await self.adopt():
            return
        link = self.live
        if link is None:
            return
        try:
            await link.kill()
            async with asyncio.timeout(ABANDON_S):
                seen = link.last_record
                while (await link.status()).proof is None:
                    seen = await link.wait_records(seen)
            await link.shutdown()
        except (LinkLost, KeeperRefusedError, TimeoutError) as error:
            self._log.warning("abandon_incomplete", directory=str(self.directory), error=str(error))
        link.close()

    async def dismiss(self) -> None:
        """After the end is in the log: the keeper may go."""
        link = self.live
        if link is not None:
            try:
                await link.shutdown()
            except (LinkLost, KeeperRefusedError) as error:
                self._log.info("dismissal_incomplete", error=str(error))  # it goes by itself, unowned
            link.close()

    def close(self) -> None:
        """Drop the link; keeper and CLI go on."""
        if self.link is not None:
            self.link.close()


def _encode(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def keeper_folder(state_dir: Path, execution: str, process_generation: int) -> Path:
    return state_dir / "executions" / execution / str(process_generation)


def prepare(state_dir: Path) -> None:
    """Make `.tether` with its own ignore file; nothing of it belongs into a user's repository."""
    for folder in (state_dir, state_dir / "executions", state_dir / "execution-recovery"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignore = state_dir / ".gitignore"
    if not ignore.exists():
        descriptor = os.open(ignore, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"*\n")
        finally:
            os.close(descriptor)
