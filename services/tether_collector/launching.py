"""From a journaled start to what runs: the adapter's launch, the keeper's specification. Deterministic but for keys.

Native session and prompt ids are uuids derived from the execution, so every replay and every redelivery names the
same ones. Keys are read from the provider's file at the moment of the launch and go to the keeper's stdin only.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether import tracing
from tether.errors import InvalidError
from tether.settings import is_secret_name
from tether.subjects import EventAddress
from tether_collector import confinement
from tether_collector.claim import claim_event
from tether_collector.config import AgentEnvironmentError, CollectorSettings, agent_environment
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters.base import Adapter, Launch, ReadsEnvironment, config_home
from tether_collector.core.fallback import next_launch
from tether_collector.journal import Start
from tether_collector.keeper_link import LaunchSpec


def derived_uuid(execution: str, purpose: str) -> str:
    """The same version-4-shaped uuid for the same execution and purpose."""
    digest = hashlib.sha256(f"{execution}\x1f{purpose}".encode()).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))


def agent_launch(settings: CollectorSettings, start: Start) -> tuple[Launch, Adapter]:
    """Raises InvalidError for an agent without an adapter (the start was checked, so only after a downgrade)."""
    command = start.command
    agent = command.agent
    address = EventAddress(start.target.tenant, start.target.workspace, start.conversation, start.execution)
    launch = Launch(
        execution=start.execution,
        prompt_id=derived_uuid(start.execution, "prompt"),
        content=[part.model_dump(mode="json") for part in command.content],
        cwd=str(settings.workspace_dir),
        session=command.resume_session or derived_uuid(start.execution, "session"),
        resume=command.resume_session is not None,
        model=agent.model,
        permission_mode=agent.permission_mode,
        args=agent.args,
        # From the claim: a replay says the same, wherever the key comes from by then.
        key_source=claim_event(address, start.claim).body.get("key_source"),
        fallback=command.fallback is True,
    )
    return launch, adapter_for(agent.kind)


def next_nonce(nonce: str, process: int) -> str:
    """The nonce of an execution's next process: the same for whoever prepares it again after a crash."""
    execution = nonce.rpartition("-")[0]
    return f"{execution}-{hashlib.sha256(f'{nonce}{chr(31)}{process}'.encode()).hexdigest()[:32]}"


def launch_spec(
    settings: CollectorSettings, start: Start, noted: Mapping[str, Any] | None = None, *, spool_after: int = 0
) -> LaunchSpec | str:
    """What the keeper is told, or why the agent cannot be started here. `noted`: how this process differs from the one
    that the command names; `spool_after`: the last record that is in its folder."""
    launch, adapter = agent_launch(settings, start)
    if noted is not None:
        launch = next_launch(launch, noted)
    binary = settings.agents.get(adapter.name)
    if binary is None:
        return f"no command is configured for the agent {adapter.name}"
    try:
        environment = agent_environment(settings, adapter.name, os.environ)
    except AgentEnvironmentError as error:
        return str(error)
    home = Path(config_home(launch, adapter.name))
    try:  # some CLIs refuse to start without it
        user = confinement.cli_user(settings)
        confinement.make_home(settings, user, home)
    except confinement.ConfinementError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be made: {error.strerror}"
    environment |= confinement.user_variables(user, home)
    given = {name: text for name, text in environment.items() if is_secret_name(name)}
    names = [name for name in adapter.secret_descriptors if name in environment]
    given |= {name: environment[name] for name in names}
    secrets = {adapter.secret_descriptors[name]: environment.pop(name) for name in names}
    if isinstance(adapter, ReadsEnvironment):
        named = adapter.environment_arguments({**environment, **dict.fromkeys(names, "")})
        launch = replace(launch, args=(*named, *launch.args))
    try:
        argv = adapter.argv(launch, binary)
    except InvalidError as error:
        return str(error)
    return LaunchSpec(
        nonce=start.nonce,
        execution=start.execution,
        process_generation=start.target.process_generation,
        argv=argv,
        cwd=str(settings.workspace_dir),
        env={**environment, **adapter.environment(launch), **tracing.environment()},
        secrets=secrets,
        isolation=settings.isolation,
        confine=confinement.confine(settings, user),
        # The collector begins a segment with the state after half as much; the keeper's own come where it cannot.
        segment_bytes_max=2 * settings.spool_segment_bytes,
        spool_quota_bytes=settings.spool_bytes_max,
        spool_after=spool_after,
        given=given,
    )
