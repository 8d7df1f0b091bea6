"""From a start to the end of an execution, with everything real: bus, keeper, agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from support_nats import NatsServer
from support_shell import Rig, Run, collector, eventually
from tether import subjects
from tether.bus import NatsBus
from tether.control import ControlReply
from tether.cursor import tag_of
from tether.fold import ExecutionFold
from tether.sandbox import Registration
from tether.snapshot import Snapshot


async def answer(rig: Rig, run: Run, interaction: str, decision: str = "allow", **fields: object) -> ControlReply:
    payload = {"interaction": interaction, "decision": decision, **fields}
    return await rig.ask("answer", target=run.target, payload=payload)


async def test_a_prompt_runs_to_its_end(bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("hello")
        ended = await run.ended()
        assert ended.body["outcome"] == "completed"
        assert ended.body["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
        assert run.events[0].type == "execution.started"
        assert [event.body["text"] for event in run.of("text.completed")] == ["You said: hello"]
        run.check_whole()
        assert (rig.state_dir / ".gitignore").read_text() == "*\n"


async def test_an_approval_is_asked_answered_and_its_tool_runs_once(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!ask write")
        asked = await run.until("interaction.requested")
        reply = await answer(rig, run, asked.body["interaction"])
        assert reply.status in ("delivered", "settled")
        await run.ended()
        [resolved] = run.of("interaction.resolved")
        assert (resolved.body["outcome"], resolved.body["control"]) == ("answered", reply.control)
        assert [event.body["status"] for event in run.of("control.receipt", control=reply.control)] == [
            "accepted",
            "delivered",
            "settled",
        ]
        run.check_whole()
        late = await rig.ask("receipt", payload={"control": reply.control})
        assert late.status == "settled"


async def test_a_denied_tool_does_not_run(bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!ask write")
        asked = await run.until("interaction.requested")
        await answer(rig, run, asked.body["interaction"], "deny", text="not today")
        await run.ended()
        assert run.of("interaction.resolved")[0].body["outcome"] == "denied"
        assert run.of("tool.completed")[0].body["status"] == "error"
        run.check_whole()
        assert not (rig.truth / "ledger.ndjson").read_text()


async def test_of_two_answers_one_wins_and_the_other_is_refused_by_name(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!ask write\n!sleep 0.3")
        asked = await run.until("interaction.requested")
        key = asked.body["interaction"]
        replies = await asyncio.gather(answer(rig, run, key), answer(rig, run, key, "deny"))
        refused = [reply for reply in replies if reply.status == "rejected"]
        won = [reply for reply in replies if reply.status != "rejected"]
        assert len(refused) == len(won) == 1
        assert refused[0].problem is not None and refused[0].problem.code == "INTERACTION_SETTLED"
        third = await answer(rig, run, key)
        assert third.result is not None and third.result["winner"]["control"] == won[0].control
        await run.ended()
        assert run.of("interaction.resolved")[0].body["control"] == won[0].control


async def test_the_same_control_again_has_no_second_effect_and_another_payload_is_a_conflict(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!ask write\n!ask write")
        asked = await run.until("interaction.requested")
        payload = {"interaction": asked.body["interaction"], "decision": "allow"}
        first = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
        again = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
        assert {first.status, again.status} <= {"delivered", "settled"}
        other = await rig.ask("answer", target=run.target, payload={**payload, "decision": "deny"}, control="ctl_1")
        assert other.problem is not None and other.problem.code == "REQUEST_CONFLICT"

        async def second() -> str | None:
            await run.fetch()
            open_ = {event.body["interaction"] for event in run.of("interaction.requested")} - {
                asked.body["interaction"]
            }
            return next(iter(open_), None)

        await answer(rig, run, await eventually(second, "the second ask"))
        await run.ended()
        run.check_whole()


async def test_an_interjection_joins_the_running_execution(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"first\n!wait_file {gate}")
        await run.until("text.completed")
        payload = {"request": "req_more", "content": [{"type": "text", "text": "!say second"}]}
        reply = await rig.ask("interject", target=run.target, payload=payload)
        assert reply.status in ("delivered", "settled")
        gate.touch()
        await run.ended()
        texts = [event.body["text"] for event in run.of("text.completed")]
        assert texts == ["first", "second"]
        run.check_whole()


async def test_an_interrupt_ends_the_turn(bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("first\n!hang")
        await run.until("text.completed")
        reply = await rig.ask("interrupt", target=run.target)
        assert reply.status in ("delivered", "settled")
        ended = await run.ended()
        assert ended.body["outcome"] == "cancelled"
        run.check_whole()


async def test_a_large_output_goes_to_the_blob_store_before_its_event(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!tool big 0 400000\n!tool big 0 400000")
        await run.ended()
        bodies = [event.body for event in run.of("tool.completed")]
        for body in bodies:
            assert len(body["output"]) == 8192 and body["blob"]["bytes"] == 400_000
        digest = bodies[0]["blob"]["digest"]
        stream = subjects.blobs_stream(tenant)
        manifest = await bus.last(stream, subjects.blob(tenant, "w1", "artifact", digest, "manifest"))
        assert manifest is not None
        facts = json.loads(manifest.data)
        chunks = [
            await bus.last(stream, subjects.blob(tenant, "w1", "artifact", digest, number))
            for number in range(facts["chunks"])
        ]
        data = b"".join(chunk.data for chunk in chunks if chunk is not None)
        assert sha256(data).hexdigest() == digest and len(data) == facts["bytes"] == 400_000
        assert data.startswith(bodies[0]["output"].encode())
        run.check_whole()


async def test_a_flood_is_told_whole_and_in_order(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        began_s = time.monotonic()
        run = await rig.begin("!flood 12000")
        await run.ended(60.0)
        took_s = time.monotonic() - began_s
        run.check_whole()
        assert run.events[-1].ordinal > 12_000
        record_property("lines_per_s", round(12_000 / took_s))
        print(f"{12_000 / took_s:.0f} lines/s in {len(run.frames)} frames")


async def test_registration_discovery_and_snapshot_say_what_is_there(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("first\n!ask write")
        asked = await run.until("interaction.requested")
        key = f"$KV.tether_sandboxes.{subjects.registration_key(tenant, 'w1', run.target.sandbox)}"

        async def registered(state: str) -> Registration | None:
            message = await bus.last("KV_tether_sandboxes", key)
            found = None if message is None else Registration.model_validate_json(message.data)
            states = [] if found is None else [entry.state for entry in found.executions]
            return found if states == [state] else None

        waiting: Registration = await eventually(lambda: registered("waiting"), "a registration that waits")
        assert waiting.boot == rig.boot and waiting.executions[0].pending_interactions == 1
        assert "executionSnapshotAttach" in waiting.capabilities and waiting.agents == ("scripted",)

        reply = await rig.ask("snapshot", target=run.target)
        assert reply.result is not None
        snapshot = Snapshot.model_validate(reply.result["snapshot"])
        assert [item.id for item in snapshot.state.pending()] == [asked.body["interaction"]]
        assert snapshot.watermark.sequence == run.sequences[-1] and snapshot.watermark.tag
        assert snapshot.watermark.ordinal == run.events[-1].end and not snapshot.terminal

        await answer(rig, run, asked.body["interaction"])
        await run.ended()
        await eventually(lambda: registered("ended"), "a registration with the end")
        reply = await rig.ask("snapshot", target=run.target)
        assert reply.result is not None
        final = Snapshot.model_validate(reply.result["snapshot"])
        assert final.terminal and final.completeness == "complete" and final.state.text == "first"
        stranger = run.target.model_copy(update={"response_generation": 9})
        refused = await rig.ask("snapshot", target=stranger)
        assert refused.problem is not None and refused.problem.code == "TARGET_UNKNOWN"
        found = await rig.ask("discover", payload={"conversation": "another"})
        assert found.result is not None and found.result["executions"] == []


async def test_an_agent_that_cannot_be_started_fails_its_response(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    agents = json.dumps({"scripted": ["/nonexistent/agent"]})
    async with collector(bus, nats_server.url, tenant, tmp_path, environment={"TETHER_AGENTS": agents}) as rig:
        run = await rig.begin("hello")
        ended = await run.ended()
        assert ended.body["outcome"] == "failed"
        assert ended.body["error"]["code"] == "AGENT_START_FAILED"
        assert ended.body["proof"]["method"] == "never_spawned"


async def test_an_environment_file_that_others_can_read_starts_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        (tmp_path / "agent-env.json").chmod(0o644)
        run = await rig.begin("hello")
        ended = await run.ended()
        assert ended.body["outcome"] == "failed" and "chmod 600" in ended.body["error"]["detail"]
        assert not run.processes()


async def test_a_snapshot_taken_in_a_flood_names_exactly_the_frame_that_it_holds(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!flood 8000")
        await run.until("text.delta")
        taken = [await run.snapshot()]
        while not taken[-1].terminal and len(taken) < 200:
            taken.append(await run.snapshot())
        await run.ended()
        last_of = dict(zip(run.sequences, (frame.last for frame in run.frames), strict=True))
        assert len({snapshot.watermark.sequence for snapshot in taken}) > 2
        for snapshot in taken:
            mark = snapshot.watermark
            assert snapshot.state.applied == mark.ordinal == last_of[mark.sequence]
            message = await bus.at(subjects.events_stream(tenant), mark.sequence)
            assert message is not None and tag_of(message.stored_at_ns) == mark.tag
            fold = ExecutionFold(snapshot.state)
            for event in run.events:
                fold.apply(event)
            assert fold.freeze() == taken[-1].state if taken[-1].terminal else fold.ended


async def test_a_lower_token_of_the_same_kind_is_refused(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("one\n!hang")
        await run.until("text.completed")
        payload = {"request": "req_2", "content": [{"type": "text", "text": "!say two"}]}

        async def interject(token: int) -> ControlReply:
            authority = await rig.lease(run.target, "h", token)
            return await rig.ask("interject", target=run.target, payload=payload, authority=authority)

        assert (await interject(7)).status in ("delivered", "settled")
        await rig.kill()
        await rig.start()
        await run.snapshot()
        older = await interject(6)
        assert older.problem is not None and older.problem.code == "LEASE_NOT_READY" and older.problem.retryable
        assert (await interject(7)).status in ("delivered", "settled")
        await rig.ask("stop", target=run.target)
        await run.ended()
