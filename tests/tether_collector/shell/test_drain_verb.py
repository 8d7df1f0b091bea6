"""D1–D4: the verb `drain` on a real collector with real keepers, and what becomes of each execution."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from support_drain import (
    SANDBOX,
    an_order,
    ask_drain,
    drained,
    manifest_of,
    of_conversation,
    reference_entry,
    reference_of,
    registration,
    report_in,
)
from support_nats import NatsServer
from support_shell import Rig, collector, eventually, marked
from tether.bus import NatsBus
from tether.control import Authority
from tether.sandbox import CAN_DRAIN

DEAF = "!ignore SIGTERM\n!ignore SIGINT\n!fork2 60\nready\n!tool build 60000"


async def known_as_ended(rig: Rig, conversation: str) -> bool:
    return any(line["conversation"] == conversation for line in rig.lines("execution_ended"))


async def test_an_idle_sandbox_is_drained_at_once_and_its_collector_ends(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        before = await eventually(partial(registration, rig), "the registration")
        assert CAN_DRAIN in before.capabilities and before.idle_since is not None
        report = await drained(rig, an_order())
        assert (report.state, report.phase, report.executions) == ("done", "over", ())
        assert await rig.exited() == 0
        entry = await reference_entry(rig)
        assert entry is not None and entry.revision == report.checkpoint_revision
        assert report.checkpoint == await reference_of(rig)
        manifest = await manifest_of(rig)
        assert manifest.clean and [file.path for file in manifest.files] == [".tether/journal.sqlite3"]


async def test_d1_each_execution_of_a_mixed_sandbox_has_its_own_outcome(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        over = await rig.begin("done\n!result\n!stay", conversation="over")
        finishing = await rig.begin(f"ready\n!wait_file {gate}\nfinished", conversation="finishing")
        waiting = await rig.begin("before\n!ask write\nafter", conversation="waiting")
        cut = await rig.begin("ready\n!tool build 60000", conversation="cut")
        ended = await rig.begin("hello", conversation="ended")
        await ended.ended()
        await eventually(partial(known_as_ended, rig, "ended"), "an end that is journaled")
        await over.until("response.ended")
        await finishing.until("text.completed")
        await waiting.until("interaction.requested")
        await cut.until("tool.started")
        order = an_order(grace_s=8.0)
        report_in(await ask_drain(rig, order))
        assert (await waiting.until("interaction.resolved")).body["outcome"] == "expired"
        await finishing.fetch()
        assert not finishing.of("response.ended"), "a turn has its share of the grace"
        gate.touch()
        assert (await finishing.ended()).body["outcome"] == "completed"
        report = await drained(rig, order)
        assert report.state == "done" and report.checkpoint is not None
        outcomes = {one.target.conversation: (one.outcome, one.cut, one.interrupted) for one in report.executions}
        assert outcomes == {
            "over": ("completed", False, ()),
            "finishing": ("completed", False, ()),
            "waiting": ("graceful", True, ("write",)),
            "cut": ("graceful", True, ("build",)),
        }
        for run, outcome in ((over, "completed"), (waiting, "drained"), (cut, "drained")):
            end = await run.ended()
            assert end.body["outcome"] == outcome and end.body["proof"]
            assert end.body.get("checkpoint") == (report.checkpoint.checkpoint if outcome == "drained" else None)
            assert run.of("response.ended")[0].body["outcome"] == outcome
            run.check_whole()
        tool = cut.of("tool.completed")[0]
        assert tool.body["status"] == "interrupted"
        assert report.checkpoint.clean
        one = of_conversation(report, "cut")
        assert one.native_session and one.agent == "scripted" and one.spec is not None
        assert one.last_ordinal == cut.events[-1].ordinal - 2, "everything but the receipt and the end"
        assert report.checkpoint.may_use == dict.fromkeys(("over", "finishing", "waiting", "cut", "ended"), 2)
        assert await rig.exited() == 0


async def test_the_end_of_a_drained_execution_comes_after_the_reference(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("before\n!ask write\nafter")
        await run.until("interaction.requested")
        report = await drained(rig, an_order())
        end = await run.ended()
        entry = await reference_entry(rig)
        assert entry is not None and report.checkpoint is not None
        last = await bus.last(f"EVENTS_{tenant}", run.subject)
        assert last is not None and last.stored_at_ns > (await _stored_at(bus, entry.revision))
        assert end.body["checkpoint"] == report.checkpoint.checkpoint


async def _stored_at(bus: NatsBus, revision: int) -> int:
    message = await bus.at("KV_tether_checkpoints", revision)
    assert message is not None
    return message.stored_at_ns


async def test_d2_an_agent_that_ignores_sigterm_is_killed_at_the_end_of_the_grace_and_the_checkpoint_is_not_clean(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin(DEAF)
        await run.until("tool.started")
        report = await drained(rig, an_order(grace_s=1.5))
        [one] = report.executions
        assert one.outcome == "forced" and one.cut and one.interrupted == ("build",)
        assert report.checkpoint is not None and not report.checkpoint.clean
        end = await run.ended()
        assert end.body["outcome"] == "drained" and end.body["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
        assert marked(run.target.execution) == []
        run.check_whole()


async def test_d3_the_same_drain_joins_another_one_hears_of_it_and_starts_are_refused(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"ready\n!wait_file {gate}\nfinished")
        await run.until("text.completed")
        order = an_order(grace_s=40.0)
        first = report_in(await ask_drain(rig, order))
        assert (first.state, first.phase) == ("running", "turn")
        again = report_in(await ask_drain(rig, order))
        joined = report_in(await ask_drain(rig, order, control="ctl_other"))
        other = report_in(await ask_drain(rig, an_order("drn_2", grace_s=0.0)))
        assert {again.drain, joined.drain, other.drain} == {"drn_1"}, "the one that runs"
        conflict = await ask_drain(rig, an_order("drn_1", grace_s=1.0))
        assert conflict.problem is not None and conflict.problem.code == "REQUEST_CONFLICT"
        late = await rig.admit("late", conversation="late")
        refused = await rig.ask_start(late)
        assert refused.problem is not None
        assert (refused.problem.code, refused.problem.retryable) == ("DRAINING", True)

        async def said() -> bool:
            found = await registration(rig)
            return found is not None and found.draining == "drn_1" and found.idle_since is None

        await eventually(said, "a registration that says so")
        gate.touch()
        report = await drained(rig, order)
        assert [one.outcome for one in report.executions] == ["completed"]
        await late.fetch()
        assert not late.events, "nothing of it has begun"
        await run.ended()
        run.check_whole()


async def test_a_message_that_comes_during_a_drain_does_not_join_a_turn_that_may_be_cut(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("ready\n!tool build 60000")
        await run.until("tool.started")
        order = an_order(grace_s=4.0)
        assert report_in(await ask_drain(rig, order)).phase == "turn"
        message = {"request": "req_late", "content": [{"type": "text", "text": "late"}]}
        refused = await rig.ask("interject", target=run.target, payload=message)
        assert refused.problem is not None
        assert (refused.problem.code, refused.problem.retryable) == ("DRAINING", True)
        assert (await drained(rig, order)).state == "done"
        await run.ended()
        assert not any("late" in line.line for process in run.processes() for line in process.stdin)


async def test_a_drain_is_ordered_by_the_newest_sandbox_record_alone(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        nobody = await ask_drain(rig, an_order(), authority=Authority())
        assert nobody.problem is not None and nobody.problem.code == "FORBIDDEN"
        bad = await rig.ask("drain", payload={"drain": "drn_1", "grace_s": -1}, authority=SANDBOX)
        assert bad.problem is not None and [one.field for one in bad.problem.fields] == ["payload.grace_s"]
        run = await rig.begin("hello")
        assert (await run.ended()).body["outcome"] == "completed", "nothing is drained by that"


async def test_d4_a_turn_that_ends_on_sigterm_keeps_its_result_and_a_crash_is_not_called_drained(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        crashing = await rig.begin(f"ready\n!wait_file {gate}\n!crash SIGKILL", conversation="crashing")
        completing = await rig.begin(f"ready\n!wait_file {gate}\nfinished", conversation="completing")
        await crashing.until("text.completed")
        await completing.until("text.completed")
        order = an_order(grace_s=30.0)
        report_in(await ask_drain(rig, order))
        gate.touch()
        report = await drained(rig, order)
        assert (await crashing.ended()).body["outcome"] == "lost"
        assert (await completing.ended()).body["outcome"] == "completed"
        assert of_conversation(report, "crashing").detail == "lost"
        assert not any(one.cut for one in report.executions)


async def test_a_stop_during_a_drain_stops_sooner_and_is_called_a_stop(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin(DEAF)
        await run.until("tool.started")
        order = an_order(grace_s=0.2)
        longer = order.model_copy(update={"grace_s": 120.0})
        report_in(await ask_drain(rig, longer))
        stopping = asyncio.create_task(rig.ask("stop", target=run.target), name="stop")
        assert (await run.ended()).body["outcome"] == "stopped"
        assert (await stopping).status == "settled"
        report = await drained(rig, longer)
        assert [(one.outcome, one.cut) for one in report.executions] == [("completed", False)]


async def test_the_idle_clock_counts_from_the_last_end_and_survives_restarts(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:

        async def since() -> int | None:
            found = await registration(rig)
            instances = [line["instance"] for line in rig.lines("service_ready")]
            current = found is not None and found.instance == instances[-1]
            return found.idle_since if found is not None and current else None

        booted = await eventually(since, "an idle clock of the boot")
        gate = tmp_path / "gate"
        run = await rig.begin(f"ready\n!wait_file {gate}")

        async def none() -> bool:
            found = await registration(rig)
            return found is not None and found.idle_since is None

        await eventually(none, "no idle clock while an execution lives")
        gate.touch()
        end = await run.ended()
        idle = await eventually(since, "an idle clock of the last end")
        assert idle == end.at > booted
        assert await rig.hand_over() == 0
        await rig.start()
        assert await eventually(since, "the clock after a restart") == idle
