"""The provider that the settings name. What only one of them needs is imported for that one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tether.ports import Bus
from tether.settings import ConfigurationError
from tether_agent.agents import AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.providers.local import COLLECTOR, LocalProvider

if TYPE_CHECKING:
    from tether_agent.providers.docker import DockerProvider
    from tether_agent.providers.kubernetes import KubernetesProvider


def provider(
    settings: AgentSettings,
    agents: AgentsFile,
    environment: Environment,
    bus: Bus | None,
    *,
    command: Sequence[str] = COLLECTOR,
) -> LocalProvider | DockerProvider | KubernetesProvider:
    """`command` starts a collector where that is a process. Raises ConfigurationError where something is missing."""
    if settings.agent_provider == "local":
        return LocalProvider(settings, agents, environment, bus, command=command)
    if settings.agent_provider == "kubernetes":
        return _kubernetes(settings, agents, environment, bus)
    try:
        from tether_agent.providers.docker import DockerProvider
    except ModuleNotFoundError as error:
        if error.name not in ("docker", "requests"):
            raise
        detail = "TETHER_AGENT_PROVIDER: docker needs the extra docker: install it with `pip install 'tether[docker]'`"
        raise ConfigurationError([detail]) from None
    return DockerProvider(settings, agents, environment, bus)


def _kubernetes(
    settings: AgentSettings, agents: AgentsFile, environment: Environment, bus: Bus | None
) -> KubernetesProvider:
    try:
        from tether_agent.providers.kubernetes import KubernetesProvider
    except ModuleNotFoundError as error:
        if error.name not in ("lightkube", "httpx2"):
            raise
        detail = "TETHER_AGENT_PROVIDER: kubernetes needs its extra: install it with `pip install 'tether[kubernetes]'`"
        raise ConfigurationError([detail]) from None
    return KubernetesProvider(settings, agents, environment, bus)
