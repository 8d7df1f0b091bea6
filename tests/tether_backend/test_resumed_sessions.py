"""What a resumed session leaves in the history: a session given the history, an answer from before, usage once."""

from __future__ import annotations

from pathlib import Path

from support_backend import Log, event, running_backend
from tether import events as ev
from tether.api import ConversationHistory
from tether.bus import NatsBus
from tether.client.types import Answer, Interaction
from tether.client.views import states_of
from tether.fold import ExecutionFold
from tether.snapshot import Snapshot

OFFERED = {"control": "k", "decision": "deny", "text": "not today"}


async def test_the_history_and_the_snapshot_tell_the_new_session_and_the_answer_from_before(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    log = Log(bus, tenant)
    started = log.started("e1")
    again = started.model_copy(update={"ordinal": 3, "at": 9_000, "body": {**started.body, "process": 2}})
    usage = {"input_tokens": 5, "output_tokens": 1, "cost_usd": 0.5}
    events = [
        started,
        event(2, ev.USAGE, {"turn": "t1", **usage}),
        again,
        event(
            4, ev.SESSION_RECOVERED, {"process": 2, "why": "not_found", "source": "export", "rows": 3, "from": "old"}
        ),
        event(5, ev.USAGE, {"turn": "t1", **usage}),
        event(6, ev.USAGE, {"turn": "t2", **usage}),
        event(
            7, ev.INTERACTION_REQUESTED, {"interaction": "i", "kind": "approval", "name": "Bash", "offered": OFFERED}
        ),
    ]
    fold = ExecutionFold()
    for one in events:
        fold.apply(one)
    async with running_backend(bus, [tenant], tmp_path) as running:
        await log.prompt("q1", "r1", "e1")
        for first, last in ((0, 2), (2, 5), (5, 7)):  # each its own batch: rows are loaded and gone on with
            await log.frame("e1", events[first:last])
            await running.projected("c1", "e1", last)
        history = ConversationHistory.model_validate(await running.projected("c1", "e1", 7))
        answer = (await running.client.get("/v1/executions/e1/snapshot")).json()
    (asked,) = history.interactions
    assert asked.offered == OFFERED
    assert Interaction.of_view("c1", asked).offered == Answer.deny("not today")
    assert [(one.kind, one.item) for one in history.items] == [
        ("session", "session/4"),
        ("interaction", "interaction/i"),
    ]
    assert [(one.turn, one.input_tokens) for one in history.usage] == [("t1", 5), ("t2", 5)]
    (view,) = history.executions
    assert (view.state, view.started_at, view.items) == ("waiting", started.at, 2)
    folded = fold.freeze()
    assert states_of(history)["e1"].items == folded.items and states_of(history)["e1"].usage == folded.usage
    assert Snapshot.model_validate(answer["snapshot"]).state == folded
