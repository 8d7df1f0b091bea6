"""The data directory of a set, and the state file that says what is up.

    {data}/lock            held (flock) by the process that runs the set: two `up` cannot clash
    {data}/state.json      0600; what is up: URLs, processes by pid and start time, where the token is
    {data}/http-token      0600; the bearer token of the HTTP API
    {data}/secrets/…       0600; keys and credentials of the bus
    {data}/nats, logs, ready, agent, workspaces, backend

The state file is a cache of what `up` did. A process counts as running only while pid, start time and the machine's
boot are the ones written down: a pid alone is reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tether.limits import EVENTS_MAX_AGE_S, EVENTS_MAX_BYTES
from tether.processes import ProcessId, is_running
from tether.service import write_whole
from tether_cli.output import CliError, Exit

STATE_VERSION: Final = 1
_STATE_BYTES_MAX: Final = 1 << 20


def data_dir(given: Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The data directory: `--data`, `$TETHER_CLI_DATA`, else `${XDG_DATA_HOME:-~/.local/share}/tether`."""
    env = os.environ if environ is None else environ
    if given is not None:
        return given.expanduser().absolute()
    if named := env.get("TETHER_CLI_DATA"):
        return Path(named).expanduser().absolute()
    base = env.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "tether"


def data_option(root: str) -> str:
    """` --data DIR` for a line that a user is to type; nothing where the set lies where commands look by themselves."""
    return "" if Path(root) == data_dir() else f" --data {shlex.quote(root)}"


@dataclass(frozen=True, slots=True)
class Paths:
    """Every path below a data directory."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def http_token(self) -> Path:
        return self.root / "http-token"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def nats(self) -> Path:
        return self.root / "nats"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def ready(self) -> Path:
        return self.root / "ready"

    @property
    def agent(self) -> Path:
        return self.root / "agent"

    @property
    def agents_file(self) -> Path:
        """What the agent service reads about agents' commands; generated at each start."""
        return self.root / "agents.toml"

    @property
    def workspaces(self) -> Path:
        return self.root / "workspaces"

    @property
    def backend(self) -> Path:
        return self.root / "backend"

    def make(self) -> None:
        """Create the folders, closed to others. Raises CliError where that cannot be."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            folders = (self.secrets, self.nats, self.logs, self.ready, self.agent, self.workspaces, self.backend)
            for folder in folders:
                folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise CliError(
                f"cannot create {error.filename or self.root}: {error.strerror}",
                remedy="choose another directory with --data",
            ) from None


@dataclass(frozen=True, slots=True)
class SetState:
    """What is up. `nats_creds_file` holds the credentials of people on the bus. `events_max_bytes` and
    `events_max_age_s`: the retention that the set gives its tenant's log. `agents`: those that it can run, each
    with where its key comes from (never the key; empty: from nowhere); None: not noted."""

    data: str
    http_url: str
    token_file: str
    nats_url: str
    nats_creds_file: str
    tenant: str
    supervisor: ProcessId
    children: dict[str, ProcessId] = field(default_factory=dict)
    ephemeral: bool = False
    started_at: int = 0
    events_max_bytes: int = EVENTS_MAX_BYTES
    events_max_age_s: int = EVENTS_MAX_AGE_S
    agents: dict[str, str] | None = None
    version: int = STATE_VERSION

    @property
    def token(self) -> str:
        """The HTTP API's bearer token."""
        return Path(self.token_file).read_text(encoding="utf-8").strip()

    @property
    def is_up(self) -> bool:
        """The supervising process lives."""
        return is_running(self.supervisor)

    def public(self) -> dict[str, Any]:
        """For `--json`: addresses and places, no secret."""
        return {
            "http_url": self.http_url,
            "token_file": self.token_file,
            "nats_url": self.nats_url,
            "nats_creds_file": self.nats_creds_file,
            "tenant": self.tenant,
            "data": self.data,
            "pid": self.supervisor.pid,
            "ephemeral": self.ephemeral,
        }


def write(paths: Paths, state: SetState) -> None:
    write_whole(paths.state, json.dumps(asdict(state), indent=1).encode())


def read(paths: Paths) -> SetState | None:
    """What the state file says, whether it still runs or not; None where there is none or it is not readable."""
    try:
        with paths.state.open("rb") as file:
            value = json.loads(file.read(_STATE_BYTES_MAX))
        if value.pop("version") != STATE_VERSION:
            return None
        supervisor = ProcessId(**value.pop("supervisor"))
        children = {name: ProcessId(**child) for name, child in value.pop("children").items()}
        return SetState(**value, supervisor=supervisor, children=children)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # a damaged state file: the lock decides whether a set is up


def running(given: Path | None = None) -> SetState | None:
    """The set that is up in this data directory, or None."""
    state = read(Paths(data_dir(given)))
    return state if state is not None and state.is_up else None


def was_killed(given: Path | None = None) -> bool:
    """A set that ends by itself removes its state file: one that is there names a set that could not."""
    state = read(Paths(data_dir(given)))
    return state is not None and not state.is_up


def require(given: Path | None = None) -> SetState:
    """The set that is up. Raises CliError (exit code 3) where none is."""
    state = running(given)
    if state is None and was_killed(given):
        raise CliError(
            f"the set in {data_dir(given)} was killed",
            remedy="`tether up --detach` goes on with what it left running, `tether down` ends it",
            exit_code=Exit.UNREACHABLE,
        )
    if state is None:
        raise CliError(
            f"no set is up in {data_dir(given)}",
            remedy="start one with `tether up --detach`, or name its directory with --data",
            exit_code=Exit.UNREACHABLE,
        )
    return state


@contextlib.contextmanager
def locked(paths: Paths) -> Iterator[None]:
    """Hold the data directory. Raises CliError where another set has it."""
    paths.make()
    try:
        opened = paths.lock.open("a")
    except OSError as error:
        raise CliError(
            f"cannot write {paths.lock}: {error.strerror}", remedy="choose another directory with --data"
        ) from None
    with opened as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = read(paths)
            who = f" (pid {state.supervisor.pid}, {state.http_url})" if state is not None and state.is_up else ""
            raise CliError(
                f"a set is already up in {paths.root}{who}",
                remedy="use it, end it with `tether down`, or choose another directory with --data",
            ) from None
        yield
