"""R12 through the whole set: the backend dies with its database while an execution waits, the log lost its start."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support_local_set import Http, eventually
from tether import subjects
from tether.bus import connect
from tether_cli.set import ServiceSet, SetOptions

pytestmark = pytest.mark.timeout(120)


async def test_a_lost_database_is_rebuilt_from_a_living_collector_where_the_log_has_lost_the_start(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    async with ServiceSet(SetOptions(data=data, log="quiet")) as running, Http(running.state) as http:
        up = running.state
        await http.prompt("c1", "q1", "before the question\n!ask look\nafter the answer")
        page: dict[str, Any] = {}

        async def asked() -> bool:
            nonlocal page
            page = await http.conversation("c1")
            return any(one["state"] == "pending" for one in page.get("interactions", []))

        await eventually(asked, "the approval waits")
        execution, workspace = page["executions"][0]["execution"], page["workspace"]
        before = {one["item"] for one in page["items"]}
        async with await connect(up.nats_url, name="eviction", creds_file=up.nats_creds_file) as bus:
            subject = subjects.event(up.tenant, workspace, "c1", execution)
            last = await bus.last(subjects.events_stream(up.tenant), subject)
            assert last is not None
            await bus.purge(subjects.events_stream(up.tenant), subject, up_to=last.sequence)
            backend = up.children["backend"].pid
            for file in (data / "backend").glob("tether.sqlite3*"):
                file.unlink()
            os.kill(backend, signal.SIGKILL)

            async def whole() -> bool:
                nonlocal page
                page = await http.conversation("c1")
                runs = {one["execution"]: one for one in page.get("executions", [])}
                known = {one["item"] for one in page.get("items", [])}
                return execution in runs and not runs[execution]["partial"] and before <= known

            await eventually(whole, "the rows are whole again")
            assert page["gaps"] == [] and "before the question" in str(page["items"])
            (waiting,) = [one for one in page["interactions"] if one["state"] == "pending"]
            answer = await http.client.post(
                f"/v1/conversations/c1/interactions/{waiting['interaction']}", json={"decision": "allow"}
            )
            assert answer.status_code == 200, answer.text

            async def over() -> bool:
                nonlocal page
                page = await http.conversation("c1")
                outcomes = [one.get("outcome") for one in page.get("responses", [])]
                return outcomes == ["completed"] and bool(page["recoveries"])

            await eventually(over, "the answer reaches the same process")
            (told,) = page["recoveries"]
            assert (told["stream"], told["execution"], told["first"]) == ("resumed", execution, 1)
            assert [one["request"] for one in page["messages"]] == ["q1"] and len(page["executions"]) == 1
            turns = [(one["execution"], one["turn"]) for one in page["usage"]]
            assert len(turns) == len(set(turns))
