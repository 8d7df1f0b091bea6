"""The registry of adapters: `agent.kind` → the one instance, which is stateless.

Adding an agent is one module here, one line below and one golden folder; one that speaks ACP is one entry in
`acp_rules.py` in place of a module, or none at all: any `acp:<name>` that a command is configured for has an adapter.
"""

from __future__ import annotations

from typing import Final

from tether.errors import InvalidError
from tether_collector.core.adapters.acp import Acp, is_acp
from tether_collector.core.adapters.base import Adapter
from tether_collector.core.adapters.claude import CLAUDE
from tether_collector.core.adapters.codex import CODEX
from tether_collector.core.adapters.scripted import SCRIPTED

ADAPTERS: Final[dict[str, Adapter]] = {adapter.name: adapter for adapter in (CLAUDE, CODEX, SCRIPTED)}


def adapter_for(kind: str) -> Adapter:
    """Raises `InvalidError` naming `agent.kind` and the known ones."""
    adapter = ADAPTERS.get(kind)
    if adapter is None and is_acp(kind):
        return Acp(kind)
    if adapter is None:
        raise InvalidError("agent.kind", f"must be one of {', '.join(sorted(ADAPTERS))}, or acp:<name>")
    return adapter
