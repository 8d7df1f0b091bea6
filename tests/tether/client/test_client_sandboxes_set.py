"""Drain, suspend, resume and delete by the SDK on a whole set, over HTTP and over NATS alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Literal

import pytest

from support_set import TetherSet, running_set
from tether.client import Client
from tether.errors import Code, ProblemError
from tether.ids import new_id

pytestmark = pytest.mark.timeout(240)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


@pytest.fixture(params=["http", "nats"])
async def client(request: pytest.FixtureRequest, up: TetherSet) -> AsyncIterator[Client]:
    over: Literal["http", "nats"] = request.param
    async with Client.from_state(str(up.data / "state.json"), over=over) as made:
        yield made


async def waiting(client: Client, conversation: str, workspace: str) -> str:
    """An execution that waits for an approval; its id."""
    await client.prompt(conversation, "!say one\n!ask remove", agent="scripted", workspace=workspace)
    async with asyncio.timeout(WAIT_S):
        while True:
            for view in (await client.executions(conversation=conversation, active=True)).executions:
                with contextlib.suppress(ProblemError):  # nothing of it is logged yet
                    if (await client.state(view.execution)).pending():
                        return view.execution
            await asyncio.sleep(0.05)


async def until(client: Client, workspace: str, state: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if (await client.sandbox(workspace)).state == state:
                return
            await asyncio.sleep(0.05)


async def refused(call: Awaitable[object]) -> ProblemError:
    with pytest.raises(ProblemError) as told:
        await call
    return told.value


async def test_a_drained_sandbox_is_read_without_waking_it_and_woken_once_by_a_prompt(client: Client) -> None:
    conversation, workspace = new_id("conv"), new_id("ws")
    execution = await waiting(client, conversation, workspace)
    busy = await refused(client.suspend(workspace))
    assert busy.problem.code is Code.SESSION_BUSY
    assert [one["execution"] for one in busy.problem.context["executions"]] == [execution]
    begun = await client.drain(workspace, grace_s=5, reason="new kernel")
    other = await client.drain(workspace, drain_id="another")
    assert (other.drain, other.joined) == (begun.drain, True), "the one that runs is joined"
    over = await client.drained(begun, timeout_s=WAIT_S)
    assert (over.state, over.sandbox_state) == ("done", "suspended")
    (one,) = over.executions
    assert one.target.execution == execution and one.cut and one.outcome in ("graceful", "forced")
    view = await client.sandbox(workspace)
    assert view.state == "suspended" and not view.connected
    assert view.checkpoint == over.checkpoint and view.checkpoint is not None
    assert (await client.drain_status(workspace, begun.drain)).executions == over.executions
    # Reads wake nothing.
    await client.conversation(conversation)
    assert (await client.state(execution)).outcome == "drained"
    assert (await client.sandbox(workspace)).state == "suspended"
    response = await asyncio.wait_for(client.ask(conversation, "!say two", agent="scripted"), WAIT_S)
    assert (response.outcome, response.text) == ("completed", "two")
    awake = await client.sandbox(workspace)
    assert awake.state == "active" and awake.sandbox == view.sandbox
    assert not (await client.resume(workspace)).woken


async def test_a_suspended_sandbox_is_woken_by_resume_and_is_gone_once_it_is_deleted(client: Client) -> None:
    conversation, workspace = new_id("conv"), new_id("ws")
    await asyncio.wait_for(client.ask(conversation, "!say hi", agent="scripted", workspace=workspace), WAIT_S)
    over = await client.drained(await client.suspend(workspace, force=True, include="workspace"), timeout_s=WAIT_S)
    assert over.state == "done" and over.checkpoint is not None and over.checkpoint.include == "workspace"
    woken = await client.resume(workspace)
    assert woken.woken and woken.checkpoint is not None
    assert woken.checkpoint.checkpoint == over.checkpoint.checkpoint
    await until(client, workspace, "active")
    gone = await client.drained(await client.delete(workspace, checkpoint=False), timeout_s=WAIT_S)
    assert (gone.state, gone.sandbox_state) == ("done", "deleted")
    assert (await refused(client.sandbox(workspace))).problem.code is Code.NOT_FOUND
    assert (await refused(client.drain(workspace))).problem.code is Code.NOT_FOUND
    # The conversation stays, and goes on in a new sandbox.
    history = await client.conversation(conversation)
    assert [view.outcome for view in history.responses] == ["completed"]


async def test_a_lost_session_is_told_with_choices_and_the_same_content_goes_on_with_one(
    client: Client, up: TetherSet
) -> None:
    conversation, workspace = new_id("conv"), new_id("ws")
    await asyncio.wait_for(client.ask(conversation, "!say hi", agent="scripted", workspace=workspace), WAIT_S)
    sessions = up.data / "workspaces" / "default" / workspace / ".tether" / "agents" / "scripted" / "sessions"
    (file,) = sessions.glob("*.json")
    file.unlink()
    failed = await asyncio.wait_for(client.ask(conversation, "!say two", agent="scripted"), WAIT_S)
    assert failed.outcome == "failed" and failed.resume_choices == ("fresh", "history")
    history = await client.conversation(conversation)
    assert history.responses[-1].error is not None
    assert history.responses[-1].error["choices"] == ["fresh", "history"]
    again = client.ask(conversation, "!say two", agent="scripted", resume=failed.resume_choices[1])
    response = await asyncio.wait_for(again, WAIT_S)
    assert (response.outcome, response.text, response.resume_choices) == ("completed", "two", ())
