"""`python -m tether_demo`: runs the demo, prints the oracle's verdict, writes `reports/demo.json`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import structlog

from tether import Client
from tether.api import ItemList
from tether.client import Answer, Interaction, NatsCredentials
from tether.errors import TetherError
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.faults import Kill, victims
from tether_cli.output import CliError
from tether_cli.set import SetOptions
from tether_cli.state import SetState
from tether_demo.readers import Reader, show
from tether_oracle import COMPLETED_KINDS, Truth, Verdict, fact_of_event, judge, load_truth

FLOOD_LINES = 2_000
BREAK_EVERY = 25
DEADLINE_S = 120.0
GREETING = "!say hello, this came through JetStream\n!tool look\n!say and nothing was lost on the way"
APPROVAL = "!say one thing needs your word\n!ask deploy\n!say thank you"
LINES_OF_STAGE = 150  # between two kills
KILLED = ("router", "agent", "collector", "backend", "nats")
NAMES = {
    "router": "router",
    "agent": "agent service",
    "collector": "collector",
    "backend": "backend",
    "nats": "nats-server",
}
STREAM = f"!lines {FLOOD_LINES} 1\n!tool tidy"


@dataclass(slots=True)
class Finding:
    """One row of the verdict."""

    who: str
    verdict: Verdict
    note: str = ""
    trouble: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.verdict.is_clean and not self.trouble


def say(text: str = "") -> None:
    print(text, flush=True)


def judged(who: str, truth: Truth, events: list[dict[str, Any]], **options: Any) -> Verdict:
    facts = [fact for event in events if (fact := fact_of_event(event)) is not None]
    return judge(truth, facts, **options)


class Demo:
    def __init__(self, state: SetState, truth: Path) -> None:
        token = Path(state.token_file).read_text(encoding="utf-8").strip()
        self.state, self.token = state, token
        self.http = Client.http(state.http_url, token)
        self.nats = Client.nats(state.nats_url, NatsCredentials(creds_file=state.nats_creds_file), tenant=state.tenant)
        self.truth_folder = truth
        self.findings: list[Finding] = []

    async def close(self) -> None:
        await self.http.close()
        await self.nats.close()

    def found(self, conversation: str, session: str, readers: list[Reader]) -> None:
        truth = load_truth(self.truth_folder)
        processes = truth.of_session(session)
        for reader in readers:
            verdict = judged(reader.name, truth, reader.events, processes=processes)
            note = f"broken off {reader.breaks} times" if reader.breaks else ""
            self.findings.append(Finding(f"{conversation}: {reader.name}", verdict, note, reader.trouble))

    async def projection(self, conversation: str, session: str) -> None:
        """What the SQL projection holds, asked until it has the end (it is behind the stream by a batch)."""
        while True:
            executions = (await self.http.executions(conversation=conversation)).executions
            if executions and all(one.outcome is not None for one in executions):
                break
            await asyncio.sleep(0.05)
        events: list[dict[str, Any]] = []
        for execution in executions:
            events += await self.items_of(execution.execution)
        history = await self.http.conversation(conversation)
        events += [{"type": "usage", "body": usage.model_dump()} for usage in history.usage]
        truth = load_truth(self.truth_folder)
        # The projection keeps what was settled: no deltas, no turn boundaries.
        kinds = COMPLETED_KINDS - {"turn.completed"}
        verdict = judged("projection", truth, events, processes=truth.of_session(session), kinds=kinds)
        self.findings.append(Finding(f"{conversation}: projection", verdict))

    async def items_of(self, execution: str) -> list[dict[str, Any]]:
        """Every item of the projection, page by page over plain HTTP."""
        events: list[dict[str, Any]] = []
        after: int | None = None
        headers = {"authorization": f"Bearer {self.token}"}
        async with httpx2.AsyncClient(base_url=self.state.http_url, headers=headers) as raw:
            while True:
                params = {"limit": 500} | ({} if after is None else {"after": after})
                reply = await raw.get(f"/v1/executions/{execution}/items", params=params)
                page = ItemList.model_validate_json(reply.raise_for_status().content)
                events += [event for view in page.items for event in events_of_item(view.state)]
                after = page.after
                if after is None:
                    return events

    async def greeting(self) -> None:
        say("1  A prompt over HTTP, read over SSE and over NATS")
        conversation = "demo-http"
        submission = await self.http.prompt(conversation, GREETING, agent="scripted")
        say(f"  sent    request {submission.request_id}: {submission.status}")
        readers = [Reader("SSE reader"), Reader("NATS reader")]
        async with asyncio.TaskGroup() as group:
            group.create_task(readers[0].read(self.http, conversation))
            group.create_task(readers[1].read(self.nats, conversation))
        again = await self.http.prompt(conversation, GREETING, agent="scripted", request_id=submission.request_id)
        say(f"  again   the same request: response {again.response_id} (nothing ran twice)")
        await self.conclude(conversation, readers)

    async def approval(self) -> None:
        say("2  A prompt over NATS; the agent asks, we answer")
        conversation = "demo-approval"
        submission = await self.nats.prompt(conversation, APPROVAL, agent="scripted")
        say(f"  sent    request {submission.request_id}: {submission.status}")
        reader = Reader("SSE reader")

        async def allow(interaction: Interaction) -> Answer:
            say(f"  you     allow {interaction.name}")
            return Answer.allow()

        async with asyncio.TaskGroup() as group:
            group.create_task(reader.read(self.http, conversation))
            response = await self.nats.ask(
                conversation, APPROVAL, agent="scripted", request_id=submission.request_id, on_interaction=allow
            )
        say(f"  outcome {response.outcome}")
        await self.conclude(conversation, [reader])

    async def broken(self) -> None:
        say(
            f"3  {FLOOD_LINES:,} lines; one reader is broken off every {BREAK_EVERY} events and goes on from its cursor"
        )
        conversation = "demo-broken"
        await self.http.prompt(conversation, STREAM, agent="scripted")
        readers = [Reader("broken SSE reader"), Reader("broken NATS reader"), Reader("steady SSE reader")]
        async with asyncio.TaskGroup() as group:
            group.create_task(readers[0].read_broken(self.http, conversation, BREAK_EVERY))
            group.create_task(readers[1].read_broken(self.nats, conversation, BREAK_EVERY))
            group.create_task(readers[2].read(self.http, conversation))
        await self.conclude(conversation, readers, quiet=True)

    async def killed(self, services: ChaosSet) -> None:
        say("4  Each service, the collector and nats-server are killed once (SIGKILL) while the agent works")
        conversation = "demo-killed"
        gates = [self.truth_folder.parent / f"go-on-{tier}" for tier in KILLED]
        work = "".join(f"!lines {LINES_OF_STAGE} 4\n!wait_file {gate}\n" for gate in gates)
        await self.http.prompt(conversation, f"{work}!lines {LINES_OF_STAGE} 1\n!tool tidy", agent="scripted")
        readers = [Reader("SSE reader"), Reader("NATS reader")]
        async with asyncio.TaskGroup() as group:
            group.create_task(readers[0].read(self.http, conversation))
            group.create_task(readers[1].read(self.nats, conversation))
            for tier, gate in zip(KILLED, gates, strict=True):
                await self._kill(services, tier, readers, gate)
        await self.conclude(conversation, readers, quiet=True)

    async def _kill(self, services: ChaosSet, tier: str, readers: list[Reader], gate: Path) -> None:
        """One line: who, how long it was away, where the stream went on. The agent works on meanwhile, up to the gate:
        so there is something left to be told, however slow the machine is."""
        await _until(lambda: all(len(reader.events) > 1 for reader in readers))
        kill = Kill(services, victims(services.paths.root, tier)[0])
        kill.strike()
        at = [len(reader.events) for reader in readers]
        up_s = await kill.up()
        if up_s is None:
            raise TimeoutError(f"the {NAMES[tier]} did not come back")
        await asyncio.to_thread(gate.touch)
        await _until(lambda: all(len(one.events) > before for one, before in zip(readers, at, strict=True)))
        back = f"back after {1000 * (up_s - kill.began_s):.0f} ms"
        say(f"  killed  {NAMES[tier]} (pid {kill.victim.process.pid}): {back}, stream goes on at event {min(at) + 1}")

    async def conclude(self, conversation: str, readers: list[Reader], *, quiet: bool = False) -> None:
        for event in readers[0].events if not quiet else []:
            line = show(event)
            if line is not None:
                say(line)
        session = next(
            str(event["body"]["native_session"]) for event in readers[0].events if event["type"] == "session.bound"
        )
        self.found(conversation, session, readers)
        await self.projection(conversation, session)
        say()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the other side is another process
        await asyncio.sleep(0.01)


def events_of_item(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The settled facts of a projected item, as the events that made it."""
    match item["kind"]:
        case "text" if item["state"] in ("completed", "partial"):
            body = {"segment": item["id"], "text": item["text"], "blob": item.get("blob")}
            return [{"type": "text.completed", "body": body}]
        case "reasoning" if item["state"] == "completed":
            return [{"type": "reasoning.completed", "body": {"segment": item["id"], "text": item["text"]}}]
        case "tool":
            started = {"tool": item["id"], "name": item["name"], "input": item["input"]}
            done = {"tool": item["id"], "status": item["state"], "output": item["output"], "blob": item.get("blob")}
            return [{"type": "tool.started", "body": started}, {"type": "tool.completed", "body": done}]
        case "interaction":
            asked = {"interaction": item["id"], "kind": item["asks"], "name": item["name"], "input": item["input"]}
            resolved = {"interaction": item["id"], "outcome": item["state"]}
            return [
                {"type": "interaction.requested", "body": asked},
                {"type": "interaction.resolved", "body": resolved},
            ]
        case _:
            return []


def report(findings: list[Finding], seconds: float) -> bool:
    """Print the table, write `reports/demo.json`; True where everything is clean."""
    say("The oracle's verdict (the agent's own record against what arrived)")
    say(f"  {'':34} {'printed':>8} {'got':>8} {'lost':>6} {'doubled':>8}")
    for finding in findings:
        v = finding.verdict
        say(f"  {finding.who:34} {v.printed:8} {v.got:8} {v.lost:6} {v.doubled:8}  {finding.note}".rstrip())
        for detail in [*v.details[:5], *finding.trouble[:5]] if not finding.clean else []:
            say(f"      {detail}")
    clean = bool(findings) and all(finding.clean for finding in findings)
    readers = [finding for finding in findings if "reader" in finding.who]
    Path("reports").mkdir(exist_ok=True)
    result = {
        "verdict": "pass" if clean else "fail",
        "figures": {
            "events": sum(finding.verdict.printed for finding in readers),
            "readers": len(readers),
            "lost": sum(finding.verdict.lost for finding in findings),
            "duplicated": sum(finding.verdict.doubled for finding in findings),
            "seconds": round(seconds, 1),
        },
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
    }
    Path("reports/demo.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return clean


async def run() -> bool:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tether-demo-") as folder:
        truth = Path(folder) / "truth"
        truth.mkdir()
        agents = Path(folder) / "agents.toml"
        agents.write_text(f"[agents.scripted]\nenv = {{ TETHER_SCRIPTED_TRUTH = {json.dumps(str(truth))} }}\n")
        data = Path(folder) / "data"
        options = SetOptions(data=data, agents_file=agents, log="quiet", ephemeral=True, back_off_max_s=0.5)
        say("Starting nats-server, router, agent service and backend on loopback …")
        async with asyncio.timeout(DEADLINE_S), ChaosSet(options) as services:
            say(f"up: {services.state.http_url}, {services.state.nats_url}")
            say()
            demo = Demo(services.state, truth)
            try:
                await demo.greeting()
                await demo.approval()
                await demo.broken()
                await demo.killed(services)
            finally:
                await demo.close()
    clean = report(demo.findings, time.monotonic() - began)
    say()
    say('Next: `source .venv/bin/activate`, `tether up --detach`, `tether run "hello" --agent scripted`.')
    say("README.md goes on from there.")
    return clean


def main() -> int:
    # What a client says when its server is killed is expected here.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        return 0 if asyncio.run(run()) else 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has ended", file=sys.stderr)
        return 130
    except (CliError, TetherError, TimeoutError) as error:
        print(f"demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
