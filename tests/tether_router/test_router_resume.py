"""D8, and what an execution begins from (native session, checkpoint, history): fixed by one compare-and-set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support_router import (
    TENANT,
    Crash,
    FaultyBus,
    Sandbox,
    World,
    a_prompt,
    admitter,
    derived,
    routing,
    virtual,
    world,
)
from tether import ids, subjects
from tether.checkpoint import CheckpointReference, DrainedExecution
from tether.control import StartCommand
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.prompt import AgentSpec, Prompt
from tether.testing import MemoryBus, MemoryServer
from tether_router.admitter import Verdict
from tether_router.core.steps import Ack, Wait

SESSION = "native-1"


async def admit(bus: MemoryBus | FaultyBus, prompt: Prompt, sequence: int, actor: str) -> Verdict:
    made = admitter(bus)  # type: ignore[arg-type]
    return await made.admit(prompt, sequence=sequence, stored_at_ns=1, actor=actor)


def choosing(request: str, **fields: Any) -> Prompt:
    return a_prompt(request).model_copy(update=fields)


@asynccontextmanager
async def resuming(**settings: Any) -> AsyncIterator[tuple[World, Sandbox]]:
    """A router, and a conversation whose first execution has ended and left a session that can be resumed."""
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server), **settings), sandbox.running():
        await stage.send(a_prompt("r1"))
        await sandbox.claims(1)
        execution = derived("r1")[1]
        bound = {"native_session": SESSION, "resumable": True, "cli_version": "2.1"}
        await sandbox.tell(execution, "session.bound", bound)
        await sandbox.finish(execution)
        await stage.state_is("idle")
        yield stage, sandbox


async def command_of(stage: World, sandbox: Sandbox, prompt: Prompt) -> StartCommand:
    await stage.send(prompt)
    await sandbox.claims(len(sandbox.claimed) + 1)
    return sandbox.commands[-1]


async def put_reference(
    stage: World, *, conversation: str = "c1", workspace: str = "w1", tenant: str = TENANT, may_use: int | None = None
) -> int:
    """A drained sandbox's reference under the world's key; its revision."""
    target = ExecutionTarget(
        tenant=tenant,
        workspace=workspace,
        conversation=conversation,
        response="rsp",
        response_generation=1,
        execution="exe",
        execution_generation=1,
        sandbox="sbx",
    )
    reference = CheckpointReference(
        checkpoint="cp1",
        drain="d1",
        tenant=tenant,
        workspace=workspace,
        sandbox="sbx",
        boot="b1",
        manifest="0" * 64,
        manifest_bytes=10,
        stored="volume",
        include="sessions",
        clean=True,
        executions=(DrainedExecution(target=target, outcome="graceful"),),
        may_use={} if may_use is None else {conversation: may_use},
    )
    bucket = Bucket(stage.bus, subjects.CHECKPOINTS)
    key = subjects.checkpoint_key(TENANT, "w1")
    entry = await bucket.get(key)
    if entry is None:
        return (await bucket.create(key, reference.value(), op=ids.new_id("op"))).revision
    return (await bucket.update(key, reference.value(), op=ids.new_id("op"), revision=entry.revision)).revision


# --- the native session ---


@virtual
async def test_the_next_prompt_resumes_the_session_and_without_a_takeover_nothing_may_stand_in_for_it() -> None:
    async with resuming() as (stage, sandbox):
        command = await command_of(stage, sandbox, a_prompt("r2"))
        assert (command.resume_session, command.resume, command.fallback, command.history_cut) == (
            SESSION,
            None,
            None,
            None,
        )
        owner = await stage.owner()
        assert (owner.native_session, owner.native_agent, owner.native_cli_version) == (SESSION, "scripted", "2.1")


@virtual
async def test_another_agent_does_not_resume_the_session_and_the_record_keeps_it() -> None:
    async with resuming() as (stage, sandbox):
        command = await command_of(stage, sandbox, choosing("r2", agent=AgentSpec(kind="claude")))
        assert (command.resume_session, command.fallback) == (None, None)
        assert (await stage.owner()).native_session == SESSION


@pytest.mark.parametrize("choice", ["fresh", "history"])
def test_the_users_choice_begins_another_session_which_replaces_the_old_one_once_it_is_bound(choice: str) -> None:
    @virtual
    async def run() -> None:
        async with resuming() as (stage, sandbox):
            end = await stage.bus.state(subjects.events_stream(TENANT))
            assert end is not None
            command = await command_of(stage, sandbox, choosing("r2", resume=choice))
            assert (command.resume_session, command.resume, command.fallback) == (None, choice, None)
            assert command.history_cut == (end.last_sequence if choice == "history" else None)
            assert (await stage.owner()).native_session == SESSION, "until the new one is known"
            bound = {"native_session": "native-2", "resumable": True}
            await sandbox.tell(derived("r2")[1], "session.bound", bound)
            await sandbox.finish(derived("r2")[1])
            await stage.state_is("idle")
            assert (await stage.owner()).native_session == "native-2"

    run()


# --- the history ---


@pytest.mark.parametrize(
    ("setting", "takeover", "allowed"),
    [
        ("takeover", True, True),
        ("takeover", False, False),
        ("always", False, True),
        ("never", True, False),
    ],
)
def test_the_history_may_stand_in_after_a_takeover_or_by_policy(setting: str, takeover: bool, allowed: bool) -> None:
    @virtual
    async def run() -> None:
        async with resuming(router_history_fallback=setting) as (stage, sandbox):
            if takeover:
                await command_of(stage, sandbox, a_prompt("r2"))
                await stage.state_is("running")
            prompt = a_prompt("r3", mode="takeover" if takeover else "auto")
            command = await command_of(stage, sandbox, prompt)
            assert command.resume_session == SESSION
            assert command.fallback is (True if allowed else None)
            if allowed:
                [admitted] = [
                    message.sequence
                    for message in await stage.stored(
                        subjects.events_stream(TENANT), subjects.event(TENANT, "w1", "c1", "_")
                    )
                    if b'"r3"' in message.data and b"prompt.admitted" in message.data
                ]
                assert command.history_cut is not None and 0 < command.history_cut < admitted
            else:
                assert command.history_cut is None

    run()


@virtual
async def test_a_command_that_is_made_again_after_a_crash_is_the_same_whatever_the_log_has_by_then() -> None:
    server = MemoryServer()
    stage = await world(MemoryBus(server))
    await put_reference(stage)
    ack = await stage.send(choosing("r1", resume="history"))
    crashing = FaultyBus(MemoryBus(server), crash_at=5)  # request, workspace, owner are written; the message is not
    with pytest.raises(Crash):
        await admit(crashing, choosing("r1", resume="history"), ack.sequence, "a")
    owner = await stage.owner()
    assert owner.state == "starting"
    await stage.send(a_prompt("r9", conversation="c2"))  # the log moves on
    other = await stage.bus.next_after(subjects.PROMPTS_STREAM, ack.sequence, subjects.prompt(TENANT, "w1", "c2"))
    assert other is not None
    verdict = await admit(MemoryBus(server), a_prompt("r9", conversation="c2"), other.sequence, "b")
    assert isinstance(verdict.end, Ack)
    verdict = await admit(MemoryBus(server), choosing("r1", resume="history"), ack.sequence, "c")
    assert isinstance(verdict.end, Ack)
    commands = await stage.stored(subjects.COMMANDS_STREAM, ">")
    made = [StartCommand.model_validate_json(each.data) for each in commands]
    mine = [each for each in made if each.request_id == "r1"]
    assert [(one.history_cut, one.checkpoint_revision) for one in mine] == [
        (owner.history_cut, owner.checkpoint_revision)
    ]


# --- the checkpoint ---


@virtual
async def test_the_reference_that_names_the_conversation_goes_into_record_and_command_once() -> None:
    async with resuming() as (stage, sandbox):
        revision = await put_reference(stage, may_use=2)
        command = await command_of(stage, sandbox, a_prompt("r2"))
        owner = await stage.owner()
        assert command.checkpoint_revision == owner.checkpoint_revision == revision
        assert owner.checkpoint_generation == command.target.execution_generation == 2
        await sandbox.finish(derived("r2")[1])
        await stage.state_is("idle")
        command = await command_of(stage, sandbox, a_prompt("r3"))
        assert command.checkpoint_revision is None, "the reference was used before"
        assert (await stage.owner()).checkpoint_revision == revision


@pytest.mark.parametrize(
    "reference",
    [{"conversation": "another"}, {"workspace": "w2"}, {"tenant": "umbrella"}, {"may_use": 9}],
    ids=["of another conversation", "of another workspace", "of another tenant", "of a later generation"],
)
def test_a_reference_that_is_not_for_this_generation_is_left_alone(reference: dict[str, Any]) -> None:
    @virtual
    async def run() -> None:
        async with resuming() as (stage, sandbox):
            await put_reference(stage, **reference)
            command = await command_of(stage, sandbox, a_prompt("r2"))
            assert command.checkpoint_revision is None
            assert (await stage.owner()).checkpoint_revision == 0

    run()


@virtual
async def test_a_reference_that_cannot_be_read_holds_no_prompt_back() -> None:
    async with resuming() as (stage, sandbox):
        key = subjects.checkpoint_key(TENANT, "w1")
        await Bucket(stage.bus, subjects.CHECKPOINTS).create(key, {"v": 1, "checkpoint": "torn"}, op="test")
        command = await command_of(stage, sandbox, a_prompt("r2"))
        assert command.checkpoint_revision is None and command.resume_session == SESSION


@virtual
async def test_d8_of_two_resumers_of_a_checkpoint_one_gets_it_and_the_other_writes_nothing() -> None:
    server = MemoryServer()
    stage = await world(MemoryBus(server))
    revision = await put_reference(stage)
    one = await stage.send(a_prompt("r1"))
    await stage.send(a_prompt("r2"))
    slow = FaultyBus(MemoryBus(server), freeze_at=3)  # it has read everything, and is about to write the owner
    resuming_slowly = asyncio.create_task(admit(slow, a_prompt("r1"), one.sequence, "slow"), name="slow")
    await slow.frozen.wait()
    assert subjects.OWNERS in slow.writes[-1]
    fast = await admit(MemoryBus(server), a_prompt("r1"), one.sequence, "fast")
    assert isinstance(fast.end, Ack)
    before = await stage.owner()
    slow.thawed.set()
    late = await resuming_slowly
    assert isinstance(late.end, Ack | Wait)
    owner = await stage.owner()
    assert (owner.generation, owner.checkpoint_revision, owner.checkpoint_generation) == (1, revision, 1)
    assert owner == before
    stored = await stage.stored(subjects.COMMANDS_STREAM, ">")
    commands = [StartCommand.model_validate_json(each.data) for each in stored]
    assert [(each.request_id, each.checkpoint_revision) for each in commands] == [("r1", revision)]
    assert [event.type for event in await stage.told()] == ["prompt.admitted", "response.created"]


# --- a turn that was cut before its session could be resumed ---


@pytest.mark.parametrize("setting", ["takeover", "always", "never"])
@pytest.mark.parametrize("how", ["drained", "taken over"])
def test_what_was_cut_too_early_to_be_resumed_begins_from_the_history_or_is_told_not_to(how: str, setting: str) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        stage = await world(MemoryBus(server))
        sandbox = Sandbox(stage.bus)
        async with routing(MemoryBus(server), router_history_fallback=setting), sandbox.running():
            await command_of(stage, sandbox, a_prompt("r1"))
            execution = derived("r1")[1]
            await sandbox.tell(execution, "session.bound", {"native_session": "early", "resumable": False})
            if how == "drained":
                await sandbox.tell(execution, "response.ended", {"outcome": "drained"})
                await sandbox.end(execution, "drained")
                await stage.state_is("idle")
            else:
                await stage.state_is("running")
            prompt = a_prompt("r2", mode="takeover" if how == "taken over" else "auto")
            command = await command_of(stage, sandbox, prompt)
            assert (command.resume_session, command.resume) == (None, "history")
            assert command.fallback is (setting != "never")
            assert bool(command.history_cut) is (setting != "never")
            await sandbox.finish(derived("r2")[1])
            await stage.state_is("idle")
            command = await command_of(stage, sandbox, choosing("r3", resume="fresh"))
            assert (command.resume, command.fallback, command.history_cut) == ("fresh", None, None)
            await sandbox.finish(derived("r3")[1])
            await stage.state_is("idle")
            command = await command_of(stage, sandbox, a_prompt("r4"))
            assert command.resume is None, "the user began anew"

    run()
