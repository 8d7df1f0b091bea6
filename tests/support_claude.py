"""The real Claude Code in a whole set, against the fake model server: conversations, processes, what the model saw."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from fake_models import FakeModels
from tether import Client
from tether import events as ev
from tether.bus import connect
from tether.client.items import ConversationItem, ExecutionItem, Item
from tether.client.types import Answer, Submission
from tether.events import Event
from tether.ids import new_id
from tether.processes import ProcessId, identify
from tether.prompt import AgentSpec
from tether.walking import entries_below
from tether_agent.providers import procfs
from tether_agents.locate import FoundAgent, Problem, find_agent
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState

KEY: Final = "sk-canary-4f1d0c77b1a24e0f9c55"
OWN_LOGIN: Final = "sk-ant-oat01-own-login-7d1e22aa90"  # of the user whose HOME it is; nobody asked for it
WORKSPACE: Final = "ws1"
DEADLINE_S: Final = 40.0
MARKER: Final = "TETHER_PROCESS_NONCE"


def found_claude() -> FoundAgent:
    return found_cli("claude")


def found_cli(kind: str) -> FoundAgent:
    """The pinned CLI; skips the test where it is not installed."""
    found = find_agent(kind, Path(os.environ["TETHER_AGENTS_DIR"]) if "TETHER_AGENTS_DIR" in os.environ else None)
    if isinstance(found, Problem):
        pytest.skip(str(found))
    return found


@asynccontextmanager
async def claude_set(
    claude: FoundAgent, root: Path, test_environment: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[Rig]:
    """A set with a key in a file, of a user who has no login of their own."""
    key_file = root / "keys.env"
    key_file.write_text(f"ANTHROPIC_API_KEY={KEY}\n")
    key_file.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch, FakeModels(require_key=KEY, log_bodies=True) as models:
        patch.setenv("HOME", str(root / "home"))
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CONFIG_DIR"):
            patch.delenv(name, raising=False)
        agents = root / "agents.toml"
        agents.write_text(
            f'[agents.claude]\ncommand = ["{claude.path}"]\nkey_file = "{key_file}"\n'
            f'env = {{ ANTHROPIC_BASE_URL = "{models.base_url}", CLAUDE_CODE_MAX_RETRIES = "1" }}\n'
        )
        options = SetOptions(data=root / "data", log="quiet", agents_file=agents, test_environment=test_environment)
        async with ServiceSet(options) as up, Client.http(up.state.http_url, up.state.token) as client:
            yield Rig(up.state, client, models, root, key_file, claude.pinned_version)


@dataclass(frozen=True, slots=True)
class Rig:
    """A set with one workspace, in which every conversation of a module runs."""

    up: SetState
    client: Client
    models: FakeModels
    root: Path
    key_file: Path
    cli_version: str
    agent: str = "claude"
    model: str | None = None
    args: tuple[str, ...] = ()
    workspace_name: str = WORKSPACE

    @property
    def data(self) -> Path:
        return Path(self.up.data)

    @property
    def workspace(self) -> Path:
        return self.data / "workspaces" / self.up.tenant / self.workspace_name

    def talk(self, conversation: str) -> Talk:
        return Talk(self, conversation)

    def model_requests(self, directive: str) -> list[dict[str, Any]]:
        """Requests that the CLI made because of this text, retries included."""
        return [entry for entry in self.models.requests if directive in str(entry.get("newest", ""))]

    async def stored(self) -> dict[str, list[bytes]]:
        """Every message of every stream, by stream: subject, headers and data of each."""
        found: dict[str, list[bytes]] = {}
        up = self.up
        async with await connect(up.nats_url, name="test", creds_file=up.nats_creds_file) as bus:
            names: Any = (await bus.api("$JS.API.STREAM.NAMES"))["streams"]
            for name in names:
                messages = found[name] = []
                after = 0
                while batch := await bus.read(name, after, ">"):
                    messages += [f"{m.subject} {dict(m.headers)} ".encode() + m.data for m in batch]
                    after = batch[-1].sequence
        return found


class Talk:
    """One conversation, read from its beginning. `items`: what came so far."""

    def __init__(self, rig: Rig, conversation: str) -> None:
        self.conversation = conversation
        self.items: list[Item] = []
        self.deadline_s = DEADLINE_S
        self._rig = rig
        self._reader: AsyncGenerator[Item, None] | None = None

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            await self._reader.aclose()

    async def prompt(self, text: str, permission_mode: Any = None, **fields: Any) -> Submission:
        """`fields`: further ones of the prompt (`continuation`)."""
        rig = self._rig
        agent = AgentSpec(kind=rig.agent, model=rig.model, permission_mode=permission_mode, args=rig.args)
        found = await rig.client.prompt(self.conversation, text, agent=agent, workspace=rig.workspace_name, **fields)
        if self._reader is None:
            self._reader = rig.client.follow(self.conversation)
        return found

    async def until(self, kind: str, /, **body: Any) -> Event:
        """The next event of an execution with this type and these fields in its body."""
        seen: list[str] = []
        assert self._reader is not None, "prompt first"
        try:
            async with asyncio.timeout(self.deadline_s):
                async for item in self._reader:
                    self.items.append(item)
                    if not isinstance(item, ExecutionItem):
                        continue
                    seen.append(f"{item.type} {json.dumps(item.event.body)[:300]}")
                    if item.type == kind and all(item.event.body.get(name) == value for name, value in body.items()):
                        return item.event
        except TimeoutError:
            pass
        raise AssertionError(f"no {kind} {body} within {self.deadline_s:g} s; there was:\n" + "\n".join(seen))

    async def ended(self) -> dict[str, Any]:
        """The body of `execution.ended`, the next one."""
        return (await self.until(ev.EXECUTION_ENDED)).body

    async def allowed(self) -> Event:
        """Wait for an approval and allow it."""
        asked = await self.until(ev.INTERACTION_REQUESTED)
        await self.answer(asked, decision="allow")
        return asked

    async def answer(self, asked: Event, **answer: Any) -> None:
        """Until it is known what became of it: the same control id has one effect."""
        control = new_id("ctl")
        interaction = asked.body["interaction"]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                receipt = await self._rig.client.answer(
                    self.conversation, interaction, Answer(**answer), control_id=control
                )
                assert receipt.problem is None, receipt
                if receipt.status != "unknown":
                    return

    def events(self, kind: str) -> list[Event]:
        return [item.event for item in self.items if isinstance(item, ExecutionItem) and item.type == kind]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [event.body for event in self.events(kind)]

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Bodies of the conversation's own events."""
        return [item.event.body for item in self.items if isinstance(item, ConversationItem) and item.type == kind]

    def execution(self) -> str:
        """The newest."""
        return [item.execution for item in self.items if isinstance(item, ExecutionItem)][-1]

    def texts(self) -> list[str]:
        return [body["text"] for body in self.bodies(ev.TEXT_COMPLETED)]


def processes_of(execution: str) -> dict[int, list[str]]:
    """Living processes that carry the execution's marker: pid → arguments."""
    needle = f"{MARKER}={execution}-".encode()
    found = {}
    for pid in procfs.pids():
        if needle in environ_of(pid) and identify(pid) is not None:
            found[pid] = procfs.argv_of(pid)
    return found


def environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def cli_of(execution: str, argument: str = "--input-format") -> ProcessId:
    """The CLI's own process, told by an argument that only it has."""
    [pid] = [pid for pid, argv in processes_of(execution).items() if argument in argv]
    identity = identify(pid)
    assert identity is not None
    return identity


def collector_of(data: Path) -> ProcessId:
    """The collector of the only sandbox of a data directory, as it is written down."""
    [path] = (data / "agent" / "sandboxes").glob("*/sandbox.json")
    value = json.loads(path.read_bytes())
    return ProcessId(value["pid"], value["start_ticks"], value["machine_boot"])


async def becomes(condition: Callable[[], bool], what: str) -> None:
    """Wait for something outside the product. Raises TimeoutError naming it."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - conditions of other processes
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"{what} did not happen within {DEADLINE_S:g} s") from None


def files_below(root: Path) -> Iterator[Path]:
    for entry in entries_below(root):
        if entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def holding(root: Path, needles: list[str]) -> list[str]:
    """Files below `root` that hold one of the needles, as paths relative to it."""
    found = []
    for path in files_below(root):
        data = path.read_bytes()
        if any(needle.encode() in data for needle in needles):
            found.append(str(path.relative_to(root)))
    return sorted(found)
