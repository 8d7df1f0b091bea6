"""The language of patterns: what is linear is taken, everything else is refused with the remedy."""

from __future__ import annotations

import time

import pytest

from tether.secret_patterns import BUILTIN, WIDTH_CHARS_MAX, PatternError, parse

KEYS = {
    "anthropic_key": "sk-ant-api03-" + "aB3_-" * 18,
    "openai_key": "sk-proj-" + "aB3_-" * 20,
    "openrouter_key": "sk-or-v1-" + "0af9" * 16,
    "api_key": "sk-" + "aB3d" * 12,
    "github_token": "ghp_" + "aB3d" * 9,
    "gitlab_token": "glpat-" + "aB3_" * 5,
    "aws_access_key": "AKIAIOSFODNN7EXAMPLE",
    "google_key": "AIza" + "aB3_-" * 7,
    "slack_token": "xoxb-1234567890-abcdefABCDEF",
    "npm_token": "npm_" + "aB3d" * 9,
    "huggingface_token": "hf_" + "aB3d" * 8,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\n"
    + ("MIIEowIBAAKC" * 5 + "\n") * 25
    + "-----END RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("name", KEYS)
def test_a_well_known_key_is_matched_as_a_whole(name: str) -> None:
    key = KEYS[name]
    mine = [pattern for pattern in BUILTIN if pattern.name == name and key.startswith(pattern.prefix)]
    assert len(key) in {pattern.end(f"{key} is it", 0) for pattern in mine}


def test_every_built_in_pattern_has_an_example() -> None:
    assert {pattern.name for pattern in BUILTIN} == set(KEYS)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("(a|b)c", "write one entry for each alternative"),
        ("corp_a|b", "write one entry for each alternative"),
        ("corp_[a-z]*", "give a bound"),
        ("corp_[a-z]+", "give a bound"),
        ("corp_.{1,4}", "name the characters"),
        ("^corp_[a-z]{3}", "beginning of a word already"),
        ("[a-z]{3}-[0-9]{4}", "must begin with 2 to 64 fixed characters"),
        ("c[a-z]{4}", "must begin with 2 to 64 fixed characters"),
        ("corp_[^a]{3}", "list what belongs to it"),
        ("corp_[a-z", "must be closed"),
        ("corp_[z-a]{2}", "bad character range"),
        ("corp_[a-z]{3,1}", "the lower bound first"),
        ("corp_[a-z]{1,30000}", "from 0 to 20000"),
        ("corp_[a-z]{,3}", "must be {m} or {m,n}"),
        ("corp_[a-z]{1,3}+", "not allowed after a count"),
        ("corp_\\b", "is not known"),
        ("corp_[a-z]{20000}[a-z]{20000}", f"may match {WIDTH_CHARS_MAX}"),
        ("", "must have 1 to"),
    ],
)
def test_what_is_not_linear_is_refused_with_what_to_write_instead(source: str, remedy: str) -> None:
    with pytest.raises(PatternError, match="corp: ") as refused:
        parse("corp", source)
    assert remedy in str(refused.value)


def test_a_name_that_no_mark_could_carry_is_refused() -> None:
    with pytest.raises(PatternError, match="letters, digits"):
        parse("a]b", "corp_[a-z]{3}")


def test_counts_take_all_they_can_and_give_nothing_back() -> None:
    pattern = parse("corp", r"corp_[a-z]{1,4}\d?-x")
    assert pattern.end("corp_abcd7-x", 0) == 12
    assert pattern.end("corp_abc-x", 0) == 10
    assert pattern.end("corp_abcde-x", 0) is None
    assert parse("corp", "corp_[a-z]{1,9}z").end("corp_zzz", 0) is None


def test_no_text_makes_a_pattern_slow() -> None:
    """The worst that the language admits is a bounded walk from each beginning: no text multiplies walks."""
    pattern = parse("corp", "co[a-z]{1,4000}[a-z]{1,4000}[a-z]{1,4000}!")
    text = "co" * 8_000
    began = time.process_time()
    assert all(pattern.end(text, at) is None for at in range(0, len(text), 80))
    assert time.process_time() - began < 10.0
