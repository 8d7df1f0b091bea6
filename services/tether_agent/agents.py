"""The agents that sandboxes may run: `TETHER_AGENTS_FILE`, TOML.

    [agents.claude]
    command = ["/home/me/.cache/tether/agents/claude/…/claude"]
    env_from = ["ANTHROPIC_API_KEY"]      # taken from the agent service's own environment
    key_file = "/home/me/.config/tether/claude.env"     # or lines NAME=value in a file that only its owner may read
    env = { CLAUDE_CODE_MAX_RETRIES = "3" }             # not secret
    args_allow = ["--add-dir=/srv/shared"]              # arguments of prompts beyond the harmless (tether.agent_args)

    [redact]
    builtin = true                                      # well-known shapes of keys
    patterns = { corp_token = "corp_[A-Za-z0-9]{20,64}" }    # further ones (tether.secret_patterns)

Values go to one file per sandbox (mode 0600, outside the workspace) that the collector reads at each start of a CLI,
and nowhere else: not to the bus, a log or an argument list. What may be told is where a key came from.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from tether.agent_args import bad_entry
from tether.private import open_to_others
from tether.refusals import remedy_of
from tether.secret_patterns import parse
from tether.service import write_whole
from tether.settings import is_secret_name

_FILE_BYTES_MAX: Final = 1 << 20
_LINE: Final = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Kind = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9:._-]{0,63}$")]


class AgentsFileError(Exception):
    """The agents file or a key file cannot be used; says where and why, no value."""


class AgentConfig(BaseModel):
    """One agent. Variables of `key_file` win over `env_from`, which wins over `env`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], Field(min_length=1)]
    env_from: tuple[EnvName, ...] = ()
    key_file: Path | None = None
    env: dict[EnvName, str] = Field(default_factory=dict)
    args_allow: tuple[str, ...] = ()

    @field_validator("args_allow")
    @classmethod
    def _entries(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if (why := bad_entry(entry)) is not None:
                raise ValueError(why)
        return value


class RedactConfig(BaseModel):
    """What is replaced in events, besides the values of the agents' own secrets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    builtin: bool = True
    patterns: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)

    @field_validator("patterns")
    @classmethod
    def _linear(cls, value: dict[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
        for name, sources in value.items():
            for source in (sources,) if isinstance(sources, str) else sources:
                parse(name, source)
        return value


class AgentsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    agents: dict[Kind, AgentConfig] = Field(default_factory=dict)
    redact: RedactConfig = RedactConfig()

    def collector_settings(self) -> dict[str, str]:
        """What every collector is told of arguments and redaction, as its variables."""
        allowed = {kind: agent.args_allow for kind, agent in self.agents.items() if agent.args_allow}
        found = {"TETHER_COLLECTOR_REDACT_BUILTIN": "true" if self.redact.builtin else "false"}
        if allowed:
            found["TETHER_COLLECTOR_AGENT_ARGS_ALLOW"] = json.dumps(allowed)
        if self.redact.patterns:
            found["TETHER_COLLECTOR_REDACT"] = json.dumps(self.redact.patterns)
        return found


@dataclass(frozen=True, slots=True)
class Environment:
    """`variables`: kind → name → value. `sources`: kind → where its keys came from, fit to be shown; no entry: no key.
    `missing`: kind → names of `env_from` that the agent service does not have."""

    variables: Mapping[str, Mapping[str, str]] = field(repr=False)
    sources: Mapping[str, str]
    missing: Mapping[str, tuple[str, ...]]


def load(path: Path | None) -> AgentsFile:
    """Read the agents file; without one no agent is known. Raises AgentsFileError."""
    if path is None:
        return AgentsFile()
    try:
        value: Any = tomllib.loads(_read_text(path))
        return AgentsFile.model_validate(value)
    except tomllib.TOMLDecodeError as error:
        raise AgentsFileError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AgentsFileError(f"{path}: {where}: {remedy_of(first)}") from None


def environment(agents: AgentsFile, environ: Mapping[str, str]) -> Environment:
    """What each CLI's environment gets. Raises AgentsFileError for a key file that cannot be used."""
    variables: dict[str, dict[str, str]] = {}
    sources: dict[str, str] = {}
    missing: dict[str, tuple[str, ...]] = {}
    for kind, agent in agents.agents.items():
        chosen, origins = dict(agent.env), dict.fromkeys(agent.env, "the agents file")
        taken = {name: environ[name] for name in agent.env_from if environ.get(name)}  # an empty one is none
        chosen.update(taken)
        origins.update(dict.fromkeys(taken, "the agent service's environment"))
        if absent := tuple(name for name in agent.env_from if not environ.get(name)):
            missing[kind] = absent
        if agent.key_file is not None:
            kept = _key_file(agent.key_file)
            chosen.update(kept)
            origins.update(dict.fromkeys(kept, str(agent.key_file)))
        variables[kind] = chosen
        if source := _source_of(origins):
            sources[kind] = source
    return Environment(variables, sources, missing)


def _source_of(origins: Mapping[str, str]) -> str:
    """Where each key comes from, by the names of the variables that hold one: what else is set is no key."""
    by_origin: dict[str, list[str]] = {}
    for name in sorted(origins):
        if is_secret_name(name):
            by_origin.setdefault(origins[name], []).append(name)
    return "; ".join(f"{', '.join(names)} of {origin}" for origin, names in by_origin.items())


def write_environment(path: Path, found: Environment) -> None:
    """The file that a collector reads, whole or not at all, mode 0600."""
    write_whole(path, json.dumps({kind: dict(names) for kind, names in found.variables.items()}).encode())


def _key_file(path: Path) -> dict[str, str]:
    text = _read_text(path, secret=True)
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        found = _LINE.fullmatch(stripped)
        if found is None:
            raise AgentsFileError(f"{path}, line {number}: must be NAME=value")
        values[found.group(1)] = _unquoted(found.group(2))
    if not values:
        raise AgentsFileError(f"{path} names no variable")
    return values


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"" else value


def _read_text(path: Path, *, secret: bool = False) -> str:
    try:
        with path.open("rb") as file:
            if secret and open_to_others(os.fstat(file.fileno())):
                raise AgentsFileError(f"{path} is open to others; chmod 600 it")
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise AgentsFileError(f"{path} has more than {_FILE_BYTES_MAX} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise AgentsFileError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AgentsFileError(f"{path} is not UTF-8") from None
