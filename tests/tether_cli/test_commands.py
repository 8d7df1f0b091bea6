"""`tether up`, `down`, `doctor`, `topology`, `nats-context`, `version` as a user types them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support_local_set import Http, collector_of, eventually, processes_of
from tether.nkey_jwt import read_credentials
from tether.processes import is_running, send_signal
from tether_cli import state
from tether_cli.state import SetState

pytestmark = pytest.mark.timeout(180)


def tether(*arguments: str, data: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tether_cli", *arguments],
        env={**os.environ, "TETHER_CLI_DATA": str(data), **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def value_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON on stdout; nothing else may be there."""
    return json.loads(done.stdout)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "data"
    yield root
    tether("down", data=root)
    assert processes_of(root) == []


def up(data: Path) -> SetState:
    done = tether("up", "--detach", data=data)
    assert done.returncode == 0, done.stderr
    found = state.running(data)
    assert found is not None
    return found


async def test_a_detached_set_works_is_told_and_goes_down_without_a_trace(data: Path) -> None:
    done = tether("up", "--detach", "--json", data=data)
    assert done.returncode == 0, done.stderr
    told = value_of(done)
    found = state.require(data)
    assert told == found.public()
    assert found.token not in done.stdout + done.stderr
    async with Http(found) as http:
        await http.prompt("c1", "r1", "hello")
        await http.ended("c1", 1)
    again = tether("up", "--detach", data=data)
    assert again.returncode == 1
    assert f"pid {found.supervisor.pid}" in again.stderr
    down = tether("down", "--json", data=data)
    assert value_of(down) == {"was_up": True, "wiped": False}
    assert processes_of(data) == []
    assert value_of(tether("down", "--json", data=data)) == {"was_up": False, "wiped": False}


async def test_what_was_said_is_there_after_the_set_was_down_and_is_gone_after_a_wipe(data: Path) -> None:
    async with Http(up(data)) as http:
        await http.prompt("c1", "r1", "hello")
        await http.ended("c1", 1)
    tether("down", data=data)
    async with Http(up(data)) as http:
        assert await http.outcomes("c1") == ["completed"]
    (data / "mine.txt").write_text("not Tether's")
    assert tether("down", "--wipe", data=data).returncode == 0
    assert sorted(os.listdir(data)) == ["lock", "mine.txt"]  # noqa: PTH208
    async with Http(up(data)) as http:
        assert await http.conversation("c1") == {}


async def test_a_set_takes_its_public_names_from_the_shell_and_tells_what_it_does_not_take(data: Path) -> None:
    shell = {"TETHER_HTTP_HOSTS": "tether.internal", "TETHER_HTTP_PORT": "1"}
    done = tether("up", "--detach", data=data, **shell)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of this shell is not used") == 1 and "TETHER_HTTP_PORT of this shell" in done.stderr
    found = state.require(data)
    headers = {"Authorization": f"Bearer {found.token}"}
    async with httpx2.AsyncClient(base_url=found.http_url, headers=headers) as http:
        statuses = [
            (await http.get("/v1/executions", headers={"Host": host})).status_code
            for host in ("tether.internal", "elsewhere.internal")
        ]
    assert statuses == [200, 403]


async def test_what_is_named_wrongly_is_told_with_where_to_look(data: Path) -> None:
    home = data.parent  # where no agent is installed
    bare = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "XDG_CONFIG_HOME": str(home), "PATH": str(home)}
    started = tether("up", "--detach", data=data, **bare)
    assert started.returncode == 0, started.stderr
    retried = tether("webhooks", "--retry", "chat/ntf_1", data=data)
    assert retried.returncode == 2
    assert "`tether webhooks` lists notifications" in retried.stderr
    # Whoever names no agent may mean one that runs in the conversation: it is sent, and what came of it is told.
    unstarted = tether("run", "hello", "--conversation", "c1", data=data)
    assert unstarted.returncode == 2
    assert "agent.kind: there is no agent claude; there is: scripted" in unstarted.stderr


def test_an_agent_that_the_set_does_not_have_is_refused_before_anything_is_sent(data: Path, tmp_path: Path) -> None:
    up(data)
    arguments = ("run", "hello", "--agent", "nosuch", "--workspace", str(tmp_path))
    refused = tether(*arguments, data=data)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert line.startswith("tether: --agent nosuch: the set has none of this name; it has scripted")
    assert "`tether agents list`" in line
    error = json.loads(tether(*arguments, "--json", data=data).stderr)["error"]
    assert "nosuch" in error["message"] and error["exit_code"] == 2
    assert value_of(tether("ps", "--all", "--json", data=data))["executions"] == []
    assert not any((data / "workspaces").iterdir()) and not any(tmp_path.glob("*/.tether"))


def test_run_says_first_that_an_agent_has_no_key(data: Path, tmp_path: Path) -> None:
    agents = tmp_path / "agents.toml"
    agents.write_text(
        '[agents.claude]\ncommand = ["/nowhere/claude"]\n[agents.codex]\ncommand = ["/nowhere/codex"]\n'
        '[agents."acp:mine"]\ncommand = ["/nowhere/mine"]\n'
    )
    shell = {"XDG_CONFIG_HOME": str(tmp_path), "OPENAI_API_KEY": "sk-do-not-show"}
    keys = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "CODEX_API_KEY")
    started = tether("up", "--detach", "--agents-file", str(agents), data=data, **shell, **dict.fromkeys(keys, ""))
    assert started.returncode == 0, started.stderr
    without = tether("run", "hello", "--agent", "claude", data=data)
    assert without.stderr.splitlines()[0].startswith("tether: claude has no key")
    assert "set ANTHROPIC_API_KEY in the shell that starts the set" in without.stderr.splitlines()[0]
    as_json = tether("run", "hello", "--agent", "claude", "--json", data=data)
    assert "claude has no key" in json.loads(as_json.stderr.splitlines()[0])["warning"]["message"]
    for line in as_json.stdout.splitlines():
        assert "warning" not in json.loads(line)
    for agent in ("codex", "acp:mine", "scripted"):
        assert "has no key" not in tether("run", "hello", "--agent", agent, data=data).stderr
    assert "sk-do-not-show" not in (data / "state.json").read_text()


async def test_the_logs_retention_is_the_shells_and_is_no_difference(data: Path) -> None:
    from tether.bus import connect

    retention = {"TETHER_EVENTS_MAX_AGE_S": "3600", "TETHER_EVENTS_MAX_BYTES": str(32 << 20)}
    done = tether("up", "--detach", data=data, **retention)
    assert done.returncode == 0 and "is not used" not in done.stderr, done.stderr
    found = state.require(data)
    assert (found.events_max_age_s, found.events_max_bytes) == (3600, 32 << 20)
    async with await connect(found.nats_url, name="test", creds_file=found.nats_creds_file) as bus:
        config = (await bus.api("$JS.API.STREAM.INFO.EVENTS_default"))["config"]
    assert isinstance(config, dict)
    assert (config["max_age"], config["max_bytes"]) == (3600 * 10**9, 32 << 20)
    # From a shell that says nothing of it: the set's own counts.
    assert value_of(tether("topology", "diff", "--json", data=data)) == {"differences": []}
    checks = {check["name"]: check for check in value_of(tether("doctor", "--json", data=data))["checks"]}
    assert checks["topology"]["verdict"] == "ok" and "80 MiB are reserved" in checks["disk"]["detail"]
    assert tether("topology", "ensure", data=data).returncode == 0
    tether("down", data=data)
    up(data)
    assert value_of(tether("topology", "diff", "--json", data=data)) == {"differences": []}
    assert state.require(data).events_max_age_s == 7 * 24 * 3600


@pytest.mark.parametrize(
    ("name", "value", "code", "told"),
    [
        ("TETHER_EVENTS_MAX_AGE_S", "7d", 2, "TETHER_EVENTS_MAX_AGE_S must be a whole number of seconds"),
        ("TETHER_EVENTS_MAX_BYTES", "-1", 2, "TETHER_EVENTS_MAX_BYTES must be a whole number of bytes"),
        ("TETHER_EVENTS_MAX_AGE_S", "5", 1, "TETHER_EVENTS_MAX_AGE_S: must be at least 60"),
    ],
)
def test_a_retention_that_cannot_be_is_named_when_the_set_starts(
    data: Path, name: str, value: str, code: int, told: str
) -> None:
    done = tether("up", "--detach", data=data, **{name: value})
    assert done.returncode == code
    assert told in done.stderr and "Traceback" not in done.stderr
    assert processes_of(data) == []


def test_a_data_directory_that_cannot_be_written_is_told_in_one_line(data: Path) -> None:
    (data / "lock").mkdir(parents=True)
    done = tether("up", "--detach", data=data)
    (data / "lock").rmdir()
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"tether: cannot write {data / 'lock'}: Is a directory; choose another directory with --data"
    ]


async def test_a_foreground_set_ends_in_order_on_ctrl_c(data: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tether_cli", "up", "--log-format", "json"),
        env={**os.environ, "TETHER_CLI_DATA": str(data)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def is_up() -> bool:
        return state.running(data) is not None

    try:
        await eventually(is_up, "the set")
    finally:
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 0, err
    assert b"tether is up: http://127.0.0.1:" in out
    assert b"next:" in out
    services = {json.loads(line)["service"] for line in err.splitlines() if line.startswith(b"{")}
    assert {"router", "agent", "backend"} <= services  # nats-server has nothing to warn of


async def test_killing_the_set_ends_its_services_and_the_next_one_goes_on_with_the_running_execution(
    data: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = up(data)
    async with Http(first) as http:
        await http.prompt("c1", "r1", f"before\n!wait_file {gate}\nafter")

        async def begun() -> bool:
            return await http.texts("c1") == ["before"]

        await eventually(begun, "the first text")
    collector = collector_of(data)
    send_signal(first.supervisor, signal.SIGKILL)

    async def services_gone() -> bool:
        return not any(is_running(child) for child in first.children.values())

    await eventually(services_gone, "the end of the services")
    told = tether("ps", data=data)
    assert told.returncode == 3
    assert "was killed" in told.stderr and "tether down" in told.stderr
    assert "was killed" in tether("doctor", data=data).stdout
    assert is_running(collector), "a sandbox outlives its set"
    async with Http(up(data)) as http:
        assert collector_of(data) == collector
        gate.write_text("")
        await http.ended("c1", 1)
        assert await http.texts("c1") == ["before", "after"]


async def test_down_after_a_killed_set_ends_the_sandboxes_that_it_left(data: Path) -> None:
    first = up(data)
    async with Http(first) as http:
        await http.prompt("c1", "r1", "working\n!hang")

        async def working() -> bool:
            return await http.texts("c1") == ["working"]

        await eventually(working, "the first text")
    send_signal(first.supervisor, signal.SIGKILL)
    down = tether("down", data=data)
    assert down.returncode == 0, down.stderr
    assert processes_of(data) == []
    async with Http(up(data)) as http:
        await http.ended("c1", 1)  # the next set tells how it ended
        [execution] = (await http.conversation("c1"))["executions"]
        assert execution["proof"] is not None


def test_a_set_that_cannot_start_detached_says_why(data: Path, tmp_path: Path) -> None:
    agents = tmp_path / "agents.toml"
    agents.write_text('[agents.claude]\ncommand = ["claude"]\nkey_file = "/nowhere/key"\n')
    done = tether("up", "--detach", "--agents-file", str(agents), data=data)
    assert done.returncode == 1, done.stderr
    assert "/nowhere/key" in done.stderr
    assert processes_of(data) == []


@pytest.mark.parametrize("how", [("--detach",), ()])
def test_a_port_that_is_taken_is_said_in_one_line_before_anything_starts(data: Path, how: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = tether("up", *how, "--port", str(port), data=data)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"port {port}" in done.stderr and "--port" in done.stderr
    assert processes_of(data) == []


async def test_topology_and_doctor_name_what_differs_and_ensure_puts_it_right(data: Path) -> None:
    from tether.bus import connect

    found = up(data)
    assert value_of(tether("topology", "diff", "--json", data=data)) == {"differences": []}
    doctor = tether("doctor", "--json", data=data)
    checks = {check["name"]: check for check in value_of(doctor)["checks"]}
    assert doctor.returncode == 0, doctor.stdout
    assert checks["topology"]["verdict"] == checks["services"]["verdict"] == "ok"
    async with await connect(found.nats_url, name="test", creds_file=found.nats_creds_file) as bus:
        await bus.delete_stream("KV_tether_checkpoints")
    diff = tether("topology", "diff", "--json", data=data)
    assert diff.returncode == 1
    assert "tether_checkpoints" in str(value_of(diff)["differences"])
    doctor = tether("doctor", "--json", data=data)
    assert doctor.returncode == 1
    assert not value_of(doctor)["ok"]
    assert tether("topology", "ensure", data=data).returncode == 0
    assert tether("topology", "diff", data=data).returncode == 0


def test_the_nats_context_is_a_closed_file_that_names_credentials_and_holds_none(data: Path, tmp_path: Path) -> None:
    found = up(data)
    done = tether("nats-context", "--json", data=data, XDG_CONFIG_HOME=str(tmp_path / "config"))
    told = value_of(done)
    path = Path(told["file"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["creds"] == found.nats_creds_file
    creds = Path(found.nats_creds_file)
    assert stat.S_IMODE(creds.stat().st_mode) == 0o600
    assert read_credentials(creds.read_text())[1].seed not in done.stdout + path.read_text()
    assert tether("nats-context", "--name", "../x", data=data).returncode == 2


@pytest.mark.parametrize(
    "arguments", [("topology", "diff"), ("topology", "ensure"), ("nats-context",), ("topology", "diff", "--json")]
)
def test_a_command_that_needs_a_set_ends_with_3_where_none_is_up(data: Path, arguments: tuple[str, ...]) -> None:
    done = tether(*arguments, data=data)
    assert done.returncode == 3
    assert "tether up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "--port", "70000"),
        ("up", "--log-format", "xml"),
        ("nosuch",),
        ("up", "--agents-file", "/nowhere.toml"),
        ("up", "--detach", "--agents-file", "/nowhere.toml"),
        ("up", "--agents-dir", "/nowhere"),
    ],
)
def test_wrong_usage_ends_with_2_and_no_traceback(data: Path, arguments: tuple[str, ...]) -> None:
    done = tether(*arguments, data=data)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("up", "--port", "70000"), "'--port': must be at most 65535"),
        (("webhooks", "--limit", "many"), "'--limit': must be a whole number"),
        (("ps", "--limit", "0"), "'--limit': must be at least 1"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_told_in_our_words(
    data: Path, arguments: tuple[str, ...], told: str
) -> None:
    done = tether(*arguments, data=data)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(told)


def test_doctor_tells_where_a_key_comes_from_and_never_the_key(data: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "claude"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\n")
    config = tmp_path / "config" / "tether"
    config.mkdir(parents=True)
    (config / "agents.toml").write_text(f'[agents.claude]\ncommand = ["{fake}"]\nenv_from = ["ANTHROPIC_API_KEY"]\n')
    env = {"ANTHROPIC_API_KEY": "sk-do-not-show", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = tether("doctor", data=data, **env)
    assert "key from $ANTHROPIC_API_KEY" in done.stdout
    assert "sk-do-not-show" not in done.stdout + done.stderr


def test_a_data_directory_that_cannot_be_made_is_said_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = tether("up", data=tmp_path / "file" / "data")
    assert done.returncode == 1
    assert "--data" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_topology_show_need_no_set(data: Path) -> None:
    assert value_of(tether("version", "--json", data=data))["tether"]
    shown = value_of(tether("topology", "show", "--json", data=data))
    assert {"PROMPTS", "COMMANDS", "EVENTS_default"} <= {stream["name"] for stream in shown["streams"]}


def test_a_damaged_state_file_is_no_set_and_does_not_hinder_the_next(data: Path) -> None:
    data.mkdir()
    for damaged in (b"", b"{", b"[]", b'{"version": 1}', b"\xff\xfe"):
        (data / "state.json").write_bytes(damaged)
        assert state.running(data) is None
    assert tether("down", data=data).returncode == 0
    up(data)


@pytest.mark.parametrize("missing", ["typer", "httpx2"])
def test_a_command_without_its_extra_says_which_one_to_install(tmp_path: Path, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['tether', 'ps']; "
    code += "from tether_cli.__main__ import main; main()"
    env = {**os.environ, "TETHER_CLI_DATA": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"tether: {missing} is not installed; the command needs the extra: tether[cli]\n"
