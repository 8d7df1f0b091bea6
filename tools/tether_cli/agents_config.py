"""The agents file for the agent service: the user's own file, completed with where the CLIs lie.

The user's file (`${XDG_CONFIG_HOME:-~/.config}/tether/agents.toml`, or `--agents-file`) may say for each agent:

    [agents.claude]
    command  = ["/opt/claude"]          # else: found by `tether_agents`
    env_from = ["ANTHROPIC_API_KEY"]    # variables of the shell that starts the set
    key_file = "/home/me/.config/tether/claude.env"
    env      = { NAME = "not secret" }
    args_allow = ["--add-dir=/srv"]     # of prompts, beyond the harmless ones

and for all of them `[redact]`, with `builtin` and `patterns`: what is replaced in events.

Without it, an agent gets its usual variables (`VARIABLES`) where the shell has them; `claude` else the login that
`tether agents login` copied. What is written holds names and paths, no key.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tether.service import write_whole
from tether_agents.locate import FoundAgent, find_agent, load_pins
from tether_cli.output import CliError, Exit

# What a CLI reads by itself. The first variables of an agent are its keys.
_CLAUDE: Final = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")
_CODEX: Final = ("CODEX_API_KEY", "OPENAI_API_KEY")
KEYS: Final[dict[str, tuple[str, ...]]] = {
    "claude": _CLAUDE,
    "codex": _CODEX,
    "acp:claude": _CLAUDE,
    "acp:codex": _CODEX,
    "acp:opencode": ("OPENCODE_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY"),
    "acp:qwen": ("OPENAI_API_KEY", "DASHSCOPE_API_KEY"),
    "acp:gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
}
# What goes with a key: the address of another model server, a configuration in one variable.
_CLAUDE_OTHERS: Final = (
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_MODEL", "CLAUDE_CODE_MAX_RETRIES", "API_TIMEOUT_MS"),
)
_OTHERS: Final[dict[str, tuple[str, ...]]] = {
    "claude": _CLAUDE_OTHERS,
    "codex": ("OPENAI_BASE_URL",),
    "acp:claude": _CLAUDE_OTHERS,
    "acp:codex": ("OPENAI_BASE_URL", "CODEX_CONFIG", "MODEL_PROVIDER", "DEFAULT_AUTH_REQUEST"),
    "acp:opencode": ("OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT"),
    "acp:qwen": ("OPENAI_BASE_URL", "OPENAI_MODEL"),
    "acp:gemini": ("GOOGLE_GEMINI_BASE_URL", "GEMINI_MODEL"),
}
# Agent → what it gets from the shell that starts the set, where the agents file says nothing else.
VARIABLES: Final[dict[str, tuple[str, ...]]] = {kind: (*keys, *_OTHERS[kind]) for kind, keys in KEYS.items()}
_FILE_BYTES_MAX: Final = 1 << 20
# Of one agent; their values the agent service judges.
_SETTINGS: Final = ("command", "env_from", "key_file", "env", "args_allow")


@dataclass(frozen=True, slots=True)
class AgentFinding:
    """One agent as the set would run it. `problem`: why it is not there, with the remedy. `key_source`: where its key
    comes from, never the key."""

    kind: str
    command: tuple[str, ...]
    version: str = ""
    found_in: str = ""
    problem: str = ""
    key_source: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def default_file(environ: Mapping[str, str] | None = None) -> Path:
    env = os.environ if environ is None else environ
    base = env.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "tether" / "agents.toml"


def imported_login(environ: Mapping[str, str] | None = None) -> Path:
    """The key file that `tether agents login` writes."""
    return default_file(environ).with_name("claude.env")


def redact(given: Path | None) -> dict[str, Any]:
    """The table `[redact]` of the user's file, as it is. Raises CliError for a wrong file."""
    return _tables(given)[1]


def _read(given: Path | None) -> dict[str, Any]:
    return _tables(given)[0]


def _tables(given: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`[agents]` and `[redact]`."""
    path = given if given is not None else default_file()
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise CliError(f"{path} is too large to be an agents file", exit_code=Exit.USAGE)
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if given is not None:
            raise CliError(f"{path} does not exist", exit_code=Exit.USAGE) from None
        return {}, {}
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", exit_code=Exit.USAGE) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CliError(f"{path} is not TOML: {error}", exit_code=Exit.USAGE) from None
    agents, redacted = value.get("agents", {}), value.get("redact", {})
    named = list(agents.values()) if isinstance(agents, dict) else [agents]
    if set(value) - {"agents", "redact"} or not all(isinstance(table, dict) for table in [*named, redacted]):
        raise CliError(f"{path}: only tables [agents.NAME] and [redact] are known", exit_code=Exit.USAGE)
    for kind, table in agents.items():
        if unknown := sorted(set(table) - set(_SETTINGS)):
            raise CliError(
                f"{path}: [agents.{_toml(kind) if ':' in kind else kind}] has {', '.join(unknown)}",
                remedy=f"it may have {', '.join(_SETTINGS)}",
                exit_code=Exit.USAGE,
            )
    return agents, redacted


def findings(
    *, agents_dir: Path | None = None, agents_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> list[AgentFinding]:
    """Every agent that is known or configured. Raises CliError for a wrong file. Runs CLIs for their version."""
    env = os.environ if environ is None else environ
    if agents_dir is not None and not agents_dir.is_dir():
        raise CliError(f"--agents-dir {agents_dir} is not a directory", exit_code=Exit.USAGE)
    configured = _read(agents_file)
    kinds = ["scripted", *load_pins(), *(kind for kind in configured if kind not in {"scripted", *load_pins()})]
    with ThreadPoolExecutor(len(kinds), thread_name_prefix="find-agents") as pool:  # each runs its CLI once
        return list(pool.map(lambda kind: _finding(kind, configured.get(kind, {}), agents_dir, env), kinds))


def _finding(kind: str, given: Mapping[str, Any], agents_dir: Path | None, env: Mapping[str, str]) -> AgentFinding:
    settings = dict(given)
    if kind in VARIABLES and "env_from" not in settings:
        settings["env_from"] = [name for name in VARIABLES[kind] if env.get(name)]
    if kind == "claude" and "key_file" not in settings and not any(env.get(name) for name in KEYS[kind]):
        imported = imported_login(env)
        if imported.is_file():
            settings["key_file"] = str(imported)
    source = _key_source(kind, settings, env)
    command = settings.get("command")
    if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
        return AgentFinding(kind, tuple(command), found_in="agents file", key_source=source, settings=settings)
    if kind == "scripted":
        own = (sys.executable, "-P", "-m", "scripted_agent")
        return AgentFinding(kind, own, version="own", found_in="tether", settings=settings)
    found = find_agent(kind, agents_dir, environment=env)
    if not isinstance(found, FoundAgent):
        return AgentFinding(kind, (), problem=str(found), key_source=source, settings=settings)
    return AgentFinding(
        kind, found.command, version=found.version, found_in=found.source, key_source=source, settings=settings
    )


def key_remedy(kind: str) -> str:
    """How an agent that wants a key gets it; of one that is not among KEYS, only its own settings are known."""
    if kind not in KEYS:
        table = _toml(kind) if ":" in kind else kind
        return f"give it its key by env_from or key_file of [agents.{table}] in the agents file"
    login = ", or `tether agents login`" if kind == "claude" else ""
    return f"set {KEYS[kind][0]} in the shell that starts the set, or key_file in the agents file{login}"


def _key_source(kind: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> str:
    if isinstance(settings.get("key_file"), str):
        return str(settings["key_file"])
    given = settings.get("env")
    if isinstance(given, dict) and any(given.get(name) for name in KEYS.get(kind, ())):
        return "agents file"
    wanted = settings.get("env_from")
    named = [name for name in wanted if isinstance(name, str) and env.get(name)] if isinstance(wanted, list) else []
    keys = [name for name in named if name in KEYS[kind]] if kind in KEYS else named
    return ", ".join(f"${name}" for name in keys)


def write(path: Path, found: list[AgentFinding], redacted: Mapping[str, Any] | None = None) -> None:
    """The file for the agent service: those that can be run, with their command, and what is redacted."""
    parts = ["# Written by `tether` at each start; edit your own agents file instead."]
    if redacted:
        parts.append("\n[redact]")
        parts += [f"{_toml(key)} = {_toml(redacted[key])}" for key in sorted(redacted)]
    for finding in found:
        if not finding.command:
            continue
        parts.append(f"\n[agents.{_toml(finding.kind)}]")
        settings = {**finding.settings, "command": list(finding.command)}
        for key in sorted(settings):
            parts.append(f"{_toml(key)} = {_toml(settings[key])}")
    write_whole(path, ("\n".join(parts) + "\n").encode())


def _toml(value: object) -> str:
    """Any value that TOML has, so that the agent service is told what the user wrote and can refuse it by name. Text
    is JSON's, but for what JSON writes as two halves; a table is written inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(str(key))} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value) if isinstance(value, float) else json.dumps(value)
