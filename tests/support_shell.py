"""A real collector process over a real nats-server, real keepers and the scripted agent, and a client's view of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether import frames, ids, owner, subjects, topology
from tether.control import Authority, ControlReply, ControlRequest, StartCommand
from tether.control_lease import USER_VERBS
from tether.errors import BusError
from tether.events import Event
from tether.frames import Frame
from tether.kv import Bucket
from tether.ports import Bus
from tether.prompt import AgentSpec, TextContent
from tether.snapshot import Snapshot
from tether_collector.keeper_link import keeper_lives
from tether_collector.launching import derived_uuid
from tether_oracle import ProcessTruth, Verdict, fact_of_event, judge, load_truth

DEADLINE_S = 30.0
CRASHING = Path(__file__).parent / "support_crashing_collector.py"


async def eventually(
    condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = DEADLINE_S, every_s: float = 0.02
) -> Any:
    """The condition's first true answer. Raises TimeoutError naming `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (found := await condition()):  # noqa: ASYNC110 - conditions of other processes
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise TimeoutError(f"{what} did not happen within {timeout_s:g} s") from None
    return found


def marked(nonce_prefix: str) -> list[int]:
    """Living processes whose environment names a process of this execution."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"TETHER_PROCESS_NONCE={nonce_prefix}".encode() in environ:
                found.append(int(entry.name))
    return found


@dataclass
class Run:
    """One execution as a reader sees it: its frames, straight from the log."""

    rig: Rig
    command: StartCommand
    frames: list[Frame] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)

    @property
    def target(self) -> ids.ExecutionTarget:
        return self.command.target

    @property
    def subject(self) -> str:
        target = self.target
        return subjects.event(target.tenant, target.workspace, target.conversation, target.execution)

    async def fetch(self) -> None:
        after = self.sequences[-1] if self.sequences else 0
        while batch := await self.rig.bus.read(subjects.events_stream(self.rig.tenant), after, self.subject):
            for message in batch:
                frame = frames.decode(message.subject, message.data)
                assert isinstance(frame, Frame)
                self.frames.append(frame)
                self.sequences.append(message.sequence)
                after = message.sequence

    @property
    def events(self) -> list[Event]:
        return [event for frame in self.frames for event in frame.events]

    def of(self, kind: str, **body: Any) -> list[Event]:
        return [
            event
            for event in self.events
            if event.type == kind and all(event.body.get(name) == value for name, value in body.items())
        ]

    async def until(self, kind: str, timeout_s: float = DEADLINE_S, /, **body: Any) -> Event:
        """The first event of this type with these values in its body."""

        async def there() -> list[Event]:
            try:
                await self.fetch()
            except BusError:
                return []
            return self.of(kind, **body)

        try:
            found: list[Event] = await eventually(there, f"{kind} {body}", timeout_s)
        except TimeoutError as error:
            told = [f"{event.ordinal} {event.type} {event.body}"[:160] for event in self.events[-12:]]
            raise TimeoutError("\n".join([str(error), *told, self.rig.log[-3000:]])) from None
        return found[0]

    async def ended(self, timeout_s: float = DEADLINE_S) -> Event:
        """The last event; checks that the log is a chain without holes that ends there."""
        event = await self.until("execution.ended", timeout_s)
        self.check_chain()
        assert self.events[-1] is event
        return event

    def check_chain(self) -> None:
        expected = 1
        for frame in self.frames:
            assert frame.first == expected, f"frame {frame.first}-{frame.last} follows {expected - 1}"
            expected = frame.last + 1

    async def snapshot(self) -> Snapshot:
        """What the collector says of it, once it knows."""

        async def asked() -> Snapshot | None:
            reply = await self.rig.ask("snapshot", target=self.target)
            return None if reply.result is None else Snapshot.model_validate(reply.result["snapshot"])

        found: Snapshot = await eventually(asked, "a snapshot")
        return found

    def verdict(self) -> Verdict:
        """The oracle's: what the agent's processes of this execution printed against what is in the log."""
        truth = load_truth(self.rig.truth)
        facts = [fact_of_event(event.model_dump(mode="json")) for event in self.events]
        return judge(truth, facts, processes=self.processes())

    def processes(self) -> Sequence[ProcessTruth]:
        """Every process that ever got this execution's prompt."""
        return load_truth(self.rig.truth).of_prompt(derived_uuid(self.target.execution, "prompt"))

    def check_whole(self) -> None:
        """One process, and everything that it printed is in the log, once."""
        assert len(self.processes()) == 1
        verdict = self.verdict()
        assert verdict.is_clean and verdict.printed > 0, (str(verdict), verdict.details)


class Rig:
    """One workspace's collector. Leaving the context ends it and every keeper that it left."""

    def __init__(
        self,
        bus: Bus,
        url: str,
        tenant: str,
        root: Path,
        *,
        workspace: str = "w1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.bus = bus
        self.tenant, self.workspace = tenant, workspace
        self.boot = f"boot_{uuid.uuid4().hex[:12]}"
        self.directory = root / workspace
        self.truth = root / "truth"
        self.state_dir = self.directory / ".tether"
        self._root = root
        self._url = url
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._leases: dict[str, Authority] = {}
        self._leasing = asyncio.Lock()
        self._log = root / f"{workspace}.log"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._agent_env = root / "agent-env.json"
        self._agent_env.touch(0o600)
        self._agent_env.write_text(
            json.dumps(
                {
                    "scripted": {
                        "TETHER_SCRIPTED_HOME": str(root / "home"),
                        "TETHER_SCRIPTED_TRUTH": str(self.truth),
                    }
                }
            )
        )

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The collector's own log lines of this event."""
        parsed = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in parsed if line.get("event") == event]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._root / "home"),
            "TETHER_NATS_URL": self._url,
            "TETHER_TENANT": self.tenant,
            "TETHER_WORKSPACE": self.workspace,
            "TETHER_BOOT": self.boot,
            "TETHER_WORKSPACE_DIR": str(self.directory),
            "TETHER_AGENTS": json.dumps({"scripted": [sys.executable, "-m", "scripted_agent"]}),
            "TETHER_AGENT_ENV_FILE": str(self._agent_env),
            "TETHER_READY_FILE": str(self._root / f"{self.workspace}.ready"),
            **self._environment,
        }

    def set_environment(self, **more: str) -> None:
        """For the next start."""
        self._environment.update(more)

    async def start(self, *, crash_at: str | None = None, ready: bool = True) -> None:
        """Start the collector (again). `crash_at`: it ends at once, by `os._exit`, when it reaches that step."""
        assert self._process is None, "it runs"
        ready_file = self._root / f"{self.workspace}.ready"
        ready_file.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "tether_collector"]
        if crash_at is not None:
            argv = [sys.executable, str(CRASHING), crash_at]
        self._spawn(argv)
        if ready:
            await eventually(self._ready(ready_file), "readiness of the collector")

    def _spawn(self, argv: Sequence[str]) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, env=self.environment(), stdout=log, stderr=log, cwd=self._root)

    def _ready(self, path: Path) -> Callable[[], Awaitable[bool]]:
        async def there() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log[-4000:]
            return os.path.exists(path)  # noqa: ASYNC240, PTH110 - looked at, not waited for

        return there

    def handles(self) -> int:
        """Open descriptors of the collector."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    async def exited(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait until the collector has ended; its exit code."""
        process = self._process
        assert process is not None

        async def gone() -> bool:
            return process.poll() is not None

        await eventually(gone, "the collector's end", timeout_s)
        self._process = None
        assert process.returncode is not None
        return process.returncode

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.exited()

    async def hand_over(self) -> int:
        """SIGHUP: the next collector goes on, agents run on; the exit code."""
        os.kill(self.pid, signal.SIGHUP)
        return await self.exited()

    async def terminate(self) -> int:
        """SIGTERM: the sandbox is drained; the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return await self.exited()

    # --- a router's and a client's part ---

    async def admit(
        self,
        text: str,
        *,
        conversation: str = "c1",
        request: str | None = None,
        resume: str | None = None,
        **command_fields: Any,
    ) -> Run:
        """The owner record to `starting`, and the command that follows from it, with these fields more."""
        request = request or f"req_{uuid.uuid4().hex[:12]}"
        bucket = Bucket(self.bus, subjects.OWNERS)
        key = subjects.owner_key(self.tenant, self.workspace, conversation)
        entry = await bucket.get(key)
        record = owner.OwnerRecord() if entry is None else owner.OwnerRecord.model_validate(entry.value)
        if record.state != "idle" and record.target is not None:
            ended = owner.decide(record, owner.Ended(record.target.execution, "completed", True, 1))
            assert isinstance(ended, owner.Accepted)
            record = ended.record
        decision = owner.decide(
            record,
            owner.Admit(
                tenant=self.tenant,
                workspace=self.workspace,
                conversation=conversation,
                request=request,
                attempt=1,
                response=ids.response_id(self.tenant, request, 1),
                execution=ids.execution_id(self.tenant, request, 1),
                sandbox=ids.sandbox_id(self.tenant, self.workspace),
                prompt_sequence=1,
                prompt_stored_at_ns=1,
                agent={"kind": "scripted"},
                at=1,
            ),
        )
        assert isinstance(decision, owner.Accepted), decision
        value, op = decision.record.value(), ids.new_id("op")
        if entry is None:
            entry = await bucket.create(key, value, op=op)
        else:
            entry = await bucket.update(key, value, op=op, revision=entry.revision)
        assert decision.record.target is not None
        command = StartCommand(
            control=ids.control_id(self.tenant, request, "start"),
            target=decision.record.target,
            owner_revision=entry.revision,
            request_id=request,
            attempt=1,
            content=(TextContent(text=text),),
            agent=AgentSpec(kind="scripted"),
            resume_session=resume,
            **command_fields,
        )
        return Run(self, command)

    async def ask(
        self,
        verb: Any,
        *,
        target: ids.ExecutionTarget | None = None,
        payload: dict[str, Any] | None = None,
        control: str | None = None,
        authority: Authority | None = None,
        timeout_s: float = 12.0,
    ) -> ControlReply:
        request = ControlRequest(
            control=control or ids.new_id("ctl"),
            verb=verb,
            target=target,
            payload=payload or {},
            authority=authority or await self._authority(verb, target),
        )
        subject = subjects.control(self.tenant, self.workspace, verb)
        data = request.model_dump_json(exclude_none=True).encode()
        answer = await self.bus.request(subject, data, timeout_s=timeout_s)
        return ControlReply.model_validate_json(answer.data)

    async def _authority(self, verb: str, target: ids.ExecutionTarget | None) -> Authority:
        """As a backend has it: the control lease of the target's conversation, held for all its controls."""
        if verb not in USER_VERBS or target is None:
            return Authority()
        async with self._leasing:
            return self._leases.get(target.execution) or await self.lease(target)

    async def lease(self, target: ids.ExecutionTarget, holder: str = "test", token: int | None = None) -> Authority:
        """The lease is this holder's from now on, whoever had it; `token`: as if acquired at that revision."""
        bucket = Bucket(self.bus, subjects.LEASES)
        key = subjects.lease_key(target.tenant, target.workspace, target.conversation)
        entry = await bucket.get(key)
        if entry is not None:
            await bucket.delete(key, revision=entry.revision)
        value: dict[str, Any] = {"holder": holder, "execution": target.execution}
        if token is not None:
            value["token"] = token
        entry = await bucket.create(key, value, op=ids.new_id("op"), ttl_s=60)
        held = Authority(kind="lease", holder=holder, token=entry.revision if token is None else token)
        self._leases[target.execution] = held
        return held

    async def ask_start(self, run: Run, timeout_s: float = 12.0) -> ControlReply:
        payload = run.command.model_dump(mode="json", exclude_none=True)
        return await self.ask("start", payload=payload, control=run.command.control, timeout_s=timeout_s)

    async def begin(
        self, text: str, *, conversation: str = "c1", resume: str | None = None, **command_fields: Any
    ) -> Run:
        """Admit and start; the collector has accepted it."""
        run = await self.admit(text, conversation=conversation, resume=resume, **command_fields)
        reply = await self.ask_start(run)
        assert reply.status in ("accepted", "delivered", "settled"), reply
        return run

    # --- the end ---

    def keeper_folders(self) -> Sequence[Path]:
        return sorted(path.parent for path in self.state_dir.glob("executions/*/*/lock"))

    async def close(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        for folder in self.keeper_folders():
            if keeper_lives(folder) and (folder / "spawn.json").exists():
                os.kill(json.loads((folder / "spawn.json").read_bytes())["keeper_pid"], signal.SIGTERM)

        async def no_keeper() -> bool:
            return not any(keeper_lives(folder) for folder in self.keeper_folders())

        await eventually(no_keeper, "the end of every keeper")
        for folder in self.keeper_folders():
            crash = folder / "keeper.crash"
            assert not crash.exists(), crash.read_text()


@asynccontextmanager
async def collector(
    bus: Bus,
    url: str,
    tenant: str,
    root: Path,
    *,
    workspace: str = "w1",
    start: bool = True,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Rig]:
    await bus.ensure(topology.tenant(tenant, max_bytes=256 << 20))
    rig = Rig(bus, url, tenant, root, workspace=workspace, environment=environment)
    try:
        if start:
            await rig.start()
        yield rig
    finally:
        await rig.close()
