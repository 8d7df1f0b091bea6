"""A key that an agent prints everywhere is in no event, blob, record, log or argument list; nor after a restart."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support_nats import NatsServer
from support_shell import Rig, Run, collector, eventually
from tether import events as ev
from tether.bus import NatsBus
from tether.errors import Code
from tether.fold import ExecutionFold
from tether.prompt import AgentSpec
from tether_collector.keeper import records
from tether_collector.spool_reader import SpoolReader

AGENT = Path(__file__).parents[2] / "support_leaky_agent.py"
KEY = "tether-canary-5d0c-91ab-77fe-e2"
SHAPED = "sk-ant-api03-" + "cAnArY_-" * 10
CORP = "corp_canarycanary"
SECRETS = (KEY, SHAPED, CORP)


def equip(rig: Rig, tmp_path: Path, piece: int, key: str = KEY) -> Path:
    """The agent's environment, as a provider writes it; the gate that its second half waits for."""
    gate = tmp_path / "gate"
    variables = {
        "SCRIPTED_API_KEY": key,
        "LEAK_NAMES": "SCRIPTED_API_KEY",
        "LEAK_TEXT": f" {SHAPED} {CORP}",
        "LEAK_PIECE": str(piece),
        "LEAK_GATE": str(gate),
    }
    path = tmp_path / "agent-env.json"
    path.touch(0o600)
    path.write_text(json.dumps({"scripted": variables}))
    rig.set_environment(
        TETHER_AGENTS=json.dumps({"scripted": [sys.executable, str(AGENT)]}),
        TETHER_AGENT_ENV_FILE=str(path),
        TETHER_COLLECTOR_REDACT=json.dumps({"corp": "corp_[a-z]{8,32}"}),
    )
    return gate


def holding(data: bytes) -> list[str]:
    return [secret for secret in SECRETS if secret.encode() in data]


async def stored(bus: NatsBus) -> dict[str, list[bytes]]:
    """Every message of every stream."""
    names: Any = (await bus.api("$JS.API.STREAM.NAMES"))["streams"]
    found: dict[str, list[bytes]] = {}
    for name in names:
        after = 0
        messages = found[name] = []
        while batch := await bus.read(name, after, ">"):
            messages += [f"{m.subject} {dict(m.headers)} ".encode() + m.data for m in batch]
            after = batch[-1].sequence
    return found


def argument_lists() -> list[bytes]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


def metas(rig: Rig) -> list[bytes]:
    """What describes the records of every spool."""
    found: list[bytes] = []
    for folder in rig.keeper_folders():
        reader, after = SpoolReader(folder), 0
        try:
            while (batch := reader.read(after, records.DATA_BYTES_MAX)).records:
                found += [json.dumps(record.meta).encode() for record in batch.records]
                after = batch.records[-1].number
        finally:
            reader.close()
    return found


async def ended(rig: Rig, run: Run) -> None:
    asked = await run.until("interaction.requested")
    payload = {"interaction": asked.body["interaction"], "decision": "allow"}

    async def answered() -> bool:
        reply = await rig.ask("answer", target=run.target, payload=payload, control="ctl_answer")
        return reply.status in ("delivered", "settled")

    await eventually(answered, "an answer that is taken")
    await run.ended()


async def test_a_key_that_an_agent_prints_everywhere_is_in_no_store(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        gate = equip(rig, tmp_path, 5)
        await rig.start()
        run = await rig.begin("tell everything")
        await run.until("text.delta")
        arguments = await asyncio.to_thread(argument_lists)
        assert not any(holding(line) for line in arguments)
        gate.touch()
        await ended(rig, run)
        snapshot = await run.snapshot()
        found = {name: [holding(message) for message in messages] for name, messages in (await stored(bus)).items()}
        assert {name for name, some in found.items() if any(some)} == set()
        assert any(name.startswith("BLOBS_") and messages for name, messages in (await stored(bus)).items())
        assert not holding(snapshot.model_dump_json().encode())
        assert not holding(rig.log.encode())
        files = [path for path in rig.directory.rglob("*") if path.is_file()]
        leaky = {path.suffix for path in files if holding(path.read_bytes())}
        assert leaky == {".seg"}, "the spool is what the agent printed, and stays on its volume"
        told = metas(rig)
        assert told
        assert not any(holding(meta) for meta in told)
    check_marks(run)


def check_marks(run: Run) -> None:
    """Every place tells that something was there, and how much."""
    told = {event.type: event.body for event in run.events if event.body.get("redacted")}
    assert {ev.TEXT_COMPLETED, ev.REASONING_COMPLETED, ev.TOOL_STARTED, ev.TOOL_COMPLETED, ev.RAW} <= set(told)
    assert {ev.TEXT_DELTA, ev.TOOL_PROGRESS, ev.INTERACTION_REQUESTED, ev.RESPONSE_ENDED} <= set(told)
    marks = "[redacted:SCRIPTED_API_KEY] [redacted:anthropic_key] [redacted:corp]"
    text = run.of(ev.TEXT_COMPLETED, segment="s1")[0].body
    assert text["text"] == f"the key is SCRIPTED_API_KEY={marks}, once more: SCRIPTED_API_KEY={marks}."
    assert text["redacted"] == 6
    assert "".join(event.body["text"] for event in run.of(ev.TEXT_DELTA, segment="s1")) == text["text"]
    progress = "".join(event.body["text"] for event in run.of(ev.TOOL_PROGRESS, tool="t2"))
    assert progress == f"only told: SCRIPTED_API_KEY={marks}"
    assert run.of(ev.TOOL_COMPLETED, tool="t1")[0].body["blob"], "what went to the artifacts was redacted before"


@pytest.mark.parametrize("hand_over", [False, True])
async def test_a_replay_redacts_as_before_whatever_keys_and_patterns_are_by_then(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, hand_over: bool
) -> None:
    """The next collector has another key and no patterns; what it tells of the same execution is what the first would
    have told."""
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        gate = equip(rig, tmp_path, 11)
        await rig.start()
        run = await rig.begin("tell everything")
        warned = await run.until("raw")
        assert warned.body["redacted"] >= 2
        await (rig.hand_over() if hand_over else rig.kill())
        equip(rig, tmp_path, 11, key="another-key-altogether-1f")
        rig.set_environment(TETHER_COLLECTOR_REDACT="{}", TETHER_COLLECTOR_REDACT_BUILTIN="false")
        gate.touch()
        await rig.start()
        await ended(rig, run)
        snapshot = await run.snapshot()
        leaks = {name for name, messages in (await stored(bus)).items() if any(holding(m) for m in messages)}
        assert leaks == set()
    check_marks(run)
    fold = ExecutionFold()
    for event in run.events:
        fold.apply(event)
    assert snapshot.state == fold.freeze()


async def test_an_argument_that_could_run_commands_is_refused_by_name_and_nothing_is_started(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    allowed = json.dumps({"scripted": ["--home="]})
    environment = {"TETHER_COLLECTOR_AGENT_ARGS_ALLOW": allowed}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        run = await rig.admit("hello")
        run.command = run.command.model_copy(update={"agent": AgentSpec(kind="scripted", args=("--truth", "/etc"))})
        reply = await rig.ask_start(run)
        assert (reply.status, reply.problem and reply.problem.code) == ("rejected", Code.INVALID)
        assert reply.problem is not None
        assert "--truth is not allowed" in reply.problem.detail
        assert not rig.keeper_folders()
        args = ("--home", str(tmp_path / "elsewhere"))
        run.command = run.command.model_copy(update={"agent": AgentSpec(kind="scripted", args=args)})
        assert (await rig.ask_start(run)).status in ("accepted", "delivered", "settled")
        await run.ended()
