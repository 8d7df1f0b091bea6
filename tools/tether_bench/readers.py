"""readers_1000_*: one conversation with 50 events a second and a thousand readers, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from tether import nats_authority, nkey_jwt
from tether.bus import NatsBus
from tether_bench.processes import CpuMeter, pids
from tether_bench.rig import END_S, START_S, Rig
from tether_bench.stats import Figure, Target, percentile_of_counts
from tether_bench.tap import BenchError, SseReplay
from tether_cli.state import Paths

READERS: Final = 1000
RATE: Final = 50  # events a second of the conversation
CUT: Final = "readers_1000_cut"
P99: Final = "readers_1000_ms_p99"
P50: Final = "readers_1000_ms_p50"
P99_TARGET_MS: Final = 250.0
DESCRIPTORS_MIN: Final = 4096  # of each process: a thousand readers, and what else it holds
_PROCESSES: Final = 2
_LATE_S: Final = 20.0  # how long after its time a round's last delta may come
_BUDGET_S: Final = 12.0  # of a short run's rounds
_SUBJECT: Final = "bench.fan"


def raise_descriptors(least: int = DESCRIPTORS_MIN) -> None:
    """Open files for this process and what it starts from now on. Raises BenchError where the hard limit is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < least:
        if hard != resource.RLIM_INFINITY and hard < least:
            raise BenchError(f"{READERS} readers need {least} open files, the hard limit is {hard}: raise `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one round, over all readers. `delays`: tenths of a ms → samples."""

    delays: Mapping[int, int]
    cut: int
    lost: int
    doubled: int
    megabytes: float

    def ms(self, share: float) -> float:
        if not self.delays:
            raise BenchError("no event came")
        return percentile_of_counts(self.delays, share) / 10


class ReaderProcesses:
    """`_PROCESSES` times `reader_process`; each command goes to all, and all answer."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ReaderProcesses:
        for _ in range(_PROCESSES):
            command = [sys.executable, "-P", "-m", "tether_bench.reader_process"]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def tell(self, command: Mapping[str, Any]) -> None:
        data = json.dumps(command).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(data)
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Raises BenchError; every command ends by itself within its own time."""
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchError("a reader process has ended")
            answer: dict[str, Any] = json.loads(line)
            if "problem" in answer:
                raise BenchError(answer["problem"])
            found.append(answer)
        return found

    def open(self, host: str, port: int, hello: str, ready: str) -> None:
        share = READERS // _PROCESSES
        self.tell({"do": "open", "host": host, "port": port, "hello": hello, "ready": ready, "count": share})
        if sum(answer["open"] for answer in self.answers()) != READERS:
            raise BenchError(f"not all of {READERS} readers are connected")

    def measured(self, group: int, last: str, run_s: float, printed: Callable[[], Mapping[str, float]]) -> Outcome:
        """Everything up to the token `last`; `printed` is asked afterwards for when each token was written."""
        self.tell({"do": "collect", "group": group, "until": f"{last} ", "timeout_s": run_s + _LATE_S})
        cut = sum(answer["cut"] for answer in self.answers())
        self.tell({"do": "judge", "group": group, "printed": dict(printed())})
        delays: dict[int, int] = {}
        answers = self.answers()
        for answer in answers:
            for tenths, samples in answer["delays"].items():
                delays[int(tenths)] = delays.get(int(tenths), 0) + samples
        size_bytes = sum(answer["bytes"] for answer in answers)
        return Outcome(
            delays, cut, sum(one["lost"] for one in answers), sum(one["doubled"] for one in answers), size_bytes / 1e6
        )


@dataclass(slots=True)
class _Conversation:
    """The running execution that all read. `tokens` of one round."""

    rig: Rig
    seconds: float
    rounds: int
    name: str
    session: str = ""
    began: int = 0
    folder: Any = None
    times: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return round(self.seconds * RATE)

    def go(self, number: int) -> str:
        """Begin a round; returns its last token."""
        (self.folder / f"go-{number}").touch()
        self.began = number + 1
        return f"e{(number + 1) * self.tokens:06d}"

    def printed(self, number: int) -> dict[str, float]:
        first, last = number * self.tokens + 1, (number + 1) * self.tokens
        wanted = {f"e{index:06d}" for index in range(first, last + 1)}
        found = {line["text"].strip(): at_s for at_s, line in self.rig.printed(self.session) if line["type"] == "delta"}
        return {token: at_s for token, at_s in found.items() if token in wanted}


@contextlib.contextmanager
def _conversation(rig: Rig, rounds: int, seconds: float) -> Iterator[_Conversation]:
    rig.warm()
    talk = _Conversation(rig, seconds, rounds, rig.name("readers"), folder=rig.folder / rig.name("readers"))
    talk.folder.mkdir()
    with rig.tap() as tap, rig.http() as client:
        stream = rig.follow(tap, talk.name)
        steps = [f"!wait_file {talk.folder}/go-{n}\n!deltas {talk.tokens} {1000 // RATE}" for n in range(rounds)]
        rig.prompt(client, talk.name, "\n".join(steps))
        try:
            rig.wait(lambda: stream.has(b'"model.request"'), START_S, "an agent's start")
            bound = [event for _, event in SseReplay(stream).told() if event["type"] == "session.bound"]
            talk.session = str(bound[0]["body"]["native_session"])
            yield talk
        finally:
            for number in range(rounds):
                (talk.folder / f"go-{number}").touch()
        left_s = (rounds - talk.began) * seconds
        rig.wait(lambda: stream.has(b'"execution.ended"'), END_S + left_s, "an execution's end")


def thousand_readers(rig: Rig) -> list[Figure]:
    """Each round: the bare baselines, then the product; all readers stay connected throughout."""
    raise_descriptors()
    rounds, seconds, baseline_s = (2, 3.0, 1.5) if rig.short else (3, 10.0, 4.0)
    outcomes: list[Outcome] = []
    nats: list[Outcome] = []
    bare: list[Outcome] = []
    cpu = CpuMeter(pids(rig.state))
    with _conversation(rig, rounds, seconds) as talk, ReaderProcesses(rig) as processes:
        begun_s = time.monotonic()
        processes.open(*_sse(rig, talk.name))
        open_s = time.monotonic() - begun_s
        processes.open(*_nats(rig))
        for number in rig.rounds(rounds, _BUDGET_S):
            nats.append(_bare_nats(rig, processes, baseline_s))
            bare.append(_bare_tcp(rig, processes, baseline_s))
            cpu.start()
            last = talk.go(number)
            outcomes.append(processes.measured(0, last, seconds, lambda n=number: talk.printed(n)))  # type: ignore[misc]
            cpu.stop()
    for number, outcome in enumerate(outcomes):
        expected = READERS * talk.tokens
        rig.losses.count(
            f"round {number + 1} of {READERS} readers", expected=expected, distinct=expected - outcome.lost
        )
        rig.losses.duplicated += outcome.doubled
    return _figures(outcomes, nats, bare, open_s, cpu.per(len(outcomes) * talk.tokens))


def _figures(
    outcomes: list[Outcome], nats: list[Outcome], bare: list[Outcome], open_s: float, cpu_us: dict[str, float]
) -> list[Figure]:
    cuts = [outcome.cut for outcome in outcomes]
    fresh = tuple(float(cut - before) for cut, before in zip(cuts, [0, *cuts], strict=False))
    note = f"{READERS} SSE readers of one conversation × {RATE}/s, connected in {open_s:.1f} s"
    baselines = {
        share: {"nats": tuple(one.ms(share) for one in nats), "tcp": tuple(one.ms(share) for one in bare)}
        for share in (0.5, 0.99)
    }
    return [
        # All that were cut, in whatever round: a median would hide one.
        Figure(CUT, "readers", (sum(fresh),), target=Target("at most", 0.0), note=note),
        Figure(
            P99,
            "ms",
            tuple(one.ms(0.99) for one in outcomes),
            baselines[0.99],
            Target("at most", P99_TARGET_MS),
            note=note,
            cpu_us=cpu_us,
        ),
        Figure(P50, "ms", tuple(one.ms(0.5) for one in outcomes), baselines[0.5], note=note),
    ]


def _sse(rig: Rig, conversation: str) -> tuple[str, int, str, str]:
    address = urlsplit(rig.state.http_url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    hello = (
        f"GET /v1/conversations/{conversation}/events HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {rig.state.token}\r\nAccept: text/event-stream\r\n\r\n"
    )
    return host, port, hello, "event: live"


def _nats(rig: Rig) -> tuple[str, int, str, str]:
    address = urlsplit(rig.state.nats_url)
    options = json.dumps({"verbose": False, "jwt": _bearer(rig)})
    hello = f"CONNECT {options}\r\nSUB {_SUBJECT} 1\r\nPING\r\n"
    return address.hostname or "127.0.0.1", address.port or 4222, hello, "PONG"


def _bearer(rig: Rig) -> str:
    """Claims of a user that proves no key: a socket here sends what it has to say without reading first."""
    services = nats_authority.keys(Paths(Path(rig.state.data)).secrets).services
    user = nkey_jwt.new_key(nkey_jwt.Kind.USER)
    hears = nkey_jwt.Allowed(publish=(), subscribe=(_SUBJECT,))
    now_s = int(time.time())
    return nkey_jwt.user_claims(services, user.public, name="bench", allowed=hears, issued_s=now_s, bearer=True)


# --- baselines: the same bytes to as many sockets of the same processes ---


def payload(token: str) -> bytes:
    """As long as the product's own frame of a delta."""
    cursor = "v1." + "x" * 60
    body = f'{{"execution":"exe_{"0" * 22}","ordinal":10000,"at":1700000000000,"type":"text.delta",'
    body += f'"body":{{"segment":"s1","text":"{token} "}},"replay":false}}'
    return f"id: {cursor}\ndata: {body}\n\n".encode()


async def _paced(seconds: float, write: Callable[[bytes], Awaitable[None]]) -> dict[str, float]:
    """Tokens at the product's rate; when each was written."""
    printed: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    next_s = loop.time()
    for index in range(1, round(seconds * RATE) + 1):
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        token = f"e{index:06d}"
        printed[token] = time.time()
        await write(payload(token))
        next_s += 1 / RATE
    return printed


def _bare_nats(rig: Rig, processes: ReaderProcesses, seconds: float) -> Outcome:
    """One core publish for all, by nats-server to a thousand raw subscriptions."""
    printed: dict[str, float] = {}

    async def work(bus: NatsBus) -> None:
        printed.update(await _paced(seconds, lambda data: bus.send(_SUBJECT, data)))

    rig.on_bus(work, timeout_s=seconds + _LATE_S)
    return processes.measured(1, f"e{round(seconds * RATE):06d}", seconds, lambda: printed)


def _bare_tcp(rig: Rig, processes: ReaderProcesses, seconds: float) -> Outcome:
    """The least that a Python service can do: one loop, one `write` of bytes that are there to each connection."""
    printed: dict[str, float] = {}
    last = f"e{round(seconds * RATE):06d}"

    async def work(_bus: NatsBus) -> Outcome:
        loop = asyncio.get_running_loop()
        transports: list[asyncio.Transport] = []

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                found = cast(asyncio.Transport, transport)
                found.write(b"ready\n")
                transports.append(found)

        server = await loop.create_server(Accepted, "127.0.0.1", 0, backlog=1024)
        try:
            port = server.sockets[0].getsockname()[1]
            await asyncio.to_thread(processes.open, "127.0.0.1", port, "hello\n", "ready")

            async def write(data: bytes) -> None:
                for transport in transports:
                    transport.write(data)

            printed.update(await _paced(seconds, write))
            outcome = await asyncio.to_thread(processes.measured, 2, last, seconds, lambda: printed)
            await asyncio.to_thread(_close_newest, processes)
            return outcome
        finally:
            server.close()

    return rig.on_bus(work, timeout_s=seconds + START_S + _LATE_S)


def _close_newest(processes: ReaderProcesses) -> None:
    processes.tell({"do": "close"})
    processes.answers()
