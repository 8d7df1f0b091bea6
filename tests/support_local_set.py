"""A whole set in a test: HTTP by its own token, prompts for the scripted agent, the processes that belong to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from tether.processes import ProcessId, identify
from tether_agent.providers import procfs
from tether_cli.state import SetState

DEADLINE_S = 40.0


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Raises TimeoutError naming `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - conditions of other processes
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"{what} did not happen within {timeout_s:g} s") from None


class Http:
    """The set's HTTP API."""

    def __init__(self, up: SetState) -> None:
        headers = {"Authorization": f"Bearer {up.token}"}
        self.client = httpx2.AsyncClient(base_url=up.http_url, headers=headers, timeout=30.0)

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def prompt(self, conversation: str, request: str, text: str, **more: Any) -> dict[str, Any]:
        body = {
            "request_id": request,
            "content": [{"type": "text", "text": text}],
            "agent": {"kind": "scripted"},
            **more,
        }
        answer = await self.client.post(f"/v1/conversations/{conversation}/messages", json=body)
        assert answer.status_code == 202, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def conversation(self, conversation: str) -> dict[str, Any]:
        """Empty where the projection does not know it yet."""
        try:
            answer = await self.client.get(f"/v1/conversations/{conversation}")
        except httpx2.TransportError:
            return {}
        found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return found

    async def outcomes(self, conversation: str) -> list[str | None]:
        found = await self.conversation(conversation)
        return [response.get("outcome") for response in found.get("responses", [])]

    async def texts(self, conversation: str) -> list[str]:
        found = await self.conversation(conversation)
        return [item["state"]["text"] for item in found.get("items", []) if item["kind"] == "text"]

    async def ended(self, conversation: str, count: int) -> None:
        """Until `count` responses of the conversation have an outcome and their executions are over."""

        async def over() -> bool:
            found = await self.conversation(conversation)
            outcomes = [response.get("outcome") for response in found.get("responses", [])]
            states = [execution["state"] for execution in found.get("executions", [])]
            return len(outcomes) == count and None not in outcomes and set(states) == {"ended"}

        await eventually(over, f"the end of {count} responses")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def listening_addresses(pids: set[int]) -> list[str]:
    """Addresses (as the kernel writes them) on which these processes listen over TCP."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                sockets.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for table in ("tcp", "tcp6") for line in _table(table)]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


def _table(name: str) -> list[str]:
    return Path(f"/proc/net/{name}").read_text().splitlines()[1:]


def processes_of(root: Path) -> list[str]:
    """Living processes whose arguments or environment name this directory: what a set must not leave behind."""
    needle = str(root).encode()
    found = []
    for pid in procfs.pids():
        if identify(pid) is None:
            continue
        if needle in _read(pid, "cmdline") + b"\0" + _read(pid, "environ"):
            found.append(f"{pid} {' '.join(procfs.argv_of(pid))[:200]}")
    return found


def collector_of(root: Path) -> ProcessId:
    """The collector of the only sandbox of a data directory."""
    [path] = (root / "agent" / "sandboxes").glob("*/sandbox.json")
    value = json.loads(path.read_bytes())
    return ProcessId(value["pid"], value["start_ticks"], value["machine_boot"])


def collector_in(root: Path, workspace: str) -> ProcessId:
    """The collector of one workspace of a data directory, as the provider's record names it."""
    found = [json.loads(path.read_bytes()) for path in (root / "agent" / "sandboxes").glob("*/sandbox.json")]
    [value] = [one for one in found if one["workspace"] == workspace]
    return ProcessId(value["pid"], value["start_ticks"], value["machine_boot"])
