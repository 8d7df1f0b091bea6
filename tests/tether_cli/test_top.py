"""`tether top`: against a set that runs, one that is partly down, on terminals of any width."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from support_local_set import Http
from support_set import TetherSet, environment, on_terminal, running_set
from tether.processes import is_running
from tether.sandbox import Registration, SandboxRecord
from tether_cli.commands.top import age, render, size
from tether_cli.looking import Consumer, Execution, Sandbox, Service, Stream, View, sandbox_of
from tether_cli.quotas_view import Quota, of_metrics

pytestmark = pytest.mark.timeout(180)
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


def look(up: TetherSet) -> dict[str, Any]:
    done = up.tether("top", "--once", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_a_look_names_services_sandboxes_executions_and_streams(up: TetherSet) -> None:
    async with Http(up.state) as http:
        told = await http.prompt("c1", "r1", "!ask remove", workspace="w1")
        deadline_s = time.monotonic() + DEADLINE_S
        quiet = {"state": "waiting", "events_per_s": 0.0}
        while not (found := look(up))["executions"] or not quiet.items() <= found["executions"][0].items():
            assert time.monotonic() < deadline_s, found
        [execution] = found["executions"]
        names = {one["name"]: one for one in found["services"]}
        assert set(names) == {"set", "nats", "router", "agent", "backend", "collector w1"}
        assert all(one["alive"] and one["rss_bytes"] > 1 << 20 and one["up_s"] > 0 for one in names.values())
        assert execution["execution"] == told["execution_id"]
        assert (execution["conversation"], execution["agent"], execution["waiting"]) == ("c1", "scripted", 1)
        assert execution["events"] > 0
        [sandbox] = found["sandboxes"]
        assert (sandbox["workspace"], sandbox["state"], sandbox["connected"]) == ("w1", "active", True)
        streams = {one["name"]: one for one in found["streams"]}
        assert streams["EVENTS_default"]["messages"] > 0 and streams["EVENTS_default"]["size_bytes"] > 0
        [projection] = streams["EVENTS_default"]["consumers"]
        assert projection["name"].startswith("projection-")
        assert (found["prompts_waiting"], found["commands_waiting"], found["problems"]) == (0, 0, [])
        await http.client.post(f"/v1/executions/{told['execution_id']}/stop", json={"control_id": "s1"})
        await http.ended("c1", 1)


def test_on_a_terminal_q_ends_it_and_the_terminal_is_left_as_it_was(up: TetherSet) -> None:
    shell = ["sh", "-c", '"$@"; echo "left $?"; stty -a', "sh", *up.command("top")]
    code, shown = on_terminal(shell, environment(up.home, {"TERM": "xterm"}), [("EVENTS_default", "q"), ("left 0", "")])
    assert code == 0
    assert re.search(r" icanon", shown) and re.search(r" echo\b", shown)


def test_ctrl_c_ends_it_without_a_traceback(up: TetherSet) -> None:
    code, shown = on_terminal(up.command("top"), environment(up.home, {"TERM": "xterm"}), [("EVENTS_default", "\x03")])
    assert code == 0 and "Traceback" not in shown


def test_without_a_terminal_it_looks_once(up: TetherSet) -> None:
    done = up.tether("top")
    assert done.returncode == 0 and "PROMPTS" in done.stdout and "router" in done.stdout


def test_where_no_set_is_up_it_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    nowhere = TetherSet(tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("data"))
    done = nowhere.tether("top", "--once")
    assert done.returncode == 3 and "tether up" in done.stderr


def test_what_is_down_is_told_and_the_rest_is_shown() -> None:
    with running_set() as own:
        found = own.state
        os.kill(found.supervisor.pid, signal.SIGKILL)  # its children end with it
        deadline_s = time.monotonic() + DEADLINE_S
        while any(is_running(child) for child in found.children.values()):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        told = look(own)
        assert {one["name"]: one["alive"] for one in told["services"]} == dict.fromkeys(
            ("set", "nats", "router", "agent", "backend"), False
        )
        assert told["streams"] == [] and told["prompts_waiting"] is None
        assert any("the bus" in problem for problem in told["problems"])
        assert "router is down" in told["problems"]


# --- what it looks like ---

LONG = "conversation-with-a-name-that-is-longer-than-any-terminal-would-like-to-show"
FULL = View(
    at_ms=0,
    services=(Service("router", 7, True, 50 << 20, 0.5, 4000.0), Service(f"collector {LONG}", 8, False)),
    sandboxes=(Sandbox(LONG, "sbx_1", "provisioning", False, 1, 3),),
    executions=(Execution("exe_1", LONG, "w", "waiting", "scripted", 61.0, 12, 3.25, 2),),
    executions_omitted=4,
    streams=(Stream("EVENTS_default", 123_456, 3 << 30, (Consumer("projection-x-0", 17),)),),
    prompts_waiting=3,
    problems=("sandbox of w is disconnected",),
)


def test_a_sandbox_that_sleeps_or_drains_is_told_and_is_not_missed() -> None:
    record = SandboxRecord(
        tenant="t", workspace="asleep", sandbox="s1", state="suspended", provider="local", starts=3, updated_at=1
    )
    left_over = Registration(tenant="t", workspace="asleep", sandbox="s1", boot="b", instance="i")
    drains = record.model_copy(update={"workspace": "drains", "state": "draining"})
    boxes = (sandbox_of(record, left_over), sandbox_of(drains, left_over))
    shown = io.StringIO()
    Console(width=120, file=shown, force_terminal=False).print(render(View(at_ms=0, sandboxes=boxes), 120))
    rows = {line.split()[0]: line.split()[1:3] for line in shown.getvalue().splitlines() if "s1" in line}
    assert rows == {"asleep": ["suspended", "asleep"], "drains": ["draining", "connected"]}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_every_line_fits_and_the_figures_stay(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(render(FULL, width))
    console.file.close()
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    for figure in ("50.0M", "down", "provisioning", "waiting", "3.2", "123456", "17", "4 more") if width >= 60 else ():
        assert figure in text, text
    assert ("exe_1" in text) == (width >= 100)


def test_a_live_view_fits_the_terminal_and_says_how_many_rows_are_missing() -> None:
    from rich.console import Console

    many = View(
        at_ms=0,
        services=tuple(Service(f"s{number}", number, True) for number in range(50)),
        streams=tuple(Stream(f"t{number}", number, 0) for number in range(3)),
    )
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(render(many, 80, height=24))
    console.file.close()
    text = console.export_text()
    assert len(text.splitlines()) <= 24
    assert "s0 " in text and "s49 " not in text and "t2 " in text and "42 more rows" in text


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (1023, "1023"), (1024, "1.0K"), (50 << 20, "50.0M"), (3 << 40, "3.0T")]
)
def test_sizes_are_short(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0s"), (61, "1m01"), (7500, "2h05"), (180000, "2d02h")])
def test_ages_are_short(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_quotas_in_use_are_shown_beside_their_limits_and_the_rest_is_not() -> None:
    from rich.console import Console

    text = """# TYPE tether_quota_used gauge
tether_quota_used{limit="readers",tenant="acme"} 3.0
tether_quota_used{limit="stored_bytes",tenant="acme"} 5.24288e+07
tether_quota_used{limit="readers",tenant="other"} 9.0
tether_quota_limit{limit="readers",tenant="acme"} 4096.0
tether_quota_limit{limit="stored_bytes",tenant="acme"} 1.048576e+08
tether_quota_limit{limit="waiting_prompts",tenant="acme"} 10.0
"""
    found = of_metrics(text, "acme")
    assert found == [
        Quota("readers", 3, 4096),
        Quota("stored_bytes", 50 << 20, 100 << 20),
        Quota("waiting_prompts", 0, 10),
    ]
    shown = io.StringIO()
    Console(width=80, file=shown, force_terminal=False).print(render(View(at_ms=0, quotas=tuple(found[:2])), 80))
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["readers", "3", "4096"] in rows and ["stored_bytes", "50.0M", "100M"] in rows
    without = io.StringIO()
    Console(width=80, file=without, force_terminal=False).print(render(View(at_ms=0), 80))
    assert "QUOTA" not in without.getvalue()
