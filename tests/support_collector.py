"""A collector of few lines for the agent service's tests: registers, claims, answers `start`.

Run as a process with a collector's environment. `fake.json` in its workspace makes it misbehave, read at each step:
`exit` (end with this code before registering), `reject` (a problem), `mute` (no answer to the first N starts),
`gate` (a file that has to exist before it registers).
Every start that it is asked for is one line in `starts.jsonl` of the workspace.
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
from tether.control import ControlReply, StartCommand, decode_request
from tether.errors import Code, WrongLastSequenceError, problem
from tether.events import Event
from tether.frames import Frame, Position
from tether.kv import Bucket, Conflict
from tether.limits import REGISTRATION_TTL_S
from tether.ports import Bus, Message
from tether.sandbox import Registration

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

    def behaviour(self) -> dict[str, Any]:
        path = self.directory / "fake.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    async def register(self) -> None:
        bucket = Bucket(self.bus, subjects.SANDBOXES)
        key = subjects.registration_key(self.tenant, self.workspace, self.sandbox)
        instance = ids.new_id("ins")
        value = Registration(
            tenant=self.tenant, workspace=self.workspace, sandbox=self.sandbox, boot=self.boot, instance=instance
        ).value()
        while True:
            entry = await bucket.get(key)
            with contextlib.suppress(Conflict):
                if entry is None:
                    await bucket.create(key, value, op=instance, ttl_s=REGISTRATION_TTL_S)
                else:
                    await bucket.update(key, value, op=instance, revision=entry.revision, ttl_s=REGISTRATION_TTL_S)
                return

    async def start(self, message: Message) -> bytes | None:
        request = decode_request(message.data)
        behaviour = self.behaviour()
        with (self.directory / "starts.jsonl").open("a") as file:
            line = {"control": request.control, "authority": request.authority.model_dump(), "pid": os.getpid()}
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


def _password() -> str | None:
    path = os.environ.get("TETHER_NATS_PASSWORD_FILE")
    return Path(path).read_text().strip() if path else None


def exists(path: str) -> bool:
    return Path(path).exists()


async def main() -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    async with await connect(
        os.environ["TETHER_NATS_URL"],
        name="fake-collector",
        user=os.environ.get("TETHER_NATS_USER"),
        password=_password(),
    ) as bus:
        fake = FakeCollector(bus, dict(os.environ))
        if (code := fake.behaviour().get("exit")) is not None:
            return int(code)
        gate = fake.behaviour().get("gate")
        while gate is not None and not exists(gate) and not stop.is_set():  # noqa: ASYNC110 - another process's file
            await asyncio.sleep(0.02)
        journal = fake.directory / ".tether" / "journal.sqlite3"  # what tells a volume from an empty directory
        journal.parent.mkdir(exist_ok=True)
        journal.touch()
        async with bus.serve(subjects.control(fake.tenant, fake.workspace, "start"), fake.start, name="collector"):
            if os.environ.get("TETHER_RECOVERY") == "true":
                (fake.directory / "recovered").touch()
                return 0
            await fake.register()
            print(json.dumps({"event": "registered", "at": time.time()}), flush=True)
            await stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
