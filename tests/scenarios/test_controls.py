"""C1–C10 through the whole set: a real nats-server, real services, the scripted agent, its truth and its processes.

What is answered, interrupted and stopped is asked of the HTTP API, as a user does; what came of it is read from the
agent's own truth and from /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import pytest_asyncio

from support_local_set import Http, collector_in, eventually, processes_of
from support_set import TetherSet
from support_writers import Writers, living
from tether.limits import CONTROL_LEASE_TTL_S, STOP_INTERRUPT_S, STOP_TERM_S
from tether.processes import ProcessId, is_running, send_signal
from tether_cli import state
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import Paths, SetState
from tether_oracle import load_truth

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

DEAF: Final = "!ignore SIGTERM\n!ignore SIGINT\n!ignore SIGHUP\n!fork2 60\nbusy\n!stay\n!tool build 60000"
KILLED: Final = ("backend", "router", "agent", "collector", "nats")
TAKEN: Final = ("delivered", "settled")


@dataclass(frozen=True)
class Up:
    state: SetState
    truth: Path

    @property
    def data(self) -> Path:
        return Path(self.state.data)

    def child(self, name: str) -> ProcessId:
        """The set's child as it runs now, by the state file."""
        now = state.read(Paths(self.data))
        assert now is not None
        found: ProcessId = now.children[name]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    root = tmp_path_factory.mktemp("controls")
    agents, truth, data = root / "agents.toml", root / "truth", root / "data"
    agents.write_text(f"[agents.scripted]\nenv = {{ TETHER_SCRIPTED_TRUTH = {json.dumps(str(truth))} }}\n")
    async with ServiceSet(SetOptions(data=data, log="quiet", agents_file=agents, back_off_max_s=0.2)) as running:
        yield Up(running.state, truth)
    assert processes_of(data) == []


async def kill(up: Up, name: str, workspace: str) -> None:
    """SIGKILL, and until its successor is there."""

    def now() -> ProcessId:
        return collector_in(up.data, workspace) if name == "collector" else up.child(name)

    before = now()
    assert send_signal(before, signal.SIGKILL)

    async def replaced() -> bool:
        after = now()
        return after != before and is_running(after)

    await eventually(replaced, f"the successor of the {name}")


async def pending(http: Http, conversation: str) -> list[dict[str, Any]]:
    found = (await http.conversation(conversation)).get("interactions", [])
    return [one for one in found if one["state"] == "pending"]


async def asks(http: Http, conversation: str) -> dict[str, Any]:
    async def there() -> bool:
        return bool(await pending(http, conversation))

    await eventually(there, "something that waits")
    return (await pending(http, conversation))[0]


async def said(http: Http, conversation: str, text: str) -> None:
    async def there() -> bool:
        return text in await http.texts(conversation)

    await eventually(there, f"the text {text!r}")


async def execution_of(http: Http, conversation: str) -> str:
    name: str = (await http.conversation(conversation))["executions"][-1]["execution"]
    return name


async def answer(
    client: httpx2.AsyncClient, conversation: str, interaction: str, control: str, **body: Any
) -> dict[str, Any]:
    """As a careful client does: the same control id until it is known what became of it."""
    path = f"/v1/conversations/{conversation}/interactions/{interaction}"
    last: Any = None
    async with asyncio.timeout(60):
        while True:
            try:
                last = await client.post(path, json={"control_id": control, **body})
            except httpx2.TransportError:
                await asyncio.sleep(0.1)
                continue
            found: dict[str, Any] = last.json()
            if last.status_code < 400 and found["status"] in TAKEN:
                return found
            assert last.status_code < 400 or found["retryable"] or last.status_code >= 500, last.text
            await asyncio.sleep(0.1)


# --- C1, C7: who answers ---


async def test_c1_an_approval_is_answered_once_and_reaches_the_same_process_whoever_is_killed_meanwhile(
    up: Up,
) -> None:
    async with Http(up.state) as http, Writers(up.state.data) as writers:
        await http.prompt("c1", "c1-1", f"!repeat {len(KILLED)}\n!ask write\n!end\ndone", workspace="own-c1")
        cli: set[int] = set()
        for number, name in enumerate(KILLED):
            waiting = await asks(http, "c1")
            execution = await execution_of(http, "c1")
            cli |= {process.pid for process in living()[execution]}
            await kill(up, name, "own-c1")
            still = await asks(http, "c1")
            assert still["interaction"] == waiting["interaction"], f"visible after the {name} was killed"
            await answer(http.client, "c1", waiting["interaction"], f"ctl-c1-{number}", decision="allow")

            async def resolved(interaction: str = waiting["interaction"]) -> bool:
                return interaction not in [one["interaction"] for one in await pending(http, "c1")]

            await eventually(resolved, f"the effect of the answer after the {name} was killed")
        await http.ended("c1", 1)
        assert len(cli) == 1, "one process, from the first question to the last"
        history = await http.conversation("c1")
        assert [one["state"] for one in history["interactions"]] == ["answered"] * len(KILLED)
        tools = [one for one in history["items"] if one["kind"] == "tool"]
        assert len(tools) == len(KILLED) and "done" in await http.texts("c1")
        assert writers.overlaps([execution]) == []


def start_backend(up: Up, root: Path, ready: Path) -> subprocess.Popen[bytes]:
    """With the environment of the set's own, but for its place."""
    raw = Path(f"/proc/{up.child('backend').pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in raw if b"=" in entry)
    environment |= {
        "TETHER_HTTP_PORT": "0",
        "TETHER_READY_FILE": str(ready),
        "TETHER_DATABASE_URL": f"sqlite+aiosqlite:///{root}/second.sqlite3",
    }
    return subprocess.Popen([sys.executable, "-P", "-m", "tether_backend"], env=environment, cwd=root)


@asynccontextmanager
async def second_backend(up: Up, root: Path) -> AsyncIterator[str]:
    """Another replica on the same bus, with rows of its own; its URL."""
    ready = root / "ready.json"
    process = await asyncio.to_thread(start_backend, up, root, ready)
    try:

        async def there() -> bool:
            assert process.poll() is None
            return ready.exists()

        await eventually(there, "the second backend")
        yield json.loads(ready.read_bytes())["url"]
    finally:
        process.terminate()
        process.wait(20)


async def test_c7_a_backend_frozen_beyond_its_lease_gives_way_and_its_late_answer_has_no_effect(
    up: Up, tmp_path: Path
) -> None:
    headers = {"Authorization": f"Bearer {up.state.token}"}
    async with (
        Http(up.state) as http,
        second_backend(up, tmp_path) as url,
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=40) as other,
    ):
        await http.prompt("c7", "c7-1", "!ask write\n!ask write\nafter", workspace="own-c7")
        first = await asks(http, "c7")
        await answer(http.client, "c7", first["interaction"], "ctl-c7-1", decision="allow")

        async def second_asked() -> bool:
            found = await pending(http, "c7")
            return bool(found) and found[0]["interaction"] != first["interaction"]

        await eventually(second_asked, "the second question")
        [second] = await pending(http, "c7")
        frozen = up.child("backend")
        # It holds the lease that it has just used, and an answer of its own is on its way to it.
        assert send_signal(frozen, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            path = f"/v1/conversations/c7/interactions/{second['interaction']}"
            late = asyncio.create_task(
                http.client.post(path, json={"control_id": "ctl-c7-late", "decision": "deny"}), name="late"
            )
            refused = await other.post(path, json={"control_id": "ctl-c7-2", "decision": "allow"})
            if refused.status_code == 409:  # words and a time to come back after, as long as the lease is another's
                assert (refused.json()["code"], refused.json()["retryable"]) == ("LEASE_NOT_READY", True)
                assert refused.json()["retry_after_s"] > 0
            await answer(other, "c7", second["interaction"], "ctl-c7-2", decision="allow")
            assert time.monotonic() - began_s < CONTROL_LEASE_TTL_S + 10
        finally:
            send_signal(frozen, signal.SIGCONT)
        refusal = await late
        assert refusal.status_code in (404, 409), refusal.text
        assert refusal.json()["code"] in ("INTERACTION_SETTLED", "SESSION_STREAM_NOT_ACTIVE", "TARGET_STALE")
        await http.ended("c7", 1)
        found = await http.conversation("c7")
        assert [one["state"] for one in found["interactions"]] == ["answered", "answered"]


async def test_two_backends_behind_one_set_take_turns_within_a_callers_wait(up: Up, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {up.state.token}"}
    async with (
        Http(up.state) as http,
        second_backend(up, tmp_path) as url,
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=40) as other,
    ):
        await http.prompt("turns", "t1", "!repeat 3\n!ask write\n!end\nafter", workspace="own-turns")
        seen: set[str] = set()
        for number, client in enumerate((http.client, other, http.client)):

            async def next_asked() -> bool:
                found = await pending(http, "turns")
                return bool(found) and found[0]["interaction"] not in seen

            await eventually(next_asked, "the next question")
            [waiting] = await pending(http, "turns")
            seen.add(waiting["interaction"])
            path = f"/v1/conversations/turns/interactions/{waiting['interaction']}"
            given = await client.post(path, json={"control_id": f"ctl-turn-{number}", "decision": "allow"})
            assert given.status_code == 200 and given.json()["status"] in TAKEN, given.text
        await http.ended("turns", 1)


# --- verbs and targets ---


async def test_targets_that_are_not_there_are_told_by_name_and_a_stale_one_names_the_current(up: Up) -> None:
    async with Http(up.state) as http:
        unknown = await http.client.post("/v1/executions/exe_nobody/stop")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "NOT_FOUND")
        await http.prompt("target", "tg1", "first")
        await http.ended("target", 1)
        old = await execution_of(http, "target")
        await http.prompt("target", "tg2", "second\n!hang")
        await said(http, "target", "second")
        current = await execution_of(http, "target")
        for verb in ("stop", "interrupt"):
            stale = await http.client.post(f"/v1/executions/{old}/{verb}")
            assert (stale.status_code, stale.json()["code"]) == (409, "TARGET_STALE"), stale.text
            assert stale.json()["context"]["current"]["execution"] == current
        nothing = await http.client.post(
            "/v1/conversations/target/interactions/never-asked", json={"decision": "allow"}
        )
        assert nothing.status_code == 404, nothing.text
        assert nothing.json()["code"] in ("TARGET_UNKNOWN", "NOT_FOUND")
        assert current in living(), "nothing of that touched what runs"
        stopped = await http.client.post(f"/v1/executions/{current}/stop", headers={"Idempotency-Key": "ctl-stop-1"})
        again = await http.client.post(f"/v1/executions/{current}/stop", headers={"Idempotency-Key": "ctl-stop-1"})
        assert (stopped.json()["status"], again.json()["status"]) == ("settled", "settled")
        await http.ended("target", 2)


async def test_c2_c3_denials_carry_their_words_approvals_their_changed_input_and_questions_every_answer(up: Up) -> None:
    script = "!ask write\n!ask write\n!question Which colour? | Red | Blue ;; [multi] Which sizes? | S | M | L\nafter"
    async with Http(up.state) as http:
        await http.prompt("forms", "f1", script, workspace="own-forms")
        path = "/v1/conversations/forms/interactions"
        first = await asks(http, "forms")
        await answer(http.client, "forms", first["interaction"], "ctl-f1", decision="deny", text="not in this house")

        async def next_one(*before: str) -> dict[str, Any]:
            async def there() -> bool:
                return any(one["interaction"] not in before for one in await pending(http, "forms"))

            await eventually(there, "the next")
            return next(one for one in await pending(http, "forms") if one["interaction"] not in before)

        second = await next_one(first["interaction"])
        late = await http.client.post(f"{path}/{first['interaction']}", json={"decision": "allow"})
        assert (late.status_code, late.json()["code"]) == (409, "INTERACTION_SETTLED"), late.text
        await answer(
            http.client, "forms", second["interaction"], "ctl-f2", decision="allow", input={"path": "elsewhere"}
        )
        conflict = await http.client.post(
            f"{path}/{second['interaction']}", json={"control_id": "ctl-f2", "decision": "deny"}
        )
        assert (conflict.status_code, conflict.json()["code"]) == (409, "REQUEST_CONFLICT")
        third = await next_one(first["interaction"], second["interaction"])
        assert [one["id"] for one in third["questions"]] == ["q1", "q2"]
        wrong = await http.client.post(
            f"{path}/{third['interaction']}", json={"decision": "allow", "answers": {"q9": ["Red"]}}
        )
        assert wrong.status_code == 422 and "q9" in wrong.text and "q1, q2" in wrong.text
        answers = {"q1": ["Blue"], "q2": ["S", "L"]}
        await answer(http.client, "forms", third["interaction"], "ctl-f3", decision="allow", answers=answers)
        await http.ended("forms", 1)
        texts = await http.texts("forms")
        assert 'Answers: {"q1":["Blue"],"q2":["S","L"]}' in texts, texts
        tools = [one["state"] for one in (await http.conversation("forms"))["items"] if one["kind"] == "tool"]
        assert [tool["state"] for tool in tools] == ["error", "ok"]
        assert tools[0]["output"] == "not in this house"
        lines = [str(record) for one in load_truth(up.truth).processes for record in one.stdin]
        assert any("elsewhere" in line for line in lines), "the agent was given the changed input"


async def test_an_interrupt_is_settled_by_the_agents_own_output_and_the_next_message_goes_on(up: Up) -> None:
    async with Http(up.state) as http:
        await http.prompt("cut", "i1", "begun\n!hang")
        await said(http, "cut", "begun")
        execution = await execution_of(http, "cut")
        given = await http.client.post(f"/v1/executions/{execution}/interrupt", json={"control_id": "ctl-cut"})
        assert given.json()["status"] in TAKEN

        async def settled() -> bool:
            receipt = await http.client.get("/v1/controls/ctl-cut", params={"execution": execution})
            return bool(receipt.status_code == 200 and receipt.json()["status"] == "settled")

        await eventually(settled, "the receipt")
        await http.ended("cut", 1)
        assert await http.outcomes("cut") == ["cancelled"]
        await http.prompt("cut", "i2", "and on")
        await http.ended("cut", 2)
        assert await http.outcomes("cut") == ["cancelled", "completed"]


# --- C6: exact stop ---


async def test_c6_a_stop_ends_everything_of_its_execution_within_its_bound_and_touches_nothing_else(
    up: Up,
) -> None:
    """Two executions in one workspace, and another workspace on this host: only the named one."""
    async with Http(up.state) as http:
        places = {"stop-a": "shared", "stop-b": "shared", "stop-c": "apart"}
        for conversation, workspace in places.items():
            await http.prompt(conversation, f"{conversation}-1", DEAF, workspace=workspace)
        for conversation in places:
            await said(http, conversation, "busy")
        names = {conversation: await execution_of(http, conversation) for conversation in places}
        before = living()
        assert all(len(before[name]) >= 2 for name in names.values()), "an agent, and what it forked away, each"
        began_s = time.monotonic()
        given = await http.client.post(f"/v1/executions/{names['stop-a']}/stop", json={"control_id": "ctl-exact"})
        await http.ended("stop-a", 1)
        took_s = time.monotonic() - began_s
        assert took_s < STOP_INTERRUPT_S + STOP_TERM_S + 3.0, f"{took_s:.1f} s"
        assert given.json()["status"] in (*TAKEN, "unknown", "accepted")
        [ended] = (await http.conversation("stop-a"))["executions"]
        assert (ended["outcome"], ended["proof"]["method"] in ("pid_namespace", "subreaper_sweep")) == ("stopped", True)
        now = living()
        assert names["stop-a"] not in now
        for other in ("stop-b", "stop-c"):
            assert {one.pid for one in now[names[other]]} == {one.pid for one in before[names[other]]}
        receipt = await http.client.get("/v1/controls/ctl-exact", params={"execution": names["stop-a"]})
        assert receipt.json()["status"] == "settled"
        for other in ("stop-b", "stop-c"):
            await http.client.post(f"/v1/executions/{names[other]}/stop")
        for other in ("stop-b", "stop-c"):
            await http.ended(other, 1)


async def test_c10_a_prompt_while_the_finished_agent_hangs_on_waits_for_the_proof_and_then_runs(up: Up) -> None:
    async with Http(up.state) as http, Writers(up.state.data) as writers:
        await http.prompt("linger", "l1", "!say done\n!result\n!stay")
        await said(http, "linger", "done")
        await http.prompt("linger", "l2", "next")
        await http.ended("linger", 2)
        assert await http.outcomes("linger") == ["completed", "completed"]
        names = [one["execution"] for one in (await http.conversation("linger"))["executions"]]
        assert writers.overlaps(names) == [] and set(names) <= writers.seen
        assert await http.texts("linger") == ["done", "You said: next"]


# --- the commands ---


async def test_commands_answer_interrupt_say_and_stop_and_tell_what_to_do_next(up: Up, tmp_path: Path) -> None:
    there = TetherSet(tmp_path, up.data)

    async def tether(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(there.tether, *arguments)

    async with Http(up.state) as http:
        await http.prompt("words", "w1", "!ask write\nasked\n!steer\n!hang")
        await asks(http, "words")
        answered = await tether("answer", "words", "-", "allow")
        assert (answered.returncode, answered.stdout) == (0, "allow: delivered\n") or "settled" in answered.stdout
        again = await tether("answer", "words", "-", "allow")
        assert again.returncode == 2 and "nothing waits in words; `tether show` tells how it stands" in again.stderr
        await said(http, "words", "asked")
        spoken = await tether("say", "words", "!say heard")
        assert (spoken.returncode, spoken.stdout) == (0, "said\n"), spoken.stderr
        await said(http, "words", "heard")
        cut = await tether("interrupt", "words")
        assert cut.returncode == 0 and ("interrupted" in cut.stdout or "delivered" in cut.stdout), cut.stderr
        await http.ended("words", 1)
        over = await tether("say", "words", "too late")
        assert over.returncode == 1 and "`tether run --conversation ID` starts a response" in over.stderr
        nobody = await tether("stop", "words")
        assert nobody.returncode == 2 and "`tether ps` lists what runs" in nobody.stderr
        await http.prompt("words", "w2", "more\n!hang")
        await said(http, "words", "more")
        stopped = await tether("stop", "words", "--json")
        assert json.loads(stopped.stdout)["status"] == "settled" and json.loads(stopped.stdout)["control_id"]
        await http.ended("words", 2)
        assert os.getpid() not in {one.pid for processes in living().values() for one in processes}
