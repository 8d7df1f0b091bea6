"""The quotas file, and the arithmetic of allowances and places."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.errors import BusUnavailableError, Code, QuotaExceededError, error_of, problem
from tether.limits import WAITING_PROMPTS_MAX
from tether.quotas import Limits, exceeded, load_quotas, waiting_full
from tether.settings import ConfigurationError

DEFAULTS = Limits(prompts_per_minute=100, readers=10, workspace_events_per_s=5)


def written(folder: Path, text: str, name: str = "quotas.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_value_comes_from_the_tenant_then_from_the_files_default_then_from_the_setting(tmp_path: Path) -> None:
    text = """
[default]
readers = 20
workspace = { running_executions = 2 }
[tenants.acme]
prompts_per_minute = 7
workspace = { events_per_s = 0 }
"""
    quotas = load_quotas(written(tmp_path, text), DEFAULTS, ("acme", "other"))
    acme, other = quotas.of("acme"), quotas.of("other")
    assert (acme.prompts_per_minute, acme.readers) == (7, 20)
    assert (acme.workspace_running_executions, acme.workspace_events_per_s) == (2, 0), "0 lifts a default"
    assert (other.prompts_per_minute, other.readers, other.workspace_events_per_s) == (100, 20, 5)
    assert load_quotas(None, DEFAULTS, ("acme",)).of("acme") == DEFAULTS


def test_the_same_file_may_be_json(tmp_path: Path) -> None:
    path = written(tmp_path, '{"tenants": {"acme": {"stored_bytes": 12}}}', "quotas.json")
    assert load_quotas(path, DEFAULTS, ("acme",)).of("acme").stored_bytes == 12


def test_every_problem_of_a_file_is_told_with_its_field_and_what_is_taken(tmp_path: Path) -> None:
    text = """
[default]
prompt_per_minute = 3
[tenants.acme]
readers = -1
workspace = { running_executions = "two" }
"""
    with pytest.raises(ConfigurationError) as refused:
        load_quotas(written(tmp_path, text), DEFAULTS, ("acme",))
    told = "\n".join(refused.value.problems)
    for field in ("default.prompt_per_minute", "tenants.acme.readers", "tenants.acme.workspace.running_executions"):
        assert field in told
    assert "TETHER_QUOTAS_FILE" in told


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("quotas.toml", "readers = ", "must be TOML"),
        ("quotas.json", "[default]", "must be JSON"),
        ("quotas.json", '{"tenants": {"stranger": {}}}', "tenants.stranger: is not in TETHER_TENANTS"),
    ],
)
def test_a_file_that_is_none_or_names_a_stranger_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_quotas(written(tmp_path, text, name), DEFAULTS, ("acme",))


def test_a_file_that_is_not_there_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load_quotas(tmp_path / "none.toml", DEFAULTS, ("acme",))


@given(st.text(max_size=200))
def test_no_content_of_a_file_is_more_than_a_configuration_error(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name in ("q.toml", "q.json"):
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8", errors="replace")
            try:
                load_quotas(path, DEFAULTS, ("acme",))
            except ConfigurationError as error:
                assert error.problems


def test_a_refusal_names_the_limit_its_value_its_scope_and_when_it_ends() -> None:
    what = exceeded("readers", 4, "tenant", "no more", retry_after_s=2.0, reset_at_ms=77)
    error = error_of(what)
    assert isinstance(error, QuotaExceededError)
    assert (error.limit, error.value, error.scope, error.reset_at_ms) == ("readers", 4, "tenant", 77)
    assert (what.status, what.retryable, what.retry_after_s) == (429, True, 2.0)
    bare = error_of(problem(Code.QUOTA_EXCEEDED, "of an older server"))
    assert isinstance(bare, QuotaExceededError) and (bare.limit, bare.value, bare.reset_at_ms) == ("", None, None)
    assert not isinstance(error_of(problem(Code.INVALID, "x")), QuotaExceededError)


def test_the_queues_own_limit_is_a_quota_of_the_conversation_and_a_full_disk_is_none() -> None:
    full = waiting_full(BusUnavailableError("maximum messages per subject exceeded", code=10077))
    assert full is not None and (full.limit, full.value, full.scope) == (
        "waiting_prompts",
        WAITING_PROMPTS_MAX,
        "conversation",
    )
    assert waiting_full(BusUnavailableError("maximum bytes exceeded", code=10077)) is None
    assert waiting_full(BusUnavailableError("no responders")) is None
