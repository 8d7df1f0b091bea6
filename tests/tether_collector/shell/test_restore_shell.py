"""D5–D7, D9, D12: a checkpoint is whole or has failed by name, and a sandbox goes on from it or does not start."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support_drain import an_order, drained, lose_the_volume, manifest_of, reference_entry, reference_of, tree
from support_nats import NatsServer
from support_shell import Rig, collector
from tether import subjects
from tether.bus import NatsBus
from tether.checkpoint import (
    FOLDER,
    RESTORE_FAILED,
    RESTORE_FAILED_EXIT,
    RESTORED,
    VOLUME,
    CheckpointReference,
    RestoreFailure,
    VolumeIdentity,
)
from tether.failpoints import FOLDER_VARIABLE
from tether.kv import Bucket
from tether_collector.restoring import PLACING, WORK

STEPS = (
    "restore_file_fetched",
    "restore_fetched",
    "restore_placing",
    "restore_placed",
    "restore_placed:3",
    "restore_committed",
)


async def a_checkpoint(rig: Rig, **more: Any) -> CheckpointReference:
    """A conversation with a turn behind it and the user's files, drained; the collector has ended."""
    run = await rig.begin("remembered words", conversation="c1")
    await run.ended()
    source = rig.directory / "src"
    source.mkdir()
    (source / "uncommitted.py").write_bytes(os.urandom(300_000))
    (source / "tool.sh").write_text("#!/bin/sh\n")
    (source / "tool.sh").chmod(0o755)
    (source / "link").symlink_to("uncommitted.py")
    (source / "copy.py").write_bytes((source / "uncommitted.py").read_bytes())
    (rig.directory / "empty" / "folder").mkdir(parents=True)
    report = await drained(rig, an_order(**{"store": "both", "include": "workspace", **more}))
    assert report.state == "done", report
    assert await rig.exited() == 0
    assert report.checkpoint is not None
    return report.checkpoint


def going_on_from(rig: Rig, reference: CheckpointReference, revision: int = 0) -> None:
    """What the provider tells the next collector."""
    rig.set_environment(
        TETHER_COLLECTOR_RESTORE=reference.checkpoint,
        TETHER_COLLECTOR_RESTORE_REVISION=str(revision),
        TETHER_COLLECTOR_CHECKPOINT_WAIT_S="2",
    )


def session_files(rig: Rig) -> dict[str, str]:
    return tree(rig.state_dir / "agents" / "scripted")


async def check_goes_on(rig: Rig, session: str) -> None:
    """The agent's own session is found again, with its turns."""
    run = await rig.begin("and on", conversation="c1", resume=session)
    end = await run.ended()
    assert end.body["outcome"] == "completed", end.body
    bound = run.of("session.bound")[0]
    assert bound.body["native_session"] == session


async def session_of(rig: Rig) -> str:
    [path] = (rig.state_dir / "agents" / "scripted" / "sessions").iterdir()
    return path.stem


async def failure_of(rig: Rig) -> RestoreFailure:
    await rig.start(ready=False)
    assert await rig.exited() == RESTORE_FAILED_EXIT
    failure = RestoreFailure.model_validate_json((rig.directory / RESTORE_FAILED).read_bytes())
    assert failure.problem.code == "RESUME_FAILED" and failure.boot == rig.boot
    assert not (rig.directory / WORK).exists()
    return failure


async def test_d7_d12_on_an_empty_volume_everything_comes_back_from_the_blob_store(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig)
        user, sessions, session = tree(rig.directory / "src"), session_files(rig), await session_of(rig)
        lose_the_volume(rig)
        entry = await reference_entry(rig)
        assert entry is not None
        going_on_from(rig, reference, entry.revision)
        await rig.start()
        assert tree(rig.directory / "src") == user and session_files(rig) == sessions
        assert (rig.directory / "src" / "tool.sh").stat().st_mode & 0o777 == 0o755
        assert (rig.directory / "empty" / "folder").is_dir()
        marker = json.loads((rig.directory / RESTORED).read_bytes())
        assert (marker["checkpoint"], marker["revision"]) == (reference.checkpoint, entry.revision)
        assert not (rig.directory / WORK).exists()
        await check_goes_on(rig, session)
        assert not rig.lines("end_lost") and not rig.lines("execution_fenced")


async def test_a_checkpoint_of_the_sessions_alone_leaves_the_users_files_where_they_are(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig, include="sessions")
        assert reference.include == "sessions"
        assert not any(file.path.startswith("src") for file in (await manifest_of(rig)).files)
        session = await session_of(rig)
        shutil.rmtree(rig.state_dir)  # the files were brought there in another way
        rig.boot = "boot_next"
        going_on_from(rig, reference)
        await rig.start()
        assert (rig.directory / "src" / "tool.sh").exists()
        await check_goes_on(rig, session)


async def test_a_volume_that_has_the_checkpoint_is_warm_and_one_that_went_on_since_is_used_as_it_is(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig, store="volume")
        session = await session_of(rig)
        rig.boot = "boot_next"
        going_on_from(rig, reference)
        await rig.start()
        await check_goes_on(rig, session)
        assert await rig.hand_over() == 0
        (rig.directory / FOLDER / f"{reference.checkpoint}.json").unlink()
        await rig.start()
        assert [line["way"] for line in rig.lines("resume")] == ["warm", "newer"]
        assert not (rig.directory / RESTORED).exists()


async def test_a_boot_that_has_begun_goes_on_whatever_the_reference_names_by_then(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig, store="volume")
        session = await session_of(rig)
        rig.boot = "boot_next"
        going_on_from(rig, reference)
        await rig.start()
        entry = await reference_entry(rig)
        assert entry is not None
        later = reference.model_copy(update={"checkpoint": "ckp_later", "drain": "later"})
        await Bucket(bus, subjects.CHECKPOINTS).update(entry.key, later.value(), op="later", revision=entry.revision)
        assert await rig.hand_over() == 0
        await rig.start()
        assert [line["way"] for line in rig.lines("resume")] == ["warm", "newer"]
        await check_goes_on(rig, session)


async def test_d6_a_torn_manifest_is_refused_by_its_digest_and_nothing_of_the_volume_is_touched(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig)
        path = rig.directory / FOLDER / f"{reference.checkpoint}.json"
        path.write_bytes(path.read_bytes()[:-10])
        before = tree(rig.directory)
        rig.boot = "boot_next"
        going_on_from(rig, reference)
        failure = await failure_of(rig)
        assert "torn" in failure.problem.detail
        (rig.directory / RESTORE_FAILED).unlink()
        assert tree(rig.directory) == before


@pytest.mark.parametrize("what", ["volume only", "blob lost", "blob damaged", "manifest lost", "foreign", "not empty"])
async def test_d9_what_cannot_be_restored_is_a_typed_failure_and_leaves_nothing_half_done(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, what: str
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig, store="volume" if what == "volume only" else "both")
        manifest = await manifest_of(rig)
        [large] = {file.digest for file in manifest.files if file.bytes == 300_000}
        lose_the_volume(rig)
        expected = "its part 1 is missing"
        match what:
            case "volume only":
                expected = "own volume only"
            case "blob lost":
                await bus.purge(f"BLOBS_{tenant}", _blob(rig, large, 1))
            case "blob damaged":
                await bus.purge(f"BLOBS_{tenant}", _blob(rig, large, 1))
                await bus.publish(_blob(rig, large, 1), b"x" * (128 * 1024))
                expected = "damaged"
            case "manifest lost":
                await bus.purge(f"BLOBS_{tenant}", _blob(rig, reference.manifest, 0))
                expected = "manifest is missing"
            case "foreign":
                await _replace_reference(rig, sandbox="sbx_other")
                expected = "another sandbox"
            case _:
                (rig.directory / "src").mkdir()
                (rig.directory / "src" / "mine").touch()
                expected = "not empty"
        before = tree(rig.directory)
        going_on_from(rig, reference)
        failure = await failure_of(rig)
        assert expected in failure.problem.detail, failure.problem.detail
        (rig.directory / RESTORE_FAILED).unlink()
        assert tree(rig.directory) == before
        assert not rig.lines("service_ready")[1:], "it was never registered"


def _blob(rig: Rig, digest: str, part: int | str) -> str:
    return subjects.blob(rig.tenant, rig.workspace, "checkpoint", digest, part)


async def _replace_reference(rig: Rig, **changes: Any) -> None:
    bucket = Bucket(rig.bus, subjects.CHECKPOINTS)
    entry = await reference_entry(rig)
    assert entry is not None
    await bucket.update(entry.key, {**entry.value, **changes}, op="op_other", revision=entry.revision)


@pytest.mark.parametrize("step", STEPS)
async def test_a_restore_that_is_killed_at_any_step_is_begun_anew_and_ends_the_same(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    name, _, nth = step.partition(":")
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig)
        user, sessions, session = tree(rig.directory / "src"), session_files(rig), await session_of(rig)
        lose_the_volume(rig)
        going_on_from(rig, reference)
        rig.set_environment(TETHER_TEST_FAILPOINT=f"collector.{name}:{nth or 1}")
        await rig.start(ready=False)
        assert await rig.exited() == -signal.SIGKILL, step
        rig.set_environment(TETHER_TEST_FAILPOINT="", **{FOLDER_VARIABLE: str(folder)})
        await rig.start()
        assert tree(rig.directory / "src") == user and session_files(rig) == sessions
        assert not (rig.directory / WORK).exists()
        await check_goes_on(rig, session)


# --- D5: a checkpoint that cannot be written ---


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A small file system of its own at `folder`; skips where that may not be made."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def check_failed(rig: Rig, says: str, before: CheckpointReference) -> None:
    """It says so, everywhere; the older reference stands and is nobody's; the sandbox is kept."""
    run = await rig.begin("before\n!ask write\nafter", conversation="cut")
    await run.until("interaction.requested")
    report = await drained(rig, an_order("drn_2", grace_s=5.0, store="both"))
    assert report.state == "failed" and report.problem is not None and report.checkpoint is None
    assert report.problem.code == "CHECKPOINT_FAILED" and says in report.problem.detail, report.problem
    [one] = report.executions
    assert one.outcome == "checkpoint_failed" and one.detail is not None and says in one.detail
    end = await run.ended()
    assert end.body["outcome"] == "drained" and "checkpoint" not in end.body
    assert end.body["error"]["code"] == "CHECKPOINT_FAILED" and says in end.body["error"]["detail"]
    assert await reference_of(rig) == before
    again = await rig.begin("hello", conversation="again")
    assert (await again.ended()).body["outcome"] == "completed", "compute is kept, and takes starts again"


async def test_d5_no_room_for_the_checkpoint_fails_it_by_name(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "w1" / ".tether" / "checkpoints", "-o", "size=64k"):
        async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
            (rig.directory / FOLDER / "ballast").write_bytes(b"x" * (48 * 1024))
            await check_failed(rig, "full", await an_older_reference(rig))


async def test_d5_a_volume_without_any_room_still_drains_out_of_the_reserve(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "w1", "-o", "size=8m"):
        async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
            run = await rig.begin("before\n!ask write\nafter", conversation="cut")
            await run.until("interaction.requested")
            fill(rig.directory / "ballast")
            report = await drained(rig, an_order(grace_s=10.0))
            assert report.state == "done", report
            end = await run.ended()
            assert end.body["checkpoint"] == (await reference_of(rig)).checkpoint
            assert (await manifest_of(rig)).executions == report.executions
            run.check_whole()


def fill(path: Path) -> None:
    """The whole file system, to its last block."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


async def an_older_reference(rig: Rig) -> CheckpointReference:
    """Of this very sandbox, as if made before: the reference alone matters."""
    value = CheckpointReference(
        op="op_before",
        checkpoint="ckp_before",
        drain="drn_before",
        tenant=rig.tenant,
        workspace=rig.workspace,
        sandbox="sbx",
        boot=rig.boot,
        manifest="0" * 64,
        manifest_bytes=1,
        stored="volume",
        include="sessions",
        clean=True,
    )
    bucket = Bucket(rig.bus, subjects.CHECKPOINTS)
    await bucket.create(subjects.checkpoint_key(rig.tenant, rig.workspace), value.value(), op="op_before")
    return value


async def test_d5_a_volume_that_cannot_be_written_fails_the_checkpoint_by_name(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "w1" / ".tether" / "checkpoints", "-o", "size=64k,ro"):
        async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
            await check_failed(rig, "Read-only file system", await an_older_reference(rig))


async def test_d5_a_blob_store_that_is_down_or_too_small_fails_the_checkpoint_by_name(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    environment = {"TETHER_COLLECTOR_CHECKPOINT_WAIT_S": "0.5"}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        before = await an_older_reference(rig)
        await bus.delete_stream(f"BLOBS_{tenant}")
        await check_failed(rig, "the blob store does not take", before)


async def test_a_reference_of_another_sandbox_since_this_one_began_is_not_written_over(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("hello")
        await run.ended()
        other = await an_older_reference(rig)
        await _replace_reference(rig, boot="boot_other", checkpoint="ckp_other")
        report = await drained(rig, an_order())
        assert report.state == "failed" and report.problem is not None
        assert "ckp_other" in report.problem.detail
        assert (await reference_of(rig)).checkpoint == "ckp_other" != other.checkpoint


async def test_what_others_left_under_the_restores_own_names_leads_nowhere_and_stops_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig)
        session = await session_of(rig)
        going_on_from(rig, reference)
        outside = "../" * 20 + str(elsewhere).lstrip("/")
        for placing in (json.dumps({"targets": [str(elsewhere), outside, 1]}), "[]", "{}", "["):
            lose_the_volume(rig)
            (rig.directory / WORK).mkdir()
            (rig.directory / PLACING).write_text(placing)
            await rig.start()
            assert (elsewhere / "file").read_text() == "kept"
            await rig.kill()
        lose_the_volume(rig)
        (rig.directory / WORK).symlink_to(elsewhere)
        await rig.start()
        assert [path.name for path in elsewhere.iterdir()] == ["file"], "nothing is written through a link"
        await check_goes_on(rig, session)


async def test_a_manifest_that_is_no_file_is_refused_and_not_waited_for(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        reference = await a_checkpoint(rig)
        manifest = rig.directory / FOLDER / f"{reference.checkpoint}.json"
        manifest.unlink()
        os.mkfifo(manifest)
        rig.boot = "boot_next"
        going_on_from(rig, reference)
        assert "torn, or another's" in (await failure_of(rig)).problem.detail


async def test_d12_another_workspaces_volume_is_refused_and_nothing_of_it_is_used(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with (
        collector(bus, nats_server.url, tenant, tmp_path) as rig,
        collector(bus, nats_server.url, tenant, tmp_path, workspace="w2") as other,
    ):
        reference = await a_checkpoint(rig)
        assert await other.hand_over() == 0
        own, foreign = rig.directory.rename(tmp_path / "own"), other.directory.rename(tmp_path / "foreign")
        for restores in (False, True):
            shutil.copytree(foreign, rig.directory)
            rig.boot = f"boot_{restores}"
            if restores:
                going_on_from(rig, reference)
            failure = await failure_of(rig)
            assert "another workspace's" in failure.problem.detail and not failure.problem.retryable
            (rig.directory / RESTORE_FAILED).unlink()
            assert tree(rig.directory) == tree(foreign)
            shutil.rmtree(rig.directory)
        own.rename(rig.directory)
        await rig.start()
        shutil.rmtree(foreign)


async def test_a_volume_gets_its_identity_once_also_one_that_was_made_without_and_no_checkpoint_has_it(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        path = rig.directory / VOLUME
        made = path.read_bytes()
        identity = VolumeIdentity.model_validate_json(made)
        assert (identity.tenant, identity.workspace) == (rig.tenant, rig.workspace)
        inode = path.stat().st_ino
        assert await rig.hand_over() == 0
        await rig.start()
        assert path.stat().st_ino == inode, "it is not written again"
        await rig.kill()
        path.unlink()
        await rig.start()
        assert path.read_bytes() == made
        await a_checkpoint(rig)
        assert not any(file.path == VOLUME for file in (await manifest_of(rig)).files)
        path.write_bytes(b"{")
        rig.boot = "boot_next"
        assert "damaged" in (await failure_of(rig)).problem.detail
