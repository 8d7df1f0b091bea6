"""What a collector process of the local provider is told, by its environment alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether import failpoints
from tether.service import write_whole
from tether_agent.agents import AgentsFile
from tether_agent.config import AgentSettings, confinement, pace, telemetry
from tether_agent.providers import sandbox_file
from tether_agent.providers.bus_access import BusAccess
from tether_agent.providers.collector_process import BOOT_VARIABLE, INHERITED
from tether_agent.providers.sandbox_file import SandboxFile


def environment_file(state_dir: Path, file: SandboxFile) -> Path:
    """The closed file of its agents' variables."""
    return sandbox_file.folder_of(state_dir, file.tenant, file.workspace) / "agent-env.json"


def collector_environment(
    settings: AgentSettings,
    agents: AgentsFile,
    file: SandboxFile,
    facts: Mapping[str, Any],
    access: BusAccess | None = None,
) -> dict[str, str]:
    """All variables of the process. A recovery collector is told of no agents."""
    folder = sandbox_file.folder_of(settings.agent_state_dir, file.tenant, file.workspace)
    commands = {} if file.recovery else {kind: list(agent.command) for kind, agent in agents.agents.items()}
    values = {name: os.environ[name] for name in INHERITED if name in os.environ}
    values |= {
        "TETHER_NATS_URL": settings.nats_url,
        "TETHER_REPLICAS": str(settings.replicas),
        "TETHER_LOG_FORMAT": settings.log_format,
        "TETHER_LOG_LEVEL": settings.log_level,
        "TETHER_TENANT": file.tenant,
        "TETHER_WORKSPACE": file.workspace,
        "TETHER_SANDBOX": file.sandbox,
        BOOT_VARIABLE: file.boot,
        "TETHER_WORKSPACE_DIR": file.directory,
        "TETHER_AGENTS": json.dumps(commands),
        "TETHER_AGENT_ENV_FILE": str(environment_file(settings.agent_state_dir, file)),
        "TETHER_FACTS": json.dumps(facts),
        "TETHER_RECOVERY": "true" if file.recovery else "false",
        # Of a drain that nobody orders: SIGTERM by the machine.
        "TETHER_COLLECTOR_DRAIN_GRACE_S": str(settings.agent_drain_grace_s),
        "TETHER_COLLECTOR_CHECKPOINT_STORE": settings.agent_checkpoint_store,
        "TETHER_COLLECTOR_CHECKPOINT_INCLUDE": settings.agent_checkpoint_include,
    }
    values |= agents.collector_settings() | confinement(settings)
    if settings.agent_cli_user is not None:
        values["TETHER_COLLECTOR_CLI_USER"] = settings.agent_cli_user
    if file.restore:
        values["TETHER_COLLECTOR_RESTORE"] = file.restore
    values |= failpoints.inherited(os.environ)
    if settings.nats_tls_ca_file is not None:
        values["TETHER_NATS_TLS_CA_FILE"] = str(settings.nats_tls_ca_file)
    access = access or BusAccess()
    values |= access.told()
    if access.path is not None:
        values["TETHER_NATS_CREDS_FILE"] = str(access.path)
    else:
        values |= _bus_credentials(settings, folder)
    return values | telemetry(settings) | pace(settings, file.tenant)


def _bus_credentials(settings: AgentSettings, folder: Path) -> dict[str, str]:
    """The collector's user on the bus; a password goes by file, never by environment or argument."""
    if settings.agent_collector_user is not None:
        found = {"TETHER_NATS_USER": settings.agent_collector_user}
        if settings.agent_collector_password_file is not None:
            found["TETHER_NATS_PASSWORD_FILE"] = str(settings.agent_collector_password_file)
        return found
    if settings.nats_creds_file is not None:
        return {"TETHER_NATS_CREDS_FILE": str(settings.nats_creds_file)}
    found = {}
    if settings.nats_user is not None:
        found["TETHER_NATS_USER"] = settings.nats_user
    password = settings.password()
    if password is not None:
        path = folder / "bus-password"
        write_whole(path, password.encode())
        found["TETHER_NATS_PASSWORD_FILE"] = str(path)
    return found
