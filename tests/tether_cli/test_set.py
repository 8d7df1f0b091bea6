"""The whole set as real processes: it starts, survives the crash of each of its parts, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
from pathlib import Path

import httpx2
import pytest

from support_local_set import Http, collector_of, eventually, listening_addresses, processes_of
from tether.nkey_jwt import read_credentials
from tether.processes import is_running, send_signal
from tether_agent.providers import procfs
from tether_cli import state, workspaces
from tether_cli.output import CliError
from tether_cli.set import ServiceSet, SetOptions, ephemeral, running_or_ephemeral
from tether_cli.state import Paths
from tether_cli.supervise import Child

pytestmark = pytest.mark.timeout(180)


def options(data: Path, **changes: object) -> SetOptions:
    return SetOptions(data=data, log="quiet", **changes)  # type: ignore[arg-type]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_a_prompt_over_http_reaches_the_scripted_agent_and_the_set_leaves_nothing_behind(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        async with Http(up.state) as http:
            await http.prompt("c1", "r1", "hello")
            await http.ended("c1", 1)
            assert await http.outcomes("c1") == ["completed"]
        assert state.running(data) == up.state
    assert processes_of(data) == []
    assert state.running(data) is None
    assert not (data / "state.json").exists()


async def test_a_step_of_the_end_that_fails_skips_no_other(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Child.stop

    async def failing(child: Child) -> None:
        await stop(child)
        if child.spec.name == "backend":
            raise RuntimeError("the end of the backend")

    with pytest.raises(RuntimeError, match="the end of the backend"):
        async with ServiceSet(options(data)) as up, Http(up.state) as http:
            await http.prompt("c1", "r1", "hello")
            await http.ended("c1", 1)
            monkeypatch.setattr(Child, "stop", failing)
    assert processes_of(data) == []
    assert state.running(data) is None


async def test_secrets_are_closed_to_others_and_in_no_argument_or_log(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        folder = data / "secrets"
        secrets = [up.state.token, *(path.read_text() for path in folder.glob("*.seed"))]
        for path in folder.glob("*.creds"):
            claims, key = read_credentials(path.read_text())
            secrets += [claims, key.seed]
        assert len(set(secrets)) == len(secrets) == 1 + 4 + 2 * 5
        assert all(len(secret) >= 32 for secret in secrets)
        arguments = "\n".join(" ".join(procfs.argv_of(pid)) for pid in procfs.pids())
        state_text = (data / "state.json").read_text()
    for path in (*(data / "secrets").iterdir(), data / "http-token", data / "nats" / "nats.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    logs = "\n".join(path.read_text() for path in (data / "logs").iterdir())
    for secret in secrets:
        assert secret not in arguments + state_text + logs


async def test_everything_listens_on_loopback_only(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        listening = listening_addresses({child.pid for child in up.state.children.values()})
    assert len(listening) >= 2
    assert set(listening) == {"0100007F"}


async def test_the_http_api_refuses_who_has_no_token(data: Path) -> None:
    async with ServiceSet(options(data)) as up, httpx2.AsyncClient(base_url=up.state.http_url) as client:
        assert (await client.get("/v1/executions")).status_code == 401


@pytest.mark.parametrize("name", ["agent", "router", "backend", "nats"])
async def test_a_killed_part_comes_back_and_a_running_execution_is_not_disturbed(
    data: Path, tmp_path: Path, name: str
) -> None:
    gate = tmp_path / "gate"
    async with ServiceSet(options(data)) as up, Http(up.state) as http:
        await http.prompt("c1", "r1", f"before\n!wait_file {gate}\nafter")

        async def waiting() -> bool:
            return await http.texts("c1") == ["before"]

        await eventually(waiting, "the first text")
        collector = collector_of(data)
        killed = up.state.children[name]
        address = up.state.http_url
        send_signal(killed, signal.SIGKILL)

        async def back() -> bool:
            now = up.state.children[name]
            return now != killed and is_running(now)

        await eventually(back, f"{name}'s return")
        gate.write_text("")
        await http.ended("c1", 1)
        assert await http.texts("c1") == ["before", "after"]
        assert await http.outcomes("c1") == ["completed"]
        assert up.state.http_url == address
        assert collector_of(data) == collector, "the collector was not replaced"
        await http.prompt("c1", "r2", "again")
        await http.ended("c1", 2)
    assert processes_of(data) == []


async def test_ending_the_set_stops_what_runs_and_tells_its_end_with_proof(data: Path) -> None:
    async with ServiceSet(options(data)) as up, Http(up.state) as http:
        await http.prompt("c1", "r1", "working\n!hang")

        async def working() -> bool:
            return await http.texts("c1") == ["working"]

        await eventually(working, "the first text")
    assert processes_of(data) == []
    async with ServiceSet(options(data)) as up, Http(up.state) as http:
        await http.ended("c1", 1)
        [execution] = (await http.conversation("c1"))["executions"]
        assert execution["outcome"] == "stopped"
        assert execution["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
        await http.prompt("c1", "r2", "and on")
        await http.ended("c1", 2)


async def test_sandboxes_of_a_set_that_was_ended_sleep_and_wake_in_the_next_one(data: Path) -> None:
    async with ServiceSet(options(data)) as up, Http(up.state) as http:
        await http.prompt("c1", "r1", "told", workspace="told")
        await http.ended("c1", 1)
        await http.prompt("c2", "r2", "working\n!hang", workspace="busy")

        async def working() -> bool:
            return await http.texts("c2") == ["working"]

        await eventually(working, "the first text")
    async with ServiceSet(options(data)) as up, Http(up.state) as http:

        async def asleep() -> bool:
            found = (await http.client.get("/v1/sandboxes")).json()["sandboxes"]
            return {(one["workspace"], one["state"]) for one in found} == {("told", "suspended"), ("busy", "suspended")}

        await eventually(asleep, "the sleep of what was ended")
        await http.prompt("c1", "r3", "!recall", workspace="told")
        await http.ended("c1", 2)
        assert (await http.texts("c1"))[-1].startswith("I remember 1 earlier turns")
        answer = await http.client.post("/v1/sandboxes/busy/resume", json={})
        assert answer.status_code == 202 and answer.json()["woken"]

        async def awake() -> bool:
            found = (await http.client.get("/v1/sandboxes/busy")).json()
            return bool(found["state"] == "active" and found["connected"])

        await eventually(awake, "the resumed sandbox")


async def test_a_second_set_on_the_same_directory_is_refused_and_harms_nothing(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        with pytest.raises(CliError, match="already up"):
            async with ServiceSet(options(data)):
                pass
        assert state.running(data) == up.state
        async with Http(up.state) as http:
            assert (await http.client.get("/readyz")).status_code == 200


def _key_of(creds_file: str) -> str:
    return read_credentials(Path(creds_file).read_text())[1].seed


async def test_the_bus_keeps_its_port_and_keys_over_a_restart_of_the_set(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        first = (up.state.nats_url, _key_of(up.state.nats_creds_file), up.state.token)
    async with ServiceSet(options(data)) as up:
        assert (up.state.nats_url, _key_of(up.state.nats_creds_file), up.state.token) == first


async def test_a_port_that_was_taken_meanwhile_is_given_up(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        url = up.state.nats_url
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(url.rpartition(":")[2])))
        taken.listen()
        async with ServiceSet(options(data)) as up:
            assert up.state.nats_url != url


async def test_a_part_that_does_not_start_is_named_with_its_last_lines_and_nothing_stays(
    data: Path, tmp_path: Path
) -> None:
    agents = tmp_path / "agents.toml"
    agents.write_text('[agents.claude]\ncommand = ["claude"]\nkey_file = "/nowhere/key"\n')
    with pytest.raises(CliError) as failure:
        async with ServiceSet(options(data, agents_file=agents)):
            pass
    assert failure.value.message.startswith("agent ended with 1 before it was ready")
    assert "/nowhere/key" in failure.value.message and "agent.log" in failure.value.message
    assert processes_of(data) == []
    async with ServiceSet(options(data)):
        pass


async def test_an_agent_that_the_set_does_not_have_is_refused_by_name(data: Path) -> None:
    async with ServiceSet(options(data)) as up, Http(up.state) as http:
        body = {"request_id": "r1", "content": [{"type": "text", "text": "hello"}], "agent": {"kind": "nosuch"}}
        answer = await http.client.post("/v1/conversations/c1/messages", json=body)
        assert answer.status_code == 422, answer.text
        assert "agent.kind" in answer.text and "nosuch" in answer.text and "there is: " in answer.text
        assert (await http.client.get("/v1/conversations/c1")).status_code == 404, "nothing was sent"


async def test_a_directory_of_the_users_is_where_the_agent_works(data: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "link").symlink_to(project)
    async with ServiceSet(options(data)) as up, Http(up.state) as http:
        workspace = await workspaces.assign(up.state, project)
        assert await workspaces.assign(up.state, tmp_path / "link") == workspace, "the same directory"
        await http.prompt("c1", "r1", "hello", workspace=workspace)
        await http.ended("c1", 1)
        with pytest.raises(CliError, match="not a directory"):
            await workspaces.assign(up.state, tmp_path / "absent")
        with pytest.raises(CliError, match="INVALID"):
            await workspaces.assign(up.state, data)
    assert await asyncio.to_thread((project / ".tether").is_dir)


async def test_an_ephemeral_set_removes_its_directory(data: Path) -> None:
    async with ephemeral() as up:
        root = Path(up.data)
        assert up.ephemeral
        async with Http(up) as http:
            await http.prompt("c1", "r1", "hello")
            await http.ended("c1", 1)
    assert not await asyncio.to_thread(root.exists)
    assert processes_of(root) == []


async def test_a_set_that_is_up_is_used_rather_than_an_ephemeral_one(data: Path) -> None:
    async with ServiceSet(options(data)) as up:
        async with running_or_ephemeral(data) as found:
            assert found == up.state
        with pytest.raises(CliError, match="agents are chosen"):
            async with running_or_ephemeral(data, agents_dir=data):
                pass


async def test_a_user_who_interrupts_the_start_leaves_nothing_behind(data: Path) -> None:
    async def starting() -> None:
        async with ServiceSet(options(data)):
            raise AssertionError("it was to be interrupted")

    task = asyncio.create_task(starting(), name="starting")

    async def begun() -> bool:
        return (Paths(data).logs / "router.log").exists()

    await eventually(begun, "the start of the router")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_of(data) == []
