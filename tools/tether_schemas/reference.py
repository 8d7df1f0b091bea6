"""docs/reference: settings, commands and error codes as Markdown, from the code that reads, parses and raises them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tether.client.environment import PREFIX as CLIENT_PREFIX
from tether.client.environment import Endpoint
from tether.errors import Code, problem
from tether.settings import PREFIX, ServiceSettings
from tether_agent.config import AgentSettings
from tether_backend.config import BackendSettings
from tether_cli.app import build
from tether_collector.config import CollectorSettings
from tether_router.config import RouterSettings
from tether_schemas.remedies import REMEDIES

_GENERATED: Final = "<!-- Written by `make generate` from the code; changes here are lost. -->\n"

# --- settings ---

SERVICES: Final[tuple[tuple[str, str, type[ServiceSettings]], ...]] = (
    ("Every service", "Router, agent service, collector and backend read these.", ServiceSettings),
    ("Router", "It makes the tenants' streams, so their retention is its to configure.", RouterSettings),
    ("Agent service", "", AgentSettings),
    ("Backend", "", BackendSettings),
    (
        "Collector",
        "Set by the agent service, which starts it; by hand only where something else runs the sandbox.",
        CollectorSettings,
    ),
)
CLIENT: Final = {
    "url": "`http(s)://…` or `nats://…`; decides which of the others are read",
    "token": "HTTP: the bearer token",
    "token_file": "HTTP: a file that holds it",
    "nats_user": "NATS: user",
    "nats_password": "NATS: its password",
    "nats_password_file": "NATS: a file that holds it",
    "nats_creds_file": "NATS: JWT and key of a user, as nsc writes them",
    "nats_tls_ca_file": "NATS: authorities that its certificate is checked against, PEM; unset: the system's",
    "nats_tls_cert_file": "NATS: this client's certificate, PEM",
    "nats_tls_key_file": "NATS: its key, PEM, not encrypted",
    "tenant": "NATS: whose conversations; over HTTP the token says it",
}
OTHERS: Final = (
    ("TETHER_CLI_DATA", "`tether` and `Client.from_state()`", "data directory of the set; `--data` wins"),
    (
        "TETHER_TEST_FAILPOINT",
        "every service, in tests",
        "`name` or `name:nth`: the process kills itself there; see chaos.md",
    ),
    ("TETHER_TEST_FAILPOINTS_DIR", "every service, in tests", "folder of armed failpoints; see chaos.md"),
    ("TETHER_SCRIPTED_TRUTH", "the scripted agent", "folder of its ground truth; see scripted-agent.md"),
    ("TETHER_SCRIPTED_HOME", "the scripted agent", "folder of its sessions; see scripted-agent.md"),
    (
        "TETHER_OPENAI_KEY_FD",
        "set by the collector for Codex",
        "descriptor that holds OPENAI_API_KEY; the key itself stands in no environment",
    ),
    ("TETHER_CODEX_KEY_FD", "set by the collector for Codex", "likewise CODEX_API_KEY"),
    ("TETHER_PROCESS_NONCE", "set by the keeper for the CLI", "marks the CLI's processes, so that none is left behind"),
)
_FOREIGN: Final = "A `TETHER_…` that a service does not know is refused at its start, with the nearest known name."


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_cells(head), "|" + "---|" * len(head), *(_cells(row) for row in rows)]) + "\n"


def type_text(annotation: Any) -> str:
    """What stands in the variable."""
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(one) for one in get_args(annotation) if one is not types.NoneType)
    if origin is dict:
        return "JSON"
    if isinstance(annotation, type) and issubclass(annotation, Path):
        return "path"
    names: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", SecretStr: "secret"}
    return names.get(annotation, "text")


def _bounds(entry: FieldInfo) -> str:
    low = high = ""
    for one in entry.metadata:
        if isinstance(one, annotated_types.Ge):
            low = f"≥ {one.ge}"
        elif isinstance(one, annotated_types.Gt):
            low = f"> {one.gt}"
        elif isinstance(one, annotated_types.Le):
            high = f"≤ {one.le}"
    return ", ".join(part for part in (low, high) if part)


def _default(entry: FieldInfo) -> str:
    if entry.is_required():
        return "**required**"
    if entry.default_factory is not None:
        return "`{}`"
    if entry.default is None or entry.default == "" or entry.default is PydanticUndefined:
        return "unset"
    text = str(entry.default).lower() if isinstance(entry.default, bool) else str(entry.default)
    return f"`{text}`"


def variables(model: type[ServiceSettings]) -> Iterator[tuple[str, FieldInfo]]:
    """(variable, field) of what this service reads beyond every service."""
    common = set() if model is ServiceSettings else set(ServiceSettings.model_fields)
    for name, entry in model.model_fields.items():
        if name not in common:
            yield f"{PREFIX}{name}".upper(), entry


def settings() -> str:
    parts = [
        _GENERATED,
        "# Settings\n",
        "Services read the environment once, at their start; all problems are reported together. "
        f"{_FOREIGN} Names end in their unit: `_S` seconds, `_MS` milliseconds, `_BYTES` bytes. "
        "`tether up` sets what a set on one machine needs by itself.\n",
    ]
    for title, text, model in SERVICES:
        parts.append(f"## {title}\n")
        if text:
            parts.append(f"{text}\n")
        rows = []
        for name, entry in variables(model):
            bounds = _bounds(entry)
            kind = type_text(entry.annotation) + (f" ({bounds})" if bounds else "")
            rows.append((f"`{name}`", kind, _default(entry), entry.description or ""))
        parts.append(table(("variable", "is", "default", "means"), rows))
    parts += ["## Client\n", "`Client.from_environment()` and the examples read these.\n"]
    client = [
        (
            f"`{CLIENT_PREFIX}{entry.name}`".upper(),
            "unset" if entry.default in (None, dataclasses.MISSING) else f"`{entry.default}`",
            CLIENT[entry.name],
        )
        for entry in dataclasses.fields(Endpoint)
    ]
    parts.append(table(("variable", "default", "means"), client))
    parts += ["## Others\n", table(("variable", "read by", "means"), ((f"`{a}`", b, c) for a, b, c in OTHERS))]
    return "\n".join(parts)


# --- commands ---


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(full name, command), a group before its own."""
    yield name, command
    for each, sub in getattr(command, "commands", {}).items():
        if not sub.hidden:
            yield from _commands(sub, f"{name} {each}")


def _metavar(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    annotation = getattr(parameter.type_descriptor, "annotation", str)
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(annotation, "TEXT")


def _option_row(parameter: Any) -> tuple[str, str]:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    shown = f"`{names}`" if parameter.is_flag else f"`{names} {_metavar(parameter)}`"
    text = str(parameter.help or "")
    notes = []
    if parameter.multiple:
        notes.append("may be given again")
    if parameter.min is not None or parameter.max is not None:
        notes.append(f"{parameter.min} to {parameter.max}")
    default = parameter.default
    if default not in (None, "", False) and "[default:" not in text:
        notes.append(f"default: {default}")
    if parameter.envvar:
        notes.append(f"env: {parameter.envvar}")
    return shown, text.replace("  [default:", " [default:") + (f" [{'; '.join(notes)}]" if notes else "")


def _usage(name: str, command: Any) -> str:
    parts = [name]
    if any(parameter.param_type_name == "option" for parameter in command.params):
        parts.append("[OPTIONS]")
    if hasattr(command, "commands"):
        parts.append("COMMAND")
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            metavar = parameter.metavar or parameter.name.upper()
            parts.append(metavar if parameter.required or metavar.startswith("[") else f"[{metavar}]")
    return " ".join(parts)


def commands() -> str:
    parts = [_GENERATED]
    for name, command in _commands(typer.main.get_command(build()), "tether"):
        is_root = name == "tether"
        parts.append(f"{'#' if is_root else '##'} {'The tether command' if is_root else name}\n")
        parts.append("\n".join(line.strip() for line in str(command.help or "").strip().splitlines()) + "\n")
        parts.append(f"```\n{_usage(name, command)}\n```\n")
        arguments = [
            (f"`{one.metavar or one.name.upper()}`", str(one.help))
            for one in command.params
            if one.param_type_name == "argument" and one.help
        ]
        options = [
            _option_row(one)
            for one in command.params
            if one.param_type_name == "option" and not one.hidden and one.name != "help"
        ]
        if arguments:
            parts.append(table(("argument", "means"), arguments))
        if options:
            parts.append(table(("option", "means"), options))
        if hasattr(command, "commands"):
            rows = []
            for each, sub in command.commands.items():
                anchor = f"{name} {each}".replace(" ", "-")
                rows.append((f"[{each}](#{anchor})", str(sub.help or "").strip().splitlines()[0]))
            parts.append(table(("command", "does"), rows))
    return "\n".join(parts)


# --- errors ---


def errors() -> str:
    rows = []
    for code in Code:
        default = problem(code, "")
        meaning, remedy = default.title, REMEDIES[code]
        rows.append((f"`{code.value}`", str(default.status), "yes" if default.retryable else "no", meaning, remedy))
    return "\n".join(
        [
            _GENERATED,
            "# Errors\n",
            "Over HTTP every refusal is a problem document (RFC 9457, `application/problem+json`); on the bus the same "
            "members stand in `problem` of a reply. `code` is stable: decide by it, never by `title` or `detail`. "
            "`retryable` of a document wins over the column here; `retry_after_s` (and the header `Retry-After`) says "
            "when. `fields` names bad input, each with its remedy; `context` holds ids that help, such as the current "
            "target. Which route can give which code: [openapi.json](../openapi.json).\n",
            table(("code", "HTTP", "retryable", "means", "what to do"), rows),
            "Three statuses are not their code's own: 413 and 405 are `INVALID` (the body is too large; the path does "
            "not take the method), 500 is `RUNTIME_UNAVAILABLE` (the request failed here and is logged).\n",
            "In the SDK they are raised as `tether.errors.ProblemError`, whose `problem` is the document. Exit codes "
            "of the command: [cli.md](cli.md).\n",
        ]
    )
