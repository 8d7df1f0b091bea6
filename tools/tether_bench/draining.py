"""drain_20_s (--short: drain_5_s) and checkpoint_*: from the order of a drain to its final report."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tether.bus import NatsBus
from tether.limits import MIB
from tether.subjects import blobs_stream
from tether_bench.rig import START_S, Rig
from tether_bench.sandboxes import PIECE_BYTES, directory, drained, fill, made, order, settled, turn
from tether_bench.stats import Figure
from tether_bench.tap import BenchError

MANY: Final = 20
FEW: Final = 5  # of a short run
SIZES_MIB: Final = (1, 50, 500)
SIZES_SHORT_MIB: Final = (1, 50)
STORED: Final = "checkpoint_stored_bytes"
GRACE_S: Final = 60.0
_WAITING: Final = "!say here\n!ask Bash"
_FILES: Final = "files"  # folder of the workspace
_OTHER_BYTES: Final = 256 * MIB  # of other figures, and what JetStream adds
_ON_BUS_S: Final = 30.0


def drain_name(sandboxes: int) -> str:
    return f"drain_{sandboxes}_s"


def checkpoint_name(size_mib: int) -> str:
    return f"checkpoint_{size_mib}mib_s"


def sizes_of(names: Sequence[str]) -> list[int]:
    """MiB of the checkpoints to make, where these figures are asked for."""
    sizes = [size for size in SIZES_MIB if checkpoint_name(size) in names]
    return sizes or (list(SIZES_SHORT_MIB) if STORED in names else [])


def log_bytes(names: Sequence[str], *, short: bool) -> int | None:
    """The quota that the blob store needs for these figures: every round's content is new. None where an ephemeral
    set's own will do."""
    sizes = sizes_of(names)
    if not sizes:
        return None
    return sum(_rounds(size, short=short) * size for size in sizes) * MIB + _OTHER_BYTES


def _rounds(size_mib: int, *, short: bool) -> int:
    return 1 if short and size_mib > 1 else 2 if size_mib >= SIZES_MIB[-1] else 3


def drains(rig: Rig, sandboxes: int) -> list[Figure]:
    """Each round: one sandbox alone, then all of them."""
    rounds = 1 if rig.short else 2
    all_s: list[float] = []
    one_s: list[float] = []
    for _ in rig.rounds(rounds, 0.0):
        one_s.append(_drained_at_once(rig, 1))
        all_s.append(_drained_at_once(rig, sandboxes))
    note = f"{sandboxes} sandboxes, each with an approval that waits, until the last final report"
    return [Figure(drain_name(sandboxes), "s", tuple(all_s), {"one": tuple(one_s)}, note=note)]


def _drained_at_once(rig: Rig, sandboxes: int) -> float:
    with made(rig, "drain", sandboxes) as workspaces, rig.tap() as tap, rig.http() as client:
        streams = [rig.follow(tap, workspace) for workspace in workspaces]  # conversations by the same names
        executions = {name: rig.prompt(client, name, _WAITING, name) for name in workspaces}
        for stream in streams:
            rig.wait(lambda s=stream: s.has(b'"interaction.requested"'), START_S, "an approval that waits")  # type: ignore[misc]
        begun_s, begun = _ordered(rig, workspaces)
        views = {name: settled(rig, client, name, drain) for name, drain in begun.items()}
        took_s = time.monotonic() - begun_s
    kept = {
        name: sum(1 for one in view["executions"] if one["target"]["execution"] == executions[name] and one["cut"])
        for name, view in views.items()
    }
    rig.losses.count(
        "executions in the reports of drains",
        expected=sandboxes,
        got={name: times for name, times in kept.items() if times},
    )
    return took_s


def _ordered(rig: Rig, workspaces: Sequence[str]) -> tuple[float, dict[str, str]]:
    """When the first was ordered, and each one's drain; a connection and a thread for each order."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(rig.http()) for _ in workspaces]
        for client in clients:
            client.ask("GET", "/healthz")
        pool = stack.enter_context(ThreadPoolExecutor(len(workspaces), "bench-drain"))
        begun_s = time.monotonic()
        begun = [
            pool.submit(order, client, name, grace_s=GRACE_S, store="volume")
            for client, name in zip(clients, workspaces, strict=True)
        ]
        return begun_s, {name: future.result() for name, future in zip(workspaces, begun, strict=True)}


def checkpoints(rig: Rig, names: Sequence[str]) -> list[Figure]:
    """Figures by size; the stored bytes of each that is measured."""
    figures: list[Figure] = []
    stored: list[Figure] = []
    for size_mib in sizes_of(names):
        name = checkpoint_name(size_mib)
        took_s, copied_s, stored_bytes = _checkpoints_of(rig, size_mib)
        if name in names:
            note = "POST of a drain into the blob store → its final report"
            figures.append(Figure(name, "s", tuple(took_s), {"copy": tuple(copied_s)}, note=note))
        if STORED in names:
            stored.append(Figure(STORED, "bytes", tuple(stored_bytes), key=f"{size_mib}mib"))
    return [*figures, *stored]


def _checkpoints_of(rig: Rig, size_mib: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the drain, seconds of a copy, bytes that the blob store grew by; of each round."""
    took_s: list[float] = []
    copied_s: list[float] = []
    stored: list[float] = []
    with made(rig, "checkpoint") as (workspace,):
        files = directory(rig, workspace) / _FILES
        for _ in rig.rounds(_rounds(size_mib, short=rig.short), float("inf")):
            turn(rig, workspace, "!say ready", workspace)
            fill(files, size_mib * MIB)
            copied_s.append(_copy(files, rig.folder / "copy"))
            before = _blob_bytes(rig)
            seconds, view = drained(rig, workspace, store="blobs", include="workspace", grace_s=GRACE_S)
            took_s.append(seconds)
            stored.append(float(_blob_bytes(rig) - before))
            if view["checkpoint"]["size_bytes"] < size_mib * MIB:
                raise BenchError(f"a checkpoint of {size_mib} MiB has {view['checkpoint']['size_bytes']} bytes")
    return took_s, copied_s, stored


def _copy(source: Path, to: Path) -> float:
    """Read, digested, written and synced by this process alone."""
    to.mkdir()
    try:
        begun_s = time.monotonic()
        for path in sorted(source.iterdir()):
            digest = hashlib.sha256()
            with path.open("rb") as reading, (to / path.name).open("wb") as writing:
                while data := reading.read(PIECE_BYTES):
                    digest.update(data)
                    writing.write(data)
                writing.flush()
                os.fsync(writing.fileno())
        return time.monotonic() - begun_s
    finally:
        shutil.rmtree(to)


def _blob_bytes(rig: Rig) -> int:
    stream = blobs_stream(rig.state.tenant)

    async def ask(bus: NatsBus) -> int:
        answer = await bus.api(f"$JS.API.STREAM.INFO.{stream}", {})
        state = answer.get("state")
        if not isinstance(state, dict):
            raise BenchError(f"nothing is known of {stream}")
        return int(state["bytes"])

    return rig.on_bus(ask, timeout_s=_ON_BUS_S)
