"""The page's fold is the fold: the same events make the same state in Chromium as in Python, to the last field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, settings

from support_events import logs
from support_page import static_pages
from tether import events as ev
from tether.conversation_fold import ConversationFold
from tether.events import ConversationEvent, Event
from tether.fold import RAW_ITEMS_MAX, ExecutionFold

if TYPE_CHECKING:
    from playwright.async_api import Page

EXAMPLES = 120
# Runs every vector; answers the numbers of those whose state or answers differ, with what was found.
RUN = """async (vectors) => {
  const { ExecutionFold, ConversationFold } = await import("/static/fold.js");
  const ordered = (value) => Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
  const sorted = (value) => Array.isArray(value) ? value.map(sorted)
    : value && typeof value === "object" ? ordered(value) : value;
  const text = (value) => JSON.stringify(sorted(value));
  const wrong = [];
  vectors.forEach((vector, number) => {
    const fold = vector.conversation ? new ConversationFold() : new ExecutionFold(vector.base ?? {});
    const skip = (step) => (fold.skipTo(step.skip, step.reason), "skipped");
    const answers = vector.steps.map((step) => step.skip ? skip(step) : fold.apply(step));
    const state = fold.freeze();
    if (text(state) !== text(vector.state) || text(answers) !== text(vector.answers)) {
      wrong.push({ number, state: text(state), expected: text(vector.state), answers, told: vector.answers });
    }
  });
  return wrong;
}"""


def vector(steps: list[Event | tuple[int, ev.GapReason]], base: ExecutionFold | None = None) -> dict[str, Any]:
    """What Python's fold makes of the steps, beginning at the state that `base` has."""
    start = None if base is None else base.freeze()
    fold = ExecutionFold(start)
    answers, told = [], []
    for step in steps:
        if isinstance(step, Event):
            answers.append(fold.apply(step).value)
            told.append(step.model_dump(mode="json"))
        else:
            fold.skip_to(*step)
            answers.append("skipped")
            told.append({"skip": step[0], "reason": step[1]})
    found = {"steps": told, "answers": answers, "state": fold.freeze().model_dump(mode="json")}
    # As the projection keeps it: without nulls.
    return found if start is None else {**found, "base": start.model_dump(mode="json", exclude_none=True)}


def numbered(*drafts: tuple[str, Any]) -> list[Event]:
    return [
        Event.model_construct(ordinal=number, last=None, at=1000 + number, type=kind, body=body)
        for number, (kind, body) in enumerate(drafts, start=1)
    ]


STARTED = {
    "boot": "b",
    "instance": "i",
    "process": 1,
    "target": {"execution": "e"},
    "agent": "scripted",
    "request": "r",
    "adapter_version": "1",
}


def crafted() -> list[dict[str, Any]]:
    """What random logs seldom have: lies, holes, overlaps, previews of blobs, code points beyond the first plane."""
    question = {"id": "q", "question": "Which?", "options": [{"label": "A"}], "multiple": True}
    blob = {"digest": "d", "bytes": 9}
    whole = numbered(
        (ev.EXECUTION_STARTED, STARTED),
        (ev.SESSION_BOUND, {"native_session": "n", "cli_version": "2", "model": "m", "resumable": True}),
        (ev.SESSION_BOUND, {"native_session": "n"}),
        (ev.TEXT_DELTA, {"segment": "s", "text": "a𝄞é", "offset": 0}),
        (ev.TEXT_DELTA, {"segment": "s", "text": "𝄞éz", "offset": 1}),
        (ev.TEXT_DELTA, {"segment": "s", "text": "a", "offset": 0}),
        (ev.TEXT_COMPLETED, {"segment": "s", "text": "a𝄞", "blob": blob, "chars": 4}),
        (ev.TEXT_COMPLETED, {"segment": "t", "text": "ab", "blob": blob, "chars": 40, "parent": "t1"}),
        (ev.TEXT_COMPLETED, {"segment": "p", "text": "cut", "partial": True}),
        (ev.TEXT_DELTA, {"segment": "k", "text": "[redacted:a]", "offset": 0, "redacted": 1}),
        (ev.TEXT_DELTA, {"segment": "k", "text": "", "offset": 12, "redacted": "two"}),
        (ev.TEXT_DELTA, {"segment": "k", "text": "[redacted:a]", "offset": 12, "redacted": 1}),
        (ev.TEXT_COMPLETED, {"segment": "k2", "text": "[redacted:a]", "redacted": 1}),
        (ev.TEXT_COMPLETED, {"segment": "k3", "text": "lie", "redacted": "one"}),
        (ev.TOOL_PROGRESS, {"tool": "k", "text": "[redacted:a]", "offset": 0, "redacted": 1}),
        (ev.TOOL_STARTED, {"tool": "k", "name": "Bash", "input": "[redacted:a]", "redacted": 1}),
        (ev.TOOL_COMPLETED, {"tool": "k", "status": "ok", "output": "[redacted:a]", "redacted": 2}),
        (ev.INTERACTION_REQUESTED, {"interaction": "k0", "kind": "approval", "input": "[redacted:a]", "redacted": 1}),
        (ev.CONTROL_RECEIPT, {"control": "k", "verb": "stop", "status": "settled", "detail": "x", "redacted": 1}),
        (ev.RAW, {"stream": "stderr", "preview": "[redacted:a]", "bytes": 9, "why": "stderr", "redacted": 3}),
        (ev.REASONING_DELTA, {"segment": "r", "text": "hm", "offset": 0, "parent": "t1"}),
        (ev.TEXT_DISCARDED, {"segment": "r"}),
        (ev.TOOL_PROGRESS, {"tool": "t1", "text": "one", "offset": 0}),
        (ev.TOOL_STARTED, {"tool": "t1", "name": "Bash", "input": {"command": "ls"}}),
        (ev.TOOL_COMPLETED, {"tool": "t1", "status": "error", "output": [1], "detail": "no", "blob": blob}),
        (ev.TOOL_STARTED, {"tool": "t2", "name": "Read"}),
        (ev.INTERACTION_REQUESTED, {"interaction": "i", "kind": "question", "questions": [question]}),
        (ev.INTERACTION_REQUESTED, {"interaction": "j", "kind": "approval", "name": "Bash", "input": {}}),
        (
            ev.INTERACTION_REQUESTED,
            {
                "interaction": "k",
                "kind": "approval",
                "options": [{"id": "a", "label": "Always", "kind": "allow_always"}],
            },
        ),
        (
            ev.INTERACTION_REQUESTED,
            {"interaction": "l", "kind": "approval", "offered": {"decision": "deny", "text": None, "control": "c"}},
        ),
        (ev.EXECUTION_STARTED, {**STARTED, "process": 2, "target": {"execution": "e", "process_generation": 2}}),
        (ev.SESSION_RECOVERED, {"process": 2, "why": "chosen", "source": "native"}),
        (
            ev.SESSION_RECOVERED,
            {
                "process": 3,
                "why": "not_found",
                "source": "export",
                "rows": 4,
                "partial": True,
                "from": "n",
                "detail": "x",
            },
        ),
        (ev.INTERACTION_RESOLVED, {"interaction": "i", "outcome": "answered", "control": "c"}),
        (ev.INTERACTION_RESOLVED, {"interaction": "i", "outcome": "denied"}),
        (ev.CONTROL_RECEIPT, {"control": "c", "verb": "answer", "status": "settled", "interaction": "i"}),
        (ev.MODEL_REQUEST, {"state": "retrying", "attempt": 2, "new": [1]}),
        (ev.USAGE, {"turn": "1", "input_tokens": 5, "cost_usd": 0.1}),
        (ev.USAGE, {"turn": "1", "input_tokens": 9}),
        (ev.USAGE, {"turn": "2", "output_tokens": 3, "cost_usd": 0.2, "model": "m"}),
        (ev.BACKGROUND, {"id": "b", "state": "started"}),
        (ev.BACKGROUND, {"id": "b", "state": "started"}),
        (ev.BACKGROUND, {"id": "c", "state": "completed"}),
        (ev.GAP, {"from": 3, "to": None, "reason": "spool_evicted", "detail": "x"}),
        (ev.RAW, {"stream": "stderr", "preview": "?", "bytes": 1, "why": "not_json"}),
        ("of.tomorrow", {"any": "thing"}),
        (ev.TURN_COMPLETED, {"turn": "1", "outcome": "completed"}),
        (ev.TEXT_DELTA, {"segment": "open", "text": "never done", "offset": 0}),
        (ev.RESPONSE_ENDED, {"outcome": "failed", "error": {"code": "X"}}),
        (ev.RESPONSE_ENDED, {"outcome": "completed"}),
        (
            ev.EXECUTION_ENDED,
            {
                "outcome": "failed",
                "exit": -9,
                "tail": "unknown",
                "proof": {"method": "pid_namespace", "at": 1},
                "error": {"code": "Y", "detail": "later"},
            },
        ),
    )
    lies = numbered(
        (ev.EXECUTION_STARTED, {**STARTED, "target": "e"}),
        (ev.TEXT_DELTA, {"segment": "s"}),
        (ev.TEXT_DELTA, {"text": "x", "offset": 0}),
        (ev.TEXT_DELTA, {"segment": 5, "text": "x", "offset": 0}),
        (ev.TEXT_DELTA, {"segment": "s", "text": "x", "offset": "0"}),
        (ev.TEXT_COMPLETED, {"segment": "s"}),
        (ev.TEXT_COMPLETED, {"segment": "s", "text": "x", "partial": None}),
        (ev.TEXT_COMPLETED, {"segment": "s", "text": "x", "blob": {"digest": "d"}}),
        (ev.TOOL_COMPLETED, {"tool": "t", "status": "wonderful"}),
        (ev.INTERACTION_REQUESTED, {"interaction": "i", "kind": "question", "questions": [{"id": "q"}]}),
        (ev.INTERACTION_REQUESTED, {"interaction": "i", "kind": "approval", "options": ["always"]}),
        (ev.INTERACTION_REQUESTED, {"interaction": "i", "kind": "approval", "offered": "allow"}),
        (ev.SESSION_RECOVERED, {"process": 2, "why": "forgotten", "source": "export"}),
        (ev.SESSION_RECOVERED, {"why": "chosen", "source": "export"}),
        (ev.RESPONSE_ENDED, {"outcome": "grand"}),
        (ev.EXECUTION_ENDED, {"outcome": "completed", "proof": {"method": "hearsay", "at": 1}}),
        (ev.USAGE, {"turn": "1", "input_tokens": "many"}),
        (ev.TEXT_DISCARDED, {}),
    )
    raws = numbered(
        *[(ev.RAW, {"stream": "stdout", "preview": str(n), "bytes": 1, "why": "x"}) for n in range(RAW_ITEMS_MAX + 3)]
    )
    merged = Event(ordinal=4, last=6, at=1, type=ev.TEXT_DELTA, body={"segment": "s", "text": "a𝄞éz", "offset": 0})
    skips: list[Event | tuple[int, ev.GapReason]] = [whole[0], whole[5], (6, "retention_gap"), (3, "corrupt"), whole[5]]
    halves = []
    for cut in range(0, len(whole), 3):
        base = ExecutionFold()
        for event in whole[:cut]:
            base.apply(event)
        halves.append(vector([*whole[max(0, cut - 2) :]], base))
    plain: list[list[Any]] = [
        whole,
        [*whole, *whole],
        lies,
        raws,
        skips,
        [*whole[:3], merged, whole[4], *whole[6:]],
        [*whole[:4], merged],
    ]
    return [*(vector(steps) for steps in plain), *halves]


def of_conversation() -> dict[str, Any]:
    created = {"response": "r", "response_generation": 1, "execution": "e", "execution_generation": 1, "agent": "a"}
    admitted = {"prompt_sequence": 1, "content": [{"type": "text", "text": "hi"}]}
    drafts: list[tuple[str, dict[str, Any]]] = [
        (ev.PROMPT_ADMITTED, {"request": "q", **admitted}),
        (ev.RESPONSE_CREATED, {"request": "q", **created}),
        (ev.PROMPT_ADMITTED, {"request": "q2", **admitted, "into": "r", "into_execution": "e", "author": "me"}),
        (ev.RESPONSE_SUPERSEDED, {"request": "q", "response": "r", "by": "r2"}),
        (ev.RESPONSE_FAILED, {"request": "q3", "code": "DRAINING", "retryable": True}),
        (ev.RESPONSE_FAILED, {"request": "q", "response": "r", "code": "X", "detail": "y"}),
        (ev.CONTROL_RECEIPT, {"control": "c", "status": "settled"}),
        (ev.RECOVERY, {"stream": "resumed"}),
        (ev.RESPONSE_CREATED, {"request": "q"}),
        (ev.PROMPT_ADMITTED, {"request": "q4", "prompt_sequence": 1, "content": "hi"}),
    ]
    told = [ConversationEvent(id=f"id{n}", generation=1, at=n, type=k, body=b) for n, (k, b) in enumerate(drafts)]
    steps = [*told, told[0], told[4]]
    fold = ConversationFold()
    answers = [fold.apply(event).value for event in steps]
    state = fold.freeze().model_dump(mode="json")
    return {
        "conversation": True,
        "steps": [one.model_dump(mode="json") for one in steps],
        "answers": answers,
        "state": state,
    }


def random_vectors() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(logs())
    def collect(events: list[Event]) -> None:
        middle = len(events) // 2
        base = ExecutionFold()
        for event in events[:middle]:
            base.apply(event)
        found.append(vector([*events]))
        found.append(vector([*events[max(0, middle - 3) :], *events[:3]], base))

    collect()
    return found


async def test_the_same_events_make_the_same_state_as_in_python(page: Page) -> None:
    vectors = [*crafted(), of_conversation(), *random_vectors()]
    kinds = {item["kind"] for one in vectors for item in one["state"].get("items", [])}
    assert kinds == {"text", "reasoning", "tool", "interaction", "session", "raw", "gap"}
    assert {"applied", "duplicate", "hole"} <= {answer for one in vectors for answer in one["answers"]}
    await static_pages(page)
    # As text: a JSON value passes as it is, surrogates and integral floats too.
    wrong = await page.evaluate(f"async (text) => ({RUN})(JSON.parse(text))", json.dumps(vectors))
    assert wrong == []
