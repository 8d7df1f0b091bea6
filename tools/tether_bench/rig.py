"""What figures measure with: the set that is up, its HTTP API, its bus, the scripted agent beside it.

Figures are plain functions in one worker thread; the set's own loop is the main thread's. What a figure starts it ends
in a `finally`; every wait has a deadline and ends early once the bench is told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import uvloop

from tether.bus import NatsBus, connect
from tether.ids import new_id
from tether.subjects import events_stream
from tether_bench.stats import Losses
from tether_bench.tap import BenchError, LineReplay, Recording, SseReplay, Tap, open_sse
from tether_cli.state import SetState

T = TypeVar("T")
_POLL_S: Final = 0.01
START_S: Final = 60.0  # until a sandbox, or all of a round's agents, are up
END_S: Final = 30.0
WORKSPACE: Final = "bench"
OVER: Final = "the bench's time is over"
AGENT: Final = (sys.executable, "-P", "-m", "scripted_agent")


@dataclass(slots=True)
class Rig:
    """`folder`: for truth, session and signal files; removed by who made it. `short`: fewer and shorter rounds."""

    state: SetState
    folder: Path
    short: bool
    losses: Losses = field(default_factory=Losses)
    stopping: threading.Event = field(default_factory=threading.Event)
    deadline_s: float = float("inf")  # monotonic; nothing is waited for beyond it
    soak_s: float = 0.0  # of the soak, where it is asked for
    say: Callable[[str], None] = print
    _names: int = 0
    _warm: set[str] = field(default_factory=set)

    @property
    def truth(self) -> Path:
        return self.folder / "truth"

    def name(self, kind: str) -> str:
        """A token that is new in this run."""
        self._names += 1
        return f"{kind}-{self._names}"

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str, *, poll_s: float = _POLL_S) -> None:
        """Raises BenchError when the time is over."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            if self.stopping.is_set():
                raise BenchError("stopped")
            if time.monotonic() >= self.deadline_s:
                raise BenchError(OVER)
            if time.monotonic() >= until_s:
                raise BenchError(f"{what}: not within {timeout_s:g} s")
            time.sleep(poll_s)

    def pause(self, seconds: float) -> None:
        """Raises BenchError once the bench's time is over."""
        self.stopping.wait(seconds)
        if self.stopping.is_set():
            raise BenchError("stopped")
        if time.monotonic() >= self.deadline_s:
            raise BenchError(OVER)

    def rounds(self, most: int, budget_s: float) -> Iterator[int]:
        """Numbers of the rounds: up to `most`, none begun in a short run once the budget is used. At least one."""
        begun_s = time.monotonic()
        for number in range(most):
            if number and self.short and time.monotonic() - begun_s > budget_s:
                return
            yield number

    # --- HTTP ---

    @contextlib.contextmanager
    def http(self) -> Iterator[Http]:
        client = Http(self.state.http_url, self.state.token)
        try:
            yield client
        finally:
            client.close()

    def prompt(self, client: Http, conversation: str, script: str, workspace: str = WORKSPACE) -> str:
        """Send a prompt; returns its execution. The same request is repeated while it is pending."""
        body = {
            "request_id": new_id("req"),
            "content": [{"type": "text", "text": script}],
            "agent": {"kind": "scripted"},
            "workspace": workspace,
        }
        until_s = time.monotonic() + START_S
        while True:
            answer = client.ask("POST", f"/v1/conversations/{conversation}/messages", body)
            if answer["status"] != "pending":
                return str(answer["execution_id"])
            if time.monotonic() > until_s or self.stopping.is_set():
                raise BenchError(f"the prompt is still pending after {START_S:g} s")

    # --- streams ---

    @contextlib.contextmanager
    def tap(self) -> Iterator[Tap]:
        tap = Tap()
        try:
            yield tap
        finally:
            tap.close()

    def follow(self, tap: Tap, conversation: str, cursor: str | None = None) -> Recording:
        """An SSE reader of the whole conversation, or of what follows the cursor; live once this returns."""
        path = f"/v1/conversations/{conversation}/events" + (f"?cursor={cursor}" if cursor else "")
        recording = open_sse(tap, self.state.http_url, self.state.token, path)
        self.wait(lambda: recording.has(b"event: live") or recording.closed, END_S, f"the stream of {conversation}")
        if recording.closed:
            SseReplay(recording).told().__next__()  # says what the server answered
        return recording

    def warm(self, workspace: str = WORKSPACE) -> str:
        """The sandbox of this workspace has run something. The default is the one that all figures share."""
        if workspace not in self._warm:
            with self.tap() as tap, self.http() as client:
                conversation = self.name("warm")
                stream = self.follow(tap, conversation)
                self.prompt(client, conversation, "!say ready", workspace)
                self.wait(lambda: stream.has(b'"execution.ended"'), START_S, "the first execution of a sandbox")
            self._warm.add(workspace)
        return workspace

    # --- the agent beside the product ---

    @contextlib.contextmanager
    def agent_process(
        self, script: str, stdout: int = subprocess.PIPE
    ) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """The scripted agent with its prompt, on bare pipes: (the process, its session)."""
        environment = {"PATH": os.defpath, "TETHER_SCRIPTED_TRUTH": str(self.truth), "HOME": str(self.folder)}
        session = new_id("bare")
        process = subprocess.Popen(
            [*AGENT, "--session-id", session],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=self.folder,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"type": "prompt", "id": session, "text": script}).encode() + b"\n")
            process.stdin.flush()
            yield process, session
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @contextlib.contextmanager
    def bare_agents(self, tap: Tap, scripts: list[str]) -> Iterator[list[tuple[Recording, str]]]:
        """One agent for each script, its stdout recorded: (its stdout, its session)."""
        found: list[tuple[Recording, str]] = []
        with contextlib.ExitStack() as stack:
            for script in scripts:
                read, write = os.pipe()
                try:
                    _, session = stack.enter_context(self.agent_process(script, write))
                finally:
                    os.close(write)
                found.append((tap.add(read, session), session))
            yield found

    def records(self, session: str) -> Iterator[dict[str, Any]]:
        """What an agent's truth says, whole records in order. Raises BenchError."""
        paths = sorted(self.truth.glob(f"{session}-*.ndjson"))
        if not paths:
            raise BenchError(f"no truth file of session {session}")
        for path in paths:
            with path.open("rb") as file:
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # still being written
                    yield json.loads(raw)

    def printed(self, session: str) -> Iterator[tuple[float, dict[str, Any]]]:
        """What it printed: (when, the line)."""
        for record in self.records(session):
            if record["ev"] == "stdout" and "line" in record:
                yield float(record["at"]), json.loads(record["line"])

    # --- the bus ---

    def on_bus(self, work: Callable[[NatsBus], Coroutine[Any, Any, T]], *, timeout_s: float) -> T:
        """Run it on a loop of its own (uvloop, as the services have) with a connection. Raises BenchError."""

        left_s = max(0.1, self.deadline_s - time.monotonic())

        async def whole() -> T:
            async with asyncio.timeout(min(timeout_s, left_s)):
                async with self.bus() as bus:
                    return await work(bus)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(whole())
        except TimeoutError:
            raise BenchError(OVER if left_s < timeout_s else f"not within {timeout_s:g} s") from None

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        state = self.state
        async with await connect(state.nats_url, name="tether-bench", creds_file=state.nats_creds_file) as bus:
            yield bus

    @property
    def log(self) -> str:
        return events_stream(self.state.tenant)


class Http:
    """One kept connection."""

    def __init__(self, url: str, token: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=30.0)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Raises BenchError for anything but success."""
        data = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, body=data, headers=self._headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise BenchError(f"{method} {path}: {error or type(error).__name__}") from None
        if answer.status >= 300:
            raise BenchError(f"{method} {path}: {answer.status} {content[:500].decode('utf-8', 'replace')}")
        value: dict[str, Any] = json.loads(content)
        return value

    def close(self) -> None:
        self._connection.close()


def cursor_of(client: Http, conversation: str) -> str | None:
    """Where a reader goes on that has the history; None where there is none yet."""
    try:
        return str(client.ask("GET", f"/v1/conversations/{conversation}")["cursor"])
    except BenchError as error:
        if " 404 " in str(error):
            return None
        raise


async def projection_of(bus: NatsBus, stream: str) -> str:
    """The name of the projection's durable consumer. Raises BenchError where there is none."""
    answer = await bus.api(f"$JS.API.CONSUMER.NAMES.{stream}", {})
    names = answer.get("consumers")
    for name in names if isinstance(names, list) else []:
        if str(name).startswith("projection-"):
            return str(name)
    raise BenchError(f"{stream} has no projection")


async def projected(bus: NatsBus, stream: str, sequence: int) -> None:
    """Until the projection has acked this sequence."""
    durable = await projection_of(bus, stream)
    while True:  # a consumer's position can only be asked for; the caller bounds the time
        state = await bus.consumer(stream, durable)
        if state is not None and state.ack_floor >= sequence:
            return
        await asyncio.sleep(0.02)


def lines_of(recording: Recording) -> Iterator[tuple[float, dict[str, Any]]]:
    """The agent's lines on a bare pipe, decoded."""
    for received_s, line in LineReplay(recording).lines():
        yield received_s, json.loads(line)
