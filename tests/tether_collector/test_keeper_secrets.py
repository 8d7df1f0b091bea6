"""A CLI's secrets come through descriptors: readable once, and in no environment, argument or spool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_keeper import KeeperRig, python_cli
from tether_collector.keeper_link import LaunchError

SECRET = "sk-only-in-the-pipe-5d0c"
READING = """
import os, subprocess, sys
with open(int(os.environ["KEY_FD"])) as pipe:
    print(len(pipe.read()), flush=True)
shown = subprocess.run(["env"], capture_output=True, text=True).stdout
print("{secret}" in shown + open("/proc/self/environ").read(), flush=True)
print(sorted(os.listdir("/proc/self/fd"))[:3], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[KeeperRig]:
    async with KeeperRig(tmp_path) as keepers:
        yield keepers


@pytest.mark.parametrize("isolation", ["auto", "subreaper"])
async def test_a_secret_is_read_from_its_descriptor_and_stands_in_no_environment(
    rig: KeeperRig, isolation: str
) -> None:
    source = READING.replace('"{secret}"', 'os.environ["HALF"] + "-5d0c"')
    environment = {**rig.environment, "HALF": SECRET.removesuffix("-5d0c")}
    secrets = {"KEY_FD": SECRET}
    cli = await rig.launch(python_cli(source), env=environment, secrets=secrets, isolation=isolation)
    await cli.until_kind("stdout", b"['0', '1', '2']")
    assert cli.lines()[:2] == [str(len(SECRET)).encode(), b"False"]
    await cli.link.stdin("end", b"\n")
    await cli.until_proof()
    for path in cli.directory.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


async def test_a_secret_that_does_not_fit_a_pipe_is_refused_by_name(rig: KeeperRig) -> None:
    with pytest.raises(LaunchError) as failure:
        await rig.launch(["cat"], secrets={"KEY_FD": "x" * 40_000})
    assert failure.value.code == "invalid_spec"
    assert "secrets" in failure.value.detail
    assert "xxxx" not in failure.value.detail


def test_a_specification_does_not_show_its_secrets(tmp_path: Path) -> None:
    spec = KeeperRig(tmp_path).spec(["cat"], secrets={"KEY_FD": SECRET}, env={"KEY": SECRET})
    assert SECRET not in repr(spec)
