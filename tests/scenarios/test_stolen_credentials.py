"""Credentials that were copied out of a sandbox, as its code can at any time: how far they reach, and until when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support_local_set import Http, eventually
from tether import subjects
from tether.bus import connect
from tether.errors import PermissionDeniedError
from tether_cli.set import ServiceSet, SetOptions


async def test_stolen_credentials_reach_their_own_workspace_until_it_is_suspended(tmp_path: Path) -> None:
    stolen = tmp_path / "stolen.creds"
    options = SetOptions(data=tmp_path / "data", log="quiet", log_level="warning")
    async with ServiceSet(options) as up, Http(up.state) as http:
        await http.prompt("c1", "r1", "hello", workspace="w1")
        await http.ended("c1", 1)
        await http.prompt("c2", "r3", "hello", workspace="w2")
        await http.ended("c2", 1)
        file = up.paths.agent / "bus" / "default.w1.creds"
        stolen.write_bytes(await asyncio.to_thread(file.read_bytes))
        thief = await connect(up.state.nats_url, name="thief", creds_file=str(stolen))
        async with thief:
            log = subjects.events_stream("default")
            await thief.barrier()
            for refused in (
                thief.publish(subjects.event("default", "w2", "c2", "e"), b"x"),
                thief.publish("$KV.tether_owners.default.w1.c1", b"x"),
                thief.publish(subjects.prompt("default", "w1", "c1"), b"x"),
                thief.read(log, 0, "tether.event.default.w1.>"),
                thief.last(log, "tether.event.default.w2.c2._", leader=False),
                thief.request(subjects.agent("suspend"), b"{}", timeout_s=20.0),
            ):
                with pytest.raises(PermissionDeniedError):
                    await refused
            answer = await http.client.post("/v1/sandboxes/w1/suspend", json={})
            assert answer.status_code == 202, answer.text

            async def cut() -> bool:
                return not thief.connected

            await eventually(cut, "the end of the stolen credentials")
        with pytest.raises(PermissionDeniedError):
            await connect(up.state.nats_url, name="thief", creds_file=str(stolen), connect_timeout_s=20.0)
        # The other sandbox was not touched, and the suspended one is woken with credentials of its own.
        await http.prompt("c2", "r4", "!recall", workspace="w2")
        await http.ended("c2", 2)
        await http.prompt("c1", "r2", "!recall", workspace="w1")
        await http.ended("c1", 2)
        assert (await http.texts("c1"))[-1].startswith("I remember 1 earlier turns")
        with pytest.raises(PermissionDeniedError):
            await connect(up.state.nats_url, name="thief", creds_file=str(stolen), connect_timeout_s=20.0)
        log_of_server = await asyncio.to_thread((up.paths.logs / "nats.log").read_text)
        violations = [line for line in log_of_server.splitlines() if "Violation" in line and '"v2' in line]
        assert not [line for line in violations if "thief" not in line], "a service asked for what it may not do"
