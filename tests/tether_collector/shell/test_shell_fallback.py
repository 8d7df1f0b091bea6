"""G5, G6, G7, D9: a session that is lost, with a real collector, keepers and the scripted agent. A backend is played.

The scripted agent is told the history apart from the prompt (`history`), remembers it as a turn of that name, and says
with `!recall` what it remembers: so a test reads in the log what the agent was given, and in the truth what it got.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support_crashing_collector import CRASHED
from support_nats import NatsServer
from support_shell import Rig, Run, collector, eventually
from tether import subjects
from tether.bus import NatsBus
from tether.errors import Code, problem
from tether.history import History, HistoryRequest, HistoryRow
from tether.ports import Bus, Message
from tether_collector.core.history import CLOSE, OPEN
from tether_oracle import load_truth

ROWS = (
    HistoryRow(role="user", text="what is 6 times 7?", at=1),
    HistoryRow(role="tool", name="calc", input={"a": 6}, output="42", status="ok", at=2),
    HistoryRow(role="assistant", text="it is 42", at=3),
)
LOST = "no-such-session"
CUT = 7


class Histories:
    """What a backend would answer. `asked`: every request."""

    def __init__(self, answer: Callable[[HistoryRequest], History] | None = None) -> None:
        self.asked: list[HistoryRequest] = []
        self._answer = answer or (
            lambda request: History(conversation=request.conversation, cut=request.cut, through=9, rows=ROWS)
        )

    @asynccontextmanager
    async def serving(self, bus: Bus, tenant: str) -> AsyncIterator[Histories]:
        async with bus.serve(subjects.histories(tenant), self._handle, name="backend"):
            yield self

    async def _handle(self, message: Message) -> bytes:
        request = HistoryRequest.model_validate_json(message.data)
        self.asked.append(request)
        return self._answer(request).encode()


def prompts(rig: Rig) -> list[dict[str, Any]]:
    """Every prompt that a process read which had a session, by its own word: one that was refused reads on its way out
    what was written to it, and does nothing of it."""
    taken = [one for one in load_truth(rig.truth).processes if not any("refused" in record for record in one.records)]
    lines = [line.message() for one in taken for line in one.stdin]
    return [dict(message) for message in lines if message is not None and message.get("type") == "prompt"]


def material(rig: Rig) -> list[Path]:
    return list((rig.state_dir / "recovery-material").glob("*"))


async def check_fell_back(rig: Rig, run: Run, histories: Histories | None = None) -> None:
    """The second process answered, and the log says how that came about; the first one is proven gone before it."""
    end = await run.ended()
    assert end.body["outcome"] == "completed", run.events
    assert [event.body["process"] for event in run.of("execution.started")] == [1, 2]
    [recovered] = run.of("session.recovered")
    assert recovered.body == {
        "from": LOST,
        "process": 2,
        "why": "not_found",
        "source": "export",
        "rows": 3,
        "partial": False,
    }
    bound = run.of("session.bound")
    assert len({event.body["native_session"] for event in bound}) == 1 and bound[0].body["native_session"] != LOST
    assert [event.body["text"] for event in run.of("text.completed")] == ["I remember 1 earlier turns: history"]
    [prompt] = prompts(rig)
    assert prompt["text"] == "!recall"
    assert prompt["history"].startswith(OPEN) and prompt["history"].endswith(CLOSE)
    assert "it is 42" in prompt["history"] and "[tool calc, ok]" in prompt["history"]
    assert material(rig) == []
    if histories is not None:
        [asked] = histories.asked
        assert (asked.conversation, asked.workspace, asked.cut) == ("c1", rig.workspace, CUT)


async def test_g5_an_unknown_session_is_followed_once_by_a_process_with_the_history(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories().serving(bus, tenant) as histories:
        run = await rig.begin("!recall", resume=LOST, fallback=True, history_cut=CUT)
        await check_fell_back(rig, run, histories)
        snapshot = await run.snapshot()
        assert snapshot.terminal and snapshot.target.process_generation == 2
        spawns = [json.loads(path.read_bytes()) for path in rig.state_dir.glob("executions/*/*/spawn.json")]
        assert sorted(spawn["process_generation"] for spawn in spawns) == [1, 2]


STEPS = (
    "process_prepared",
    "process_noted",
    "process_told",
    "spool_handed_on",
    "process_journaled",
    "next_spawned",
    "next_spawn_journaled",
    "terminal_stored",
)


@pytest.mark.parametrize("step", STEPS)
async def test_g5_a_crash_at_any_step_of_the_fallback_is_continued_and_it_happens_once(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with (
        collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig,
        Histories().serving(bus, tenant) as histories,
    ):
        await rig.start(crash_at=step)
        run = await rig.admit("!recall", resume=LOST, fallback=True, history_cut=CUT)
        asking = asyncio.create_task(rig.ask_start(run), name="start")
        assert await rig.exited() == CRASHED, rig.log[-3000:]
        await asyncio.gather(asking, return_exceptions=True)
        await rig.start()
        await check_fell_back(rig, run)
        assert len({asked.cut for asked in histories.asked}) == 1
        assert len(run.of("session.recovered")) == 1
        starts = [
            record for one in load_truth(rig.truth).processes for record in one.records if record["ev"] == "start"
        ]
        assert sorted("refused" in record for record in starts) == [False, True], "each process began once"


async def test_g5_without_leave_the_response_fails_and_names_the_choices(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories().serving(bus, tenant) as histories:
        run = await rig.begin("!recall", resume=LOST, history_cut=CUT)
        end = await run.ended()
        assert end.body["error"]["code"] == "RESUME_FAILED"
        assert run.of("response.ended")[0].body["error"]["choices"] == ["fresh", "history"]
        assert histories.asked == [] and prompts(rig) == []


async def test_g6_after_output_there_is_no_fallback(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, sys\n"
        "sys.stdin.readline()\n"
        "say = lambda **line: print(json.dumps(line), flush=True)\n"
        f"say(type='session', session_id={LOST!r}, resumed=True)\n"
        "say(type='turn.started', prompt='p')\n"
        "say(type='text', segment='s1', text='said before')\n"
        "say(type='error', code='session_not_found', message='it is gone')\n"
        "sys.exit(1)\n"
    )
    environment = {"TETHER_AGENTS": json.dumps({"scripted": ["python3", str(agent)]})}
    async with (
        collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig,
        Histories().serving(bus, tenant) as histories,
    ):
        run = await rig.begin("hello", resume=LOST, fallback=True, history_cut=CUT)
        end = await run.ended()
        assert (end.body["outcome"], end.body["error"]["code"]) == ("failed", "RESUME_FAILED")
        assert [event.body["process"] for event in run.of("execution.started")] == [1]
        assert histories.asked == []


@pytest.mark.parametrize("fallback", [None, True])
async def test_g7_a_resume_that_was_accepted_with_nothing_behind_it_is_reported_as_not_resumed(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, fallback: bool | None
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories().serving(bus, tenant) as histories:
        first = await rig.begin("remember this\n!forget soft")
        await first.ended()
        session = first.of("session.bound")[-1].body["native_session"]
        run = await rig.begin("!tool build 20000", resume=session, fallback=fallback, history_cut=CUT)
        end = await run.ended()
        error = run.of("response.ended")[0].body["error"]
        assert (error["code"], error["choices"]) == ("RESUME_FAILED", ["fresh", "history"])
        assert "in place of it" in error["detail"] or "resumed nothing" in error["detail"]
        assert run.of("session.bound") == [], "the other session is not the conversation's"
        assert end.body["proof"] and histories.asked == []


async def test_the_chosen_history_begins_a_new_session_with_the_first_process(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories().serving(bus, tenant):
        run = await chose(rig, "history")
        end = await run.ended()
        assert end.body["outcome"] == "completed", (run.events, rig.log[-3000:])
        [recovered] = run.of("session.recovered")
        assert (recovered.body["process"], recovered.body["why"]) == (1, "chosen")
        assert [event.body["text"] for event in run.of("text.completed")] == ["I remember 1 earlier turns: history"]
        assert len(run.of("execution.started")) == 1 and material(rig) == []


@pytest.mark.parametrize("step", ["process_noted", "spawned", "spawn_journaled"])
async def test_a_crash_while_the_chosen_history_is_prepared_is_continued_with_the_same(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with (
        collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig,
        Histories().serving(bus, tenant) as histories,
    ):
        await rig.start(crash_at=step)
        run = await rig.admit("!recall", history_cut=CUT)
        run.command = run.command.model_copy(update={"resume": "history"})
        asking = asyncio.create_task(rig.ask_start(run), name="start")
        assert await rig.exited() == CRASHED, rig.log[-3000:]
        await asyncio.gather(asking, return_exceptions=True)
        await rig.start()
        assert (await run.ended()).body["outcome"] == "completed", rig.log[-3000:]
        assert len(run.of("session.recovered")) == 1 and len(histories.asked) == 1
        assert len(prompts(rig)) == 1 and material(rig) == []


async def chose(rig: Rig, choice: str) -> Run:
    run = await rig.admit("!recall", history_cut=CUT)
    run.command = run.command.model_copy(update={"resume": choice})
    reply = await rig.ask_start(run, timeout_s=25.0)
    assert reply.status in ("accepted", "delivered", "settled"), reply
    return run


def refusing(code: Code, *, retryable: bool | None = None) -> Callable[[HistoryRequest], History]:
    why = problem(code, "as the test wants it", retryable=retryable)
    return lambda asked: History(conversation=asked.conversation, cut=asked.cut, problem=why)


def nothing(asked: HistoryRequest) -> History:
    return History(conversation=asked.conversation, cut=asked.cut)


@pytest.mark.parametrize("answer", [refusing(Code.NOT_FOUND), nothing], ids=["unknown", "empty"])
async def test_d9_without_a_history_it_fails_by_name_and_never_begins_afresh(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, answer: Callable[[HistoryRequest], History]
) -> None:
    async with (
        collector(bus, nats_server.url, tenant, tmp_path) as rig,
        Histories(answer).serving(bus, tenant) as histories,
    ):
        for choice in (None, "history"):
            if choice is None:
                run = await rig.begin("!recall", resume=LOST, fallback=True, history_cut=CUT)
            else:
                run = await chose(rig, choice)
            end = await run.ended()
            error = end.body["error"]
            assert (end.body["outcome"], error["code"]) == ("failed", "RESUME_FAILED")
            only_fresh = error["choices"] == ["fresh"]  # what has no rows is no choice
            assert error["choices"] == ["fresh", "history"] or (only_fresh and answer is nothing)
            assert len(run.of("execution.started")) == 1
        assert prompts(rig) == [] and len(histories.asked) == 2


async def test_a_projection_that_is_behind_is_asked_again(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    behind = refusing(Code.RUNTIME_UNAVAILABLE)
    given: list[History] = []

    def answer(asked: HistoryRequest) -> History:
        whole = History(conversation=asked.conversation, cut=asked.cut, through=9, rows=ROWS)
        given.append(whole if len(given) == 2 else behind(asked))
        return given[-1]

    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories(answer).serving(bus, tenant):
        run = await rig.begin("!recall", resume=LOST, fallback=True, history_cut=CUT)
        await check_fell_back(rig, run)
        assert len(given) == 3


async def test_material_without_room_fails_by_name_and_is_not_tried_again(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories().serving(bus, tenant) as histories:
        folder = rig.state_dir / "recovery-material"
        folder.mkdir()
        for number in range(64):
            (folder / f"other-{number}.json").write_bytes(b"{}")
        run = await rig.begin("!recall", resume=LOST, fallback=True, history_cut=CUT)
        end = await run.ended()
        assert (end.body["outcome"], end.body["error"]["code"]) == ("failed", "QUOTA_EXCEEDED")
        assert "64 files" in end.body["error"]["detail"]
        assert len(histories.asked) == 1 and prompts(rig) == []
        assert len(material(rig)) == 64


async def test_a_stop_while_the_history_is_waited_for_ends_it_at_once(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with (
        collector(bus, nats_server.url, tenant, tmp_path) as rig,
        Histories(refusing(Code.RUNTIME_UNAVAILABLE)).serving(bus, tenant) as histories,
    ):
        run = await rig.begin("!recall", resume=LOST, fallback=True, history_cut=CUT)

        async def asked() -> bool:
            return bool(histories.asked)

        await eventually(asked, "the question for the history")
        reply = await rig.ask("stop", target=run.target)
        assert reply.status in ("accepted", "delivered", "settled"), reply
        end = await run.ended(timeout_s=10.0)
        assert end.body["outcome"] == "stopped" and end.body["proof"]
        assert len(run.of("execution.started")) == 1 and prompts(rig) == []


async def test_a_resume_that_works_prepares_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig, Histories().serving(bus, tenant) as histories:
        first = await rig.begin("remember this")
        await first.ended()
        session = first.of("session.bound")[-1].body["native_session"]
        path = rig.state_dir / "sessions" / f"{session}.json"

        async def is_noted() -> bool:
            return path.exists()

        await eventually(is_noted, "the session's note")
        noted = json.loads(path.read_bytes())
        assert (noted["agent"], noted["session"], noted["cli_version"]) == ("scripted", session, "1.0.0")
        run = await rig.begin("!recall", resume=session, fallback=True, history_cut=CUT)
        assert (await run.ended()).body["outcome"] == "completed"
        assert len(run.of("execution.started")) == 1 and run.of("session.recovered") == []
        assert histories.asked == [] and not (rig.state_dir / "recovery-material").exists()


BUSY_AGENT = """
import json, os, pathlib, sys
tries = pathlib.Path({folder!r}) / "tries"
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
if "--resume" in sys.argv and len(tries.read_text()) <= {busy}:
    print(json.dumps({{"type": "error", "code": "session_busy", "message": "it has a writer"}}), flush=True)
    sys.exit(1)
os.execvp(sys.executable, [sys.executable, "-m", "scripted_agent", *sys.argv[1:]])
"""


async def test_a_busy_session_is_resumed_once_the_old_process_has_let_go_of_it(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(BUSY_AGENT.format(folder=str(tmp_path), busy=3))  # the first prompt's process, then twice
    environment = {"TETHER_AGENTS": json.dumps({"scripted": [sys.executable, str(agent)]})}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        first = await rig.begin("remember this")
        await first.ended()
        session = first.of("session.bound")[-1].body["native_session"]
        run = await rig.begin("!recall", resume=session)
        end = await run.ended()
        assert end.body["outcome"] == "completed", run.events
        assert [event.body["process"] for event in run.of("execution.started")] == [1, 2, 3]
        assert {event.body["resumed_from"] for event in run.of("execution.started")} == {session}
        assert "1 earlier turns" in run.of("text.completed")[0].body["text"]
        assert {event.body["native_session"] for event in run.of("session.bound")} == {session}, "never another one"


async def test_an_answer_that_was_cut_off_is_offered_to_the_resumed_session_that_asks_the_same(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, os, signal, sys\n"
        "say = lambda **line: print(json.dumps(line), flush=True)\n"
        "session = sys.argv[sys.argv.index('--session-id' if '--session-id' in sys.argv else '--resume') + 1]\n"
        "sys.stdin.readline()\n"
        "say(type='session', session_id=session)\n"
        "say(type='turn.started', prompt='p')\n"
        "say(type='ask', request=f'r{os.getpid()}', kind='approval', tool='write', tool_id='t', input={'path': 'a'})\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {"TETHER_AGENTS": json.dumps({"scripted": [sys.executable, str(agent)]})}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        first = await rig.begin("hello")
        asked = await first.until("interaction.requested")
        answer = {"interaction": asked.body["interaction"], "decision": "allow", "text": "please"}
        await rig.ask("answer", target=first.target, payload=answer, control="ctl_first")
        assert (await first.ended()).body["outcome"] == "lost"
        session = first.of("session.bound")[-1].body["native_session"]
        path = rig.state_dir / "sessions" / f"{session}.json"

        async def is_noted() -> bool:
            return path.exists()

        await eventually(is_noted, "the session's note")
        run = await rig.begin("and now", resume=session)
        again = await run.until("interaction.requested")
        assert again.body["offered"] == {"control": "ctl_first", "decision": "allow", "text": "please"}
        await rig.ask("stop", target=run.target)
        await run.ended()
