"""Answers of a human, laid to the questions that were asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tether.errors import InvalidError
from tether_collector.core.adapters.base import Answer


def chosen(questions: Sequence[Mapping[str, Any]], answer: Answer) -> dict[str, list[str]]:
    """Question id → chosen labels or free text, for every question but one that is `optional` and was left out. Keys of
    the answer may be ids or texts; a single question may be answered by `text` alone. Raises `InvalidError` naming the
    question."""
    given = dict(answer.answers)
    if not given and answer.text is not None and len(questions) == 1:
        given = {questions[0]["id"]: (answer.text,)}
    answers: dict[str, list[str]] = {}
    for question in questions:
        picked = given.pop(question["id"], None) or given.pop(question["question"], None)
        field = f"payload.answers.{question['id']}"
        if not picked:
            if question.get("optional"):
                continue
            raise InvalidError(field, "is missing: every question wants an answer")
        if len(picked) > 1 and not question["multiple"]:
            raise InvalidError(field, "takes one answer")
        answers[question["id"]] = list(picked)
    if given:
        raise InvalidError(f"payload.answers.{next(iter(given))}", "must be the id or the text of a question")
    return answers
