"""D9 with the real, pinned Claude Code: its own file of a session stands elsewhere than where it looks for it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from support_claude import Rig, becomes, claude_set, found_cli
from support_real_resume import asked_with, session_files, session_folders, sessions
from tether import events as ev
from tether.failpoints import FOLDER_VARIABLE

STEP = "native_placed"
pytestmark = [pytest.mark.real_cli, pytest.mark.timeout(180)]


async def test_the_clis_own_file_that_stands_elsewhere_is_taken_if_it_is_the_same(tmp_path: Path) -> None:
    claude = found_cli("claude")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_ROUTER_HISTORY_FALLBACK", "always")
        async with claude_set(claude, tmp_path) as rig:
            await check_native(rig, "elsewhere", changed=False)
            await check_native(rig, "changed", changed=True)


async def test_a_collector_that_dies_when_the_clis_own_file_is_in_place_goes_on_with_it_once(tmp_path: Path) -> None:
    claude = found_cli("claude")
    armed = tmp_path / "failpoints"
    armed.mkdir()
    step = armed / f"collector.{STEP}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_ROUTER_HISTORY_FALLBACK", "always")
        async with claude_set(claude, tmp_path, ((FOLDER_VARIABLE, str(armed)),)) as rig:
            await check_native(rig, "killed", changed=False, armed=step)
            assert not step.exists(), "nobody passed it"
            assert len(rig.model_requests("in killed?")) == 1


async def check_native(rig: Rig, conversation: str, *, changed: bool, armed: Path | None = None) -> None:
    """As a volume that was put together by hand has it: the session's file is there, under another name. `armed`: the
    file of a failpoint, for the prompt that meets it."""
    async with rig.talk(conversation) as talk:
        await talk.prompt("[[text:the number is 4714]]")
        await talk.ended()
        session = talk.bodies(ev.SESSION_BOUND)[-1]["native_session"]
        noted = rig.workspace / ".tether" / "sessions" / f"{session}.json"
        await becomes(lambda: noted.exists() and "digest" in noted.read_text(), "the note of the session")
        [path] = session_files(rig, session)
        copy = sessions(rig) / "restored" / f"{conversation}.jsonl"
        copy.parent.mkdir(exist_ok=True)
        path.rename(copy)
        for folder in session_folders(rig, session):
            shutil.rmtree(folder)
        if changed:
            copy.write_bytes(copy.read_bytes().replace(b"4714", b"9999"))
        before = copy.read_bytes()
        if armed is not None:
            await asyncio.to_thread(armed.touch)
        await talk.prompt(f"[[text:found again]] what number was it in {conversation}?")
        recovered = await talk.until(ev.SESSION_RECOVERED)
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        assert (recovered.body["source"], recovered.body["from"]) == ("export" if changed else "native", session)
        seen = asked_with(rig, f"in {conversation}?")[-1]
        assert "the number is 4714" in seen and "9999" not in seen
        assert ("conversation_history" in seen) == changed
        assert copy.read_bytes() == before, "what was found is left as it is"
        assert len(talk.bodies(ev.SESSION_RECOVERED)) == 1
        assert talk.bodies(ev.SESSION_BOUND)[-1]["native_session"] != session
