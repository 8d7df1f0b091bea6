"""CLIs that do not do what they should: each ends with a reason and the proof, and none takes the collector along."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from support_nats import NatsServer
from support_shell import Rig, Run, collector, eventually
from tether.bus import NatsBus
from tether.prompt import AgentSpec

KIND: Final = "acp:bad"
AGENT: Final = """
import json, os, signal, sys, time

mode = sys.argv[1]
out = sys.stdout.buffer


def say(message):
    out.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n")
    out.flush()


def read():
    return json.loads(sys.stdin.readline())


def shake():
    say({"id": read()["id"], "result": {"protocolVersion": 1}})
    say({"id": read()["id"], "result": {"sessionId": "ses_1"}})
    return read()["id"]


def chunk(text):
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    say({"method": "session/update", "params": {"sessionId": "ses_1", "update": update}})


def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


if mode == "complains":
    sys.stderr.write("no licence\\n")
    sys.exit(3)
if mode == "leaves":
    sys.exit(0)
if mode == "silent":
    stay()
prompt = shake()
chunk("one")
if mode == "closes stdout":
    os.close(1)
    stay()
if mode == "dies with a half line":
    out.write(b'{"jsonrpc":"2.0","id":')
    out.flush()
    os.kill(os.getpid(), 9)
if mode == "prints rubbish":
    out.write(b"\\x00\\xff\\xfe not UTF-8\\n" + b"\\x00" * 100 + b"\\n" + b"[" * 100000 + b"\\n{}\\n\\n")
    out.write(b'{"jsonrpc":"2.0","method":"session/update","params":{"x":"' + b"y" * (50 << 20) + b'"}}\\n')
    chunk(" two")
if mode == "leaves a child":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stay()
        os._exit(0)
if mode == "answers twice":
    say({"id": prompt, "result": {"stopReason": "end_turn"}})
    say({"id": 99, "result": {}})
say({"id": prompt, "result": {"stopReason": "end_turn"}})
if mode == "stays":
    stay()
if mode in ("leaves a child", "answers twice", "prints rubbish"):
    sys.stdin.read()
"""


@asynccontextmanager
async def bad(bus: NatsBus, server: NatsServer, tenant: str, root: Path, mode: str) -> AsyncIterator[tuple[Rig, Run]]:
    script = root / "bad.py"
    script.write_text(AGENT)
    command = [sys.executable, str(script), mode]
    if mode == "is missing":
        command = [str(root / "nowhere")]
    elif mode == "is not executable":
        command = [str(script)]
    environment = {"TETHER_AGENTS": json.dumps({KIND: command})}
    async with collector(bus, server.url, tenant, root, environment=environment) as rig:
        run = await rig.admit("hello")
        run.command = run.command.model_copy(update={"agent": AgentSpec(kind=KIND)})
        await rig.ask_start(run)
        yield rig, run


@pytest.mark.parametrize(
    ("mode", "outcome", "code", "words"),
    [
        ("is missing", "failed", "AGENT_START_FAILED", "No such file"),
        ("is not executable", "failed", "AGENT_START_FAILED", "Permission denied"),
        ("complains", "failed", "AGENT_START_FAILED", "exit code 3: no licence"),
        ("leaves", "lost", "EXECUTION_DURABILITY_GAP", "without its terminal line"),
        ("dies with a half line", "lost", "EXECUTION_DURABILITY_GAP", "killed by signal 9"),
        ("prints rubbish", "completed", None, ""),
        ("leaves a child", "completed", None, ""),
        ("answers twice", "completed", None, ""),
    ],
)
async def test_however_a_cli_leaves_its_response_ends_with_the_reason_and_the_proof(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, mode: str, outcome: str, code: str, words: str
) -> None:
    async with bad(bus, nats_server, tenant, tmp_path, mode) as (_, run):
        ended = await run.ended()
        error = ended.body.get("error") or {}
        assert (ended.body["outcome"], error.get("code")) == (outcome, code), run.events
        assert words in error.get("detail", "")
        assert ended.body["proof"]["method"]
        assert len(run.of("response.ended")) == 1
        if mode == "prints rubbish":
            assert [event.body["text"] for event in run.of("text.completed")] == ["one two"]
            assert len(run.of("raw")) <= 6


@pytest.mark.parametrize("mode", ["silent", "closes stdout"])
async def test_a_cli_that_stays_without_a_word_is_running_until_it_is_stopped(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, mode: str
) -> None:
    async with bad(bus, nats_server, tenant, tmp_path, mode) as (rig, run):
        if mode == "closes stdout":
            await run.until("text.delta")
        else:
            await run.until("execution.started")
        await rig.kill()
        await rig.start()

        async def taken() -> bool:  # until the collector knows again what there is
            return (await rig.ask("stop", target=run.target, control="ctl_stop")).status != "rejected"

        await eventually(taken, "a stop that is taken")
        ended = await run.ended(20.0)
        assert ended.body["outcome"] == "stopped"
        assert ended.body["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
