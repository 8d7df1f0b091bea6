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

from tether.events import EXECUTION_ENDED, RESPONSE_ENDED, SESSION_BOUND, USAGE, ConversationEvent, Event
from tether_chaos.load import Outcome
from tether_chaos.readers import Got
from tether_collector.launching import derived_uuid
from tether_oracle import KINDS, Truth, fact_of_event, judge
from tether_oracle.truth import ProcessTruth

_DETAILS_MAX = 8
_PROJECTED = frozenset({"text.completed", "tool.completed"})
_ABORTED = frozenset({"stopped", "cancelled", "never_started", "lost", "failed"})


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

    def outcome(self, execution: str) -> str | None:
        last = self.executions.get(execution, [None])[-1]
        return None if last is None else last.body.get("outcome")


def sequence_faults(who: str, executions: Mapping[str, Sequence[Event]]) -> list[str]:
    """Ordinals must go on without a hole and without repetition."""
    faults = []
    for execution, events in executions.items():
        expected = 1
        for event in events:
            if event.ordinal != expected:
                what = "lost" if event.ordinal > expected else "doubled"
                faults.append(f"{who}: {execution}: {what} at ordinal {expected}, got {event.ordinal} {event.type}")
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
    faults += [f"log: the conversation's event {id_} is there {count} times" for id_, count in ids.items() if count > 1]
    return faults


def reader_faults(got: Got, log: Log) -> list[str]:
    faults = sequence_faults(got.name, got.executions)
    for execution, last in log.ends().items():
        events = got.executions.get(execution)
        if events is None or events[-1].end != last:
            had = 0 if events is None else events[-1].end
            faults.append(f"{got.name}: {execution}: has {had} of {last} events")
    ids = Counter(got.conversation)
    wanted = Counter(event.id for event in log.conversation)
    if ids != wanted:
        faults.append(f"{got.name}: conversation events: lost {wanted - ids}, doubled {ids - wanted}")
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
    return [f"{who}, against its agent: {verdict}", *(f"    {line}" for line in verdict.details[:_DETAILS_MAX])]


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
        faults.append(f"{who}: usage lost {dict(wanted - had)}, doubled {dict(had - wanted)}")
    return faults


def _usage(body: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(body["turn"]), int(body["input_tokens"]), int(body["output_tokens"])


Found = Mapping[str, Sequence[ProcessTruth]]


def processes_of(truth: Truth, log: Log) -> dict[str, list[ProcessTruth]]:
    """By execution: its prompt's id is derived from it. What has no prompt goes to the session's execution without one.
    An execution that no agent was started for has none."""
    by_prompt = {prompt: process for process in truth.processes for prompt in process.prompts()[:1]}
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
    for process in truth.processes:
        if not process.prompts() and process.session in sessions:
            found[sessions[process.session]].append(process)
    return found


def overlap_faults(name: str, processes: Sequence[ProcessTruth]) -> list[str]:
    """Two agents at a time. A killed one is known to have lived until its last record."""
    faults = []
    latest: ProcessTruth | None = None
    for process in sorted(processes, key=lambda one: one.started_at):
        if latest is not None and process.started_at < float(latest.records[-1]["at"]):
            faults.append(f"{name}: agent {process.file} began while {latest.file} ran")
        if latest is None or float(process.records[-1]["at"]) > float(latest.records[-1]["at"]):
            latest = process
    return faults


def prompt_faults(truth: Truth, outcomes: Sequence[Outcome], log: Log, cut: set[str]) -> list[str]:
    """Each request: one answer for all who asked, and the text reached an agent once."""
    reached: Counter[str] = Counter()
    texts = [str(m["text"]) for p in truth.processes for m in _messages(p) if m["type"] == "prompt"]
    for text in texts:
        reached[text.split("\n", 1)[0].removeprefix("!say ")] += 1
    faults = []
    for outcome in outcomes:
        request, count = outcome.prompt.request, reached[outcome.prompt.marker]
        if len(set(outcome.answers)) > 1:
            faults.append(f"request {request}: different answers {outcome.answers}")
        if count > 1:
            faults.append(f"request {request}: reached an agent {count} times")
        submission = outcome.submission
        if submission is None:
            if count:
                faults.append(f"request {request}: refused with {outcome.refused}, and reached an agent")
            continue
        execution = submission.execution or ""
        may_miss = execution in cut and log.outcome(execution) in _ABORTED
        if not count and not may_miss:
            faults.append(
                f"request {request}: {submission.status} into {execution} ({log.outcome(execution)}), reached no agent"
            )
    return faults


def outcome_faults(outcomes: Sequence[Outcome], log: Log, cut: set[str]) -> list[str]:
    """What nobody cut short completes: no fault of a service ends an agent."""
    faults = []
    for execution in log.executions:
        outcome = log.outcome(execution)
        if execution not in cut and outcome != "completed":
            faults.append(f"log: {execution} ended {outcome}: {json.dumps(log.executions[execution][-1].body)[:300]}")
    faults += [f"request {o.prompt.request}: refused with {o.refused}" for o in outcomes if o.refused is not None]
    return faults


def _messages(process: ProcessTruth) -> Iterable[Mapping[str, Any]]:
    for line in process.stdin:
        message = line.message()
        if message is not None:
            yield message
