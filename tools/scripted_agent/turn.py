"""One turn's state, and the ways in which a step is left early."""

from __future__ import annotations


class Interrupted(Exception):  # noqa: N818 - a way out of a step, not an error
    """The running turn was interrupted from outside."""


class TurnOver(Exception):  # noqa: N818 - a way out of a step, not an error
    """A step ended the turn; its result is printed."""


class Exiting(Exception):  # noqa: N818 - a way out of a step, not an error
    """The process ends now, without another line."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Ask:
    """A request that waits for an answer; `answer` is None until then."""

    __slots__ = ("answer", "request")

    def __init__(self, request: str) -> None:
        self.request = request
        self.answer: dict[str, object] | None = None


class Turn:
    """What belongs to one prompt's run.

    A steered prompt has its own steps and prints into the turn around it: then `acting_prompt` is its id, while
    `prompt` stays the one that the turn, its usage and its result belong to.
    """

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self.acting_prompt = prompt
        self.step = 0
        self.loop_pass = 0
        self.is_steerable = False
        self.has_result = False
        self.last_text = ""
        self.status = "running"
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost_usd: float | None = None
        self.segment: str | None = None
        self.segment_parts: list[str] = []
        # Tools that were started and not ended: id → (name, id of the side effect or "").
        self.open_tools: dict[str, tuple[str, str]] = {}

    def usage(self) -> dict[str, object]:
        cost = self.cost_usd
        if cost is None:
            cost = round((self.input_tokens + 5 * self.output_tokens) / 1e6, 6)
        return {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "cost_usd": cost}
