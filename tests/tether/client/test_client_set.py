"""The client against the whole set, over HTTP and over NATS alike; the examples; a backend killed in mid-stream."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import pytest

from support_set import COMMAND_S, TetherSet, environment, running_set
from tether.api import ControlAnswer
from tether.client import (
    Answer,
    CaughtUp,
    Client,
    ExecutionItem,
    Interaction,
)
from tether.errors import Code, ProblemError
from tether.ids import new_id

pytestmark = pytest.mark.timeout(240)
WAIT_S = 60.0
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


@pytest.fixture(params=["http", "nats"])
async def client(request: pytest.FixtureRequest, up: TetherSet) -> AsyncIterator[Client]:
    over: Literal["http", "nats"] = request.param
    async with Client.from_state(str(up.data / "state.json"), over=over) as made:
        yield made


async def ended(client: Client, conversation: str) -> None:
    """Until the conversation's execution has gone."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if not (await client.executions(conversation=conversation, active=True)).executions:
                return
            await asyncio.sleep(0.05)


async def settled(client: Client, control: str, execution: str) -> ControlAnswer:
    """The receipt of a control whose execution has ended, once the rows behind HTTP have caught up with the log."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                found = await client.receipt(control, execution=execution)
                if found.status == "settled":
                    return found
            except ProblemError as error:
                assert error.problem.code is Code.TARGET_STALE
            await asyncio.sleep(0.05)


async def test_ask_gives_the_whole_response(client: Client) -> None:
    conversation = new_id("conv")
    response = await asyncio.wait_for(client.ask(conversation, "!say hi\n!tool look", agent="scripted"), WAIT_S)
    assert (response.outcome, response.text, response.partial) == ("completed", "hi", False)
    assert [item.kind for item in response.items] == ["text", "tool"]
    assert response.usage.turns == 1
    await ended(client, conversation)
    history = await client.conversation(conversation)
    assert [view.outcome for view in history.responses] == ["completed"]
    assert (await client.state(response.execution)).outcome == "completed"
    assert conversation in [view.conversation for view in (await client.conversations()).conversations]
    assert (await client.sandboxes()).sandboxes


async def test_the_same_request_is_the_same_response_and_another_payload_a_conflict(client: Client) -> None:
    conversation, request = new_id("conv"), new_id("req")
    first = await client.prompt(conversation, "!say once", agent="scripted", request_id=request)
    again = await client.prompt(conversation, "!say once", agent="scripted", request_id=request)
    assert (again.response_id, again.execution, again.cursor) == (first.response_id, first.execution, first.cursor)
    with pytest.raises(ProblemError) as told:
        await client.prompt(conversation, "!say other", agent="scripted", request_id=request)
    assert told.value.problem.code is Code.REQUEST_CONFLICT


async def test_approvals_and_questions_are_answered_by_the_callback(client: Client) -> None:
    asked: list[tuple[str, str]] = []

    async def decide(interaction: Interaction) -> Answer | None:
        asked.append((interaction.kind, interaction.name))
        if interaction.kind == "question":
            return Answer.choose({str(question["id"]): ["blue"] for question in interaction.questions})
        return Answer.allow() if interaction.name == "look" else Answer.deny("no")

    text = "!ask look\n!ask remove\n!question Colour? | red | blue"
    response = await asyncio.wait_for(client.ask(new_id("conv"), text, agent="scripted", on_interaction=decide), WAIT_S)
    assert asked[:2] == [("approval", "look"), ("approval", "remove")] and asked[2][0] == "question"
    tools = {item.name: item.state for item in response.items if item.kind == "tool"}
    assert (tools["look"], tools["remove"]) == ("ok", "error")
    assert "blue" in response.text


async def test_of_two_answers_one_wins_and_the_other_is_told(client: Client) -> None:
    conversation = new_id("conv")
    found: asyncio.Future[Interaction] = asyncio.get_running_loop().create_future()

    async def hand_over(interaction: Interaction) -> None:
        found.set_result(interaction)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        asking = group.create_task(
            client.ask(conversation, "!ask look\n!sleep 2", agent="scripted", on_interaction=hand_over), name="ask"
        )
        interaction = await found
        outcomes = await asyncio.gather(
            client.answer(conversation, interaction.id, Answer.allow(), control_id="ctl_one"),
            client.answer(conversation, interaction.id, Answer.deny(), control_id="ctl_two"),
            return_exceptions=True,
        )
        await asking
    refused = [one for one in outcomes if isinstance(one, ProblemError)]
    assert len(refused) == 1
    assert refused[0].problem.code is Code.INTERACTION_SETTLED


async def test_a_message_joins_the_running_response_and_stop_ends_it_with_proof(client: Client) -> None:
    conversation = new_id("conv")
    submission = await client.prompt(conversation, "!steer\n!say begun\n!hang", agent="scripted")
    assert submission.execution is not None
    said = False
    outcomes: list[str] = []
    proof = None
    async with (
        asyncio.timeout(WAIT_S),
        aclosing(client.follow(conversation, submission.cursor)) as items,
    ):
        async for item in items:
            match item:
                case ExecutionItem(type="text.completed") if not said:
                    said = True
                    joined = await client.say(conversation, "!say me too")
                    assert (joined.status, joined.response_id) == ("interjected", submission.response_id)
                case ExecutionItem(type="text.completed"):
                    assert item.event.body["text"] == "me too"
                    receipt = await client.stop(submission.execution)
                    assert receipt.status in ("accepted", "delivered", "settled")
                case ExecutionItem(type="response.ended"):
                    outcomes.append(item.event.body["outcome"])
                case ExecutionItem(type="execution.ended"):
                    proof = item.event.body["proof"]
                    break
                case _:
                    pass
    assert outcomes == ["stopped"]
    assert proof is not None
    assert (await settled(client, receipt.control_id, submission.execution)).status == "settled"


async def test_who_asks_into_a_running_execution_gets_the_end_of_what_it_joined(client: Client) -> None:
    conversation = new_id("conv")
    running = await client.prompt(conversation, "!say first\n!sleep 1.5", agent="scripted")
    response = await asyncio.wait_for(client.ask(conversation, "!say joined", agent="scripted"), WAIT_S)
    submission = response.submission
    assert (submission.status, submission.response_id, submission.execution) == (
        "interjected",
        running.response_id,
        running.execution,
    )
    assert (response.outcome, response.text) == ("completed", "first\n\njoined")
    again = client.ask(conversation, "!say joined", agent="scripted", request_id=submission.request_id)
    assert (await asyncio.wait_for(again, WAIT_S)).outcome == "completed", "asked again when all of it was over"


async def test_follow_until_a_response_that_is_over_ends_at_once(client: Client) -> None:
    conversation = new_id("conv")
    response = await asyncio.wait_for(client.ask(conversation, "!say x", agent="scripted"), WAIT_S)
    await ended(client, conversation)
    async with asyncio.timeout(WAIT_S):
        items = [
            item async for item in client.follow(conversation, response.cursor, until_response=response.response_id)
        ]
        whole = [item async for item in client.follow(conversation, until_response=response.response_id)]
    assert not [item for item in items if isinstance(item, ExecutionItem) and item.type == "response.ended"]
    assert isinstance(whole[-1], ExecutionItem) and whole[-1].type == "response.ended"


async def test_a_cursor_of_one_transport_goes_on_over_the_other(up: TetherSet) -> None:
    path = str(up.data / "state.json")
    conversation = new_id("conv")
    got: list[int] = []
    async with Client.from_state(path, over="http") as http, Client.from_state(path, over="nats") as nats:
        await asyncio.wait_for(http.ask(conversation, "!deltas 200\n!lines 20", agent="scripted"), WAIT_S)
        await ended(http, conversation)
        cursor = None
        for turn in range(40):
            client = (http, nats)[turn % 2]
            async with asyncio.timeout(WAIT_S), aclosing(client.follow(conversation, cursor)) as items:
                taken = 0
                async for item in items:
                    cursor = item.cursor
                    if isinstance(item, ExecutionItem):
                        got += range(item.ordinal, item.event.end + 1)
                        taken += 1
                    if taken == 3 or isinstance(item, CaughtUp):
                        break
    assert got == list(range(1, len(got) + 1))
    assert len(got) > 40


async def test_a_backend_killed_in_mid_stream_costs_the_reader_nothing(up: TetherSet) -> None:
    conversation = new_id("conv")
    got: list[int] = []
    async with Client.from_state(str(up.data / "state.json")) as client:
        submission = await client.prompt(conversation, "!deltas 300 10\n!say done", agent="scripted")
        killed = False
        items = client.follow(conversation, submission.cursor, until_response=submission.response_id)
        async with asyncio.timeout(WAIT_S), aclosing(items):
            async for item in items:
                if isinstance(item, ExecutionItem):
                    got += range(item.ordinal, item.event.end + 1)
                    if len(got) > 50 and not killed:
                        killed = True
                        os.kill(up.state.children["backend"].pid, signal.SIGKILL)
    assert killed
    assert got == list(range(1, len(got) + 1))
    assert isinstance(item, ExecutionItem) and item.type == "response.ended"


async def test_bad_input_is_refused_with_the_field_named(client: Client) -> None:
    for call in (
        client.prompt("a b", "x"),
        client.prompt("c", ""),
        client.prompt("c", "x", agent="No Agent"),
        client.prompt("c", "x", request_id="../x"),
        client.execution("a.b"),
    ):
        with pytest.raises(ProblemError) as told:
            await call
        assert told.value.problem.code is Code.INVALID
        assert told.value.problem.fields
    with pytest.raises(ProblemError) as missing:
        await client.execution("exe_none")
    assert missing.value.problem.code is Code.NOT_FOUND
    with pytest.raises(ProblemError) as damaged:
        async with aclosing(client.follow("c", "not-a-cursor")) as items:
            await anext(items)
    assert damaged.value.problem.code is Code.INVALID


async def test_an_agent_that_is_not_there_is_refused_or_is_a_failed_response_that_says_so(client: Client) -> None:
    """Over HTTP the edge knows the agents; over NATS the agent service says it."""
    try:
        response = await asyncio.wait_for(client.ask(new_id("conv"), "x", agent="no-such-agent"), WAIT_S)
    except ProblemError as error:
        assert (error.problem.code, error.problem.fields[0].field) == (Code.INVALID, "agent.kind")
        assert "there is: scripted" in error.problem.fields[0].remedy
        return
    assert response.outcome in ("failed", "never_started")
    assert response.error is not None and response.error["detail"].startswith("agent.kind")


async def test_an_interjection_where_nothing_runs_is_refused(client: Client) -> None:
    with pytest.raises(ProblemError) as told:
        await client.say(new_id("conv"), "hello?")
    assert told.value.problem.code is Code.SESSION_STREAM_NOT_ACTIVE
    with pytest.raises(ProblemError) as refused:
        await client.ask(new_id("conv"), "hello?", agent="scripted", mode="interject")
    assert refused.value.problem.code is Code.SESSION_STREAM_NOT_ACTIVE


def example(up: TetherSet, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment(up.home, {"TETHER_CLI_DATA": str(up.data)}),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


@pytest.mark.parametrize("call", ["submit_and_follow.py x", "nats_follow.py c1", "approve.py x"])
def test_an_example_without_a_set_says_in_one_line_how_to_start_one(tmp_path: Path, call: str) -> None:
    done = example(TetherSet(tmp_path, tmp_path / "none"), *call.split())
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.endswith("no set is up here; start one with `tether up --detach`")


def test_the_example_over_http_runs(up: TetherSet) -> None:
    done = example(up, "submit_and_follow.py", "!say hello\n!tool look")
    assert done.returncode == 0, done.stderr
    assert "hello\n[tool] ok\noutcome: completed\n" in done.stdout


def test_the_example_over_nats_goes_on_where_it_was(up: TetherSet) -> None:
    first = example(up, "nats_follow.py", "example-conv", "--prompt", "!say hello")
    assert first.returncode == 0, first.stderr
    assert "text.completed" in first.stdout and "execution.ended" in first.stdout
    second = example(up, "nats_follow.py", "example-conv")
    assert second.returncode == 0, second.stderr
    assert "text.completed" not in second.stdout and "caught up" in second.stdout


def test_the_example_that_decides_approvals_runs(up: TetherSet) -> None:
    done = example(up, "approve.py", "!ask look\n!ask remove\n!say done")
    assert done.returncode == 0, done.stderr
    assert "tool look: ok" in done.stdout and "tool remove: error" in done.stdout
