"""What the agent service forgets of a deleted conversation: in its record of the sandbox, on a volume nobody holds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from support_agent import provider_for
from support_sandboxes import report_of, target_of
from tether.bus import NatsBus
from tether.deletion import ForgetPayload
from tether.sandbox import DrainOrder, DrainReport, SandboxRecord
from tether_agent.config import AgentSettings
from tether_agent.core.sandbox import ConversationForgotten, Keep, Wait, Write, decide

PAYLOAD: Final = ForgetPayload(deletion="del_1", conversation="c1", sessions=("session-of-c1",))


def record_of(report: DrainReport, **fields: object) -> SandboxRecord:
    given = {"tenant": "t", "workspace": "w1", "sandbox": "sbx-w1", "state": "suspended", "provider": "local"}
    return SandboxRecord.model_validate({**given, "drained": report, "failed": (report,), **fields})


def both(drain: str = "d1") -> DrainReport:
    """A drain that met `c1` and `c2`."""
    report = report_of("t", "w1", drain)
    (mine,) = report.executions
    other = mine.model_copy(update={"target": target_of("t", "w1", "e2").model_copy(update={"conversation": "c2"})})
    assert report.checkpoint is not None
    reference = report.checkpoint.model_copy(update={"executions": (mine, other), "may_use": {"c1": 2, "c2": 3}})
    return report.model_copy(update={"executions": (mine, other), "checkpoint": reference})


def test_reports_name_the_conversation_no_more_and_others_as_before() -> None:
    decision = decide(record_of(both()), ConversationForgotten("c1", 5))
    assert isinstance(decision, Write)
    record = decision.record
    assert '"c1"' not in record.model_dump_json()
    assert record.drained is not None and record.drained.checkpoint is not None
    assert [one.target.conversation for one in record.drained.executions] == ["c2"]
    assert record.drained.checkpoint.may_use == {"c2": 3}
    assert record.state == "suspended"
    assert isinstance(decide(record, ConversationForgotten("c1", 6)), Keep), "twice is once"


def test_a_drain_that_runs_is_waited_for() -> None:
    record = record_of(both(), state="draining", drain=DrainOrder(drain="d2"))
    assert isinstance(decide(record, ConversationForgotten("c1", 5)), Wait)
    assert isinstance(decide(None, ConversationForgotten("c1", 5)), Keep)


async def test_a_volume_that_nobody_holds_is_cleaned_where_it_lies(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (provider := provider_for(settings, bus)).running():
        workspace = await provider.ensure(tenant, "w1")
        held = await provider.forget(tenant, "w1", PAYLOAD)
        assert not held.clean and "its collector holds it" in held.pending_on
        await provider.stop(tenant, "w1")
        folder = _folder(settings, tenant, workspace.workspace)
        sessions = folder / ".tether" / "agents" / "scripted" / "sessions"
        sessions.mkdir(parents=True)
        (sessions / "session-of-c1.json").write_text("its words")
        (sessions / "session-of-c2.json").write_text("another's")
        (folder / "session-of-c1.txt").write_text("the user's own")
        done = await provider.forget(tenant, "w1", PAYLOAD)
        assert done.clean and done.files == 1
        assert [path.name for path in sessions.iterdir()] == ["session-of-c2.json"]
        assert (folder / "session-of-c1.txt").exists()


@pytest.mark.parametrize("workspace", ["never-was"])
async def test_a_workspace_that_never_was_is_clean_and_is_not_made(
    bus: NatsBus, settings: AgentSettings, tenant: str, workspace: str
) -> None:
    async with (provider := provider_for(settings, bus)).running():
        assert (await provider.forget(tenant, workspace, PAYLOAD)).clean
        assert not _folder(settings, tenant, workspace).exists()


def _folder(settings: AgentSettings, tenant: str, workspace: str) -> Path:
    return settings.agent_workspaces_dir / tenant / workspace
