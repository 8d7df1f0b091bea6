"""A drain as an agent service orders it, and what it leaves: the report, the reference, the manifest, the volume."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from support_shell import Rig, eventually
from tether import ids, subjects
from tether.checkpoint import FOLDER, CheckpointManifest, CheckpointReference, DrainedExecution, decode_manifest
from tether.control import Authority, ControlReply
from tether.errors import BusError
from tether.kv import Bucket, Entry
from tether.sandbox import DrainOrder, DrainReport, Registration

SANDBOX = Authority(kind="sandbox", holder="agent-service", token=0)


def an_order(drain: str = "drn_1", grace_s: float = 20.0, **more: Any) -> DrainOrder:
    return DrainOrder(drain=drain, grace_s=grace_s, began_at=1, reason="test", **more)


async def ask_drain(rig: Rig, order: DrainOrder, control: str | None = None, **more: Any) -> ControlReply:
    """Once, under the control id that follows from the drain."""
    payload = order.model_dump(mode="json")
    return await rig.ask(
        "drain", payload=payload, control=control or f"ctl_{order.drain}", authority=more.get("authority", SANDBOX)
    )


def report_in(reply: ControlReply) -> DrainReport:
    assert reply.problem is None and reply.result is not None, reply
    report = DrainReport.model_validate(reply.result)
    assert reply.status == ("accepted" if report.state == "running" else "settled")
    return report


async def drained(rig: Rig, order: DrainOrder, timeout_s: float = 40.0) -> DrainReport:
    """Ask until it is over."""

    async def over() -> DrainReport | None:
        try:
            report = report_in(await ask_drain(rig, order))
        except BusError:
            return None
        return report if report.state != "running" else None

    try:
        found: DrainReport = await eventually(over, "the end of the drain", timeout_s, every_s=0.05)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{rig.log[-4000:]}") from None
    return found


def of_conversation(report: DrainReport, conversation: str) -> DrainedExecution:
    [found] = [one for one in report.executions if one.target.conversation == conversation]
    return found


async def reference_entry(rig: Rig) -> Entry | None:
    return await Bucket(rig.bus, subjects.CHECKPOINTS).get(subjects.checkpoint_key(rig.tenant, rig.workspace))


async def reference_of(rig: Rig) -> CheckpointReference:
    entry = await reference_entry(rig)
    assert entry is not None
    return CheckpointReference.model_validate(entry.value)


async def manifest_of(rig: Rig) -> CheckpointManifest:
    """The one on the volume, checked against the reference."""
    reference = await reference_of(rig)
    data = (rig.directory / FOLDER / f"{reference.checkpoint}.json").read_bytes()
    return decode_manifest(data, reference)


async def registration(rig: Rig) -> Registration | None:
    key = subjects.registration_key(rig.tenant, rig.workspace, ids.sandbox_id(rig.tenant, rig.workspace))
    return await Bucket(rig.bus, subjects.SANDBOXES).record(key, Registration)


def tree(folder: Path) -> dict[str, str]:
    """Path → digest of the content, or the link's target, of all below."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def lose_the_volume(rig: Rig) -> None:
    """Another machine: nothing of the workspace is there, and the sandbox boots anew."""
    shutil.rmtree(rig.directory)
    rig.directory.mkdir()
    rig.boot = ids.new_id("boot")
