"""`tether export` and `tether rm`, on a set: what is kept is whole, what is deleted is asked for and gone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support_local_set import Http, eventually
from support_set import TetherSet, environment, on_terminal, running_set
from tether.deletion import DeletionView
from tether.export_format import ConversationExport
from tether_cli.commands.rm import lines_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


async def test_a_conversation_is_exported_to_a_file_and_deleted_by_hand(up: TetherSet) -> None:
    async with Http(up.state) as http:
        await http.prompt("talk", "talk_r1", "!say the heron")
        await http.ended("talk", 1)
    kept = up.home / "talk.md"
    done = up.tether("export", "talk", "-o", str(kept))
    assert done.returncode == 0, done.stderr
    assert f"talk is in {kept}" in done.stderr
    text = kept.read_text()
    assert text.startswith("# Conversation `talk`") and "the heron" in text and text.endswith("*End of the export.*\n")
    export = ConversationExport.model_validate_json(up.tether("export", "talk").stdout)
    assert [entry.kind for entry in export.entries] == ["message", "response"]

    unasked = up.tether("rm", "talk")
    assert unasked.returncode == 2 and "`tether export talk` keeps a copy" in unasked.stderr
    argv, env = up.command("rm", "talk"), environment(up.home)
    code, shown = on_terminal(argv, env, [("delete the conversation talk? [y/N] ", "n\n")])
    assert code == 4 and "nothing was deleted" in shown
    code, shown = on_terminal(argv, env, [("delete the conversation talk? [y/N] ", "y\n")])
    assert code == 0 and "talk is deleted" in shown and "erased      " in shown
    again = json.loads(up.tether("rm", "talk", "--yes", "--json").stdout)
    assert again["state"] == "done"
    gone = up.tether("run", "--conversation", "talk", "hello")
    assert gone.returncode != 0 and "CONVERSATION_DELETED" in gone.stderr, gone.stderr


async def test_what_runs_is_named_and_stopped_only_with_force(up: TetherSet) -> None:
    async with Http(up.state) as http:
        await http.prompt("busy", "busy_r1", "!say begun\n!hang")

        async def runs() -> bool:
            return "begun" in " ".join(await http.texts("busy"))

        await eventually(runs, "what it says")
    refused = up.tether("rm", "busy", "--yes")
    assert refused.returncode == 1 and "SESSION_BUSY" in refused.stderr and "--force" in refused.stderr
    forced = up.tether("rm", "busy", "--yes", "--force")
    assert forced.returncode == 0, forced.stderr
    assert "busy is deleted" in forced.stdout


async def test_an_export_that_is_refused_leaves_no_file(up: TetherSet) -> None:
    file = up.home / "none.json"
    missing = up.tether("export", "nothing-of-this-name", "-o", str(file))
    assert missing.returncode == 2 and "NOT_FOUND" in missing.stderr
    nowhere = up.tether("export", "nothing", "-o", str(up.home / "no" / "such" / "folder.json"))
    assert nowhere.returncode == 1 and "cannot be written" in nowhere.stderr
    assert [path.name for path in up.home.iterdir() if "none" in path.name] == []


def test_a_deletion_that_waits_says_for_what() -> None:
    view = DeletionView(
        conversation="c1",
        workspace="w1",
        deletion="del_1",
        state="running",
        step="volume",
        pending_on=("workspace volume: it sleeps",),
        erased={"events": 41, "quarantine": 0},
    )
    assert lines_of(view) == [
        "c1 is being deleted (step volume); it goes on by itself",
        "  erased      41 events",
        "  waits for   workspace volume: it sleeps",
    ]
