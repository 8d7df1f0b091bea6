"""How each failpoint of the code is come by: the table that the runner uses, and that a test holds against the code.

A key is a name, or the beginning of names; the longest that fits counts. A scenario is what is said in a conversation
of its own and what happens to it meanwhile; the failpoint is armed just before, so that somebody dies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tether_chaos.plan import ConversationPlan, Mode, PromptPlan

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


@dataclass(frozen=True, slots=True)
class Scenario:
    """`also`: failpoints that have to be passed before the case's own can be."""

    said: tuple[Said, ...]
    act: Act = "none"
    also: tuple[str, ...] = ()


_WHOLE: Final = "!tool first\n!ask deploy\n!tool big 10 300000\n!flood 300\n!usage 3 4"
_LONG: Final = "!tool first\n!lines 120 20\n!sleep 5\n!tool last\n!usage 3 4"
# Lives on while a backend that lost its database starts and asks the collector for what the log no longer has.
_PATIENT: Final = "!tool first\n!lines 120 20\n!sleep 25\n!tool last\n!usage 3 4"
_BUSY: Final = Said("!lines 30 20\n!sleep 6\n!tool last")

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
}

TABLE: Final[Mapping[str, str]] = {
    "agent.command.": "talk",
    "agent.command.later": "unheard_start",
    "agent.command.store_never_started": "unknown_agent",
    "agent.command.tell_failure": "unknown_agent",
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
    "collector.handed_over": "upgrade",
    "collector.salvaged": "closed_by_another",
    "router.": "talk",
    "router.admission.ask_receipt": "lost_reply",
    "router.admission.read_later": "takeover",
    "router.admission.resolve": "takeover",
    "router.admission.send_control": "interject",
    "router.admission.wait": "queue",
}
# Not come by in a conversation: what is deleted after hours, or for a quota of hundreds of MiB, and what somebody has
# to ask for. Name → the test that kills a process there.
_QUOTA: Final = (
    "tests/tether_collector/shell/test_shell_retention.py"
    "::test_over_a_quota_the_oldest_out_of_its_grace_goes_and_everybody_is_told"
)
_DRAINS: Final = (
    "tests/tether_agent/test_drain_crashes.py"
    "::test_a_service_that_is_killed_goes_on_from_the_record_and_does_everything_once"
)
_IDLE: Final = "tests/tether_agent/test_drain_crashes.py::test_an_idle_suspend_that_was_killed_ends_suspended"
_DRAIN: Final = (
    "tests/tether_collector/shell/test_drain_crashes.py"
    "::test_a_collector_that_dies_at_any_step_of_a_drain_goes_on_to_the_same_end"
)
_RESTORE: Final = (
    "tests/tether_collector/shell/test_restore_shell.py"
    "::test_a_restore_that_is_killed_at_any_step_is_begun_anew_and_ends_the_same"
)
_STEPS_OF_A_DRAIN: Final = (
    "drain_journaled", "leave_journaled", "drain_leaving", "drain_killing", "drain_publishing", "drain_checkpoint",
    "checkpoint_collected", "manifest_written", "blob_part_stored", "checkpoint_stored", "checkpoint_journaled",
    "reference_written", "drain_releasing", "drain_over",
)  # fmt: skip
ELSEWHERE: Final[Mapping[str, str]] = {
    "collector.gaps_journaled": _QUOTA,
    "collector.finals_deleted": _QUOTA,
    **{f"collector.{step}": _DRAIN for step in _STEPS_OF_A_DRAIN},
    **{f"collector.restore_{step}": _RESTORE for step in ("file_fetched", "fetched", "placing", "placed", "committed")},
    **{f"agent.drain.{step}": _DRAINS for step in ("ordered", "asked", "reported", "released", "over")},
    "agent.drain.idle": _IDLE,
    **{f"agent.resume.{step}": _DRAINS for step in ("ordered", "ensured", "continued", "active")},
    **{f"agent.delete.{step}": _DRAINS for step in ("ordered", "stopped", "removed")},
}
WORKSPACES: Final = 3  # shared; a case of the agent service gets one of its own, whose sandbox is new


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
    workspace = f"own{number}-{attempt}" if failpoint.startswith("agent.") else f"w{number % WORKSPACES}"
    prompts = []
    for place, said in enumerate(scenario.said):
        request = f"{name}-{place}"
        prompts.append(
            PromptPlan(
                request=request,
                marker=f"<{request}>",
                text=f"!say <{request}>\n{said.text}",
                over="nats" if (number + place) % 2 else "http",
                again_after_s=None,
                fate="run",
                fate_after_s=0.0,
                next_at_once=False,
                mode=said.mode,
                after_s=said.after_s,
                agent=said.agent,
            )
        )
    return ConversationPlan(name, workspace, (tuple(prompts),), ("sse", "nats"))
