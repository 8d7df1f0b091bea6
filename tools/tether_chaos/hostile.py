"""Rubbish on every subject and in every bucket of a living set: `python -m tether_chaos.hostile --seed N --messages M`.

Messages are drawn from good ones (prompts, commands, frames, conversation events, controls, records) by breaking them:
fields of the wrong type, left out, unknown, giant, other versions, bad UTF-8, NaN, deep nesting, lone surrogates; on
their own subjects, on another's, on subjects of the wrong length. What must hold:

    no service ends or stalls: the same processes answer afterwards, none has told of a broken handler
    every question is answered, with a result or a problem
    a conversation that rubbish was not aimed at runs as if nothing happened, before, during and after
    what cannot be understood does not stay in a work queue
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import functools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from tether import Client, subjects
from tether.bus import NatsBus, connect
from tether.client import NatsCredentials
from tether.errors import BusError, NoReplyError, TetherError
from tether_cli import state
from tether_cli.output import CliError
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState

GOOD: Final = "good"  # the conversation that nothing is aimed at
AIM: Final = "aim"  # the one whose own subjects and records are hit
QUEUE_EMPTY_S: Final = 60.0
ANSWER_S: Final = 10.0
PARALLEL: Final = 16
_TOLD_BROKEN: Final = ("Traceback (most recent call last)", "delivery_broken", "exception")
_GIANT: Final = "x" * 900_000
_NOT_JSON: Final[tuple[bytes, ...]] = (
    b"",
    b"\x00",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"NaN",
    b'{"v": NaN}',
    b'{"v": 1e999}',
    b"\xff\xfe\x80",
    b'{"v":1,"content":[{"type":"text","text":"\\ud800"}]}',
    b"[" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"v":1,"v":2}',
    _GIANT.encode(),
)
_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    -1,
    2**63,
    10**40,
    1.5,
    "",
    "a.b",
    "../../etc/passwd",
    "\x00",
    "é" * 65,
    "*",
    ">",
    [],
    {},
    [[[[]]]],
    {"v": 2},
    _GIANT,
    "_",
)


@dataclass(slots=True)
class Report:
    """`answered`: what kinds of answers questions got."""

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def broken(rng: random.Random, good: dict[str, Any]) -> bytes:
    """A message that differs from a good one in one to three places, or has nothing to do with it."""
    if rng.random() < 0.2:
        return rng.choice(_NOT_JSON)
    value: Any = copy.deepcopy(good)
    for _ in range(rng.randint(1, 3)):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
                place = inner
                continue
            what = rng.random()
            if what < 0.2 and isinstance(place, dict):
                del place[key]
            elif what < 0.3 and isinstance(place, dict):
                place["unheard_of"] = copy.deepcopy(rng.choice(_VALUES))
            else:
                place[key] = copy.deepcopy(rng.choice(_VALUES))
            break
    data = json.dumps(value).encode()
    return data if len(data) < 950_000 else rng.choice(_NOT_JSON)


class Hostile:
    """One run against a set that is up."""

    def __init__(self, up: SetState, seed: int) -> None:
        self.up = up
        self.rng = random.Random(seed)
        self.report = Report()
        password = NatsCredentials(creds_file=up.nats_creds_file)
        self.http = Client.http(up.http_url, up.token)
        self.nats = Client.nats(up.nats_url, password, tenant=up.tenant)
        self._good: dict[str, dict[str, Any]] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    async def run(self, messages: int) -> Report:
        up = self.up
        async with await connect(up.nats_url, name="hostile", creds_file=up.nats_creds_file) as bus:
            await self._ask("before", GOOD)
            await self._ask("before", AIM)
            before = self._pids()
            await self._learn(bus)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._work_on(), name="good-work")
                for _ in range(messages):
                    await self._slots.acquire()
                    group.create_task(self._one(bus), name="rubbish").add_done_callback(lambda _: self._slots.release())
            await self._ask("after", GOOD)
            await self._ask("after", "fresh")
            await self._lists()
            await self._empty(bus)
            if (now := self._pids()) != before:
                self.report.violations.append(f"services ended: {before} are now {now}")
            self._look_at_logs()
        await self.http.close()
        await self.nats.close()
        return self.report

    def _pids(self) -> dict[str, int]:
        paths = state.Paths(Path(self.up.data))
        now = state.read(paths)
        found = {} if now is None else {name: child.pid for name, child in now.children.items()}
        sandbox = paths.agent / "sandboxes" / f"{self.up.tenant}.{GOOD}" / "sandbox.json"
        found["collector"] = int(json.loads(sandbox.read_bytes())["pid"])
        return found

    def _look_at_logs(self) -> None:
        paths = state.Paths(Path(self.up.data))
        for path in [*paths.logs.glob("*.log"), *(paths.agent / "sandboxes").glob("*/collector.log")]:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines):
                if any(word in line for word in _TOLD_BROKEN):
                    shown = " | ".join(part[:600] for part in lines[number : number + 1])
                    self.report.violations.append(f"{path.name}: {shown}")

    # --- good work ---

    async def _ask(self, what: str, conversation: str) -> None:
        """A prompt of its own must be answered, over both transports in turn."""
        for client in (self.http, self.nats):
            try:
                async with asyncio.timeout(60.0):
                    response = await client.ask(
                        conversation, f"!say {what}\n!tool look", agent="scripted", workspace=conversation
                    )
            except (TetherError, TimeoutError) as error:
                self.report.violations.append(f"{conversation}, {what}: {type(error).__name__} {error}")
            else:
                if response.outcome != "completed" or what not in response.text:
                    self.report.violations.append(f"{conversation}, {what}: {response.outcome} {response.text!r}")

    async def _lists(self) -> None:
        """A list is not lost for one entry that nobody can read."""
        for name, client in (("http", self.http), ("nats", self.nats)):
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "sandboxes": client.sandboxes,
                "conversations": client.conversations,
                "executions": client.executions,
                "active executions": functools.partial(client.executions, active=True),
            }
            for what, call in calls.items():
                try:
                    await call()
                except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
                    self.report.violations.append(f"{what} over {name}: {type(error).__name__} {str(error)[:300]}")

    async def _work_on(self) -> None:
        for number in range(4):
            await self._ask(f"during-{number}", GOOD)

    # --- rubbish ---

    async def _learn(self, bus: NatsBus) -> None:
        """Good messages, as they lie in the log and in the buckets."""
        tenant = self.up.tenant
        target = {
            "tenant": tenant,
            "workspace": AIM,
            "conversation": AIM,
            "response": "rsp_x",
            "response_generation": 1,
            "execution": "exe_x",
            "execution_generation": 1,
            "sandbox": "sbx_x",
        }
        prompt = {
            "v": 1,
            "tenant": tenant,
            "workspace": AIM,
            "conversation": AIM,
            "request_id": "req-x",
            "attempt": 1,
            "content": [{"type": "text", "text": "!say rubbish"}],
            "agent": {"kind": "scripted", "args": ["x"], "model": "m"},
            "mode": "auto",
        }
        command = {
            "v": 1,
            "kind": "start",
            "control": "ctl-x",
            "target": target,
            "owner_revision": 1,
            "request_id": "req-x",
            "attempt": 1,
            "content": prompt["content"],
            "agent": prompt["agent"],
            "mode": "auto",
        }
        control = {
            "v": 1,
            "control": "ctl-y",
            "verb": "answer",
            "target": target,
            "authority": {"kind": "lease", "holder": "h", "token": 5},
            "payload": {"interaction": "r1", "decision": "allow", "answers": {"q": ["a"]}},
        }
        self._good = {"prompt": prompt, "command": command, "control": control}
        for message in await bus.read(subjects.events_stream(tenant), 0, f"tether.event.{tenant}.{AIM}.>", limit=50):
            name = "event" if message.subject.endswith("._") else "frame"
            self._good[name] = json.loads(message.data)
        for bucket in (
            subjects.OWNERS,
            subjects.REQUESTS,
            subjects.SANDBOXES,
            subjects.CONVERSATIONS,
            subjects.PROJECTIONS,
            subjects.LEASES,
        ):
            for message in await bus.read(f"KV_{bucket}", 0, f"$KV.{bucket}.>", limit=50):
                with contextlib.suppress(ValueError):
                    self._good[bucket] = json.loads(message.data)

    async def _one(self, bus: NatsBus) -> None:
        kinds: dict[str, Callable[[NatsBus], Any]] = {
            "prompt": self._prompt,
            "command": self._command,
            "event": self._event,
            "control": self._control,
            "agent": self._agent,
            "record": self._record,
        }
        name = self.rng.choice(list(kinds))
        self.report.sent[name] += 1
        with contextlib.suppress(BusError):  # refused by the server itself: as good an answer as any
            await kinds[name](bus)

    def _tokens(self, *good: str) -> str:
        """Mostly as they should be; else one token wrong, one too many or one too few."""
        tokens = list(good)
        what = self.rng.random()
        if what < 0.1:
            tokens[self.rng.randrange(len(tokens))] = self.rng.choice(("x" * 65, "é", "a:b", "%00", "_", "-", "$KV"))
        elif what < 0.15:
            tokens.append("more")
        elif what < 0.2:
            tokens.pop()
        return ".".join(tokens)

    async def _prompt(self, bus: NatsBus) -> None:
        where = self._tokens(self.up.tenant, AIM, self.rng.choice((AIM, f"aim-{self.rng.randrange(5)}")))
        data = broken(self.rng, self._good["prompt"])
        headers = self.rng.choice(({}, {"Nats-Msg-Id": f"m{self.rng.random()}"}, {"Tether-X": "y" * 4000}))
        await bus.publish(f"tether.prompt.{where}", data, headers=headers)

    async def _command(self, bus: NatsBus) -> None:
        data = broken(self.rng, self._good["command"])
        await bus.publish(f"tether.command.{self._tokens(self.up.tenant, AIM)}", data)

    async def _event(self, bus: NatsBus) -> None:
        conversation = f"aim-{self.rng.randrange(5)}"
        name = self.rng.choice(("event", "frame"))
        execution = "_" if self.rng.random() < 0.5 else f"exe_{self.rng.randrange(5)}"
        where = self._tokens(self.up.tenant, AIM, conversation, execution)
        subject = f"tether.{self.rng.choice(('event', 'event', 'live'))}.{where}"
        data = broken(self.rng, self._good[name])
        if subject.startswith("tether.live"):
            headers = {"Nats-Sequence": self.rng.choice(("0", "-1", "x", "9" * 30)), "Nats-Last-Sequence": "z"}
            await bus.send(subject, data, headers=headers)
        else:
            await bus.publish(subject, data)

    async def _control(self, bus: NatsBus) -> None:
        verb = self.rng.choice(("start", "answer", "interject", "interrupt", "stop", "receipt", "snapshot", "discover"))
        good = {**self._good["control"], "verb": verb}
        if verb == "start":
            good["payload"] = self._good["command"]
        subject = f"tether.control.{self.up.tenant}.{AIM}.{self.rng.choice((verb, verb, verb, 'unheard'))}"
        await self._question(bus, subject, broken(self.rng, good))

    async def _agent(self, bus: NatsBus) -> None:
        verb = self.rng.choice(("sandboxes", "workspace", "stop"))
        good: dict[str, Any] = {"tenant": self.up.tenant, "workspace": f"nobody-{self.rng.randrange(5)}"}
        if verb == "workspace":
            good["path"] = self.rng.choice(("/nowhere/at/all", "relative", "/dev/null", "/tmp/\x00", "/" + "y" * 5000))
        await self._question(bus, subjects.agent(verb), broken(self.rng, good))

    async def _question(self, bus: NatsBus, subject: str, data: bytes) -> None:
        try:
            answer = await bus.request(subject, data, timeout_s=ANSWER_S)
        except NoReplyError:
            self.report.violations.append(f"{subject}: no answer to {data[:300]!r}")
            return
        try:
            value = json.loads(answer.data)
            found = value.get("problem") or {}
            self.report.answered[str(found.get("code", value.get("status", "result")))] += 1
        except (ValueError, AttributeError):
            self.report.violations.append(f"{subject}: {answer.data[:200]!r} to {data[:300]!r}")

    async def _record(self, bus: NatsBus) -> None:
        """Records of conversations, requests and sandboxes that nobody else uses."""
        bucket = self.rng.choice([name for name in self._good if name.startswith("tether_")])
        tenant, name = self.up.tenant, f"aim-{self.rng.randrange(5)}"
        keys = {
            subjects.OWNERS: f"{tenant}.{AIM}.{name}",
            subjects.REQUESTS: f"{tenant}.req-{name}",
            subjects.CONVERSATIONS: f"{tenant}.{name}",
            subjects.SANDBOXES: self.rng.choice((f"{tenant}.{name}", f"{tenant}.{name}.sbx_{name}")),
            subjects.PROJECTIONS: f"db.{tenant}.{name}",
            subjects.LEASES: f"control.{tenant}.{AIM}.{name}",
        }
        key = self._tokens(*keys[bucket].split("."))
        headers = {"KV-Operation": self.rng.choice(("DEL", "PURGE"))} if self.rng.random() < 0.1 else {}
        await bus.publish(f"$KV.{bucket}.{key}", broken(self.rng, self._good[bucket]), headers=headers)

    async def _empty(self, bus: NatsBus) -> None:
        """What nobody understands must go. A good prompt into records that were destroyed may wait."""
        until_s = asyncio.get_running_loop().time() + QUEUE_EMPTY_S
        left: list[str] = []
        while asyncio.get_running_loop().time() < until_s:
            left = []
            for stream, filter_ in (
                (subjects.PROMPTS_STREAM, subjects.PROMPTS_ALL),
                (subjects.COMMANDS_STREAM, subjects.COMMANDS_ALL),
            ):
                counts = await bus.subjects(stream, filter_)
                left += [f"{subject}: {count}" for subject, count in counts.items()]
            if not left:
                return
            await asyncio.sleep(0.5)
        self.report.violations.append(f"queues are not empty after {QUEUE_EMPTY_S:g} s: {left[:10]}")


async def attack(seed: int, messages: int, folder: Path) -> Report:
    """On a set of its own in `folder`."""
    options = SetOptions(data=folder / "data", log="quiet", ephemeral=True)
    async with ServiceSet(options) as services:
        return await Hostile(services.state, seed).run(messages)


def main() -> int:
    import logging

    parser = argparse.ArgumentParser(prog="tether_chaos.hostile", description="Rubbish on every subject of a set.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--messages", type=int, default=2_000)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="tether-hostile-") as folder:
        try:
            report = asyncio.run(attack(options.seed, options.messages, Path(folder)))
        except CliError as error:
            print(f"hostile: {error}", file=sys.stderr)
            return 1
    print(f"seed {options.seed}: sent {dict(report.sent)}, answers {dict(report.answered)}")
    for line in report.violations[:40]:
        print(f"  ! {line}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
