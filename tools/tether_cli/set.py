"""The whole set on this machine: nats-server, router, agent service, backend, as children of one process.

Start (`async with ServiceSet(options) as up`):          End, in this order, each step with a deadline:
    1  the data directory's lock                             1  backend      no new requests
    2  what a killed predecessor left behind is ended        2  router       prompts stay in the queue
    3  secrets, agents file, configuration                   3  sandboxes    each execution stopped, its end in the log
    4  nats-server, ready                                    4  agent service
    5  router, agent service, backend, ready                 5  nats-server
    6  state.json                                            6  state.json, lock

A child that crashes is started again; one that refuses its configuration ends the set. The children die with this
process (see `child`), sandboxes do not: the next set on this data directory adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tether import failpoints, subjects
from tether.bus import connect
from tether.errors import BusError
from tether.limits import EVENTS_MAX_AGE_S, EVENTS_MAX_BYTES
from tether.nats_authority import AUTHORITY_USER, PERSON, Keys
from tether.processes import identify
from tether.service import write_whole
from tether_cli import agents_config, nats_server, state
from tether_cli.output import CliError, Exit
from tether_cli.processes import end
from tether_cli.state import Paths, SetState
from tether_cli.supervise import BACK_OFF_MAX_S, Child, ChildSpec, LogMode, LogSink, inherited, ready_by_file

SANDBOXES_STOP_S: Final = 60.0
LEFTOVER_TERM_S: Final = 15.0
EPHEMERAL_LOG_BYTES: Final = 128 << 20  # reserved by JetStream for a set that lives as long as one command
_EPHEMERAL_PREFIX: Final = "tether-"
_DIGITS_MAX: Final = 18  # JetStream's numbers are of 64 bits
# What the shell that starts the set may say of traces and metrics. With port 0 each service takes a free one: its
# ready file and its log say which.
_TELEMETRY: Final = (
    *("TETHER_TRACES_ENDPOINT", "TETHER_TRACES_SAMPLE", "TETHER_TRACES_DELAY_MS", "TETHER_METRICS_LISTEN"),
)
_COLLECTOR_TELEMETRY: Final = ("TETHER_AGENT_COLLECTOR_METRICS_LISTEN",)
# When sandboxes are suspended, and what of them is kept: the agent service's own.
_SANDBOXES: Final = (
    *("TETHER_AGENT_CREDENTIALS_LIFE_S",),
    *("TETHER_AGENT_IDLE_S", "TETHER_AGENT_IDLE_WAITING", "TETHER_AGENT_DRAIN_GRACE_S"),
    *("TETHER_AGENT_CHECKPOINT_STORE", "TETHER_AGENT_CHECKPOINT_INCLUDE"),
    # Who runs them, and as what; with `docker` the agents file names commands inside a sandbox.
    *("TETHER_AGENT_PROVIDER", "TETHER_DOCKER_IMAGE", "TETHER_DOCKER_PREFIX", "TETHER_DOCKER_NETWORK"),
    *("TETHER_DOCKER_NATS_URL", "TETHER_DOCKER_AGENTS_DIR", "TETHER_DOCKER_CPUS", "TETHER_DOCKER_MEMORY_BYTES"),
    *("TETHER_DOCKER_PIDS", "TETHER_DOCKER_TMP_BYTES"),
    *("TETHER_QUOTAS_FILE", "TETHER_AGENT_QUOTA_EVENTS_PER_S", "TETHER_AGENT_QUOTA_EVENT_BYTES_PER_S"),
)
_PROVIDER_FOLDERS: Final = {"local": "sandboxes", "docker": "containers"}  # of the agent service's state
# What else that shell decides; everything that is not named here the set decides itself.
_FRONT: Final = (
    *("TETHER_HTTP_HOSTS", "TETHER_HTTP_ORIGINS", "TETHER_WEBHOOKS_FILE", "TETHER_QUOTAS_FILE"),
    *("TETHER_BACKEND_QUOTA_PROMPTS_PER_MINUTE", "TETHER_BACKEND_QUOTA_WORKSPACE_PROMPTS_PER_MINUTE"),
    *("TETHER_BACKEND_QUOTA_WAITING_PROMPTS", "TETHER_BACKEND_QUOTA_WORKSPACE_WAITING_PROMPTS"),
    *("TETHER_BACKEND_QUOTA_STORED_BYTES", "TETHER_BACKEND_QUOTA_READERS", "TETHER_BACKEND_QUOTA_READERS_TOTAL"),
)
_ROUTER: Final = (
    *("TETHER_ROUTER_HISTORY_FALLBACK", "TETHER_QUOTAS_FILE", "TETHER_ROUTER_QUOTA_RUNNING_EXECUTIONS"),
    *("TETHER_ROUTER_QUOTA_WORKSPACE_RUNNING_EXECUTIONS", "TETHER_ROUTER_QUOTA_RUNNING_TOTAL"),
)
_EVENTS_BYTES: Final = "TETHER_EVENTS_MAX_BYTES"
_EVENTS_AGE: Final = "TETHER_EVENTS_MAX_AGE_S"
# Not for the services: the command's own, the SDK's, the test agent's, and what tests arm.
_NOT_OF_SERVICES: Final = ("TETHER_CLI_", "TETHER_CLIENT_", "TETHER_SCRIPTED_", "TETHER_TEST_")
_SERVICES: Final = {"router": "tether_router", "agent": "tether_agent", "backend": "tether_backend"}


@dataclass(frozen=True, slots=True)
class SetOptions:
    """`data`: the data directory. `http_port` 0: a free one. `agents_file`: the user's own (see `agents_config`).
    `idle_s`: sandboxes in which nothing runs are suspended after so long; None: as the shell says, else never.
    `log_bytes`: quota of an ephemeral set's log and of its blob store; None: EPHEMERAL_LOG_BYTES each.
    `back_off_max_s`: the longest pause before a child that crashes again and again is started anew. `test_environment`:
    variables `TETHER_TEST_…` for the services."""

    data: Path
    tenant: str = "default"
    http_port: int = 0
    agents_dir: Path | None = None
    agents_file: Path | None = None
    log: LogMode = "console"
    log_level: str = "info"
    ephemeral: bool = False
    log_bytes: int | None = None
    idle_s: float | None = None
    back_off_max_s: float = BACK_OFF_MAX_S
    test_environment: tuple[tuple[str, str], ...] = ()


def unused_settings(environ: Mapping[str, str]) -> list[str]:
    """Variables `TETHER_…` of a shell that a set started from it does not take over."""
    taken = {*_TELEMETRY, *_COLLECTOR_TELEMETRY, *_SANDBOXES, *_FRONT, *_ROUTER, _EVENTS_BYTES, _EVENTS_AGE}
    return sorted(
        name
        for name in environ
        if name.startswith("TETHER_") and name not in taken and not name.startswith(_NOT_OF_SERVICES)
    )


@dataclass(frozen=True, slots=True)
class Retention:
    """Of the tenant's log: `max_bytes` (JetStream reserves them) and `max_age_s`."""

    max_bytes: int = EVENTS_MAX_BYTES
    max_age_s: int = EVENTS_MAX_AGE_S


def retention(environ: Mapping[str, str], *, ephemeral: bool = False) -> Retention:
    """As the shell says it; an ephemeral set has its own. Raises CliError for what is no number; what numbers it takes
    the router says when it starts."""
    if ephemeral:
        return Retention(max_bytes=EPHEMERAL_LOG_BYTES)
    return Retention(
        max_bytes=_number(environ, _EVENTS_BYTES, EVENTS_MAX_BYTES, "bytes"),
        max_age_s=_number(environ, _EVENTS_AGE, EVENTS_MAX_AGE_S, "seconds"),
    )


def _number(environ: Mapping[str, str], name: str, default: int, unit: str) -> int:
    given = environ.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _DIGITS_MAX):
        remedy = f"as {name}={default}, or leave it out"
        raise CliError(f"{name} must be a whole number of {unit}", remedy=remedy, exit_code=Exit.USAGE)
    return int(given)


class ServiceSet:
    """See the module's docstring. `state` says where everything is; `failed()` waits for the set to fail."""

    def __init__(self, options: SetOptions) -> None:
        self.options = options
        self.paths = Paths(options.data)
        self._sink = LogSink(options.log)
        self._children: dict[str, Child] = {}
        self._stack = contextlib.ExitStack()
        self._keepers: list[asyncio.Task[None]] = []
        self._state: SetState | None = None
        self._http_url = ""
        self._retention = retention(os.environ, ephemeral=options.ephemeral)
        if options.ephemeral and options.log_bytes is not None:
            self._retention = replace(self._retention, max_bytes=options.log_bytes)

    @property
    def state(self) -> SetState:
        assert self._state is not None, "the set is not up"
        return self._state

    @property
    def bus_tenants(self) -> tuple[str, ...]:
        """Those that the services' permissions on the bus are for."""
        return (self.options.tenant,)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def failed(self) -> None:
        """Until a child is lost for good: raises the CliError that says so. Cancel it to go on to the end."""
        done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    # --- start ---

    async def _start(self) -> None:
        self._stack.enter_context(state.locked(self.paths))
        await asyncio.to_thread(end_leftovers, self.paths)
        _check_port(self.options.http_port)
        found = await asyncio.to_thread(
            agents_config.findings, agents_dir=self.options.agents_dir, agents_file=self.options.agents_file
        )
        agents_config.write(self.paths.agents_file, found, agents_config.redact(self.options.agents_file))
        own = nats_server.credentials(self.paths)
        token = self._http_token()
        server = await self._start_bus(own)
        specs = [self._service_spec(name, server, own) for name in _SERVICES]
        try:
            async with asyncio.TaskGroup() as group:
                for spec in specs:
                    group.create_task(self._run(spec), name=f"start-{spec.name}")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled for it
        supervisor = identify(os.getpid())
        assert supervisor is not None
        self._state = SetState(
            data=str(self.paths.root),
            http_url=self._http_url,
            token_file=str(token),
            nats_url=server.url,
            nats_creds_file=str(own.creds_file(PERSON)),
            tenant=self.options.tenant,
            supervisor=supervisor,
            ephemeral=self.options.ephemeral,
            started_at=time.time_ns() // 1_000_000,
            events_max_bytes=self._retention.max_bytes,
            events_max_age_s=self._retention.max_age_s,
            agents={each.kind: each.key_source for each in found if each.command},
        )
        self._note_children()

    async def _start_bus(self, own: Keys) -> nats_server.EmbeddedServer:
        server = nats_server.EmbeddedServer(self.paths, own, self.bus_tenants)
        server.prepare()
        await self._run(self._nats_spec(server))
        return server

    async def _run(self, spec: ChildSpec) -> None:
        child = Child(spec, self._sink, back_off_max_s=self.options.back_off_max_s)
        self._children[spec.name] = child
        await child.start()
        self._keepers.append(asyncio.create_task(child.keep(), name=f"keep-{spec.name}"))

    def _note_children(self) -> None:
        """After each start of a child: the state file names the living ones."""
        if self._state is not None:
            living = {name: child.identity for name, child in self._children.items() if child.identity is not None}
            self._state = replace(self._state, children=living)
            state.write(self.paths, self._state)

    def _http_token(self) -> Path:
        """The bearer token, kept over restarts; the backend gets its digest."""
        if not self.paths.http_token.exists():
            write_whole(self.paths.http_token, secrets.token_urlsafe(32).encode())
        token = self.paths.http_token.read_text(encoding="ascii").strip()
        digest = hashlib.sha256(token.encode()).hexdigest()
        entry = {"token_sha256": digest, "tenant": self.options.tenant, "name": "local"}
        write_whole(self.paths.root / "http-tokens.json", json.dumps([entry]).encode())
        return self.paths.http_token

    def _nats_spec(self, server: nats_server.EmbeddedServer) -> ChildSpec:
        def started(facts: dict[str, Any]) -> None:
            server.started(facts)
            self._note_children()

        return ChildSpec(
            name="nats",
            argv=(str(nats_server.find_binary()), "-c", str(server.config)),
            env=inherited(os.environ, everything=False),
            log=self.paths.logs / "nats.log",
            ready=server.ready,
            restarted=started,
            json_lines=False,
            file_only="[INF]",
        )

    def _service_spec(self, name: str, server: nats_server.EmbeddedServer, own: Keys) -> ChildSpec:
        ready_file = self.paths.ready / f"{name}.json"
        ready_file.unlink(missing_ok=True)
        env = inherited(os.environ, everything=name == "agent") | {
            "TETHER_NATS_URL": server.url,
            "TETHER_NATS_CREDS_FILE": str(own.creds_file(name)),
            "TETHER_TENANTS": self.options.tenant,
            "TETHER_LOG_FORMAT": "console" if self.options.log == "console" else "json",
            "TETHER_LOG_LEVEL": self.options.log_level,
            "TETHER_READY_FILE": str(ready_file),
            **{key: os.environ[key] for key in _TELEMETRY if key in os.environ},
            **failpoints.inherited(os.environ),
            **dict(self.options.test_environment),
            **self._own_settings(name, own),
        }

        def started(facts: dict[str, Any]) -> None:
            if name == "backend":
                # A restarted backend keeps its address: clients and the state file know it.
                self._http_url = str(facts["url"])
                env["TETHER_HTTP_PORT"] = self._http_url.rpartition(":")[2]
            self._note_children()

        return ChildSpec(
            name=name,
            argv=(sys.executable, "-P", "-m", _SERVICES[name]),
            env=env,
            log=self.paths.logs / f"{name}.log",
            ready=ready_by_file(ready_file),
            restarted=started,
            json_lines=self.options.log != "console",
        )

    def _own_settings(self, name: str, own: Keys) -> dict[str, str]:
        match name:
            case "router":
                return {
                    _EVENTS_BYTES: str(self._retention.max_bytes),
                    _EVENTS_AGE: str(self._retention.max_age_s),
                    **{key: os.environ[key] for key in _ROUTER if key in os.environ},
                }
            case "agent":
                return {
                    "TETHER_AGENT_STATE_DIR": str(self.paths.agent),
                    "TETHER_AGENT_WORKSPACES_DIR": str(self.paths.workspaces),
                    "TETHER_AGENTS_FILE": str(self.paths.agents_file),
                    "TETHER_AGENT_AUTHORITY_KEY_FILE": str(own.authority_file),
                    "TETHER_AGENT_AUTHORITY_CREDS_FILE": str(own.creds_file(AUTHORITY_USER)),
                    "TETHER_AGENT_AUTHORITY_ACCOUNT": own.services.public,
                    **{key: os.environ[key] for key in (*_COLLECTOR_TELEMETRY, *_SANDBOXES) if key in os.environ},
                    **({} if self.options.idle_s is None else {"TETHER_AGENT_IDLE_S": str(self.options.idle_s)}),
                    # An ephemeral set leaves nothing behind, however it ends.
                    "TETHER_AGENT_STOP_SANDBOXES": "true" if self.options.ephemeral else "false",
                }
            case _:
                return {
                    "TETHER_HTTP_HOST": "127.0.0.1",
                    "TETHER_HTTP_PORT": str(self.options.http_port),
                    "TETHER_HTTP_TOKENS_FILE": str(self.paths.root / "http-tokens.json"),
                    **{key: os.environ[key] for key in _FRONT if key in os.environ},
                    "TETHER_DATABASE_URL": f"sqlite+aiosqlite:///{self.paths.backend / 'tether.sqlite3'}",
                }

    # --- end ---

    async def _stop(self) -> None:
        """Every step is taken, whatever became of the one before it. Shielded: a set is ended whole."""
        await asyncio.shield(asyncio.create_task(self._stop_in_order(), name="set-stop"))

    async def _stop_in_order(self) -> None:
        async with contextlib.AsyncExitStack() as steps:  # the last one first; a step that fails skips no other
            steps.callback(self._stack.close)
            steps.push_async_callback(self._forget)
            steps.push_async_callback(self._stop_child, "nats")
            steps.push_async_callback(self._stop_agent)
            steps.push_async_callback(self._stop_child, "router")
            steps.push_async_callback(self._stop_child, "backend")

    async def _stop_agent(self) -> None:
        if "agent" not in self._children:
            return
        stopped = await self._stop_sandboxes()
        await self._stop_child("agent")
        if not stopped:
            await asyncio.to_thread(stop_sandboxes_offline, self.paths)

    async def _forget(self) -> None:
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._state is not None:
            self.paths.state.unlink(missing_ok=True)

    async def _stop_child(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None:
            await child.stop()

    async def _stop_sandboxes(self) -> bool:
        """Ask the agent service, while the bus is there, so that every end is told in the log."""
        if self._state is None:
            return False
        try:
            creds = self._state.nats_creds_file
            async with await connect(
                self._state.nats_url, name="tether-set", creds_file=creds, connect_timeout_s=3.0
            ) as bus:
                answer = await bus.request(subjects.agent("stop"), b'{"all": true}', timeout_s=SANDBOXES_STOP_S)
        except BusError as error:
            self._sink.say("sandboxes_not_stopped", reason=str(error))
            return False
        return "problem" not in json.loads(answer.data)


def _check_port(port: int) -> None:
    """Say it here, in one line, rather than by a backend that cannot start."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise CliError(
            f"port {port} on 127.0.0.1 cannot be used: {os.strerror(error.errno or 0)}",
            remedy="choose another with --port, or leave it out to take a free one",
            exit_code=Exit.USAGE,
        ) from None


def end_leftovers(paths: Paths) -> None:
    """End the children of a set whose process was killed: they are ending already, and hold ports and files."""
    previous = state.read(paths)
    if previous is None:
        return
    for process in previous.children.values():
        end(process, term_s=LEFTOVER_TERM_S)
    paths.state.unlink(missing_ok=True)


def stop_sandboxes_offline(paths: Paths) -> bool:
    """End what an agent service of this data directory left running, without a bus."""
    there = [name for name, folder in _PROVIDER_FOLDERS.items() if (paths.agent / folder).is_dir()]
    ended = [_stop_offline(paths, provider) for provider in there]
    return all(ended)


def _stop_offline(paths: Paths, provider: str) -> bool:
    import subprocess

    env = inherited(os.environ, everything=False) | {
        "TETHER_AGENT_PROVIDER": provider,
        "TETHER_AGENT_STATE_DIR": str(paths.agent),
        "TETHER_AGENT_WORKSPACES_DIR": str(paths.workspaces),
        "TETHER_LOG_LEVEL": "warning",
    }
    with (paths.logs / "agent.log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tether_agent", "stop-sandboxes"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=2 * SANDBOXES_STOP_S,
            check=False,
        )
    return done.returncode == 0


def _remove_killed() -> None:
    """Directories of ephemeral sets that were killed: whoever starts the next one removes them."""
    for root in Path(tempfile.gettempdir()).glob(f"{_EPHEMERAL_PREFIX}*"):
        paths = Paths(root / "data")
        with contextlib.suppress(OSError, CliError):
            found = state.read(paths) if root.stat().st_uid == os.getuid() else None
            if found is None or not found.ephemeral or found.is_up or found.data != str(paths.root):
                continue
            with state.locked(paths):
                end_leftovers(paths)
                if stop_sandboxes_offline(paths):
                    shutil.rmtree(root, ignore_errors=True)


@contextlib.asynccontextmanager
async def ephemeral(
    *,
    agents_dir: Path | None = None,
    agents_file: Path | None = None,
    log_level: str = "warning",
    log_bytes: int | None = None,
) -> AsyncIterator[SetState]:
    """A set that lives as long as the context, in a directory of its own that is removed after it."""
    await asyncio.to_thread(_remove_killed)
    root = Path(tempfile.mkdtemp(prefix=_EPHEMERAL_PREFIX))
    try:
        options = SetOptions(
            data=root / "data",
            agents_dir=agents_dir,
            agents_file=agents_file,
            log="quiet",
            log_level=log_level,
            ephemeral=True,
            log_bytes=log_bytes,
        )
        async with ServiceSet(options) as up:
            failing = asyncio.create_task(up.failed(), name="set-failed")
            try:
                yield up.state
            finally:
                failing.cancel()
                await asyncio.gather(failing, return_exceptions=True)
    finally:
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


@contextlib.asynccontextmanager
async def running_or_ephemeral(
    data: Path | None, *, agents_dir: Path | None = None, agents_file: Path | None = None
) -> AsyncIterator[SetState]:
    """The set that is up in this data directory, else an ephemeral one (`state.ephemeral` tells)."""
    found = state.running(data)
    if found is not None:
        if agents_dir is not None or agents_file is not None:
            raise CliError(
                "a set is up, and agents are chosen when it starts",
                remedy="leave --agents-dir and --agents-file out, or restart the set with them",
                exit_code=Exit.USAGE,
            )
        yield found
        return
    async with ephemeral(agents_dir=agents_dir, agents_file=agents_file) as started:
        yield started
