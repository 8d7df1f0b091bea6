"""The oracle's side: what must hold after a round, each violation one sentence.

log         ordinals 1..n without holes, nothing twice, one end with its proof, `_` events once
agent       what each reader and the log have = what the agents printed; side effects once; each prompt reached an
            agent once; one agent at a time in a conversation
callers     one request has one answer, whoever asked and by whatever transport
projection  holds what was settled
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.errors import Code
from tether.events import (
    EXECUTION_ENDED,
    RESPONSE_ENDED,
    RESPONSE_SUPERSEDED,
    SESSION_BOUND,
    USAGE,
    ConversationEvent,
    Event,
)
from tether.limits import RECOVERY_WAIT_S
from tether_chaos.load import FINAL, Outcome
from tether_chaos.readers import Got
from tether_collector.launching import derived_uuid
from tether_oracle import KINDS, Truth, fact_of_event, judge, ledger_duplicates
from tether_oracle.truth import ProcessTruth

_DETAILS_MAX = 8
COLUMNS = ("lost", "duplicated", "reordered", "second_prompts", "repeated_side_effects", "two_writers")
# What a prompt of a mode may be told in the best of worlds: nobody to interject, another takeover that came later.
_REFUSALS: Mapping[str, frozenset[Code]] = {
    "interject": FINAL["interject"] | {Code.TARGET_STALE},
    "takeover": frozenset({Code.REQUEST_SUPERSEDED}),
}
_OVERTAKEN = frozenset({Code.REQUEST_SUPERSEDED})
_PROJECTED = frozenset({"text.completed", "tool.completed"})
_ABORTED = frozenset({"stopped", "cancelled", "never_started", "lost", "failed", "drained"})


class Fault(str):
    """One sentence, and what it counts for in the table's columns (see COLUMNS); other faults count for none."""

    __slots__ = ("counts",)
    counts: dict[str, int]

    def __new__(cls, text: str, **counts: int) -> Fault:
        made = super().__new__(cls, text)
        made.counts = {column: count for column, count in counts.items() if count}
        return made


def tally(faults: Iterable[str]) -> dict[str, int]:
    """The fault columns of a table over these violations."""
    total = dict.fromkeys(COLUMNS, 0)
    for fault in faults:
        for column, count in fault.counts.items() if isinstance(fault, Fault) else ():
            total[column] += count
    return total


@dataclass(slots=True)
class Log:
    """One conversation's log as it is stored. `order`: executions as they began."""

    executions: dict[str, list[Event]] = field(default_factory=dict)
    conversation: list[ConversationEvent] = field(default_factory=list)

    def ends(self) -> dict[str, int]:
        return {execution: events[-1].end for execution, events in self.executions.items()}

    def over(self) -> bool:
        return all(events[-1].type == EXECUTION_ENDED for events in self.executions.values())

    def facts(self) -> list[dict[str, Any]]:
        return [{"type": e.type, "body": e.body} for events in self.executions.values() for e in events]

    def lived_s(self, execution: str) -> float:
        events = self.executions[execution]
        return (events[-1].at - events[0].at) / 1000

    def outcome(self, execution: str) -> str | None:
        last = self.executions.get(execution, [None])[-1]
        return None if last is None else last.body.get("outcome")


def sequence_faults(who: str, executions: Mapping[str, Sequence[Event]]) -> list[str]:
    """Ordinals must go on without a hole and without repetition."""
    faults: list[str] = []
    for execution, events in executions.items():
        expected = 1
        for event in events:
            if event.ordinal != expected:
                missing = max(0, event.ordinal - expected)
                what = "lost" if missing else "doubled"
                text = f"{who}: {execution}: {what} at ordinal {expected}, got {event.ordinal} {event.type}"
                faults.append(Fault(text, lost=missing, duplicated=int(not missing)))
            expected = max(expected, event.end + 1)
    return faults


def log_faults(log: Log) -> list[str]:
    faults = sequence_faults("log", log.executions)
    for execution, events in log.executions.items():
        types = Counter(event.type for event in events)
        if events[-1].type != EXECUTION_ENDED or not events[-1].body.get("proof"):
            faults.append(f"log: {execution} has no end with a proof, but {events[-1].type}")
        for kind in (EXECUTION_ENDED, RESPONSE_ENDED):
            if types[kind] > 1 or (kind == RESPONSE_ENDED and not types[kind]):
                faults.append(f"log: {execution} has {kind} {types[kind]} times")
    ids = Counter(event.id for event in log.conversation)
    faults += [
        Fault(f"log: the conversation's event {id_} is there {count} times", duplicated=count - 1)
        for id_, count in ids.items()
        if count > 1
    ]
    return faults


def reader_faults(got: Got, log: Log) -> list[str]:
    faults = sequence_faults(got.name, got.executions)
    for execution, last in log.ends().items():
        events = got.executions.get(execution)
        if events is None or events[-1].end != last:
            had = 0 if events is None else events[-1].end
            faults.append(Fault(f"{got.name}: {execution}: has {had} of {last} events", lost=max(0, last - had)))
    ids = Counter(got.conversation)
    wanted = Counter(event.id for event in log.conversation)
    if ids != wanted:
        lost, doubled = wanted - ids, ids - wanted
        text = f"{got.name}: conversation events: lost {lost}, doubled {doubled}"
        faults.append(Fault(text, lost=lost.total(), duplicated=doubled.total()))
    elif got.conversation != [event.id for event in log.conversation]:
        faults.append(Fault(f"{got.name}: conversation events are in another order than in the log", reordered=1))
    faults += [f"{got.name}: {trouble}" for trouble in got.trouble]
    return faults


def agent_faults(who: str, truth: Truth, found: Found, executions: Mapping[str, Sequence[Event]]) -> list[str]:
    """Execution by execution: a resumed session prints its name again, and segments count anew in each process."""
    faults = []
    for execution, processes in found.items():
        events = [{"type": event.type, "body": event.body} for event in executions.get(execution, ())]
        faults += _compared(f"{who}: {execution}", truth, processes, events, KINDS)
    return faults


def _compared(
    who: str, truth: Truth, processes: Sequence[ProcessTruth], events: Sequence[Any], kinds: frozenset[str]
) -> list[str]:
    verdict = judge(truth, (fact_of_event(event) for event in events), processes=processes, kinds=kinds)
    if verdict.is_clean:
        return []
    counts = {"lost": verdict.lost, "duplicated": verdict.doubled + verdict.foreign, "reordered": verdict.out_of_order}
    head = Fault(f"{who}, against its agent: {verdict}", **counts)
    return [head, *(f"    {line}" for line in verdict.details[:_DETAILS_MAX])]


def settled_of_item(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A projected item as the event that settled it; nothing for what is open, or is no text and no tool."""
    match item["kind"], item.get("state"):
        case "text", "completed" | "partial":
            body = {"segment": item["id"], "text": item["text"], "blob": item.get("blob")}
            return [{"type": "text.completed", "body": body}]
        case "tool", "ok" | "error" | "interrupted":
            return [{"type": "tool.completed", "body": {"tool": item["id"], "status": item["state"]}}]
        case _:
            return []


def projection_faults(
    who: str, truth: Truth, found: Found, items: Mapping[str, Sequence[Any]], usage: Sequence[Any], log: Log
) -> list[str]:
    """Settled texts and tools in order; usage of each turn once."""
    faults = []
    for execution, processes in found.items():
        faults += _compared(f"{who}: {execution}", truth, processes, items.get(execution, ()), _PROJECTED)
    wanted = Counter(_usage(fact["body"]) for fact in log.facts() if fact["type"] == USAGE)
    had = Counter(_usage(entry) for entry in usage)
    if wanted != had:
        lost, doubled = wanted - had, had - wanted
        text = f"{who}: usage lost {dict(lost)}, doubled {dict(doubled)}"
        faults.append(Fault(text, lost=lost.total(), duplicated=doubled.total()))
    return faults


def _usage(body: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(body["turn"]), int(body["input_tokens"]), int(body["output_tokens"])


Found = Mapping[str, Sequence[ProcessTruth]]


def processes_of(truth: Truth, log: Log) -> dict[str, list[ProcessTruth]]:
    """By execution: its prompt's id is derived from it. What has no prompt goes to the session's execution without one.
    An execution that no agent was started for has none."""
    by_prompt = {prompt: process for process in _taken(truth) for prompt in process.prompts()[:1]}
    found: dict[str, list[ProcessTruth]] = {}
    for execution in log.executions:
        process = by_prompt.get(derived_uuid(execution, "prompt"))
        found[execution] = [] if process is None else [process]
    sessions = {
        event.body["native_session"]: execution
        for execution in log.executions
        if not found[execution]
        for event in log.executions[execution]
        if event.type == SESSION_BOUND
    }
    for process in _taken(truth):
        if not process.prompts() and process.session in sessions:
            found[sessions[process.session]].append(process)
    return found


def overlap_faults(name: str, processes: Sequence[ProcessTruth]) -> list[str]:
    """Two agents at a time. A killed one is known to have lived until its last record."""
    faults: list[str] = []
    latest: ProcessTruth | None = None
    for process in sorted(processes, key=lambda one: one.started_at):
        if latest is not None and process.started_at < float(latest.records[-1]["at"]):
            faults.append(Fault(f"{name}: agent {process.file} began while {latest.file} ran", two_writers=1))
        if latest is None or float(process.records[-1]["at"]) > float(latest.records[-1]["at"]):
            latest = process
    return faults


def prompt_faults(truth: Truth, outcomes: Sequence[Outcome], log: Log, cut: set[str]) -> list[str]:
    """Each request: one answer for all who asked, and the text reached an agent once. Where one caller was told that
    there was nobody to say it to, another may have asked later, as its next attempt, and was told otherwise."""
    reached = _reached(truth, log)
    faults: list[str] = []
    for outcome in outcomes:
        request, count = outcome.prompt.request, reached[outcome.prompt.marker]
        nobody_there = FINAL.get(outcome.prompt.mode, frozenset())
        if len({answer for answer in outcome.answers if answer[0] not in nobody_there}) > 1:
            faults.append(f"request {request}: different answers {outcome.answers}")
        if count > 1:
            faults.append(Fault(f"request {request}: reached an agent {count} times", second_prompts=count - 1))
        submission = outcome.submission
        if submission is None:
            if count:
                faults.append(f"request {request}: refused with {outcome.refused}, and reached an agent")
            continue
        execution = submission.execution or ""
        may_miss = execution in cut and log.outcome(execution) in _ABORTED
        if submission.status == "interjected" and log.outcome(execution) == "drained" and _went_on(log, execution):
            may_miss = False  # its sender was told that it had arrived
        if not count and not may_miss:
            what = f"{submission.status} into {execution} ({log.outcome(execution)}), reached no agent"
            faults.append(Fault(f"request {request}: {what}", lost=1))
    return faults


def _went_on(log: Log, execution: str) -> bool:
    """An agent has lived in the conversation since."""
    order = list(log.executions)
    return any(
        log.outcome(later) != "never_started" and any(event.type == SESSION_BOUND for event in log.executions[later])
        for later in order[order.index(execution) + 1 :]
    )


def _reached(truth: Truth, log: Log) -> Counter[str]:
    """How often each prompt's marker reached an agent. What joined a turn that a drain cut, and had not been taken up,
    did not: it is told again before whatever comes next, whose text has several markers for it."""
    cut = {
        process.file
        for execution, processes in processes_of(truth, log).items()
        if log.outcome(execution) == "drained"
        for process in processes
    }
    reached: Counter[str] = Counter()
    for process in _taken(truth):
        heard = _taken_up(process) if process.file in cut else frozenset()
        first = process.prompts()[:1]
        for message in _messages(process):
            if message["type"] != "prompt" or (
                process.file in cut and message["id"] not in heard and (message["id"],) != first
            ):
                continue
            lines = str(message["text"]).split("\n")
            reached.update(line.removeprefix("!say ") for line in lines if line.startswith("!say <"))
    return reached


def _taken_up(process: ProcessTruth) -> frozenset[str]:
    """Prompts for which it began a turn, or which it took into the running one, and said so. Its last record may be of
    a line in the middle of which it was killed."""
    found = set()
    for record in process.records[:-1]:
        line = record.get("line") if record["ev"] == "stdout" else None
        said = json.loads(line) if isinstance(line, str) and "garbage" not in record else {}
        if said.get("type") == "turn.started":
            found.add(str(said["prompt"]))
        elif said.get("type") == "prompt.accepted" and said.get("mode") == "steered":
            found.add(str(said["id"]))
    return frozenset(found)


def effect_faults(truth: Truth) -> list[str]:
    """Side effects by the ledger, over the whole round."""
    repeated = ledger_duplicates(truth)
    return [Fault(f"{repeated} side effects were done more than once", repeated_side_effects=repeated)] * bool(repeated)


def taken_over(outcomes: Sequence[Outcome], log: Log) -> set[str]:
    """Executions that another prompt's takeover may have ended, or kept from starting."""
    by = {o.submission.execution for o in outcomes if o.submission is not None and o.prompt.mode == "takeover"}
    order = list(log.executions)
    last = max((order.index(execution) for execution in by if execution in order), default=0)
    found = {execution for execution in order[:last] if log.outcome(execution) != "completed"}
    # A prompt without a mode takes over, too, from what takes no message and was not heard of for long; never from what
    # has just started.
    superseded = {event.body.get("response") for event in log.conversation if event.type == RESPONSE_SUPERSEDED}
    responses = {name: events[0].body.get("target", {}).get("response") for name, events in log.executions.items()}
    return found | {
        execution
        for execution, response in responses.items()
        if response in superseded and log.lived_s(execution) >= RECOVERY_WAIT_S
    }


def starved(log: Log) -> set[str]:
    """Executions whose agent crashed by itself, as the scripted one does where a full disk does not take its session.
    What it had said is judged all the same."""
    ends = {execution: events[-1].body for execution, events in log.executions.items()}
    return {name for name, end in ends.items() if end.get("exit") == 1 and end.get("outcome") in ("lost", "failed")}


def outcome_faults(
    outcomes: Sequence[Outcome], log: Log, cut: set[str], failing: frozenset[str] | set[str] = frozenset()
) -> list[str]:
    """What nobody cut short completes: no fault of a service ends an agent."""
    faults = []
    for execution in log.executions:
        outcome = log.outcome(execution)
        expected = ("completed", "failed") if execution in failing else ("completed",)
        if execution not in cut and outcome not in expected:
            asked = [
                o.prompt.request for o in outcomes if o.submission is not None and o.submission.execution == execution
            ]
            ended = json.dumps(log.executions[execution][-1].body)[:300]
            faults.append(f"log: {execution} of {', '.join(asked)} ended {outcome}: {ended}")
    overtaken = any(outcome.prompt.mode == "takeover" for outcome in outcomes)
    for one in outcomes:
        if one.refused is None:
            continue
        allowed = _REFUSALS.get(one.prompt.mode, frozenset()) | (_OVERTAKEN if overtaken else frozenset())
        if one.refused not in allowed:
            faults.append(f"request {one.prompt.request} ({one.prompt.mode}): refused with {one.refused}")
    return faults


def _taken(truth: Truth) -> list[ProcessTruth]:
    """Processes that had a session: one whose session was refused reads on its way out what was written to it, and does
    nothing of it."""
    return [one for one in truth.processes if not any("refused" in record for record in one.records)]


def _messages(process: ProcessTruth) -> Iterable[Mapping[str, Any]]:
    for line in process.stdin:
        message = line.message()
        if message is not None:
            yield message
