"""Drain, suspend, resume and delete over the bus: the local provider, a collector of few lines, a real nats-server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support_agent import Conversation, agent_service, conversation, until
from support_sandbox import Sandbox, ask
from tether import events, frames, ids, owner, subjects
from tether.bus import NatsBus
from tether.errors import Code, problem
from tether.events import Event
from tether.frames import Frame, Position
from tether.kv import Bucket
from tether.limits import DRAIN_GRACE_S
from tether.processes import is_running, send_signal
from tether.subjects import EventAddress
from tether_agent import lifecycle
from tether_agent.config import AgentSettings
from tether_agent.providers import procfs, sandbox_file
from tether_agent.providers.local import LocalProvider
from tether_agent.providers.sandbox_file import SandboxFile


@pytest.fixture
async def talk(bus: NatsBus, tenant: str) -> Conversation:
    return await conversation(bus, tenant)


@pytest.fixture
def sandbox(bus: NatsBus, settings: AgentSettings, tenant: str) -> Sandbox:
    return Sandbox(bus, settings, tenant)


@pytest.fixture
async def active(
    sandbox: Sandbox, talk: Conversation, bus: NatsBus, settings: AgentSettings
) -> AsyncIterator[LocalProvider]:
    """A sandbox in which a start was claimed, and its agent service."""
    async with agent_service(settings, bus) as provider:
        await begin(talk)
        yield provider


async def begin(talk: Conversation, request: str = "req_1") -> None:
    await talk.send(await talk.admit(request))
    await until(talk.queue_empty, "the ack of a command")


async def close(talk: Conversation) -> None:
    """What a router does with the end of an execution."""
    bucket, key = Bucket(talk.bus, subjects.OWNERS), subjects.owner_key(talk.tenant, talk.workspace, talk.name)
    known = await bucket.record(key, owner.OwnerRecord)
    assert known is not None and known.target is not None
    await talk.change_owner(owner.Ended(known.target.execution, "drained", True, 2))


def file_of(sandbox: Sandbox) -> SandboxFile:
    found = sandbox_file.read(sandbox.settings.agent_state_dir, sandbox.tenant, sandbox.workspace)
    assert found is not None
    return found


def living(boot: str) -> list[int]:
    return [identity.pid for identity in procfs.with_environ("TETHER_BOOT", boot)]


async def test_a_drain_is_answered_at_once_and_ends_with_the_compute_gone_and_the_reference_kept(
    active: LocalProvider, sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.behave(drain={"hold": str(tmp_path / "go")})
    answer = await sandbox.ask("drain", drain_id="d1", grace_s=30, reason="upgrade")
    assert (answer["purpose"], answer["state"], answer["joined"]) == ("drain", "draining", False)
    assert answer["report"]["state"] == "running"

    async def leaving() -> bool:
        found = await sandbox.ask("drain-status", drain_id="d1")
        return bool(found["report"]["phase"] == "leaving")

    await until(leaving, "progress")
    boot = file_of(sandbox).boot
    (tmp_path / "go").touch()
    told = await sandbox.report("d1")
    assert (told["report"]["state"], told["report"]["phase"], told["state"]) == ("done", "over", "suspended")
    record, reference = await sandbox.record(), await sandbox.reference()
    assert record is not None and reference is not None
    assert (record.state, record.drain, reference.boot) == ("suspended", None, boot)
    assert record.checkpoint_revision == told["report"]["checkpoint_revision"] > 0
    assert living(boot) == []
    assert file_of(sandbox).status == "stopped"
    orders = sandbox.lines("drains.jsonl")
    assert {order["control"] for order in orders} == {ids.drain_control_id(sandbox.tenant, "w1", "d1")}
    assert {(order["drain"], order["grace_s"], order["reason"]) for order in orders} == {("d1", 30.0, "upgrade")}
    tokens = [order["authority"]["token"] for order in orders]
    assert tokens == sorted(tokens) and {order["authority"]["kind"] for order in orders} == {"sandbox"}


async def test_the_same_id_joins_another_id_joins_too_and_says_whose_drain_it_is(
    active: LocalProvider, sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.behave(drain={"hold": str(tmp_path / "go")})
    await sandbox.ask("drain", drain_id="d1")
    for verb, drain in (("drain", "d1"), ("drain", "d2"), ("suspend", "d3")):
        answer = await sandbox.ask(verb, drain_id=drain)
        assert (answer["report"]["drain"], answer["joined"], answer["state"]) == ("d1", True, "draining")
    refused = await sandbox.ask("delete", drain_id="d4")
    assert (refused["problem"]["code"], refused["problem"]["retryable"]) == ("DRAINING", True)
    assert (await sandbox.ask("resume"))["problem"]["code"] == "DRAINING"
    (tmp_path / "go").touch()
    await sandbox.reaches("suspended")
    again = await sandbox.ask("drain", drain_id="d1")
    assert (again["report"]["state"], again["joined"], again["state"]) == ("done", True, "suspended")
    other = await sandbox.ask("drain", drain_id="d5")
    assert (other["report"]["drain"], other["joined"], other["state"]) == ("d1", True, "suspended")


async def test_an_id_of_before_is_told_how_it_ended_and_begins_nothing_and_joins_none_that_came_after(
    active: LocalProvider, sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.ask("drain", drain_id="went-well")
    await sandbox.reaches("suspended")
    first = await sandbox.reference()
    await sandbox.ask("resume")
    await sandbox.reaches("active")
    sandbox.behave(drain={"fail": "CHECKPOINT_FAILED"})
    await sandbox.ask("drain", drain_id="failed")
    await sandbox.report("failed")
    sandbox.behave(drain={"hold": str(tmp_path / "go")})
    assert (await sandbox.ask("drain", drain_id="runs"))["report"]["state"] == "running"
    for state, joined in (("draining", "runs"), ("suspended", "runs")):
        for drain, ended in (("went-well", "done"), ("failed", "failed")):
            told = await sandbox.ask("drain-status", drain_id=drain)
            assert (told["report"]["drain"], told["report"]["state"], told["state"]) == (drain, ended, state)
            for verb in ("drain", "suspend", "delete"):
                again = await sandbox.ask(verb, drain_id=drain)
                assert (again["report"]["drain"], again["report"]["state"]) == (drain, ended), verb
                assert (again["state"], again["joined"]) == (state, True)
        assert first is not None
        made = (await sandbox.ask("drain-status", drain_id="went-well"))["report"]["checkpoint"]
        assert made["checkpoint"] == first.checkpoint
        assert (await sandbox.ask("drain", drain_id="new"))["report"]["drain"] == joined
        (tmp_path / "go").touch()
        await sandbox.reaches("suspended")
    assert (await sandbox.ask("drain-status", drain_id="nobodys"))["problem"]["code"] == "NOT_FOUND"


async def test_a_start_that_meets_a_drain_waits_and_then_wakes_the_sandbox_with_the_checkpoint(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation, tmp_path: Path
) -> None:
    sandbox.behave(drain={"hold": str(tmp_path / "go")})
    before = file_of(sandbox).boot
    await close(talk)
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("draining")
    command = await talk.admit("req_2")
    await talk.send(command)
    (tmp_path / "go").touch()
    await until(talk.queue_empty, "the ack of the second command")
    assert await talk.execution(command) == ["execution.started"]
    assert await sandbox.state() == "active"
    after = file_of(sandbox)
    assert after.boot != before and after.restore == "chk_d1"
    assert sandbox.lines("restores.jsonl") == [{"restore": "chk_d1", "boot": after.boot}]


async def test_suspend_refuses_a_busy_sandbox_naming_who_unless_it_is_forced(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    refused = await sandbox.ask("suspend", drain_id="d1")
    assert refused["problem"]["code"] == "SESSION_BUSY"
    assert refused["problem"]["context"]["executions"][0]["conversation"] == "c1"
    assert await sandbox.state() == "active"
    forced = await sandbox.ask("suspend", drain_id="d1", force=True)
    assert (forced["purpose"], forced["joined"]) == ("suspend", False)
    await sandbox.reaches("suspended")


async def test_suspend_takes_an_idle_sandbox(active: LocalProvider, sandbox: Sandbox, talk: Conversation) -> None:
    await close(talk)
    assert (await sandbox.ask("suspend", drain_id="d1"))["state"] == "draining"
    await sandbox.reaches("suspended")
    assert (await sandbox.report("d1"))["purpose"] == "suspend"


async def test_suspend_goes_by_the_log_where_records_lag_behind_an_end(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    known = await Bucket(talk.bus, subjects.OWNERS).record(
        subjects.owner_key(talk.tenant, talk.workspace, talk.name), owner.OwnerRecord
    )
    assert known is not None and known.target is not None
    target = known.target
    address = EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
    ended = Event(ordinal=1, at=1, type=events.EXECUTION_ENDED, body={"outcome": "completed"})
    frame = Frame(first=1, last=1, pos=Position(record=0, index=0), events=[ended])
    assert (await sandbox.ask("suspend", drain_id="d1"))["problem"]["code"] == "SESSION_BUSY"
    await sandbox.bus.publish(address.subject, frames.encode(frame))
    assert (await sandbox.ask("suspend", drain_id="d1"))["state"] == "draining"
    await sandbox.reaches("suspended")


async def test_a_prompt_that_waits_is_busy_too(active: LocalProvider, sandbox: Sandbox, talk: Conversation) -> None:
    await close(talk)
    subject = subjects.prompt(sandbox.tenant, "w1", "c1")
    await sandbox.bus.publish(subject, b"{}")
    try:
        assert (await sandbox.ask("suspend", drain_id="d1"))["problem"]["code"] == "SESSION_BUSY"
    finally:
        await sandbox.bus.purge(subjects.PROMPTS_STREAM, subject)  # other tests' routers would be given it


async def test_resume_wakes_once_however_many_ask_and_reads_wake_nothing(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    await close(talk)
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    suspended = await sandbox.revision()
    await sandbox.ask("drain-status")
    await ask(sandbox.bus, "sandboxes", tenant=sandbox.tenant)
    await sandbox.ask("drain", drain_id="d2")
    assert await sandbox.revision() == suspended
    answers = await asyncio.gather(*(sandbox.ask("resume") for _ in range(5)))
    assert sorted(answer["woken"] for answer in answers) == [False] * 4 + [True]
    assert {answer["checkpoint"]["checkpoint"] for answer in answers} == {"chk_d1"}
    await sandbox.reaches("active")
    assert len(sandbox.lines("restores.jsonl")) == 1
    assert (await sandbox.ask("resume"))["state"] == "active"
    # A second drain, after the resume, is another operation with another checkpoint.
    await sandbox.ask("drain", drain_id="d3")
    await sandbox.reaches("suspended")
    reference = await sandbox.reference()
    assert reference is not None and reference.drain == "d3"
    assert (await sandbox.ask("drain", drain_id="d3"))["joined"]


async def test_a_checkpoint_that_failed_keeps_the_compute_and_is_told_with_what_was_not_saved(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    sandbox.behave(drain={"fail": "CHECKPOINT_FAILED"})
    boot = file_of(sandbox).boot
    await sandbox.ask("drain", drain_id="d1")
    told = await sandbox.report("d1")
    assert (told["report"]["state"], told["state"]) == ("failed", "active")
    assert told["report"]["problem"]["code"] == "CHECKPOINT_FAILED" and told["report"]["unsaved"]
    assert len(living(boot)) == 1
    assert await sandbox.reference() is None
    assert (await sandbox.ask("drain", drain_id="d1"))["report"]["state"] == "failed", "the same id begins nothing"
    sandbox.behave()
    await sandbox.ask("drain", drain_id="d2")
    await sandbox.reaches("suspended")


async def test_a_collector_that_cannot_drain_is_refused_before_anything_changes(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    sandbox.behave(drain={"incapable": True})

    async def told() -> bool:
        found = await sandbox.registration()
        return found is not None and not found.capabilities

    await until(told, "the registration without the capability")
    for verb in ("drain", "suspend", "delete"):
        answer = await sandbox.ask(verb, drain_id=f"{verb}_1", **({"force": True} if verb == "suspend" else {}))
        assert answer["problem"]["code"] == "CAPABILITY_MISSING"
    assert await sandbox.state() == "active"
    assert sandbox.lines("drains.jsonl") == [], "an older peer is never sent a verb that it does not know"


async def test_a_collector_that_turns_out_not_to_be_able_to_drain_leaves_the_sandbox_active(
    active: LocalProvider, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unseen(*_: object) -> None:
        return None

    monkeypatch.setattr("tether_agent.operations.Operations._check_can_drain", unseen)
    sandbox.behave(drain={"incapable": True})

    async def told() -> bool:
        found = await sandbox.registration()
        return found is not None and not found.capabilities

    await until(told, "the registration without the capability")
    await sandbox.ask("drain", drain_id="d1")
    report = (await sandbox.report("d1"))["report"]
    assert report["problem"]["code"] == "CAPABILITY_MISSING"
    assert await sandbox.state() == "active"


async def test_a_collector_that_dies_in_the_middle_goes_on_from_its_journal(
    active: LocalProvider, sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.behave(drain={"die": 2, "hold": str(tmp_path / "go")})
    await sandbox.ask("drain", drain_id="d1")

    async def asked_after_its_death() -> bool:
        return len(sandbox.lines("drains.jsonl")) >= 3

    await until(asked_after_its_death, "the next collector's first question")
    (tmp_path / "go").touch()
    await sandbox.reaches("suspended")
    assert (await sandbox.report("d1"))["report"]["state"] == "done"


async def test_a_collector_without_a_word_ends_the_drain_by_its_deadline(
    active: LocalProvider, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.core.draining.DRAIN_DEADLINE_S", 0.5)
    monkeypatch.setattr(lifecycle, "DRAIN_REPLY_S", 0.2)
    monkeypatch.setattr(lifecycle, "DRAIN_ASK_MAX_S", 0.1)
    sandbox.behave(drain={"mute": True})
    await sandbox.ask("drain", drain_id="d1", grace_s=0.2)
    told = await sandbox.report("d1")
    assert (told["report"]["state"], told["state"]) == ("failed", "active")
    assert "no checkpoint was made" in told["report"]["unsaved"]


async def test_a_drain_of_a_sandbox_whose_collector_is_gone_starts_one_for_it(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    await close(talk)
    await active.stop(sandbox.tenant, "w1")
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    reference = await sandbox.reference()
    assert reference is not None and reference.boot == file_of(sandbox).boot
    assert living(reference.boot) == []


async def test_sigterm_to_a_collector_suspends_its_sandbox_without_an_order(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    await close(talk)
    sandbox.behave(drains_itself=True)
    collector = file_of(sandbox).process
    assert collector is not None
    send_signal(collector, signal.SIGTERM)
    await sandbox.reaches("suspended")
    assert file_of(sandbox).status == "stopped"
    record, reference = await sandbox.record(), await sandbox.reference()
    assert record is not None and reference is not None and record.drained is not None
    assert record.drained.drain == reference.drain
    await begin(talk, "req_2")
    assert [line["restore"] for line in sandbox.lines("restores.jsonl")] == [reference.checkpoint]


async def test_a_restart_of_the_collector_hands_over_and_drains_nothing(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    sandbox.behave(drains_itself=True)
    before = file_of(sandbox).boot
    answer = await sandbox.ask("restart-collector")
    assert answer["boot"] == before and answer["instance"] != answer["before"]
    assert await sandbox.reference() is None
    assert await sandbox.state() == "active"


async def test_a_drained_collector_that_stays_is_ended_before_the_sandbox_counts_as_suspended(
    active: LocalProvider, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.providers.local.DRAINED_END_S", 0.3)
    sandbox.behave(drain={"stay": True})
    boot = file_of(sandbox).boot
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    assert living(boot) == []


async def test_a_release_leaves_a_later_boot_and_what_it_does_not_know_alone(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    boot = file_of(sandbox).boot
    gone = await active.release(sandbox.tenant, "w1", "boot_before")
    assert gone is not None and boot in gone.proof
    assert len(living(boot)) == 1
    assert await active.release(sandbox.tenant, "w9", boot) is None


FULL = problem(Code.RESUME_FAILED, "neither the volume nor the blobs have it")
AWAY = problem(Code.RESUME_FAILED, "the blob store takes nothing now", retryable=True)


async def test_a_checkpoint_that_cannot_be_restored_fails_by_its_name_and_the_sandbox_stays_suspended(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    await close(talk)
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    sandbox.behave(restore=FULL.model_dump(mode="json"))
    await begin(talk, "req_2")
    told = await talk.told()
    assert (told[-1].type, told[-1].body["code"]) == ("response.failed", "RESUME_FAILED")
    await sandbox.reaches("suspended")
    assert (await sandbox.ask("resume"))["woken"]

    async def tried_again() -> bool:
        return len(sandbox.lines("restores.jsonl")) >= 2 and await sandbox.state() == "suspended"

    await until(tried_again, "the wake that fails")
    sandbox.behave()
    assert (await sandbox.ask("resume"))["woken"]
    await sandbox.reaches("active")


async def test_a_blob_store_that_is_away_is_waited_for(
    active: LocalProvider, sandbox: Sandbox, talk: Conversation
) -> None:
    await close(talk)
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    sandbox.behave(restore=AWAY.model_dump(mode="json"))
    command = await talk.admit("req_2")
    await talk.send(command)

    async def tried_twice() -> bool:
        return len(sandbox.lines("restores.jsonl")) >= 2

    await until(tried_twice, "a second try")
    assert await talk.told() == [] and await sandbox.state() == "resuming"
    sandbox.behave()
    await until(talk.queue_empty, "the ack of the command")
    assert await talk.execution(command) == ["execution.started"]


# --- deleting ---


async def test_deleting_what_is_active_drains_it_first_and_keeps_the_checkpoint(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    answer = await sandbox.ask("delete", drain_id="d1")
    assert (answer["purpose"], answer["state"]) == ("delete", "draining")
    await sandbox.reaches(None)
    told = await sandbox.ask("drain-status", drain_id="d1")
    assert (told["report"]["state"], told["state"]) == ("done", "deleted")
    reference = await sandbox.reference()
    assert reference is not None and told["report"]["checkpoint"]["checkpoint"] == reference.checkpoint
    assert living(reference.boot) == []
    again = await sandbox.ask("delete", drain_id="d1")
    assert (again["report"]["state"], again["state"], again["joined"]) == ("done", "deleted", True)
    refused = (await sandbox.ask("delete", drain_id="d2"))["problem"]
    assert (refused["code"], refused["fields"][0]["field"]) == ("NOT_FOUND", "workspace")


async def test_deleting_what_is_suspended_drains_nothing_and_verifies_what_is_kept(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    asked = len(sandbox.lines("drains.jsonl"))
    answer = await sandbox.ask("delete", drain_id="d2")
    assert answer["report"]["checkpoint"]["drain"] == "d1" and "unsaved" not in answer["report"]
    await sandbox.reaches(None)
    assert len(sandbox.lines("drains.jsonl")) == asked
    assert await sandbox.reference() is not None


async def test_a_delete_that_would_lose_the_only_way_back_is_refused_until_it_is_said_to_be_wanted(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    [manifest] = (sandbox.directory / ".tether" / "checkpoints").glob("*.json")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    refused = await sandbox.ask("delete", drain_id="d2")
    assert refused["problem"]["code"] == "CHECKPOINT_FAILED" and "manifest" in refused["problem"]["detail"]
    manifest.unlink()
    assert (await sandbox.ask("delete", drain_id="d2"))["problem"]["code"] == "CHECKPOINT_FAILED"
    assert await sandbox.state() == "suspended"
    assert (await sandbox.ask("delete", drain_id="d2", checkpoint=False))["state"] == "deleting"
    await sandbox.reaches(None)


async def test_a_completed_sandbox_is_deleted_without_a_drain_and_said_to_have_no_checkpoint(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    await active.stop(sandbox.tenant, "w1")
    answer = await sandbox.ask("delete", drain_id="d1")
    assert answer["state"] == "deleting" and "no checkpoint" in answer["report"]["unsaved"]
    await sandbox.reaches(None)
    assert sandbox.lines("drains.jsonl") == []


async def test_a_delete_without_a_checkpoint_skips_the_drain_even_one_that_hangs(
    active: LocalProvider, sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.behave(drain={"hold": str(tmp_path / "never")})
    boot = file_of(sandbox).boot
    await sandbox.ask("drain", drain_id="d1")
    answer = await sandbox.ask("delete", drain_id="d2", checkpoint=False)
    assert answer["state"] == "deleting" and "without a checkpoint" in answer["report"]["unsaved"]
    await sandbox.reaches(None)
    assert living(boot) == [] and await sandbox.reference() is None


async def test_what_is_asked_wrongly_is_refused_by_the_name_of_the_field(
    active: LocalProvider, sandbox: Sandbox
) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("drain", {}, "drain_id"),
        ("drain", {"drain_id": "a b"}, "drain_id"),
        ("drain", {"drain_id": "d", "grace_s": -1}, "grace_s"),
        ("drain", {"drain_id": "d", "grace_s": 3601}, "grace_s"),
        ("drain", {"drain_id": "d", "grace_s": "soon"}, "grace_s"),
        ("drain", {"drain_id": "d", "reason": "x" * 257}, "reason"),
        ("drain", {"drain_id": "d", "store": "tape"}, "store"),
        ("drain", {"drain_id": "d", "include": "all"}, "include"),
        ("drain", {"drain_id": "d", "force": True}, "force"),
        ("suspend", {"drain_id": "d", "force": "very"}, "force"),
        ("suspend", {"drain_id": "d", "checkpoint": False}, "checkpoint"),
        ("delete", {"drain_id": "d", "checkpoint": "no way"}, "checkpoint"),
        ("drain-status", {"drain_id": ""}, "drain_id"),
        ("resume", {"drain_id": "d"}, "drain_id"),
    ]
    for verb, fields, named in wrong:
        answer = await sandbox.ask(verb, **fields)
        assert answer["problem"]["code"] == "INVALID", (verb, fields)
        assert answer["problem"]["fields"][0]["field"] == named
    assert await sandbox.state() == "active"
    for verb in ("drain", "suspend", "delete"):
        missing = await ask(sandbox.bus, verb, tenant=sandbox.tenant, workspace="w9", drain_id="d")
        assert missing["problem"]["code"] == "NOT_FOUND"
    assert (await sandbox.ask("drain-status", drain_id="d9"))["problem"]["code"] == "NOT_FOUND"


async def test_what_is_not_said_of_a_drain_is_the_services_setting(active: LocalProvider, sandbox: Sandbox) -> None:
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    order = sandbox.lines("drains.jsonl")[0]
    assert (order["grace_s"], order["store"], order["include"]) == (DRAIN_GRACE_S, "volume", "sessions")


async def test_a_suspended_sandbox_stays_suspended_over_a_restart_of_the_service(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await begin(talk)
        collector = file_of(sandbox).process
        await sandbox.ask("drain", drain_id="d1")
        await sandbox.reaches("suspended")
    async with agent_service(settings, bus) as provider:
        [status] = provider.statuses()
        assert not status.alive and status.ended
        assert await sandbox.state() == "suspended"
    assert collector is not None and not is_running(collector)
