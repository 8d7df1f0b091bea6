"""The sandbox record's life cycle, as data."""

from __future__ import annotations

import pytest

from tether.sandbox import SandboxRecord, SandboxState
from tether_agent.core.sandbox import Forwarded, Keep, Provisioned, SandboxInput, Wait, Wanted, Write, decide

WANTED = Wanted("acme", "w1", "sbx_1", "local", at=5)


def record(state: SandboxState, **changes: object) -> SandboxRecord:
    base = SandboxRecord(tenant="acme", workspace="w1", sandbox="sbx_1", state=state, provider="local")
    return base.model_copy(update=changes)


def test_a_first_start_makes_the_record_in_provisioning() -> None:
    decision = decide(None, WANTED)
    assert isinstance(decision, Write)
    assert (decision.record.state, decision.record.starts, decision.record.updated_at) == ("provisioning", 0, 5)


@pytest.mark.parametrize("state", ["provisioning", "resuming", "active"])
def test_a_sandbox_that_is_there_or_on_its_way_is_kept(state: SandboxState) -> None:
    assert decide(record(state), WANTED) == Keep()


def test_a_suspended_sandbox_is_resumed() -> None:
    decision = decide(record("suspended", starts=3), WANTED)
    assert isinstance(decision, Write)
    assert (decision.record.state, decision.record.starts) == ("resuming", 3)


@pytest.mark.parametrize("state", ["draining", "deleting"])
@pytest.mark.parametrize("event", [WANTED, Provisioned({}, at=6), Forwarded(at=6)])
def test_a_sandbox_that_is_going_away_makes_every_start_wait(state: SandboxState, event: SandboxInput) -> None:
    assert decide(record(state), event) == Wait(f"the sandbox is {state}")


def test_another_providers_sandbox_is_left_alone() -> None:
    assert isinstance(decide(record("active", provider="kubernetes"), WANTED), Wait)


@pytest.mark.parametrize("state", ["provisioning", "resuming"])
def test_provisioned_compute_makes_the_sandbox_active_with_its_facts(state: SandboxState) -> None:
    decision = decide(record(state), Provisioned({"boot": "b"}, at=7))
    assert isinstance(decision, Write)
    assert (decision.record.state, decision.record.facts) == ("active", {"boot": "b"})


def test_the_same_facts_again_write_nothing_so_that_a_drain_is_not_disturbed() -> None:
    assert decide(record("active", facts={"boot": "b"}), Provisioned({"boot": "b"}, at=8)) == Keep()


def test_every_forwarded_start_is_counted() -> None:
    decision = decide(record("active", starts=41), Forwarded(at=9))
    assert isinstance(decision, Write)
    assert decision.record.starts == 42


@pytest.mark.parametrize("state", ["provisioning", "suspended", "resuming"])
def test_a_start_is_forwarded_to_an_active_sandbox_only(state: SandboxState) -> None:
    assert isinstance(decide(record(state), Forwarded(at=9)), Wait)
    assert isinstance(decide(None, Forwarded(at=9)), Wait)
