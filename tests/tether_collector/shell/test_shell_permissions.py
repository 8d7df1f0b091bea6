"""A collector whose user may do nothing beyond its own workspace runs a whole execution."""

from __future__ import annotations

from pathlib import Path

from support_nats import running_server
from support_shell import collector
from tether import ids, topology
from tether.bus import connect

TENANT, WORKSPACE = "acme", "w1"
SANDBOX = ids.sandbox_id(TENANT, WORKSPACE)
REGISTRATION = f"$KV.tether_sandboxes.{TENANT}.{WORKSPACE}.{SANDBOX}"
PUBLISH = (
    f"tether.event.{TENANT}.{WORKSPACE}.>",
    f"tether.blob.{TENANT}.{WORKSPACE}.>",
    f"tether.history.{TENANT}.{WORKSPACE}",
    REGISTRATION,
    f"$JS.API.DIRECT.GET.EVENTS_{TENANT}.tether.event.{TENANT}.{WORKSPACE}.>",
    f"$JS.API.DIRECT.GET.KV_tether_owners.$KV.tether_owners.{TENANT}.{WORKSPACE}.>",
    f"$JS.API.DIRECT.GET.KV_tether_leases.$KV.tether_leases.control.{TENANT}.{WORKSPACE}.>",
    f"$JS.API.DIRECT.GET.KV_tether_sandboxes.{REGISTRATION}",
    "_INBOX_c1.>",
)
SUBSCRIBE = ("_INBOX_c1.>", f"tether.control.{TENANT}.{WORKSPACE}.>", "$SRV.>")


def quoted(subjects: tuple[str, ...]) -> str:
    return ", ".join(f'"{subject}"' for subject in subjects)


USERS = f"""
authorization {{ users: [
  {{ user: "admin", password: "a" }}
  {{ user: "collector", password: "c", permissions: {{
      publish: [{quoted(PUBLISH)}], subscribe: [{quoted(SUBSCRIBE)}], allow_responses: true }} }}
] }}
"""


async def test_a_confined_user_is_enough(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("c\n")
    with running_server(extra=USERS) as server:
        async with await connect(server.url, name="test", user="admin", password="a") as bus:
            await bus.ensure(topology.base())
            confined = {
                "TETHER_NATS_USER": "collector",
                "TETHER_NATS_PASSWORD_FILE": str(password),
                "TETHER_NATS_INBOX_PREFIX": "_INBOX_c1",
            }
            async with collector(bus, server.url, TENANT, tmp_path, environment=confined) as rig:
                run = await rig.begin("one\n!tool big 0 200000\n!ask write")
                asked = await run.until("interaction.requested")
                payload = {"interaction": asked.body["interaction"], "decision": "allow"}
                await rig.ask("answer", target=run.target, payload=payload)
                await run.ended()
                run.check_whole()
                assert (await run.snapshot()).watermark.tag
                assert await bus.last("KV_tether_sandboxes", REGISTRATION) is not None
                await rig.kill()
                await rig.start()
                assert (await run.snapshot()).terminal
                assert "denied" not in rig.log.lower(), rig.log
