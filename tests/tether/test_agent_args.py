"""Which arguments of a prompt an agent's command line takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tether.agent_args import ALLOWED, OWN, bad_entry, check, check_own
from tether.errors import InvalidError


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("claude", ()),
        ("claude", ("--max-turns", "3", "--effort=high")),
        ("claude", ("--append-system-prompt=- be brief",)),
        ("codex", ("-c", "model_reasoning_effort=high")),
        ("codex", ("--config=model_verbosity=low",)),
    ],
)
def test_what_only_shapes_an_answer_is_taken(kind: str, args: Sequence[str]) -> None:
    check(kind, args)


@pytest.mark.parametrize(
    ("kind", "args", "named"),
    [
        ("claude", ("--dangerously-skip-permissions",), "turns the agent's questions off"),
        ("claude", ("--mcp-config", "/tmp/servers.json"), "starts MCP servers"),
        ("claude", ("--settings={}",), "loads another configuration"),
        ("claude", ("--setting-sources", "user"), "loads another configuration"),
        ("claude", ("--allowedTools", "Bash"), "without a question"),
        ("claude", ("--add-dir", "/"), "beyond the workspace"),
        ("claude", ("--debug",), "into a log"),
        ("claude", ("--permission-mode", "bypassPermissions"), "Tether sets it itself"),
        ("claude", ("--resume=other",), "Tether sets it itself"),
        ("claude", ("-p",), "Tether sets it itself"),
        ("claude", ("--max-turns", "--mcp-config"), "needs a value"),
        ("claude", ("--max-turns",), "needs a value"),
        ("claude", ("--max-turns", "3", "do this"), "is no option"),
        ("claude", ("--", "x"), "is no option"),
        ("codex", ("-c", "mcp_servers.x.command=sh"), "sets any configuration"),
        ("codex", ("-cnotify=[1]",), "without harm"),
        ("codex", ("--dangerously-bypass-approvals-and-sandbox",), "its sandbox off"),
        ("codex", ("--enable", "anything"), "changes what the agent may do"),
        ("acp:gemini", ("--yolo",), "its sandbox off"),
        ("acp:other", ("--anything",), "an ACP agent"),
        ("scripted", ("--home", "/tmp"), "without harm"),
        ("never-heard-of", ("-x",), "without harm"),
    ],
)
def test_what_may_read_keys_or_run_commands_is_refused_by_name(kind: str, args: Sequence[str], named: str) -> None:
    with pytest.raises(InvalidError) as refused:
        check(kind, args)
    assert refused.value.field == "agent.args"
    assert named in refused.value.remedy
    assert (
        "leave it out" in refused.value.remedy or "VALUE" in refused.value.remedy or "content" in refused.value.remedy
    )


def test_a_refusal_says_the_name_and_not_the_value() -> None:
    with pytest.raises(InvalidError) as refused:
        check("claude", ("--settings=sk-ant-what-somebody-typed",))
    assert "sk-ant" not in str(refused.value)


def test_an_operator_can_allow_more_but_not_what_is_tethers_own() -> None:
    check("claude", ("--mcp-config", "/etc/one.json"), ("--mcp-config=/etc/one.json",))
    check("codex", ("-c", "web_search=live"), ("-c=web_search=*",))
    check("acp:other", ("--flag", "word"), ("*",))
    with pytest.raises(InvalidError, match="starts MCP servers"):
        check("claude", ("--mcp-config", "/etc/two.json"), ("--mcp-config=/etc/one.json",))
    with pytest.raises(InvalidError, match="takes no value"):
        check("acp:other", ("--flag=1",), ("--flag",))
    with pytest.raises(InvalidError, match="Tether sets it itself"):
        check("claude", ("--session-id", "x"), ("*",))


def test_a_backend_refuses_what_no_operator_can_allow() -> None:
    check_own("claude", ("--mcp-config", "x"))
    with pytest.raises(InvalidError, match="Tether sets it itself"):
        check_own("claude", ("--output-format=text",))


def test_no_argument_is_both_allowed_and_tethers_own() -> None:
    for kind, entries in ALLOWED.items():
        assert not {entry.partition("=")[0] for entry in entries} & OWN[kind]


@pytest.mark.parametrize("entry", ["", "x", "--", "-", "--a b", "=x"])
def test_an_entry_that_names_no_option_is_refused(entry: str) -> None:
    assert bad_entry(entry) is not None


@pytest.mark.parametrize("entry", ["*", "-c=x*", "--flag", "--option="])
def test_an_entry_names_an_option(entry: str) -> None:
    assert bad_entry(entry) is None
