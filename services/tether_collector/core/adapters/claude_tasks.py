"""Claude Code's background work: Bash commands and subagents that outlive the turn that started them.

    task_started / listed in background_tasks_changed ──▶ open ──no longer listed──▶ over
                                                           └──task_notification──▶ over, and a turn is owed

The list and the notification come in either order. The owed turn begins with an `init` that names no prompt; where the
CLI told the model within the running turn none comes, so whoever waits for it waits with a bound.
"""

from __future__ import annotations

from typing import Any

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.inputs import Draft

State = dict[str, Any]
Line = dict[str, Any]


def background_now(state: State) -> b.BackgroundChanged:
    return b.BackgroundChanged(sum(state["tasks"].values()), state["owed"])


def task_started(state: State, line: Line) -> b.Reading | str:
    task = lines.id_of(line.get("task_id"))
    if task is None:
        return "task_started without task_id"
    if line.get("is_backgrounded") is False:
        return b.Reading()
    return _task_open(state, task, line)


def _task_open(state: State, task: str, line: Line) -> b.Reading:
    if state["tasks"].get(task):
        return b.Reading()
    state["tasks"][task] = True
    body: Line = {"id": task, "state": "started"}
    if (description := lines.detail_of(line.get("description"))) is not None:
        body["description"] = description
    return b.Reading((Draft(ev.BACKGROUND, body),), (background_now(state),))


def _task_over(state: State, task: str, description: Any) -> list[Draft]:
    """The end of open work, told once."""
    if not state["tasks"].get(task):
        return []
    state["tasks"][task] = False
    body: Line = {"id": task, "state": "completed"}
    if (text := lines.detail_of(description)) is not None:
        body["description"] = text
    return [Draft(ev.BACKGROUND, body)]


def task_notification(state: State, line: Line) -> b.Reading | str:
    """Background work ended, and the model will be told: a turn is owed."""
    task = lines.id_of(line.get("task_id"))
    if task is None:
        return "task_notification without task_id"
    if task not in state["tasks"]:
        return b.Reading()
    drafts = _task_over(state, task, line.get("summary"))
    del state["tasks"][task]
    state["owed"] += 1
    return b.Reading(drafts, (background_now(state),))


def background_tasks_changed(state: State, line: Line) -> b.Reading | str:
    """The whole list: what is new is open, what is missing is over."""
    tasks = line.get("tasks")
    if not isinstance(tasks, list):
        return "background_tasks_changed without tasks"
    listed: dict[str, Line] = {}
    for task in tasks:
        key = lines.id_of(task.get("task_id")) if isinstance(task, dict) else None
        if key is not None:
            listed[key] = task
    drafts: list[Draft] = []
    for key in [known for known, is_open in state["tasks"].items() if is_open and known not in listed]:
        drafts += _task_over(state, key, None)
    for key, task in listed.items():
        drafts += _task_open(state, key, task).drafts
    return b.Reading(drafts, (background_now(state),))
