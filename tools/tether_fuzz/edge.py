"""The HTTP edge of a whole set (a real nats-server, router, agent service, backend), asked by Schemathesis and by hand.

Schemathesis draws requests from the OpenAPI document, with a token and without, and checks each answer against it:
statuses, media types, headers, schemas, no 5xx but the documented ones. Beside it `edge_raw` sends what no client
would. Event streams and WebSockets have no end, so they are asked by hand alone. What must hold besides: the same
processes answer afterwards, none has told of an exception, the backend's memory is where it was, and a prompt is
answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import urlopen

from tether import Client
from tether.errors import TetherError
from tether_cli import state
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState
from tether_fuzz import edge_hooks
from tether_fuzz.edge_raw import Raw
from tether_fuzz.guard import Finding, Result

NAME: Final = "http"
GROWTH_BYTES_MAX: Final = 192 << 20  # of the backend's resident memory
ASK_S: Final = 90.0
REQUEST_S: Final = 45  # of one request: a control waits 10 s for its collector, on a machine that is busy longer
LATE_S: Final = 90.0  # beyond its time, until Schemathesis is ended: it makes its failures smaller
# What never ends, or ends the sandbox that everything shares.
_BY_HAND: Final = ("followEvents", "followOverWebSocket")
# Left out, as what they ask for is not so here: a request of the right shape may be refused for what it asks for; a 503
# is documented (`edge_hooks` looks at what is 5xx); a drain that joins another is found under the other's name alone; a
# deletion can be looked up after it.
_EXCLUDED_CHECKS: Final = ",".join(
    ("positive_data_acceptance", "not_a_server_error", "ensure_resource_availability", "use_after_free")
)
_TOLD_BROKEN: Final = ("Traceback (most recent call last)", "delivery_broken", '"exception"')


def run(seconds: float, seed: int) -> list[Result]:
    """On a set of its own."""
    with tempfile.TemporaryDirectory(prefix="tether-fuzz-") as folder:
        return asyncio.run(_run(Path(folder), seconds, seed))


async def _run(folder: Path, seconds: float, seed: int) -> list[Result]:
    asked, raw = Result("http-openapi"), Result("http-raw")
    async with ServiceSet(SetOptions(data=folder / "data", log="quiet", ephemeral=True)) as services:
        up = services.state
        await _ask(up, asked)
        before = _processes(up)
        backend = before.get("backend", 0)
        memory = _resident_bytes(backend)
        stopping = threading.Event()
        by_hand = asyncio.create_task(asyncio.to_thread(_by_hand, up, seconds, seed, raw, stopping), name="by-hand")
        try:
            await asyncio.to_thread(_schemathesis, up, folder, seconds, seed, asked)
        finally:
            stopping.set()
            await by_hand
        await _ask(up, asked)
        if (now := _processes(up)) != before:
            _wrong(asked, "services ended", f"{before} are now {now}")
        elif (grown := _resident_bytes(backend) - memory) > GROWTH_BYTES_MAX:
            _wrong(asked, "memory of the backend", f"grew by {grown} bytes")
        _look_at_logs(up, asked)
    return [asked, raw]


def _wrong(result: Result, where: str, text: str, data: bytes = b"", kind: str = "crash") -> None:
    result.findings.append(Finding(result.target, kind, where, text, data))


async def _ask(up: SetState, result: Result) -> None:
    async with Client.http(up.http_url, up.token) as client:
        try:
            async with asyncio.timeout(ASK_S):
                response = await client.ask(
                    edge_hooks.CONVERSATION, "!say hello\n!tool look", agent="scripted", workspace=edge_hooks.WORKSPACE
                )
        except (TetherError, TimeoutError) as error:
            _wrong(result, "a prompt is not answered", f"{type(error).__name__} {error}")
        else:
            if response.outcome != "completed":
                _wrong(result, "a prompt is not answered", f"{response.outcome} {response.text!r}")


def _processes(up: SetState) -> dict[str, int]:
    now = state.read(state.Paths(Path(up.data)))
    return {} if now is None else {name: child.pid for name, child in now.children.items()}


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _look_at_logs(up: SetState, result: Result) -> None:
    for path in sorted(state.Paths(Path(up.data)).logs.glob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines):
            if any(word in line for word in _TOLD_BROKEN):
                _wrong(result, f"{path.name} tells of an exception", "\n".join(_told(lines[number:])[-60:]))
                break


def _told(lines: list[str]) -> list[str]:
    """A traceback, up to the log's next line."""
    found = lines[:1]
    for line in lines[1:400]:
        if line.startswith(("{", "INFO", "WARNING", "ERROR")):
            break
        found.append(line)
    return found


# --- Schemathesis ----------------------------------------------------------------------------------------------------


def _schemathesis(up: SetState, folder: Path, seconds: float, seed: int, result: Result) -> None:
    report = folder / "schemathesis.json"
    argv = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{up.http_url}/openapi.json"]
    argv += ["-H", f"Authorization: Bearer {up.token}", "--seed", str(seed), "--max-time", str(max(1, round(seconds)))]
    argv += ["--checks", "all", "--exclude-checks", _EXCLUDED_CHECKS, "--max-response-time", str(REQUEST_S)]
    argv += ["--request-timeout", str(REQUEST_S), "--suppress-health-check", "all", "--warnings", "off"]
    argv += ["--continue-on-failure", "--report", "json", "--report-json-path", str(report)]
    for operation in _BY_HAND:
        argv += ["--exclude-operation-id", operation]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": edge_hooks.__name__, "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            argv, capture_output=True, env=environment, cwd=folder, timeout=seconds + LATE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        _wrong(
            result, "schemathesis does not end", (error.stdout or b"").decode("utf-8", "replace")[-4000:], kind="hang"
        )
        return
    told = done.stdout.decode("utf-8", "replace")
    _read(json.loads(report.read_bytes()) if report.exists() else {}, result)
    if done.returncode != 0:
        failures = told.partition("= FAILURES =")[2] or told.partition("= ERRORS =")[2] or told
        _wrong(result, f"schemathesis ended with {done.returncode}", failures[:8000] + done.stderr.decode()[-2000:])


def _read(report: dict[str, Any], result: Result) -> None:
    result.inputs = int((report.get("test_cases") or {}).get("generated", 0))
    result.features = int((report.get("operations") or {}).get("tested", 0))


# --- by hand ---------------------------------------------------------------------------------------------------------


def _by_hand(up: SetState, seconds: float, seed: int, result: Result, stopping: threading.Event) -> None:
    place = urlsplit(up.http_url)
    with urlopen(f"{up.http_url}/healthz", timeout=REQUEST_S) as answer:
        answer.read()
    document = json.loads(_get(up, "/openapi.json"))
    raw = Raw(place.hostname or "127.0.0.1", place.port or 80, up.token, document, random.Random(f"raw/{seed}"))
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not stopping.is_set():
        raw.one()
        result.inputs += 1
    result.features = len(raw.answers)
    for wrong in raw.wrong:
        _wrong(result, wrong.where, wrong.text, wrong.data)


def _get(up: SetState, path: str) -> bytes:
    from urllib.request import Request

    request = Request(f"{up.http_url}{path}", headers={"Authorization": f"Bearer {up.token}"})
    with urlopen(request, timeout=REQUEST_S) as answer:
        data: bytes = answer.read()
    return data
