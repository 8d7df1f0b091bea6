"""Files with secrets: who else may read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tether.private import open_to_others


def facts(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(("mode", "others"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_of_ones_own_is_ones_own_alone(tmp_path: Path, mode: int, others: bool) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(mode)
    assert open_to_others(path.stat()) is others


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "others"),
    [
        (0o440, 0, 65532, False),
        (0o440, 0, 1, True),  # a group that is not ours
        (0o440, 1000, 65532, True),  # whose is it?
        (0o460, 0, 65532, True),
        (0o444, 0, 65532, True),
    ],
)
def test_a_secret_that_is_mounted_for_the_pods_group_is_its_own(
    monkeypatch: pytest.MonkeyPatch, mode: int, uid: int, gid: int, others: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    monkeypatch.setattr(os, "getegid", lambda: 65532)
    monkeypatch.setattr(os, "getgroups", lambda: [65532])
    assert open_to_others(facts(mode, uid, gid)) is others
