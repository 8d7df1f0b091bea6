"""Which arguments of a prompt (`agent.args`) may stand on an agent's command line. Pure.

    Tether's own (`OWN`)               never: the session, the protocol, the model, the mode are set by Tether
    allowed for the kind (`ALLOWED`)   they shape an answer, and do nothing else
    allowed by the operator            `args_allow` of the agents file, `TETHER_COLLECTOR_AGENT_ARGS_ALLOW`
    everything else                    refused by name: whoever may prompt must not load configuration or MCP servers,
                                       run commands, read keys or turn the agent's questions off by an argument

An entry of a list is one of

    --flag             without a value
    --option=          with any value
    --option=VALUE     with this value; with `*` at its end: with a value that begins so
    *                  everything but Tether's own

A value is given as `--option VALUE` or `--option=VALUE`; one that begins with a dash only in the second form, as some
CLIs take it for an option. What is no option is refused: an agent's words come by its stdin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tether.errors import InvalidError

FIELD: Final = "agent.args"
ANYTHING: Final = "*"
_ACP: Final = "acp:"

# What Tether sets itself; another value would break session, protocol or fence.
OWN: Final[Mapping[str, frozenset[str]]] = {
    "claude": frozenset(
        [
            *("-p", "--print", "--input-format", "--output-format", "--verbose", "--include-partial-messages"),
            *("--permission-prompt-tool", "--permission-mode", "--model", "--session-id", "--fork-session"),
            *("-r", "--resume", "-c", "--continue", "--replay-user-messages"),
        ]
    ),
    "codex": frozenset(["--listen", "-m", "--model", "--session-source"]),
    "scripted": frozenset(["--session-id", "--resume"]),
}
ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "claude": (
        *("--max-turns=", "--max-budget-usd=", "--max-thinking-tokens=", "--effort=", "--fallback-model="),
        *("--append-system-prompt=", "--system-prompt=", "--disallowedTools=", "--disallowed-tools="),
    ),
    "codex": (
        *("-c=model_reasoning_effort=*", "-c=model_reasoning_summary=*", "-c=model_verbosity=*"),
        "-c=features.default_mode_request_user_input=*",  # whether the model may ask questions
        *("--config=model_reasoning_effort=*", "--config=model_reasoning_summary=*", "--config=model_verbosity=*"),
    ),
    "scripted": (),
}
_WHY: Final[Mapping[str, str]] = {
    "--dangerously-skip-permissions": "it turns the agent's questions off; agent.permission_mode says how it asks",
    "--allow-dangerously-skip-permissions": "it turns the agent's questions off",
    "--dangerously-bypass-approvals-and-sandbox": "it turns the agent's questions and its sandbox off",
    "--yolo": "it turns the agent's questions and its sandbox off",
    "--full-auto": "it turns the agent's questions off",
    "--allowedTools": "it lets tools run without a question",
    "--allowed-tools": "it lets tools run without a question",
    "--mcp-config": "it starts MCP servers, which are commands",
    "--strict-mcp-config": "it chooses MCP servers, which are commands",
    "--settings": "it loads another configuration, with hooks, which are commands",
    "--setting-sources": "it loads another configuration",
    "--plugin-dir": "it loads plugins, which run commands",
    "--plugin-url": "it loads plugins, which run commands",
    "--agents": "it defines agents with tools of their own",
    "--add-dir": "it reaches beyond the workspace",
    "--debug": "it writes requests, with their keys, into a log",
    "--debug-file": "it writes requests, with their keys, into a file",
    "--ide": "it connects the agent to other programs",
    "--chrome": "it connects the agent to other programs",
    "-c": "it sets any configuration: commands, servers, the sandbox",
    "--config": "it sets any configuration: commands, servers, the sandbox",
    "-p": "it chooses another configuration",
    "--profile": "it chooses another configuration",
    "-s": "it changes the sandbox",
    "--sandbox": "it changes the sandbox",
    "-a": "it changes when the agent asks",
    "--ask-for-approval": "it changes when the agent asks",
    "--enable": "it changes what the agent may do",
    "--disable": "it changes what the agent may do",
}


def bad_entry(entry: str) -> str | None:
    """What is wrong with an operator's entry; None where it is one."""
    if entry == ANYTHING:
        return None
    name = entry.partition("=")[0]
    if not name.startswith("-") or name.strip("-") == "" or any(char.isspace() for char in name):
        return f"{entry[:64]!r} must be --flag, --option=, --option=VALUE, --option=PREFIX*, or *"
    return None


def check_own(kind: str, args: Sequence[str]) -> None:
    """Raises InvalidError for an argument that no operator can allow. For who does not know the operator's list."""
    own = OWN.get(kind, frozenset())
    for arg in args:
        name = arg.partition("=")[0]
        if name in own:
            raise _refused(name, "Tether sets it itself")


def check(kind: str, args: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Raises InvalidError naming the first argument that is not allowed. `allowed`: the operator's entries."""
    check_own(kind, args)
    if ANYTHING in allowed:
        return
    entries = (*ALLOWED.get(kind, ()), *allowed)
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("-") or arg.strip("-") == "":
            raise InvalidError(FIELD, f"{_shown(arg)} is no option; the agent's words go into content")
        name, attached, value = arg.partition("=")
        values = [entry.partition("=")[2] for entry in entries if entry.startswith(f"{name}=")]
        if not attached and name in entries:
            continue
        if not values:
            raise _refused(name, _why(name, kind, attached=bool(attached) and name in entries))
        if not attached:
            if not rest or rest[0].startswith("-"):
                raise InvalidError(FIELD, f"{_shown(name)} needs a value; one that begins with a dash as {name}=VALUE")
            value = rest.pop(0)
        if not any(_fits(value, wanted) for wanted in values):
            raise _refused(name, _why(name, kind, attached=False))


def _fits(value: str, wanted: str) -> bool:
    if wanted.endswith("*"):
        return value.startswith(wanted[:-1])
    return not wanted or value == wanted


def _why(name: str, kind: str, *, attached: bool) -> str:
    if attached:
        return "it takes no value"
    return _WHY.get(name, f"it is none of those that {_family(kind)} is known to take without harm")


def _family(kind: str) -> str:
    return "an ACP agent" if kind.startswith(_ACP) else kind


def _refused(name: str, why: str) -> InvalidError:
    if why == "Tether sets it itself":
        return InvalidError(FIELD, f"{_shown(name)} is not taken: {why}; leave it out")
    remedy = "leave it out, or let the operator allow it (args_allow of the agents file)"
    return InvalidError(FIELD, f"{_shown(name)} is not allowed: {why}; {remedy}")


def _shown(arg: str) -> str:
    """The name of an argument, without what may follow it."""
    return arg.partition("=")[0][:64] if arg.startswith("-") else repr(arg[:32])
