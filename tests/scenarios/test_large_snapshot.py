"""An execution whose snapshot is larger than a message: read through the blob store by everybody who needs it.

The log has lost the execution's beginning, so the collector's snapshot is the only way to it: for a backend that starts
without its database, for readers over HTTP and NATS, for the command line; while the agent waits and after its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from support_local_set import Http, eventually
from tether import Client, subjects
from tether.api import ExecutionSnapshot
from tether.bus import NatsBus, connect
from tether.client import NatsCredentials
from tether.client.items import CaughtUp, GapItem, SnapshotItem
from tether.control import ControlReply, ControlRequest
from tether.ids import ExecutionTarget, new_id
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState

pytestmark = pytest.mark.timeout(150)
TOOLS: Final = 60
OUTPUT_BYTES: Final = 30_000
PAYLOAD_BYTES: Final = 1 << 20
TEXT: Final = f"the first words\n!repeat {TOOLS}\n!tool big 0 {OUTPUT_BYTES}\n!end\n!ask look\nafter the answer"


@asynccontextmanager
async def bus_of(up: SetState) -> AsyncIterator[NatsBus]:
    async with await connect(up.nats_url, name="test", creds_file=up.nats_creds_file) as bus:
        yield bus


@asynccontextmanager
async def clients(up: SetState) -> AsyncIterator[tuple[Client, Client]]:
    credentials = NatsCredentials(creds_file=up.nats_creds_file)
    async with (
        Client.http(up.http_url, up.token) as over_http,
        Client.nats(up.nats_url, credentials, tenant=up.tenant) as over_nats,
    ):
        yield over_http, over_nats


async def evict(up: SetState, workspace: str, execution: str) -> None:
    """All of the execution's log but its last message."""
    async with bus_of(up) as bus:
        subject = subjects.event(up.tenant, workspace, "c1", execution)
        stream = subjects.events_stream(up.tenant)
        last = await bus.last(stream, subject)
        assert last is not None
        await bus.purge(stream, subject, up_to=last.sequence)


async def reply_of_collector(up: SetState, target: ExecutionTarget) -> ControlReply:
    asked = ControlRequest(control=new_id("ctl"), verb="snapshot", target=target, payload={})
    async with bus_of(up) as bus:
        subject = subjects.control(up.tenant, target.workspace, "snapshot")
        answer = await bus.request(subject, asked.model_dump_json(exclude_none=True).encode(), timeout_s=10.0)
    return ControlReply.model_validate_json(answer.data)


def whole(snapshot: ExecutionSnapshot | dict[str, Any]) -> bool:
    value = snapshot if isinstance(snapshot, dict) else snapshot.model_dump(mode="json")
    text = json.dumps(value)
    return value["source"] == "collector" and "the first words" in text and len(text) > PAYLOAD_BYTES


def show(up: SetState, execution: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tether_cli", "show", execution, "--json"],
        env={**os.environ, "TETHER_CLI_DATA": up.data},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def read_by_everybody(up: SetState, execution: str) -> None:
    async with clients(up) as (over_http, over_nats):
        assert whole(await over_http.snapshot(execution))
        assert whole(await over_nats.snapshot(execution))
        given, gaps = "", []
        async for item in over_nats.follow("c1"):
            match item:
                case SnapshotItem(executions=states):
                    given += str(states.get(execution))
                case GapItem():
                    gaps.append(item)
                case CaughtUp():
                    break
                case _:
                    pass
        assert "the first words" in given and len(given) > PAYLOAD_BYTES and gaps == []
    shown = show(up, execution)
    assert shown.returncode == 0, shown.stderr
    assert whole(json.loads(shown.stdout)["snapshot"])


def lose_database(up: SetState) -> None:
    for file in (Path(up.data) / "backend").glob("tether.sqlite3*"):
        file.unlink()
    os.kill(up.children["backend"].pid, signal.SIGKILL)


async def test_a_snapshot_larger_than_a_message_reaches_projection_readers_and_command_line(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with ServiceSet(SetOptions(data=data, log="quiet")) as running, Http(running.state) as http:
        up = running.state
        await http.prompt("c1", "q1", TEXT)
        page: dict[str, Any] = {}

        async def asked() -> bool:
            nonlocal page
            page = await http.conversation("c1")
            return any(one["state"] == "pending" for one in page.get("interactions", []))

        await eventually(asked, "the approval waits")
        execution, workspace = page["executions"][0]["execution"], page["workspace"]
        async with clients(up) as (over_http, _):
            target = ExecutionTarget.model_validate((await over_http.snapshot(execution)).snapshot["target"])
        reply = await reply_of_collector(up, target)
        assert reply.result is not None and "blob" in reply.result, "too large for a message"
        await evict(up, workspace, execution)
        lose_database(up)

        async def repaired() -> bool:
            nonlocal page
            page = await http.conversation("c1")
            runs = {one["execution"]: one for one in page.get("executions", [])}
            return execution in runs and not runs[execution]["partial"] and bool(page["interactions"])

        await eventually(repaired, "the rows are whole again")
        answer = await http.client.get(f"/v1/executions/{execution}/items", params={"limit": 500})
        tools = [one for one in answer.json()["items"] if one["state"]["kind"] == "tool"]
        assert len([one for one in tools if one["state"].get("name") == "big"]) == TOOLS
        await read_by_everybody(up, execution)
        [waiting] = [one for one in page["interactions"] if one["state"] == "pending"]
        path = f"/v1/conversations/c1/interactions/{waiting['interaction']}"
        answered = await http.client.post(path, json={"decision": "allow"})
        assert answered.status_code == 200, answered.text
        await http.ended("c1", 1)
        await read_by_everybody(up, execution)  # what has ended: the final snapshot, read and nothing else
        assert len((await http.conversation("c1"))["executions"]) == 1
