"""`tether page`: the address for everyone, the token for a terminal alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support_set import TetherSet, environment, on_terminal, running_set

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


def test_the_address_is_shown_without_the_token_and_the_link_that_signs_in_on_a_terminal_only(up: TetherSet) -> None:
    url, token = f"{up.state.http_url}/", up.state.token
    shown = up.tether("page")
    assert shown.returncode == 0 and shown.stdout.startswith(f"{url}\n") and up.state.token_file in shown.stdout
    assert json.loads(up.tether("page", "--json").stdout) == {"url": url, "token_file": up.state.token_file}
    piped = up.tether("page", "--sign-in")
    assert piped.returncode == 2 and "on a terminal only" in piped.stderr
    code, text = on_terminal(up.command("page", "--sign-in"), environment(up.home), [])
    assert code == 0 and text.strip() == f"{url}#token={token}"
    assert token not in shown.stdout + shown.stderr + piped.stdout + piped.stderr


def test_without_a_set_it_says_how_to_start_one(up: TetherSet) -> None:
    other = TetherSet(up.home, up.home / "none")
    told = other.tether("page")
    assert told.returncode == 3 and "tether up" in told.stderr
