"""Where a client finds its server: all problems at once, nothing secret shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tether.client.environment import Endpoint, load, local, state_path
from tether.settings import ConfigurationError


def test_every_problem_is_told_at_once_and_a_misspelt_name_is_met_with_the_right_one() -> None:
    with pytest.raises(ConfigurationError) as told:
        load({"TETHER_CLIENT_URL": "ftp://x", "TETHER_CLIENT_TOKEN_FIEL": "/x", "TETHER_NATS_URL": "of a service"})
    assert len(told.value.problems) == 2
    assert "did you mean TETHER_CLIENT_TOKEN_FILE" in told.value.problems[0]


def test_http_needs_a_token_and_nats_does_not() -> None:
    with pytest.raises(ConfigurationError, match="TOKEN"):
        load({"TETHER_CLIENT_URL": "http://x"})
    assert load({"TETHER_CLIENT_URL": "nats://x", "TETHER_CLIENT_TENANT": "t"}).over_nats


def test_secrets_are_not_in_the_representation() -> None:
    endpoint = Endpoint("http://x", token="hidden-token", nats_password="hidden-password")
    assert "hidden" not in repr(endpoint)


def test_the_local_set_is_found_by_its_state_file(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with pytest.raises(ConfigurationError, match="tether up"):
        local(str(file))
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match="not the state of a set"):
        local(str(file))
    value = {
        "http_url": "http://127.0.0.1:1",
        "token_file": "/t",
        "nats_url": "nats://127.0.0.1:2",
        "nats_creds_file": "/p",
        "tenant": "default",
    }
    file.write_text(json.dumps(value))
    assert local(str(file)).token_file == "/t"
    assert local(str(file), "nats").nats_creds_file == "/p"


def test_the_state_file_lies_where_the_command_puts_it() -> None:
    assert state_path({"TETHER_CLI_DATA": "/d"}) == Path("/d/state.json")
    assert state_path({"XDG_DATA_HOME": "/x"}) == Path("/x/tether/state.json")
