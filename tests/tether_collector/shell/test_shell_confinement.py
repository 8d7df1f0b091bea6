"""A collector of root whose CLIs run as another user; and the modes of everything that a collector makes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_nats import NatsServer
from support_shell import collector, eventually
from tether import ids, subjects
from tether.bus import NatsBus
from tether.kv import Bucket
from tether.sandbox import Registration

PYTHON = "/usr/bin/python3"
USER = 54322
AGENT = """
import json, os, sys
prompt = json.loads(sys.stdin.readline())["id"]
def say(**line): print(json.dumps(line), flush=True)
def tried(deed):
    try:
        return str(deed())[:60]
    except OSError as error:
        return type(error).__name__
say(type="session", session_id=sys.argv[2], agent="scripted", version="1")
say(type="turn.started", prompt=prompt)
state = os.path.join(os.getcwd(), ".tether")
found = {
    "uid": os.getuid(), "home": os.environ["HOME"], "made": tried(lambda: open("made", "w").close()),
    "journal": tried(lambda: open(state + "/journal.sqlite3", "rb").read(1)),
    "list": tried(lambda: os.listdir(state)), "spool": tried(lambda: os.listdir(state + "/executions")),
    "moved": tried(lambda: os.rename(state, state + "2")), "keys": tried(lambda: open(sys.argv[0]).close()),
    "parent": tried(lambda: open(f"/proc/{os.getppid()}/environ", "rb").read()),
    "session": tried(lambda: open(state + "/agents/scripted/mine", "w").close()),
    "sink": tried(lambda: open("/dev/stderr", "w").close()),
}
say(type="text", segment="s1", text=json.dumps(found))
say(type="usage", prompt=prompt, input_tokens=1, output_tokens=1)
say(type="result", status="ok", prompt=prompt, text="", usage={})
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tether-confine-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0 or not os.access(PYTHON, os.X_OK), reason="needs root and the system's python3")
async def test_a_cli_of_another_user_works_in_its_workspace_and_reaches_nothing_of_the_collectors(
    bus: NatsBus, nats_server: NatsServer, tenant: str, shared: Path
) -> None:
    agent = shared / "agent.py"
    agent.write_text(AGENT)
    environment = {
        "TETHER_AGENTS": f'{{"scripted": ["{PYTHON}", "{agent}"]}}',
        "TETHER_COLLECTOR_CLI_USER": f"{USER}:{USER}",
    }
    async with collector(bus, nats_server.url, tenant, shared, environment=environment, start=False) as rig:
        rig.directory.chmod(0o755)
        await rig.start()
        refused = await rig.begin("one", conversation="c0")
        why = (await refused.until("response.ended")).body["error"]["detail"]
        assert f"chown 0:{USER}, chmod 1770" in why, "a workspace in which a CLI could move the collector's state"
        os.chown(rig.directory, 0, USER)
        rig.directory.chmod(0o1770)
        run = await rig.begin("two")
        said = (await run.until("text.completed")).body["text"]
        assert (await run.ended()).body["outcome"] == "completed"
        home = rig.state_dir / "agents" / "scripted"
        expected = {
            "uid": USER,
            "home": str(home),
            "made": "None",
            "session": "None",
            "keys": "None",
            "sink": "None",
            **dict.fromkeys(("journal", "list", "spool", "moved", "parent"), "PermissionError"),
        }
        found = json.loads(said)
        if found["parent"] == "FileNotFoundError":
            expected["parent"] = "FileNotFoundError"
        assert found == expected
        assert stat.S_IMODE((rig.directory / "made").stat().st_mode) == 0o600
        await confinement_is_told(bus, rig.tenant, rig.workspace, f"{USER}:{USER}")


async def confinement_is_told(bus: NatsBus, tenant: str, workspace: str, user: str) -> None:
    bucket = Bucket(bus, subjects.SANDBOXES)

    async def told() -> bool:
        key = subjects.registration_key(tenant, workspace, ids.sandbox_id(tenant, workspace))
        found = await bucket.record(key, Registration)
        if found is not None:
            facts = found.facts["confinement"]
            if facts.get("isolation") in ("pid_namespace", "subreaper"):
                return bool(facts["user"] == user and facts["new_privileges"] is False)
        return False

    await eventually(told, "the registration's word on confinement")


async def test_every_file_of_a_collector_is_its_users_alone(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        first = await rig.begin("one\n!tool big 0 200000")
        await first.ended()
        second = await rig.begin("two\n!ask write")
        await second.until("interaction.requested")
        await rig.kill()
        await rig.start()

        async def stopped() -> bool:
            reply = await rig.ask("stop", target=second.target, control="ctl_stop")
            return reply.status in ("accepted", "delivered", "settled")

        await eventually(stopped, "a stop that is taken")
        await second.ended()
        assert await rig.terminate() == 0
        paths = [path for path in rig.state_dir.rglob("*") if not path.is_symlink()]
        kinds = {path.suffix or path.name for path in paths if path.is_file()}
        assert {".sqlite3", ".seg", ".json", "lock"} <= kinds, "what a whole life leaves"
        assert {"checkpoints", "executions", "execution-recovery"} <= {path.name for path in paths if path.is_dir()}
        open_ones = [
            f"{stat.S_IMODE(path.stat().st_mode):o} {path.relative_to(rig.state_dir)}"
            for path in [rig.state_dir, *paths]
            if stat.S_IMODE(path.stat().st_mode) & 0o077 or (path.is_file() and path.stat().st_mode & 0o111)
        ]
        assert open_ones == []
