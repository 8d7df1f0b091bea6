"""Exact stop: the named execution's whole tree, with proof, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

from support_nats import NatsServer
from support_shell import collector, eventually, marked
from tether.bus import NatsBus
from tether.limits import STOP_INTERRUPT_S, STOP_TERM_S


async def test_a_tree_that_ignores_sigterm_is_proven_gone_soon_after_the_escalation(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!ignore SIGTERM\n!ignore SIGINT\n!fork2\n!child\nready\n!stay")
        await run.until("text.completed")
        assert len(marked(run.target.execution)) >= 3
        began_s = time.monotonic()
        reply = await rig.ask("stop", target=run.target)
        ended = await run.ended()
        took_s = time.monotonic() - began_s
        assert ended.body["outcome"] == "stopped"
        assert ended.body["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
        assert marked(run.target.execution) == []
        assert took_s < STOP_INTERRUPT_S + STOP_TERM_S + 3.0, took_s
        assert reply.status in ("delivered", "settled")
        assert (await rig.ask("receipt", payload={"control": reply.control})).status == "settled"


async def test_of_two_executions_only_the_named_one_is_stopped(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        stopped = await rig.begin("ready\n!hang", conversation="c1")
        other = await rig.begin(f"ready\n!wait_file {gate}\n!say done", conversation="c2")
        await stopped.until("text.completed")
        await other.until("text.completed")
        reply = await rig.ask("stop", target=stopped.target)
        assert (await stopped.ended()).body["outcome"] == "stopped"
        await other.fetch()
        assert not other.of("response.ended") and marked(other.target.execution)
        gate.touch()
        assert (await other.ended()).body["outcome"] == "completed"
        other.check_whole()
        assert reply.status == "settled"


async def test_a_stop_of_another_generation_is_stale_and_changes_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"ready\n!wait_file {gate}")
        await run.until("text.completed")
        older = run.target.model_copy(update={"execution_generation": 7})
        reply = await rig.ask("stop", target=older)
        assert reply.problem is not None and reply.problem.code == "TARGET_STALE"
        assert reply.target is not None and reply.target.execution_generation == run.target.execution_generation
        previous = run.target.model_copy(update={"execution": "exe_older"})
        reply = await rig.ask("stop", target=previous)
        assert reply.problem is not None and reply.problem.code == "TARGET_STALE"
        gate.touch()
        assert (await run.ended()).body["outcome"] == "completed"


async def test_a_stop_that_loses_to_the_end_keeps_the_result(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("hello")
        await run.ended()

        async def known_as_ended() -> bool:
            reply = await rig.ask("stop", target=run.target)
            assert reply.problem is not None
            return reply.problem.code == "SESSION_STREAM_NOT_ACTIVE" and reply.problem.context["ended"] is True

        await eventually(known_as_ended, "a refusal that says that it has ended")
        assert run.of("response.ended")[0].body["outcome"] == "completed"


async def test_a_finished_agent_that_stays_is_ended_by_the_watchdog(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("done\n!result\n!stay")
        await run.until("response.ended")
        ended = await run.ended()
        assert ended.body["outcome"] == "completed" and ended.body["proof"]
        assert marked(run.target.execution) == []
