"""What calls take and answer, whatever the transport. Lists and views are `tether.api`'s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from pydantic import ValidationError

from tether.api import AnswerRequest, InteractionView
from tether.errors import Code, ProblemError
from tether.events import InteractionRequested
from tether.fold import ExecutionState, InteractionItem, UsageTotal
from tether.prompt import AgentSpec, Continuation, Mode, ResumeChoice, TextContent

_OF_AN_ANSWER: Final = ("decision", "text", "input", "answers")
SUBMIT_PATIENCE_S: Final = 60.0  # how long a submission in doubt is sent again, always with the same request id


@dataclass(frozen=True, slots=True)
class Message:
    """A prompt before it has a tenant. The same `request_id` with the same content is the same request."""

    conversation: str
    request_id: str
    content: tuple[TextContent, ...]
    agent: AgentSpec
    workspace: str | None
    mode: Mode
    resume: ResumeChoice | None = None
    continuation: Continuation | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """`pending`: durably accepted, its outcome not known within the wait; the same request may be sent again to ask.
    `response_id`: of an interjection the running one. `cursor`: the events of this request come after it."""

    conversation: str
    request_id: str
    status: Literal["admitted", "interjected", "pending"]
    response_id: str | None
    execution: str | None
    cursor: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Interaction:
    """Something that waits for a human: an approval of a tool, or questions. `options`: what the agent offers for an
    approval beyond allow and deny; `Answer.allow(option=…)` and `Answer.deny(option=…)` name one.

    `offered`: the answer that was given when the agent asked the same in an earlier process, and of which it is not
    known that it was applied. Nobody gives it again but who answers: with it, or with another one."""

    conversation: str
    execution: str
    id: str
    kind: Literal["approval", "question"]
    name: str = ""
    input: Any = None
    description: str | None = None
    questions: tuple[Mapping[str, Any], ...] = ()
    options: tuple[Mapping[str, Any], ...] = ()
    offered: Answer | None = None

    @staticmethod
    def of_event(conversation: str, execution: str, body: InteractionRequested) -> Interaction:
        return Interaction(
            conversation,
            execution,
            body.interaction,
            body.kind,
            body.name,
            body.input,
            body.description,
            tuple(question.model_dump() for question in body.questions),
            tuple(body.options),
            _offered(body.offered, body.kind, body.options),
        )

    @staticmethod
    def of_state(conversation: str, execution: str, item: InteractionItem) -> Interaction:
        return Interaction(
            conversation,
            execution,
            item.id,
            item.asks,
            item.name,
            item.input,
            item.description,
            tuple(item.questions),
            tuple(item.options),
            _offered(item.offered, item.asks, item.options),
        )

    @staticmethod
    def of_view(conversation: str, view: InteractionView) -> Interaction:
        return Interaction(
            conversation,
            view.execution,
            view.interaction,
            view.asks,
            view.name,
            view.input,
            view.description,
            tuple(view.questions),
            tuple(view.options),
            _offered(view.offered, view.asks, view.options),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`text`: a reason or free text. `input` replaces a tool's input. `answers`: question id → labels or free text."""

    decision: Literal["allow", "deny"]
    text: str | None = None
    input: dict[str, Any] | None = None
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @staticmethod
    def allow(*, input: dict[str, Any] | None = None, option: str | None = None) -> Answer:  # noqa: A002 - the contract's
        """`option`: the id of one that the agent offers (`Interaction.options`), such as to allow this always."""
        return Answer("allow", input=input, answers={} if option is None else {"option": (option,)})

    @staticmethod
    def deny(text: str | None = None, *, option: str | None = None) -> Answer:
        return Answer("deny", text=text, answers={} if option is None else {"option": (option,)})

    @staticmethod
    def choose(answers: Mapping[str, Sequence[str]]) -> Answer:
        return Answer("allow", answers=answers)


def _offered(offered: Mapping[str, Any] | None, kind: str, options: Sequence[Mapping[str, Any]]) -> Answer | None:
    """The answer that `offered` tells; None where there is none, or not one that could be given. An option that the
    agent does not offer this time is left out: the decision stays, for this once."""
    if offered is None:
        return None
    try:
        given = AnswerRequest.model_validate({name: offered[name] for name in _OF_AN_ANSWER if name in offered})
    except ValidationError:
        return None
    answers = dict(given.answers)
    if kind == "approval" and not set(answers.get("option", ())) <= {option.get("id") for option in options}:
        del answers["option"]
    return Answer(given.decision, given.text, given.input, answers)


# None: not answered here; it stays pending for whoever answers it.
OnInteraction = Callable[[Interaction], Awaitable[Answer | None]]


@dataclass(frozen=True, slots=True)
class Response:
    """What a prompt came to. `outcome`: completed, failed, cancelled, stopped, …, superseded. `state` is the folded
    execution with its items; `cursor` is behind the response's end. `partial`: a gap was told."""

    submission: Submission
    response_id: str
    execution: str
    outcome: str
    text: str
    usage: UsageTotal
    state: ExecutionState
    cursor: str
    error: dict[str, Any] | None = None
    partial: bool = False

    @property
    def items(self) -> list[Any]:
        return self.state.items

    @property
    def resume_choices(self) -> tuple[ResumeChoice, ...]:
        """Where the agent's session could not be resumed, with what the same content may be sent again (`resume=`):
        `fresh`, `history`. Empty for every other outcome."""
        return resume_choices(self.error)


class ResponseFailedError(ProblemError):
    """The request came to nothing before or instead of an execution."""

    @property
    def resume_choices(self) -> tuple[ResumeChoice, ...]:
        """As `Response.resume_choices`."""
        return resume_choices({"code": self.problem.code, **self.problem.context})


def resume_choices(error: Mapping[str, Any] | None) -> tuple[ResumeChoice, ...]:
    """What a response's `error` leaves to choose from; nothing unless it is RESUME_FAILED."""
    if error is None or error.get("code") != Code.RESUME_FAILED:
        return ()
    told = error.get("choices") or get_args(ResumeChoice)
    return tuple(choice for choice in get_args(ResumeChoice) if choice in told)
