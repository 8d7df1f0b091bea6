"""A collector that is still reading what happened before it came refuses nothing for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support_nats import NatsServer
from support_shell import DEADLINE_S, collector
from tether.bus import NatsBus
from tether.errors import Code, NoReplyError, Problem


async def test_an_answer_while_a_long_spool_is_read_again_is_put_off_and_never_refused(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!flood 30000\n!ask write\nafter")
        asked = await run.until("interaction.requested", 60.0)
        await rig.kill()
        await rig.start(ready=False)
        refusals: list[Problem] = []
        payload = {"interaction": asked.body["interaction"], "decision": "allow"}

        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    reply = await rig.ask(
                        "answer", target=run.target, payload=payload, control="ctl_early", timeout_s=1.0
                    )
                except NoReplyError:  # nobody serves yet: at once again, to be there when the reading begins
                    continue
                if reply.problem is not None:
                    refusals.append(reply.problem)
                if reply.status in ("delivered", "settled"):
                    break
        assert (await run.ended(60.0)).body["outcome"] == "completed"
        assert {why.code for why in refusals} <= {Code.RUNTIME_UNAVAILABLE}, "what has no answer yet is no refusal"
        assert run.of("interaction.resolved")[0].body["control"] == "ctl_early"
        run.check_whole()
