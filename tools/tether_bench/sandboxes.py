"""Sandboxes as figures use them: drained to the final report, asked for a conversation's next turn, deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tether.limits import DRAIN_DEADLINE_S, MIB
from tether_bench.rig import START_S, Http, Rig, cursor_of
from tether_bench.tap import BenchError, SseReplay
from tether_cli.state import Paths

LOOK_S: Final = 0.02  # between looks at a drain
PIECE_BYTES: Final = 1 * MIB
ENDED: Final = b'"execution.ended"'
RECALL: Final = "!recall"


@dataclass(frozen=True, slots=True)
class Told:
    """One turn: ms from before the POST to the execution's claim, and to the first event that its CLI printed; what the
    agent said last."""

    claimed_ms: float
    printed_ms: float
    said: str


def turn(rig: Rig, conversation: str, script: str, workspace: str) -> Told:
    """A prompt to the end of its execution, read by a reader that begins after the history. Raises BenchError."""
    with rig.tap() as tap, rig.http() as client:
        stream = rig.follow(tap, conversation, cursor_of(client, conversation))
        client.ask("GET", "/healthz")  # the connection is there before the time is taken
        sent_s = time.time()
        execution = rig.prompt(client, conversation, script, workspace)
        rig.wait(lambda: stream.has(ENDED) or stream.closed, START_S, "an execution's end")
        events = [(at, event) for at, event in SseReplay(stream).told() if event.get("execution") == execution]
    return told(sent_s, events)


def told(sent_s: float, events: list[tuple[float, dict[str, Any]]]) -> Told:
    """Of the events of one execution as a reader received them. Raises BenchError where its CLI never spoke."""
    times: dict[str, float] = {}
    said = ""
    for received_s, event in events:
        times.setdefault(event["type"], received_s)
        if event["type"] == "text.completed":
            said = str(event["body"]["text"])
    if "execution.started" not in times or "session.bound" not in times:
        raise BenchError(f"an execution without a session: {', '.join(times) or 'no event'}")
    return Told(1000 * (times["execution.started"] - sent_s), 1000 * (times["session.bound"] - sent_s), said)


def order(client: Http, workspace: str, **options: object) -> str:
    """Begin a drain; its id."""
    return str(client.ask("POST", f"/v1/sandboxes/{workspace}/drain", options)["drain"])


def settled(rig: Rig, client: Http, workspace: str, drain: str) -> dict[str, Any]:
    """The final report. Raises BenchError where it failed."""
    view: dict[str, Any] = {"state": "running"}

    def over() -> bool:
        nonlocal view
        view = client.ask("GET", f"/v1/sandboxes/{workspace}/drains/{drain}")
        return bool(view["state"] != "running")

    rig.wait(over, DRAIN_DEADLINE_S, f"the drain of {workspace}", poll_s=LOOK_S)
    if view["state"] != "done" or view.get("checkpoint") is None:
        raise BenchError(f"the drain of {workspace} is {view['state']}: {view.get('problem')}")
    return view


def drained(rig: Rig, workspace: str, **options: object) -> tuple[float, dict[str, Any]]:
    """Seconds from before the POST to the final report, and the report."""
    with rig.http() as client:
        client.ask("GET", "/healthz")
        begun_s = time.monotonic()
        view = settled(rig, client, workspace, order(client, workspace, **options))
        return time.monotonic() - begun_s, view


def directory(rig: Rig, workspace: str) -> Path:
    """Where provider `local` has the workspace's volume."""
    return Paths(Path(rig.state.data)).workspaces / rig.state.tenant / workspace


def empty(rig: Rig, workspace: str) -> None:
    """The volume of a suspended sandbox is gone, as on another machine."""
    shutil.rmtree(directory(rig, workspace))


def fill(folder: Path, size_bytes: int) -> None:
    """So much that nobody has stored yet, in files of at most PIECE_BYTES and at least 16 of them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    piece = min(PIECE_BYTES, size_bytes // 16)
    for number in range(size_bytes // piece):
        (folder / f"{number:06d}").write_bytes(os.urandom(piece))


@contextlib.contextmanager
def made(rig: Rig, kind: str, count: int = 1) -> Iterator[list[str]]:
    """Names for workspaces of a figure's own; whatever became of them is deleted afterwards."""
    names = [rig.name(kind) for _ in range(count)]
    try:
        yield names
    finally:
        with rig.http() as client:
            for name in names:
                with contextlib.suppress(BenchError):  # it never came to be, or the bench is being ended
                    client.ask("DELETE", f"/v1/sandboxes/{name}?checkpoint=false")
