"""One tenant without measure beside one that works as usual, in alternating rounds.

    quiet round   the honest tenant alone: an execution that speaks 20 times a second and its reader, a prompt now and
                  then in a new conversation
    noisy round   the same; beside it the other tenant sends prompts from many callers without a pause, its executions
                  print as fast as they can, and its readers connect, go and connect again

Both tenants have the same quotas, which are what an operator would set on a machine of this size. Compared: from the
agent's print to the reader, and from a prompt's sending to its admission and to the first event of its execution; the
median over rounds of each round's median, and of its 99th percentile. The noise must be there: what the other tenant
was refused, and what it got through, is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tether import Client, subjects
from tether.client.items import ExecutionItem
from tether.errors import ProblemError
from tether.ids import new_id
from tether_bench.readers import raise_descriptors
from tether_bench.stats import median, percentile
from tether_collector.launching import derived_uuid
from tether_load.load_set import Plane, plane
from tether_load.report import Finding, others_share

HONEST: Final = "honest"
NOISY: Final = "noisy"
WORKSPACE: Final = "work"
RATIO_MAX: Final = 2.0
FLOOR_MS: Final = 10.0  # a difference below it is nobody's: two ticks of a scheduler
RATE: Final = 20  # deltas a second of the honest execution
QUOTAS: Final[dict[str, Any]] = {
    "default": {
        "prompts_per_minute": 120,
        "waiting_prompts": 50,
        "running_executions": 4,
        "readers": 200,
        "workspace": {"events_per_s": 1000, "event_bytes_per_s": 262_144, "running_executions": 2},
    }
}
_PROMPT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int  # of each kind
    seconds: float
    prompts: int  # of the honest tenant in each round
    callers: int
    readers: int
    look_s: float  # at what others use of the machine


FULL: Final = Size(rounds=5, seconds=15.0, prompts=6, callers=80, readers=250, look_s=2.0)
SHORT: Final = Size(rounds=1, seconds=3.0, prompts=2, callers=70, readers=20, look_s=0.5)


@dataclass(slots=True)
class Round:
    """Milliseconds. `noise`: what the other tenant was answered."""

    events_ms: list[float] = field(default_factory=list)
    admitted_ms: list[float] = field(default_factory=list)
    started_ms: list[float] = field(default_factory=list)
    noise: Counter[str] = field(default_factory=Counter)


async def run(size: Size, say: Callable[[str], None]) -> Finding:
    """Raises CliError where the set fails, BenchError where the machine cannot have so many files."""
    raise_descriptors(4 * size.readers + 512)
    finding = Finding("noisy")
    async with plane([HONEST, NOISY], {}, say, quotas=QUOTAS) as up:
        await _warm(up)
        quiet: list[Round] = []
        noisy: list[Round] = []
        for number in range(size.rounds):
            finding.shares.append(await others_share(size.look_s))
            quiet.append(await _round(up, size, number, loud=False))
            noisy.append(await _round(up, size, number, loud=True))
            say(f"round {number + 1}: {_told(quiet[-1])} alone, {_told(noisy[-1])} beside {dict(noisy[-1].noise)}")
        finding.shares.append(await others_share(size.look_s))
    _judge(finding, quiet, noisy)
    return finding


def _told(one: Round) -> str:
    events, admitted = percentile(one.events_ms, 0.99), median(one.admitted_ms)
    return f"events p99 {events:.0f} ms, admission {admitted:.0f} ms"


def _judge(finding: Finding, quiet: list[Round], noisy: list[Round]) -> None:
    names: tuple[tuple[str, Callable[[Round], float]], ...] = (
        ("events_ms_p50", lambda one: percentile(one.events_ms, 0.5)),
        ("events_ms_p99", lambda one: percentile(one.events_ms, 0.99)),
        ("admitted_ms_p50", lambda one: percentile(one.admitted_ms, 0.5)),
        ("started_ms_p50", lambda one: percentile(one.started_ms, 0.5)),
    )
    for name, of in names:
        alone, beside = median([of(one) for one in quiet]), median([of(one) for one in noisy])
        most = max(RATIO_MAX * alone, alone + FLOOR_MS)
        finding.row(f"{name}_alone", alone, "ms")
        finding.row(f"{name}_beside", beside, "ms", f"≤ {most:.1f}", beside <= most)
    noise: Counter[str] = Counter()
    for one in noisy:
        noise.update(one.noise)
    for name, count in sorted(noise.items()):
        finding.row(f"noise_{name}", count, "")
    if not noise["prompts admitted"] or not noise["QUOTA_EXCEEDED"]:
        finding.faults.append(f"the noisy tenant was not noisy: {dict(noise)}")
    lost = sum(not one.events_ms for one in (*quiet, *noisy))
    if lost:
        finding.faults.append(f"in {lost} rounds the honest tenant's reader got nothing")


async def _warm(up: Plane) -> None:
    """Both sandboxes are there, and have run something."""
    for tenant in (HONEST, NOISY):
        async with _client(up, tenant) as client:
            await _first_event(client, await _send(client, f"warm-{tenant}", "!say ready"))


@contextlib.asynccontextmanager
async def _client(up: Plane, tenant: str) -> AsyncIterator[Client]:
    client = Client.http(up.state.http_url, up.tokens[tenant])
    try:
        yield client
    finally:
        await client.close()


async def _send(client: Client, conversation: str, script: str) -> tuple[str, str]:
    """(conversation, execution) once it is admitted. Raises ProblemError."""
    request = new_id("req")
    async with asyncio.timeout(_PROMPT_S):
        while True:
            told = await client.prompt(
                conversation, script, agent="scripted", workspace=WORKSPACE, request_id=request, patience_s=0.5
            )
            if told.execution is not None:
                return conversation, told.execution


async def _first_event(client: Client, where: tuple[str, str]) -> None:
    conversation, execution = where
    async with asyncio.timeout(_PROMPT_S), contextlib.aclosing(client.follow(conversation)) as items:
        async for item in items:
            if isinstance(item, ExecutionItem) and item.execution == execution:
                return


# --- a round ---


async def _round(up: Plane, size: Size, number: int, *, loud: bool) -> Round:
    one = Round()
    kind = "noisy" if loud else "quiet"
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(_client(up, HONEST))
        go = up.folder / f"go-{kind}-{number}"
        conversation = f"talk-{kind}-{number}"
        script = f"!wait_file {go}\n!deltas {round(size.seconds * RATE)} {1000 // RATE}"
        where = await _send(client, conversation, script)
        following = asyncio.create_task(_follow(client, where), name="honest-reader")
        await _first_event(client, where)
        async with _noise(up, size, number, one.noise) if loud else contextlib.nullcontext():
            if loud:
                await asyncio.sleep(1.5)  # it is well under way
            go.touch()
            await _prompts(client, size, f"{kind}-{number}", one)
            came = await following
        printed = _printed(up, where)
    one.events_ms = [1000 * (came[token] - at_s) for token, at_s in printed.items() if token in came]
    return one


async def _follow(client: Client, where: tuple[str, str]) -> dict[str, float]:
    """When each delta came, until the execution's end."""
    conversation, execution = where
    came: dict[str, float] = {}
    async with contextlib.aclosing(client.follow(conversation)) as items:
        async for item in items:
            now_s = time.time()
            if isinstance(item, ExecutionItem) and item.execution == execution:
                if item.type == "text.delta":
                    for token in str(item.event.body["text"]).split():
                        came.setdefault(token, now_s)
                elif item.type == "execution.ended":
                    break
    return came


def _printed(up: Plane, where: tuple[str, str]) -> dict[str, float]:
    """When the agent printed each, by its own truth."""
    prompt = derived_uuid(where[1], "prompt")
    for path in up.truth.glob("*.ndjson"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if prompt in text:
            return dict(_deltas(text))
    return {}


def _deltas(text: str) -> Iterator[tuple[str, float]]:
    for raw in text.splitlines():
        record = json.loads(raw)
        if record.get("ev") == "stdout" and '"delta"' in str(record.get("line", "")):
            line = json.loads(record["line"])
            if line.get("type") == "delta":
                yield str(line["text"]).strip(), float(record["at"])


async def _prompts(client: Client, size: Size, name: str, one: Round) -> None:
    """Spread over the round, each in a new conversation; it ends when its last one has begun."""
    pause_s = size.seconds / (size.prompts + 1)
    for index in range(size.prompts):
        await asyncio.sleep(pause_s)
        begun_s = time.monotonic()
        where = await _send(client, f"ask-{name}-{index}", "!say hello")
        one.admitted_ms.append(1000 * (time.monotonic() - begun_s))
        await _first_event(client, where)
        one.started_ms.append(1000 * (time.monotonic() - begun_s))


# --- the noise ---


@contextlib.asynccontextmanager
async def _noise(up: Plane, size: Size, number: int, noise: Counter[str]) -> AsyncIterator[None]:
    """As long as the context; `noise` is told afterwards."""
    given = {"number": number, "callers": size.callers, "readers": size.readers}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tether_load.noise_process"), stdin=PIPE, stdout=PIPE, limit=1 << 20
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({**given, "url": up.state.http_url, "token": up.tokens[NOISY]}).encode() + b"\n")
        await process.stdin.drain()
        yield
        async with asyncio.timeout(_PROMPT_S):
            told, _ = await process.communicate(b"")  # which ends its stdin
        noise.update(json.loads(told or b"{}"))
        async with _client(up, NOISY) as client:
            await _quieten(up, client)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _quieten(up: Plane, client: Client) -> None:
    """What the noisy tenant still has in the queue is thrown away, and its executions are stopped, until none is left:
    a quiet round is quiet."""
    async with up.bus() as bus:
        await bus.purge(subjects.PROMPTS_STREAM, f"tether.prompt.{NOISY}.>")
    until_s = time.monotonic() + _PROMPT_S
    while time.monotonic() < until_s:
        page = await client.executions(active=True)
        if not page.executions:
            return
        for one in page.executions:
            with contextlib.suppress(ProblemError):
                await client.stop(one.execution)
        await asyncio.sleep(0.2)
