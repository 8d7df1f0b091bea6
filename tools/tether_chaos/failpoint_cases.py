"""How each failpoint of the code is come by: the table that the runner uses, and that a test holds against the code.

A key is a name, or the beginning of names; the longest that fits counts. A scenario is what is said in a conversation
of its own and what happens to it meanwhile; the failpoint is armed just before, so that somebody dies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tether_chaos.plan import ConversationPlan, Deed, Mode, Over, PromptPlan, Store

Act = Literal[
    "none",
    "kill_agent",  # the agent service, while an execution runs: the next one adopts
    "kill_collector",
    "kill_backend",
    "lose_database",  # the backend's database is gone, and the backend killed
    "restart_collector",  # in order, as an upgrade does
    "evict",  # the oldest part of the execution's subject is gone; then readers come from the beginning
    "evict_and_lose",  # likewise, and the backend's database too
    "close",  # another says that the execution is lost, its tail unknown, while the collector is frozen
    "read",  # a reader process comes while the execution runs
    "read_durable",
]


@dataclass(frozen=True, slots=True)
class Said:
    """One prompt: sent `after_s` later than the scenario begins."""

    text: str
    mode: Mode = "auto"
    after_s: float = 0.0
    agent: str = "scripted"
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """`also`: failpoints that have to be passed before the case's own can be. `then`: said when all of `said` is over,
    and what was done is.

    `deeds`: what is done to the sandbox, which is the case's own, while the first turn runs or, with `at_rest`, when it
    is over; `grace_s` and `store` of them. `until_idle`: `then` waits until it was suspended, as it was idle."""

    said: tuple[Said, ...]
    act: Act = "none"
    also: tuple[str, ...] = ()
    then: tuple[Said, ...] = ()
    deeds: tuple[Deed, ...] = ()
    at_rest: bool = False
    grace_s: float = 4.0
    store: Store = "volume"
    until_idle: bool = False

    @property
    def own_sandbox(self) -> bool:
        return bool(self.deeds) or self.until_idle


_WHOLE: Final = "!tool first\n!ask deploy\n!tool big 10 300000\n!flood 300\n!usage 3 4"
_LONG: Final = "!tool first\n!lines 120 20\n!sleep 5\n!tool last\n!usage 3 4"
# Lives on while a backend that lost its database starts and asks the collector for what the log no longer has.
_PATIENT: Final = "!tool first\n!lines 120 20\n!sleep 25\n!tool last\n!usage 3 4"
_BUSY: Final = Said("!lines 30 20\n!sleep 6\n!tool last")
# Not over by itself within any grace; `first` is, and is not done again.
_CUT: Final = "!tool first\n!lines 60 20\n!tool build 60000"
_FORGETFUL: Final = "!forget hard\n!lines 60 20\n!sleep 20"
_AFTER: Final = (Said(_WHOLE),)

SCENARIOS: Final[Mapping[str, Scenario]] = {
    "talk": Scenario((Said(_WHOLE),)),
    "unheard_start": Scenario((Said(_WHOLE),), also=("collector.journaled",)),
    "queue": Scenario((_BUSY, Said(_WHOLE, after_s=0.6))),
    "interject": Scenario((_BUSY, Said(_WHOLE, "interject", 1.2))),
    "lost_reply": Scenario((_BUSY, Said(_WHOLE, "interject", 1.2)), also=("collector.control_journaled",)),
    "takeover": Scenario((_BUSY, Said(_WHOLE, after_s=0.6), Said(_WHOLE, "takeover", 1.2))),
    "unknown_agent": Scenario((Said(_WHOLE, agent="unheard-of"),)),
    "adopt_sandbox": Scenario((Said(_LONG),), "kill_agent"),
    "adopt_keeper": Scenario((Said(_LONG),), "kill_collector"),
    "upgrade": Scenario((Said(_LONG),), "restart_collector"),
    "bind_again": Scenario((Said(_LONG),), "kill_backend"),
    "lost_database": Scenario((Said(_LONG),), "lose_database"),
    "evicted": Scenario((Said(_LONG),), "evict"),
    "evicted_and_lost": Scenario((Said(_PATIENT),), "evict_and_lose"),
    "closed_by_another": Scenario((Said(_LONG),), "close"),
    "reader": Scenario((Said(_LONG),), "read"),
    "durable_reader": Scenario((Said(_LONG),), "read_durable"),
    "drain": Scenario((Said(_CUT, goes_on=True), Said(_WHOLE, after_s=3.0)), then=_AFTER, deeds=("drain",)),
    "drain_deaf": Scenario(
        (Said(f"!ignore SIGTERM\n{_CUT}"),), then=_AFTER, deeds=("force", "resume"), grace_s=2.0, store="both"
    ),
    "suspend": Scenario((Said(_WHOLE),), then=_AFTER, deeds=("suspend",), at_rest=True),
    "idle": Scenario((Said(_WHOLE),), then=_AFTER, until_idle=True),
    "restore": Scenario((Said(_WHOLE),), then=_AFTER, deeds=("lose_volume",), at_rest=True),
    "delete": Scenario((Said(_CUT),), then=_AFTER, deeds=("delete",)),
    "delete_suspended": Scenario((Said(_WHOLE),), then=_AFTER, deeds=("suspend", "delete"), at_rest=True),
    "forgotten": Scenario((Said(_WHOLE),), then=(Said(_FORGETFUL), Said(_WHOLE, "takeover", 3.0))),
}

TABLE: Final[Mapping[str, str]] = {
    "agent.command.": "talk",
    "agent.command.later": "unheard_start",
    "agent.command.store_never_started": "unknown_agent",
    "agent.command.tell_failure": "unknown_agent",
    "agent.delete.": "delete",
    "agent.delete.ordered": "delete_suspended",
    "agent.drain.": "drain",
    "agent.drain.idle": "idle",
    "agent.resume.": "suspend",
    "agent.sandbox.": "talk",
    "agent.sandbox.adopted": "adopt_sandbox",
    "attach.": "reader",
    "attach.durable_": "durable_reader",
    "attach.snapshot_read": "evicted",
    "backend.attach.": "talk",
    "backend.attach.snapshot_made": "evicted",
    "backend.projection.": "talk",
    "backend.projection.caught_up": "bind_again",
    "backend.projection.consumer_": "lost_database",
    "backend.projection.told": "lost_database",
    "backend.projection.unfinished_marked": "lost_database",
    "backend.recovery.": "evicted_and_lost",
    "backend.webhooks.": "talk",
    "collector.": "talk",
    "collector.adopted": "adopt_keeper",
    "collector.blob_part_stored": "drain_deaf",
    "collector.checkpoint_": "drain",
    "collector.checkpoint_stored": "drain_deaf",
    "collector.drain_": "drain",
    "collector.handed_over": "upgrade",
    "collector.leave_journaled": "drain",
    "collector.manifest_written": "drain",
    "collector.next_": "forgotten",
    "collector.process_": "forgotten",
    "collector.reference_written": "drain",
    "collector.restore_": "restore",
    "collector.salvaged": "closed_by_another",
    "collector.spool_handed_on": "forgotten",
    "router.": "talk",
    "router.admission.ask_receipt": "lost_reply",
    "router.admission.read_later": "takeover",
    "router.admission.resolve": "takeover",
    "router.admission.send_control": "interject",
    "router.admission.wait": "queue",
}
# Not come by in a conversation of the scripted agent: what is deleted for a quota of hundreds of MiB, and what only
# Claude Code has. Name → the test that kills a process there.
_QUOTA: Final = (
    "tests/tether_collector/shell/test_shell_retention.py"
    "::test_over_a_quota_the_oldest_out_of_its_grace_goes_and_everybody_is_told"
)
_NATIVE: Final = (
    "tests/scenarios/test_real_session_file.py"
    "::test_a_collector_that_dies_when_the_clis_own_file_is_in_place_goes_on_with_it_once"
)
ELSEWHERE: Final[Mapping[str, str]] = {
    "collector.gaps_journaled": _QUOTA,
    "collector.finals_deleted": _QUOTA,
    "collector.native_placed": _NATIVE,
}
WORKSPACES: Final = 3  # shared; a case of the agent service, or of a drain, gets one of its own, whose sandbox is new


def scenario_of(failpoint: str) -> str | None:
    """The scenario's name; None where the table has nothing that fits."""
    fitting = [key for key in TABLE if failpoint == key or (key.endswith((".", "_")) and failpoint.startswith(key))]
    return TABLE[max(fitting, key=len)] if fitting else None


def unused(failpoints: frozenset[str]) -> list[str]:
    """Keys of the table that no failpoint of the code goes by any more."""
    used = set()
    for name in failpoints:
        fitting = [key for key in TABLE if name == key or (key.endswith((".", "_")) and name.startswith(key))]
        used.add(max(fitting, key=len, default=""))
    return sorted(set(TABLE) - used)


def conversation(number: int, failpoint: str, scenario: Scenario, attempt: int = 0) -> ConversationPlan:
    """One conversation for one case; readers of both transports follow it."""
    name = f"f{number}" if attempt == 0 else f"f{number}-again{attempt}"
    own = failpoint.startswith("agent.") or scenario.own_sandbox
    workspace = f"own{number}-{attempt}" if own else f"w{number % WORKSPACES}"
    turns = tuple(
        tuple(
            _prompt(f"{name}-{first + place}", said, "nats" if (number + place) % 2 else "http")
            for place, said in enumerate(turn)
        )
        for first, turn in ((0, scenario.said), (len(scenario.said), scenario.then))
        if turn
    )
    return ConversationPlan(name, workspace, turns, ("sse", "nats"))


def _prompt(request: str, said: Said, over: Over) -> PromptPlan:
    return PromptPlan(
        request=request,
        marker=f"<{request}>",
        text=f"!say <{request}>\n{said.text}",
        over=over,
        again_after_s=None,
        fate="run",
        fate_after_s=0.0,
        next_at_once=False,
        mode=said.mode,
        after_s=said.after_s,
        agent=said.agent,
        goes_on=said.goes_on,
    )
