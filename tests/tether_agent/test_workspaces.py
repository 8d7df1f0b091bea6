"""Which directories may be workspaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tether.errors import InvalidError
from tether_agent.providers import ProvisionError
from tether_agent.providers.workspaces import Workspaces


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir()
    return made


@pytest.fixture
def workspaces(tmp_path: Path, state: Path) -> Workspaces:
    return Workspaces(tmp_path / "workspaces", state)


def test_a_users_directory_is_kept_over_a_restart(workspaces: Workspaces, tmp_path: Path, state: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    assert workspaces.assign("t", "w", str(project), in_use=False) == project
    assert workspaces.assign("t", "w", str(project), in_use=True) == project
    assert Workspaces(tmp_path / "workspaces", state).directory("t", "w") == project


def test_a_workspace_without_a_directory_of_the_users_gets_one(workspaces: Workspaces, tmp_path: Path) -> None:
    assert workspaces.directory("t", "w") == tmp_path / "workspaces" / "t" / "w"
    assert (tmp_path / "workspaces" / "t" / "w").is_dir()


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("project", "absolute"),
        ("", "must be a path"),
        ("{tmp}/project/../other", "normal"),
        ("{tmp}/project/", "normal"),
        ("//{tmp}", "normal"),
        ("{tmp}/absent", "existing"),
        ("{tmp}/file", "existing"),
        ("{tmp}/link", "symlink"),
        ("{tmp}/link/inner", "symlink"),
        ("{tmp}/state", "state"),
        ("{tmp}", "state"),
        ("/", "state"),
        ("/tmp/a\0b", "must be a path"),
        (17, "must be a path"),
        ("/" + "a" * 5000, "must be a path"),
    ],
)
def test_a_path_that_is_not_plainly_a_directory_is_refused(
    workspaces: Workspaces, tmp_path: Path, path: object, remedy: str
) -> None:
    (tmp_path / "project" / "inner").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "project")
    given = path.replace("{tmp}", str(tmp_path)) if isinstance(path, str) else path
    with pytest.raises(InvalidError) as refused:
        workspaces.assign("t", "w", given, in_use=False)
    assert refused.value.field == "path"
    assert remedy in refused.value.remedy


def test_a_workspace_is_one_directory_for_good_and_a_directory_one_workspace(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    workspaces.assign("t", "w", str(tmp_path / "a"), in_use=False)
    with pytest.raises(InvalidError, match="is the directory"):
        workspaces.assign("t", "w", str(tmp_path / "b"), in_use=False)
    with pytest.raises(InvalidError, match="is workspace w already"):
        workspaces.assign("t", "w2", str(tmp_path / "a"), in_use=False)
    with pytest.raises(InvalidError, match="directory of its own"):
        workspaces.assign("t", "w3", str(tmp_path / "b"), in_use=True)


def test_a_directory_that_became_a_symlink_since_is_refused_at_the_start(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    workspaces.assign("t", "w", str(tmp_path / "project"), in_use=False)
    (tmp_path / "project").rmdir()
    (tmp_path / "project").symlink_to("/etc")
    with pytest.raises(ProvisionError, match="symlink"):
        workspaces.directory("t", "w")


def test_a_damaged_mapping_stops_the_service_rather_than_showing_an_empty_workspace(
    tmp_path: Path, state: Path
) -> None:
    (state / "workspaces.json").write_text('{"t.w": ')
    with pytest.raises(RuntimeError, match="damaged"):
        Workspaces(tmp_path / "workspaces", state)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root shares a directory with a group that it is not in")
def test_a_new_directory_is_shared_with_the_user_of_clis_and_keeps_what_is_not_theirs(
    tmp_path: Path, state: Path
) -> None:
    made = Workspaces(tmp_path / "workspaces", state, "54321:54322").directory("t", "w")
    facts = made.stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (0, 54322, 0o1770)
    with pytest.raises(RuntimeError, match="nobody-of-that-name is no user here"):
        Workspaces(tmp_path / "workspaces", state, "nobody-of-that-name")
