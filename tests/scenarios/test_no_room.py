"""JetStream without room: at its own limit, and on a disk that is full. Who publishes waits and keeps; nothing that was
told to be taken is lost; what cannot be taken is refused by name, and is taken once there is room again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from support_fault_round import FaultRound, talk
from support_local_set import Http
from tether.errors import BusError
from tether.nats_authority import Keys
from tether.service import write_whole
from tether_chaos.chaos_set import ChaosSet
from tether_cli.nats_server import EmbeddedServer

MIB: Final = 1 << 20
LOG_BYTES: Final = 16 * MIB  # reserved, twice
ROOM_BYTES: Final = 64 * MIB
FILL: Final = "FILL"
LINES: Final = 200
Step = Callable[[FaultRound], Awaitable[None]]


class SmallServer(EmbeddedServer):
    """Its JetStream takes ROOM_BYTES."""

    def write_config(self) -> None:
        super().write_config()
        text = self.config.read_text(encoding="utf-8")
        text = text.replace("jetstream {", f"jetstream {{\n  max_file_store: {ROOM_BYTES}")
        write_whole(self.config, text.encode())


class SmallSet(ChaosSet):
    async def _start_bus(self, own: Keys) -> EmbeddedServer:
        self._server = server = SmallServer(self.paths, own, self.bus_tenants)
        server.prepare()
        await self._run(self._nats_spec(server))
        return server


async def fill_the_limit(run: FaultRound) -> None:
    """Another stream of the same server takes all that is left."""
    await run.api(f"STREAM.CREATE.{FILL}", name=FILL, subjects=["fill"], storage="file", max_bytes=-1)
    async with run.bus() as bus:
        for size_bytes in (512 * 1024, 1024):
            with contextlib.suppress(BusError):
                for _ in range(2 * ROOM_BYTES // size_bytes):
                    await bus.publish("fill", bytes(size_bytes))
        with pytest.raises(BusError):
            await bus.publish("fill", bytes(1024))


async def empty_the_limit(run: FaultRound) -> None:
    await run.api(f"STREAM.DELETE.{FILL}")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own for the server's store."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES},mode=0700", "tether-no-room", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def ballast(run: FaultRound) -> Path:
    return run.services.paths.nats / "store" / "ballast"


async def fill_the_disk(run: FaultRound) -> None:
    with ballast(run).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


async def empty_the_disk(run: FaultRound) -> None:
    """Room is made, and the server started anew: one whose disk was full takes nothing until then."""
    ballast(run).unlink()
    await run.kill("nats")


def body(request: str, text: str) -> dict[str, Any]:
    return {"request_id": request, "content": [{"type": "text", "text": text}], "agent": {"kind": "scripted"}}


# The small one may find its place where the large one does not.
SMALL: Final = ("small", body("late-1", "a few words"))
LARGE: Final = ("large", body("late-2", "many words " + "x" * 100_000))


async def refused_by_name(run: FaultRound) -> None:
    """A prompt that cannot be stored is refused, by name, as something to try again."""
    async with Http(run.up) as http:

        async def send(conversation: str, asked: dict[str, Any]) -> httpx2.Response:
            return await http.client.post(f"/v1/conversations/{conversation}/messages", json=asked)

        large, small = await asyncio.gather(send(*LARGE), send(*SMALL))
    assert large.status_code == 503 and small.status_code in (202, 503), (large.text, small.text)
    for answer in (large, small):
        found = answer.json()
        assert answer.status_code == 202 or (found["code"], found["retryable"]) == ("RUNTIME_UNAVAILABLE", True), found


async def taken_once(run: FaultRound) -> None:
    """The same requests again: each runs once."""
    async with Http(run.up) as http:
        for conversation, asked in (LARGE, SMALL):

            async def taken(where: str = conversation, what: dict[str, Any] = asked) -> bool:
                answer = await http.client.post(f"/v1/conversations/{where}/messages", json=what)
                return answer.status_code == 202 and answer.json()["status"] == "admitted"

            await run.until(taken, f"the {conversation} prompt")
            await http.ended(conversation, 1)
            [text] = await http.texts(conversation)
            assert "words" in text


def harm(full: Step, room: Step, gate: Path, worked: Path) -> Callable[[FaultRound], Awaitable[None]]:
    async def act(run: FaultRound) -> None:
        streaming = run.begin("c0")
        await run.reads("c0", 6)
        await full(run)
        before = run.count("c0")
        await asyncio.to_thread(gate.touch)
        await refused_by_name(run)
        waiting = run.begin("c1")  # its users try again and again

        async def printed() -> bool:
            return await asyncio.to_thread(worked.exists)

        await run.until(printed, "the agent's work without room in the log")
        assert run.count("c0") < before + LINES, "what it printed waits in its spool"
        await room(run)
        await taken_once(run)
        await asyncio.gather(streaming, waiting)

    return act


async def judge(tmp_path: Path, full: Step, room: Step, made: type[ChaosSet]) -> None:
    gate, worked = tmp_path / "gate", tmp_path / "worked"
    plans = [
        talk("c0", f"!lines 20 20\n!wait_file {gate}\n!lines {LINES} 5\n!touch {worked}\n!ask deploy\n!flood 300"),
        talk("c1", "!lines 10 5", workspace="w1"),
    ]
    run = FaultRound(plans, tmp_path / "run", harm(full, room, gate, worked), made=made)
    run.options = {"ephemeral": False}
    await run.judged()


@pytest.fixture(autouse=True)
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_EVENTS_MAX_BYTES", str(LOG_BYTES))


@pytest.mark.timeout(180)
async def test_a_server_at_its_limit_loses_nothing_that_was_taken_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    await judge(tmp_path, fill_the_limit, empty_the_limit, SmallSet)


@pytest.mark.timeout(180)
async def test_a_server_whose_disk_is_full_loses_nothing_that_was_taken_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "run" / "data" / "nats" / "store"):
        await judge(tmp_path, fill_the_disk, empty_the_disk, ChaosSet)
