"""A keeper and its CLI without processes: what the collector sees of them, in virtual time, with a truth of their own.

The spool is the real one, on disk. Keeper and CLI outlive a collector, as the real ones do. `Machine` holds them all
and refuses a second CLI of a conversation at the moment of its spawn: the invariant is not looked for, it is met.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tether_collector.keeper import records
from tether_collector.keeper.jsonlite import dumps
from tether_collector.keeper.spool import SpoolWriter
from tether_collector.keeper_link import Gone, KeeperRefusedError, LaunchError, LaunchSpec, LinkLost, StdinReply

SEGMENT_BYTES = 1 << 20
QUOTA_BYTES = 64 << 20


class BrokenError(AssertionError):
    """The model met what must never be."""


class ModelKeeper:
    """One CLI and its keeper. `behaviour` is the first word of its prompt:

    say    answers and waits for the end of its stdin
    ask    asks for approval, then as `say`
    hang   works until it is interrupted, or until the machine lets everything go
    deaf   as `hang`, and nothing but a kill ends it
    stay   answers, and does not leave when its stdin is closed
    """

    def __init__(self, machine: Machine, folder: Path, spec: LaunchSpec) -> None:
        (folder / "spool").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.machine, self.spec = machine, spec
        try:
            self.spool = SpoolWriter(str(folder / "spool"), spec.nonce, SEGMENT_BYTES, QUOTA_BYTES)
        except FileExistsError as error:  # a note of a launch that was given up lies there: a real keeper ends here
            raise LaunchError("crashed", str(error)) from None
        (folder / "spawn.json").write_text(json.dumps({"nonce": spec.nonce}))
        self.link: ModelLink | None = None
        self.alive = True  # of the CLI
        self.gone = False  # the keeper itself
        self.proven = False
        self.behaviour = ""
        self.stdin: list[tuple[str, dict[str, Any]]] = []  # what reached the CLI, by control id
        self.effects: list[str] = []  # control ids that it acted on
        self.killed = 0
        self._results: dict[str, str] = {}
        self._open = True
        self._turn: str | None = None
        self._steered: list[str] = []
        self._asked: str | None = None
        named = [after for flag, after in pairwise(spec.argv) if flag in ("--resume", "--session-id")]
        self._session = named[0] if named else spec.execution

    @property
    def waits(self) -> bool:
        """For the answer to an approval."""
        return self.alive and self._asked is not None

    # --- the keeper ---

    def record(
        self, kind: int, data: bytes = b"", meta: Mapping[str, object] | None = None, *, sync: bool = False
    ) -> int:
        number = self.spool.append(kind, data, dumps(dict(meta)) if meta else b"")
        self.spool.flush(sync)
        if self.link is not None:
            self.link.push(self.spool.last)
        return number

    def write(self, control: str, data: bytes) -> StdinReply:
        """Once per control id, in the spool before the CLI sees it."""
        known = self._results.get(control)
        if known is not None:
            return StdinReply("known", known, None)  # type: ignore[arg-type]
        if not self._open:
            raise KeeperRefusedError("stdin_closed", "")
        number = self.record(records.STDIN, data, {"control_id": control}, sync=True)
        self._results[control] = "written"
        self.record(records.STDIN_DONE, meta={"control_id": control, "result": "written"})
        self.stdin.append((control, json.loads(data)))
        self.later(self._read, control, json.loads(data))
        return StdinReply("written", "written", number)

    def close_stdin(self) -> bool:
        if self._open:
            self._open = False
            self.record(records.EOF, meta={"stream": "stdin"})
            self.later(self._leave_if_idle)
        return True

    def signal(self, name: str) -> None:
        if not self.alive:
            raise KeeperRefusedError("exited", "")
        if self.behaviour not in ("deaf", "stay"):
            self.later(self._exit, None, 15)

    def kill(self) -> None:
        self.killed += 1
        if self.alive:
            self._exit(None, 9)

    def die(self) -> None:
        """SIGKILL to the keeper: the CLI goes with it, and nobody records anything."""
        self.alive, self.gone, self._open = False, True, False
        if self.link is not None:
            self.link.lose()

    def later(self, act: Callable[..., None], *arguments: Any) -> None:
        self.machine.later(act, *arguments)

    def _exit(self, rc: int | None, signal: int | None = None) -> None:
        if not self.alive:
            return
        self.alive = False
        self.close_stdin()
        for stream in ("stdout", "stderr"):
            self.record(records.EOF, meta={"stream": stream})
        self.record(records.EXIT, meta={"rc": rc, "signal": signal}, sync=True)
        self.later(self._prove)

    def _prove(self) -> None:
        if not self.gone and not self.proven:
            self.proven = True
            proof = {"method": "pid_namespace", "empty": True, "at": self.machine.now_ms() * 1000}
            self.record(records.PROOF, meta=proof, sync=True)

    # --- the CLI ---

    def say(self, **line: Any) -> None:
        if self.alive:
            self.record(records.STDOUT, json.dumps(line).encode())

    def _read(self, control: str, line: dict[str, Any]) -> None:
        if not self.alive:
            return
        match line["type"]:
            case "prompt" if self.behaviour == "":
                self.effects.append(control)
                self._begin(line)
            case "prompt":
                self.effects.append(control)
                self._take(line)
            case "answer":
                if self._asked == line["request"]:
                    self.effects.append(control)
                    self._asked = None
                    self.say(type="ask.resolved", request=line["request"], decision=line["decision"])
                    self.later(self._finish, "ok")
            case "interrupt" if self.behaviour != "deaf":
                self.effects.append(control)
                self.say(type="interrupted", id=line["id"])
                if self._asked is not None:
                    self.say(type="ask.cancelled", request=self._asked)
                    self._asked = None
                if self._turn is not None:
                    self._finish("interrupted")

    def _begin(self, line: dict[str, Any]) -> None:
        self.behaviour = str(line["text"]).split()[0]
        self._turn = line["id"]
        self.say(type="session", session_id=self._session, agent="scripted", version="1")
        self.say(type="turn.started", prompt=self._turn)
        self.say(type="text", segment="s1", text="working")
        match self.behaviour:
            case "ask":
                self._asked = "ask-1"
                self.say(type="ask", request="ask-1", kind="approval", tool="write", input={"path": "x"})
                if self.machine.released:
                    self.later(self.release)
            case "say" | "stay":
                self.later(self._finish, "ok")
            case _ if self.machine.released:
                self.later(self._finish, "ok")

    def _take(self, line: dict[str, Any]) -> None:
        if self._turn is None:
            self.say(type="prompt.accepted", id=line["id"], mode="queued")
            self._turn = line["id"]
            self.say(type="turn.started", prompt=self._turn)
            self.later(self._finish, "ok")
            return
        self._steered.append(line["id"])
        self.say(type="prompt.accepted", id=line["id"], mode="steered")

    def _finish(self, status: str) -> None:
        if self._turn is None or not self.alive:
            return
        if status == "ok":
            self.say(type="model", state="completed")
        self.say(type="usage", prompt=self._turn, input_tokens=1, output_tokens=1)
        self.say(type="result", status=status, prompt=self._turn, text="working")
        left, self._turn = self._steered, None
        self._steered = []
        if status == "interrupted" and left:
            # What was said into a turn that was cut runs as a turn of its own, as real CLIs do it.
            self._turn = left[-1]
            self.say(type="turn.started", prompt=self._turn)
            self.later(self._finish, "ok")
            return
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self._open and self._turn is None and self.behaviour not in ("deaf", "stay"):
            self._exit(0)

    def release(self) -> None:
        """Whatever it waited for comes: every CLI can end from here on."""
        if not self.alive or self._turn is None:
            return
        if self._asked is not None:
            self.say(type="ask.cancelled", request=self._asked)
            self._asked = None
            self._finish("ok")
        elif self.behaviour in ("hang", "deaf"):
            self._finish("ok")


@dataclass(eq=False)
class ModelLink:
    """A collector's link: what `KeeperLink` gives, over nothing. Its collector's death loses it."""

    keeper: ModelKeeper
    dead: Callable[[], bool]
    last_record: int = 0
    lost: bool = False
    superseded: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.last_record = self.keeper.spool.last
        self.hello = SimpleNamespace(last_record=self.last_record)
        if self.keeper.link is not None:
            self.keeper.link.superseded = True
            self.keeper.link.changed.set()
        self.keeper.link = self

    def push(self, last: int) -> None:
        self.last_record = last
        self.changed.set()

    def lose(self) -> None:
        self.lost = True
        self.changed.set()

    async def _asked(self) -> ModelKeeper:
        await asyncio.sleep(0)
        if self.dead():
            self.lose()
        if self.lost or self.keeper.gone:
            raise LinkLost("the keeper's connection is gone")
        if self.superseded:
            raise KeeperRefusedError("superseded", "")
        return self.keeper

    async def _answered(self, value: Any) -> Any:
        await asyncio.sleep(0)
        if self.dead() or self.keeper.gone:
            raise LinkLost("the reply was lost")  # after its effect
        return value

    async def wait_records(self, after: int) -> int:
        while self.last_record <= after:
            if self.lost:
                raise LinkLost("the keeper's connection is gone")
            self.changed.clear()
            await self.changed.wait()
        return self.last_record

    async def pushes(self) -> AsyncIterator[int]:
        seen = 0
        while not (self.lost or self.superseded):
            if self.last_record > seen:
                seen = self.last_record
                yield seen
                continue
            self.changed.clear()
            await self.changed.wait()

    async def stdin(self, control_id: str, data: bytes, timeout_s: float | None = None) -> StdinReply:
        reply: StdinReply = await self._answered((await self._asked()).write(control_id, data))
        return reply

    async def close_stdin(self) -> bool:
        return bool(await self._answered((await self._asked()).close_stdin()))

    async def signal(self, name: str) -> None:
        (await self._asked()).signal(name)
        await self._answered(None)

    async def append(self, kind: str, meta: Mapping[str, object] | None = None, data: bytes = b"") -> int:
        kinds = {"timer": records.TIMER, "adapter": records.ADAPTER, "note": records.NOTE}
        return int(await self._answered((await self._asked()).record(kinds[kind], data, meta)))

    async def kill(self) -> None:
        (await self._asked()).kill()
        await self._answered(None)

    async def status(self) -> Any:
        return await self._answered(SimpleNamespace(proof=True if (await self._asked()).proven else None))

    async def shutdown(self) -> None:
        keeper = await self._asked()
        if not keeper.proven:
            raise KeeperRefusedError("not_ended", "")
        keeper.gone = True
        self.lose()

    def close(self) -> None:
        self.lose()
        if self.keeper.link is self:
            self.keeper.link = None


class Machine:
    """The host: every keeper by its folder. `conversation_of` names an execution's conversation."""

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop, conversation_of: Callable[[str], str]) -> None:
        self.random = random.Random(seed)
        self.keepers: dict[Path, ModelKeeper] = {}
        self.released = False
        self._loop = loop
        self._conversation_of = conversation_of

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000) + 1_700_000_000_000

    def later(self, act: Callable[..., None], *arguments: Any) -> None:
        """After a moment that nobody can foresee; now and then a long one."""
        moment_s = self.random.choice((0.0, 0.001, 0.02, 0.2, 1.0)) * self.random.random()
        self._loop.call_later(moment_s, act, *arguments)

    def living(self) -> dict[str, list[str]]:
        """Conversation → executions with a living CLI."""
        found: dict[str, list[str]] = {}
        for keeper in self.keepers.values():
            if keeper.alive:
                found.setdefault(self._conversation_of(keeper.spec.execution), []).append(keeper.spec.execution)
        return found

    def of_execution(self, execution: str) -> list[ModelKeeper]:
        return [keeper for keeper in self.keepers.values() if keeper.spec.execution == execution]

    def spawn(self, folder: Path, spec: LaunchSpec) -> ModelKeeper:
        conversation = self._conversation_of(spec.execution)
        if others := self.living().get(conversation):
            raise BrokenError(f"{spec.execution} is spawned while {others} of {conversation} live: two writers")
        if self.of_execution(spec.execution):
            raise BrokenError(f"{spec.execution} is spawned again")
        keeper = self.keepers[folder] = ModelKeeper(self, folder, spec)
        return keeper

    def release(self) -> None:
        self.released = True
        for keeper in self.keepers.values():
            keeper.release()

    # --- what `tether_collector.process` calls ---

    async def launch(self, folder: Path, spec: LaunchSpec, dead: Callable[[], bool]) -> ModelLink:
        await asyncio.sleep(self.random.random() * 0.05)
        if dead():
            raise asyncio.CancelledError("the collector died")  # what is dead does not try again
        if (folder / "spawn.json").exists():
            raise LaunchError("already_spawned", "")
        keeper = self.spawn(folder, spec)
        await asyncio.sleep(self.random.random() * 0.05)
        if dead():
            raise asyncio.CancelledError("the collector died")
        return ModelLink(keeper, dead)

    async def adopt(self, folder: Path, dead: Callable[[], bool]) -> ModelLink | Gone:
        await asyncio.sleep(self.random.random() * 0.02)
        keeper = self.keepers.get(folder)
        if keeper is None or keeper.gone:
            return Gone(spawned=(folder / "spawn.json").exists())
        return ModelLink(keeper, dead)
