"""The real, pinned Claude Code against the fake model server: what the adapter relies on, without a real model.

Skipped where the CLI is not installed (`make agents`). Each test starts the CLI as the product does: streamed JSON
both ways, approvals over stdio, an environment that holds only what is named.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fake_models import FakeModels
from tether_agents.locate import FoundAgent, Problem, find_agent

DEADLINE_S = 60.0
ARGUMENTS = [
    *("-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
    *("--include-partial-messages", "--permission-prompt-tool", "stdio", "--permission-mode", "default"),
    *("--setting-sources", "", "--strict-mcp-config"),
]


@pytest.fixture(scope="module")
def claude() -> FoundAgent:
    found = find_agent("claude", Path(os.environ["TETHER_AGENTS_DIR"]) if "TETHER_AGENTS_DIR" in os.environ else None)
    if isinstance(found, Problem):
        pytest.skip(str(found))
    return found


@pytest.fixture
def models() -> Iterator[FakeModels]:
    with FakeModels(require_key="the-key") as server:
        yield server


class Claude:
    """One process of the CLI."""

    def __init__(self, found: FoundAgent, models: FakeModels, folder: Path, key: str) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "CLAUDE_CONFIG_DIR": str(folder / "config"),
            "ANTHROPIC_BASE_URL": models.base_url,
            "ANTHROPIC_API_KEY": key,
            "CLAUDE_CODE_MAX_RETRIES": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        self.session = str(uuid.uuid4())
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        self.process = subprocess.Popen(
            [str(found.path), *ARGUMENTS, "--session-id", self.session],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=self.workspace,
        )
        self.seen: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def prompt(self, text: str) -> None:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        self.send({"type": "user", "uuid": str(uuid.uuid4()), "message": message})

    def answer(self, request: dict[str, Any], response: dict[str, Any]) -> None:
        body = {"subtype": "success", "request_id": request["request_id"], "response": response}
        self.send({"type": "control_response", "response": body})

    def until(self, kind: str) -> dict[str, Any]:
        while (line := self._lines.get(timeout=DEADLINE_S)) is not None:
            message: dict[str, Any] = json.loads(line)
            self.seen.append(message)
            if message["type"] == kind:
                return message
        raise AssertionError(f"stdout ended without {kind}; got {[m['type'] for m in self.seen]}")

    def finish(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def deltas(self) -> str:
        events = [m["event"] for m in self.seen if m["type"] == "stream_event"]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        return "".join(d["text"] for d in deltas if d["type"] == "text_delta")


@contextmanager
def running(found: FoundAgent, models: FakeModels, folder: Path, key: str = "the-key") -> Iterator[Claude]:
    agent = Claude(found, models, folder, key)
    try:
        yield agent
    finally:
        agent.process.kill()
        agent.process.wait(DEADLINE_S)
        agent._reader.join(DEADLINE_S)
        for pipe in (agent.process.stdin, agent.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def test_a_text_comes_in_deltas_and_then_whole(claude: FoundAgent, models: FakeModels, tmp_path: Path) -> None:
    with running(claude, models, tmp_path) as agent:
        agent.prompt("[[text:one two three]]")
        result = agent.until("result")
        assert (result["is_error"], result["result"], result["session_id"]) == (False, "one two three", agent.session)
        assert agent.deltas() == "one two three"
        init = next(m for m in agent.seen if m["type"] == "system" and m.get("subtype") == "init")
        assert init["claude_code_version"] == claude.pinned_version
        assert agent.finish() == 0
    assert {entry["key"] for entry in models.requests if "directive" in entry} == {"accepted"}


@pytest.mark.parametrize("decision", ["allow", "deny"])
def test_a_tool_runs_only_when_it_is_allowed(
    claude: FoundAgent, models: FakeModels, tmp_path: Path, decision: str
) -> None:
    with running(claude, models, tmp_path) as agent:
        agent.prompt("[[bash:touch was-here]]")
        request = agent.until("control_request")
        assert (request["request"]["subtype"], request["request"]["tool_name"]) == ("can_use_tool", "Bash")
        if decision == "allow":
            agent.answer(request, {"behavior": "allow", "updatedInput": request["request"]["input"]})
        else:
            agent.answer(request, {"behavior": "deny", "message": "not today"})
        result = agent.until("result")
        assert result["result"] == "The command is done."
        outcome = next(m for m in agent.seen if m["type"] == "user")["message"]["content"][0]
        assert bool(outcome.get("is_error")) == (decision == "deny")
        assert (agent.workspace / "was-here").exists() == (decision == "allow")
        assert agent.finish() == 0


def test_a_question_is_asked_like_an_approval_and_answered_in_its_input(
    claude: FoundAgent, models: FakeModels, tmp_path: Path
) -> None:
    with running(claude, models, tmp_path) as agent:
        agent.prompt("[[ask]]")
        request = agent.until("control_request")
        assert request["request"]["tool_name"] == "AskUserQuestion"
        answered = request["request"]["input"] | {"answers": {"Which colour?": "Blue"}}
        agent.answer(request, {"behavior": "allow", "updatedInput": answered})
        assert agent.until("result")["result"] == "Thanks for the answer."
        told = next(m for m in agent.seen if m["type"] == "user")
        assert "Blue" in json.dumps(told)
        assert agent.finish() == 0


def test_an_interrupt_ends_the_turn_and_the_next_prompt_is_answered(
    claude: FoundAgent, models: FakeModels, tmp_path: Path
) -> None:
    with running(claude, models, tmp_path) as agent:
        agent.prompt("[[slow:1000,20]]")
        while "tok2 " not in agent.deltas():
            agent.until("stream_event")
        agent.send({"type": "control_request", "request_id": "i1", "request": {"subtype": "interrupt"}})
        assert agent.until("control_response")["response"]["request_id"] == "i1"
        result = agent.until("result")
        assert (result["is_error"], result["terminal_reason"]) == (True, "aborted_streaming")
        agent.prompt("[[text:still here]]")
        assert agent.until("result")["result"] == "still here"
        assert agent.finish() == 0


@pytest.mark.parametrize(("key", "prompt", "status"), [("wrong", "hello", 401), ("the-key", "[[http:500]]", 500)])
def test_a_model_error_is_a_result_that_says_so(
    claude: FoundAgent, models: FakeModels, tmp_path: Path, key: str, prompt: str, status: int
) -> None:
    with running(claude, models, tmp_path, key) as agent:
        agent.prompt(prompt)
        result = agent.until("result")
        assert result["is_error"] is True
        assert result["terminal_reason"] == "api_error"
        assert result["api_error_status"] == status
        assert agent.finish() == 1
