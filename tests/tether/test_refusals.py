"""What is told of refused input: our words for every common error, every field, nothing of the input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from tether.errors import InvalidError
from tether.ids import TOKEN_REMEDY, Token, check_token
from tether.prompt import AgentSpec, invalid
from tether.refusals import FIELDS_MAX


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    known: int = 0


class Everything(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: Token = "t"
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = "0" * 64
    word: Annotated[str, StringConstraints(min_length=1, max_length=4)] = "w"
    longer: Annotated[str, StringConstraints(min_length=3)] = "www"
    number: Annotated[int, Field(ge=1, le=9)] = 1
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    flag: bool = False
    choice: Literal["a", "b", "c"] = "a"
    version: Literal[1] = 1
    parts: Annotated[tuple[int, ...], Field(min_length=1, max_length=2)] = (1,)
    entries: list[int] = []
    table: dict[str, int] = {}
    inner: Inner = Inner()
    own: str = ""

    @field_validator("own")
    @classmethod
    def _own(cls, value: str) -> str:
        if value:
            raise ValueError("must be a name that is known")
        return value


def refused(**values: Any) -> Any:
    with pytest.raises(ValidationError) as caught:
        Everything.model_validate(values)
    return invalid(caught.value).problem


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("token", "a b", TOKEN_REMEDY),
        ("token", 7, "must be text"),
        ("digest", "xyz", "must be 64 of the characters 0-9 a-f"),
        ("word", "", "must not be empty"),
        ("word", "wwwww", "must have at most 4 characters"),
        ("longer", "w", "must have at least 3 characters"),
        ("number", 0, "must be at least 1"),
        ("number", 10, "must be at most 9"),
        ("number", "x", "must be a whole number"),
        ("number", 1.5, "must be a whole number"),
        ("number", [], "must be a whole number"),
        ("share", 0, "must be more than 0.0"),
        ("share", 1, "must be less than 1.0"),
        ("share", "x", "must be a number"),
        ("flag", "perhaps", "must be true or false"),
        ("flag", {}, "must be true or false"),
        ("choice", "d", "must be one of a, b or c"),
        ("version", 2, "must be 1"),
        ("parts", [], "must not be empty"),
        ("parts", [1, 2, 3], "must have at most 2 entries"),
        ("parts", "text", "must be a list"),
        ("entries", "text", "must be a list"),
        ("table", [], "must be an object"),
        ("inner", [], "must be an object"),
        ("own", "x", "must be a name that is known"),
        ("other", "x", "is not known; leave it out"),
    ],
)
def test_a_common_error_has_a_remedy_in_the_words_of_json(field: str, value: object, remedy: str) -> None:
    told = refused(**{field: value})
    assert [(one.field, one.remedy) for one in told.fields] == [(field, remedy)]
    assert told.detail == f"{field}: {remedy}"


def test_the_words_for_an_agents_kind_are_those_of_its_pattern() -> None:
    with pytest.raises(ValidationError) as caught:
        AgentSpec(kind="Not One")
    assert invalid(caught.value, "agent").remedy.endswith("a-z 0-9 : . _ -, with a letter or digit first")


def test_a_token_is_refused_in_the_same_words_wherever_it_stands() -> None:
    with pytest.raises(InvalidError) as caught:
        check_token("a b", "token")
    assert caught.value.problem == refused(token="a b")


def test_every_refused_field_is_told_and_the_first_is_the_errors_own() -> None:
    with pytest.raises(ValidationError) as caught:
        Everything.model_validate({"token": "a b", "flag": 7, "inner": {"known": "x", "more": 1}})
    error = invalid(caught.value, "payload")
    assert (error.field, error.remedy) == ("payload.token", TOKEN_REMEDY)
    assert [one.field for one in error.problem.fields] == [
        *("payload.token", "payload.flag", "payload.inner.known", "payload.inner.more"),
    ]
    for one in error.problem.fields:
        assert f"{one.field}: {one.remedy}" in error.problem.detail


@pytest.mark.parametrize("value", [{f"field-{index}": 1 for index in range(10_000)}, {"k" * 1_000_000: 1}], ids=len)
def test_what_is_told_of_hostile_input_is_bounded(value: dict[str, Any]) -> None:
    told = refused(**value)
    assert 1 <= len(told.fields) <= FIELDS_MAX
    assert len(told.detail) < 4096


def test_nothing_of_a_refused_value_is_echoed() -> None:
    secret = "sk-do-not-show"
    told = refused(token=f"{secret} !", number=secret, choice=secret, parts=secret, inner=secret, own=secret)
    assert len(told.fields) == 6 and secret not in told.model_dump_json()
