"""A collector of few lines for the agent service's tests: registers, claims, answers `start`.

Run as a process with a collector's environment. `fake.json` in its workspace makes it misbehave, read at each step:
`exit` (end with this code before registering), `reject` (a problem), `mute` (no answer to the first N starts),
`gate` (a file that has to exist before it registers).
Every start that it is asked for is one line in `starts.jsonl` of the workspace.

A drain is kept in `drain.json`, as a journal would: `drain` of `fake.json` says what becomes of it. {"hold": file}: it
runs until the file exists; {"fail": code}; {"mute": true}; {"die": n}: SIGKILL to itself once it was asked n times;
{"incapable": true}: it does not say that it can; {"cut": [tools], "target": …, "continuation": …}: that execution is
cut; {"stay": true}: it does not end by itself. Done: a manifest on the volume, the reference, exit 0 after its report
was asked for. `drains_itself`: on SIGTERM too. `busy`, `idle_since`: of its registration. `restore`: of a checkpoint
fails with this problem, exit code 78. Every order is one line in `drains.jsonl`, every `restore` that it was told of
one in `restores.jsonl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tether import frames, ids, subjects
from tether.bus import connect
from tether.checkpoint import (
    FOLDER,
    RESTORE_FAILED,
    CheckpointManifest,
    CheckpointReference,
    DrainedExecution,
    RestoreFailure,
    digest_of,
)
from tether.control import ControlReply, StartCommand, decode_request
from tether.errors import Code, WrongLastSequenceError, problem
from tether.events import Event, ReceiptStatus
from tether.frames import Frame, Position
from tether.ids import ExecutionTarget
from tether.kv import Bucket, Conflict
from tether.limits import REGISTRATION_TTL_S
from tether.ports import Bus, Message
from tether.prompt import AgentSpec
from tether.sandbox import CAN_DRAIN, DrainOrder, DrainReport, ExecutionSummary, Registration

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))


def claim_frame(command: StartCommand, boot: str) -> Frame:
    body = {
        "boot": boot,
        "instance": "fake",
        "process": 1,
        "target": command.target.model_dump(mode="json"),
        "agent": command.agent.kind,
        "request": command.request_id,
        "adapter_version": "1",
    }
    event = Event(ordinal=1, at=1, type="execution.started", body=body)
    return Frame(first=1, last=1, pos=Position(record=0, index=0), events=[event])


class FakeCollector:
    def __init__(self, bus: Bus, environ: dict[str, str]) -> None:
        self.bus = bus
        self.tenant, self.workspace = environ["TETHER_TENANT"], environ["TETHER_WORKSPACE"]
        self.sandbox, self.boot = environ["TETHER_SANDBOX"], environ["TETHER_BOOT"]
        self.directory = Path(environ["TETHER_WORKSPACE_DIR"])
        self.asked = 0
        self.instance = ids.new_id("ins")
        self.stop = asyncio.Event()
        self.terminated = asyncio.Event()

    def behaviour(self) -> dict[str, Any]:
        path = self.directory / "fake.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    async def register(self) -> None:
        bucket = Bucket(self.bus, subjects.SANDBOXES)
        key = subjects.registration_key(self.tenant, self.workspace, self.sandbox)
        instance = self.instance
        while True:
            behaviour = self.behaviour()
            value = self.registration(instance, behaviour).value()
            entry = await bucket.get(key)
            with contextlib.suppress(Conflict):
                if entry is None:
                    await bucket.create(key, value, op=instance, ttl_s=REGISTRATION_TTL_S)
                else:
                    await bucket.update(key, value, op=instance, revision=entry.revision, ttl_s=REGISTRATION_TTL_S)
                return

    def registration(self, instance: str, behaviour: dict[str, Any]) -> Registration:
        capable = not behaviour.get("drain", {}).get("incapable", False)
        busy = [ExecutionSummary.model_validate(one) for one in behaviour.get("busy", [])]
        return Registration(
            tenant=self.tenant,
            workspace=self.workspace,
            sandbox=self.sandbox,
            boot=self.boot,
            instance=instance,
            capabilities=(CAN_DRAIN,) if capable else (),
            executions=tuple(busy),
            idle_since=behaviour.get("idle_since"),
            updated_at=time.time_ns() // 1_000_000,
        )

    async def drain(self, message: Message) -> bytes | None:
        request = decode_request(message.data)
        behaviour = self.behaviour().get("drain", {})
        with (self.directory / "drains.jsonl").open("a") as file:
            line = {"control": request.control, "authority": request.authority.model_dump(), **request.payload}
            file.write(json.dumps(line) + "\n")
        journal = self.directory / "drain.json"
        kept = json.loads(journal.read_text()) if journal.exists() else {}
        if kept.get("control") != request.control:
            kept = {"control": request.control, "asked": 0}
        kept["asked"] += 1
        journal.write_text(json.dumps(kept))
        if kept["asked"] == behaviour.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour.get("mute"):
            return None
        order = DrainOrder.model_validate(request.payload)
        if "report" not in kept:
            hold = behaviour.get("hold")
            if hold is not None and not exists(hold):
                report = DrainReport(drain=order.drain, state="running", phase="leaving")
                return self.drained(request.control, report)
            kept["report"] = (await self.checkpoint(order, behaviour)).model_dump(mode="json", exclude_none=True)
            journal.write_text(json.dumps(kept))
        report = DrainReport.model_validate(kept["report"])
        if report.state == "done" and not behaviour.get("stay"):
            asyncio.get_running_loop().call_later(0.05, self.stop.set)
        return self.drained(request.control, report)

    def drained(self, control: str, report: DrainReport) -> bytes:
        status: ReceiptStatus = "accepted" if report.state == "running" else "settled"
        result = report.model_dump(mode="json", exclude_none=True)
        return ControlReply(control=control, verb="drain", status=status, result=result).encode()

    async def checkpoint(self, order: DrainOrder, behaviour: dict[str, Any]) -> DrainReport:
        if "fail" in behaviour:
            failure = problem(Code(behaviour["fail"]), "no space left on the device")
            return DrainReport(drain=order.drain, state="failed", phase="over", problem=failure, unsaved="everything")
        executions: tuple[DrainedExecution, ...] = ()
        if "cut" in behaviour:
            target = ExecutionTarget.model_validate(behaviour["target"])
            executions = (
                DrainedExecution(
                    target=target,
                    outcome="graceful",
                    agent="scripted",
                    spec=AgentSpec(kind="scripted", model="m1"),
                    cut=True,
                    interrupted=tuple(behaviour["cut"]),
                    continuation=behaviour.get("continuation", "wait"),
                ),
            )
        reference = await keep(self.bus, self, order, executions)
        return DrainReport(
            drain=order.drain,
            state="done",
            phase="over",
            executions=executions,
            checkpoint=reference[0],
            checkpoint_revision=reference[1],
        )

    async def start(self, message: Message) -> bytes | None:
        request = decode_request(message.data)
        behaviour = self.behaviour()
        with (self.directory / "starts.jsonl").open("a") as file:
            line = {
                "control": request.control,
                "authority": request.authority.model_dump(),
                "pid": os.getpid(),
                "texts": [part["text"] for part in request.payload["content"]],
            }
            file.write(json.dumps(line) + "\n")
        self.asked += 1
        if self.asked <= behaviour.get("mute", 0):
            return None
        if "reject" in behaviour:
            refused = problem(Code(behaviour["reject"]), "refused by the test")
            return ControlReply(control=request.control, verb="start", status="rejected", problem=refused).encode()
        command = StartCommand.model_validate(request.payload)
        target = command.target
        address = subjects.EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
        frame = claim_frame(command, self.boot)
        data = frames.encode(frame)
        with contextlib.suppress(WrongLastSequenceError):
            await self.bus.publish(address.subject, data, msg_id=frames.message_id(address, frame, data), expect_last=0)
        return ControlReply(control=request.control, verb="start", status="accepted").encode()


async def keep(
    bus: Bus, fake: FakeCollector, order: DrainOrder, executions: tuple[DrainedExecution, ...]
) -> tuple[CheckpointReference, int]:
    """The manifest on the volume, then the reference."""
    names = {"drain": order.drain, "tenant": fake.tenant, "workspace": fake.workspace, "sandbox": fake.sandbox}
    checkpoint, at = f"chk_{order.drain}", time.time_ns() // 1_000_000
    manifest = CheckpointManifest(
        checkpoint=checkpoint,
        boot=fake.boot,
        created_at=at,
        include=order.include,
        clean=True,
        executions=executions,
        **names,
    ).encode()
    folder = fake.directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{checkpoint}.json").write_bytes(manifest)
    reference = CheckpointReference(
        checkpoint=checkpoint,
        boot=fake.boot,
        manifest=digest_of(manifest),
        manifest_bytes=len(manifest),
        stored="volume",
        include=order.include,
        clean=True,
        executions=executions,
        created_at=at,
        **names,
    )
    bucket, key = Bucket(bus, subjects.CHECKPOINTS), subjects.checkpoint_key(fake.tenant, fake.workspace)
    entry = await bucket.get(key)
    if entry is None:
        entry = await bucket.create(key, reference.value(), op=order.drain)
    else:
        entry = await bucket.update(key, reference.value(), op=order.drain, revision=entry.revision)
    return reference, entry.revision


def _password() -> str | None:
    path = os.environ.get("TETHER_NATS_PASSWORD_FILE")
    return Path(path).read_text().strip() if path else None


async def drain_itself(fake: FakeCollector) -> None:
    """SIGTERM: a drain that nobody ordered; without anything to keep it just ends."""
    await fake.terminated.wait()
    if fake.behaviour().get("drains_itself"):
        await keep(fake.bus, fake, DrainOrder(drain=f"drain_{fake.boot}"), ())
    fake.stop.set()


async def renew(fake: FakeCollector) -> None:
    """The registration follows `fake.json`."""
    told = fake.behaviour()
    while True:
        await asyncio.sleep(0.05)
        if (now := fake.behaviour()) != told:
            told = now
            await fake.register()


def exists(path: str) -> bool:
    return Path(path).exists()


async def main() -> int:
    loop = asyncio.get_running_loop()
    async with await connect(
        os.environ["TETHER_NATS_URL"],
        name="fake-collector",
        user=os.environ.get("TETHER_NATS_USER"),
        password=_password(),
    ) as bus:
        fake = FakeCollector(bus, dict(os.environ))
        loop.add_signal_handler(signal.SIGHUP, fake.stop.set)
        loop.add_signal_handler(signal.SIGTERM, fake.terminated.set)
        if (restore := os.environ.get("TETHER_COLLECTOR_RESTORE")) is not None:
            with (fake.directory / "restores.jsonl").open("a") as file:
                file.write(json.dumps({"restore": restore, "boot": fake.boot}) + "\n")
            if (refused := fake.behaviour().get("restore")) is not None:
                failure = RestoreFailure(checkpoint=restore, boot=fake.boot, problem=refused, at=1)
                (fake.directory / RESTORE_FAILED).write_text(failure.model_dump_json())
                return 78
        if (code := fake.behaviour().get("exit")) is not None:
            return int(code)
        gate = fake.behaviour().get("gate")
        while gate is not None and not exists(gate) and not fake.stop.is_set():  # noqa: ASYNC110 - another process's file
            await asyncio.sleep(0.02)
        journal = fake.directory / ".tether" / "journal.sqlite3"  # what tells a volume from an empty directory
        journal.parent.mkdir(exist_ok=True)
        journal.touch()
        control = subjects.control(fake.tenant, fake.workspace, "start")
        drains = subjects.control(fake.tenant, fake.workspace, "drain")
        async with (
            bus.serve(control, fake.start, name="collector"),
            bus.serve(drains, fake.drain, name="collector"),
            asyncio.TaskGroup() as group,
        ):
            if os.environ.get("TETHER_RECOVERY") == "true":
                (fake.directory / "recovered").touch()
                return 0
            await fake.register()
            print(json.dumps({"event": "registered", "at": time.time()}), flush=True)
            terminated = group.create_task(drain_itself(fake), name="sigterm")
            renewed = group.create_task(renew(fake), name="registration")
            await fake.stop.wait()
            terminated.cancel()
            renewed.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
