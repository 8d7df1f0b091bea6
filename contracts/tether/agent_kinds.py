"""Which agents there are, asked of whoever starts them, so that a message for one that nobody has is refused at once.

    tether.agent.agents  {}  →  {agents: [kind]}    answered by one of the agent services: they share an agents file

What is known stays known: an agent that is gone is told of by its start. Where no agent service answers nothing is
refused: the message waits for one, as ever.
"""

from __future__ import annotations

import asyncio

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from tether import subjects
from tether.errors import BusError, InvalidError
from tether.ports import Bus

ASK_S = 1.0
NAMED_MAX = 32  # agents that a refusal names
_log = structlog.get_logger("tether.agents")


class Kinds(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    agents: tuple[str, ...]


class KnownAgents:
    """Of one process."""

    def __init__(self) -> None:
        self._kinds: frozenset[str] = frozenset()
        self._asking = asyncio.Lock()

    async def check(self, bus: Bus, kind: str) -> None:
        """Raises InvalidError for an agent that the agent services do not have."""
        if kind in self._kinds:
            return
        async with self._asking:  # one question for however many wait
            if kind in self._kinds:
                return
            kinds = await _ask(bus)
            if kinds is None:
                return
            self._kinds |= kinds
        if kind not in self._kinds:
            named = ", ".join(sorted(self._kinds)[:NAMED_MAX]) or "none"
            raise InvalidError("agent.kind", f"there is no agent {kind[:64]}; there is: {named}")


async def _ask(bus: Bus) -> frozenset[str] | None:
    """None where nobody says."""
    try:
        answer = await bus.request(subjects.agent("agents"), b"{}", timeout_s=ASK_S)
        return frozenset(Kinds.model_validate_json(answer.data).agents)
    except BusError:
        return None  # no agent service for now
    except ValidationError:
        _log.info("agents_not_told", reason="the agent service is of an older version")
        return None
