"""What a sandbox's container is made of. Pure, but for the files that hold secrets, which are read here.

In `docker inspect` stand image, limits, mounts and labels. What the collector is told, secrets or not, is handed to the
running container over the standard input of a command in it, into a file system in memory (FILES): it stands in no
variable, argument, image or layer.

No capability is given. The keeper of a CLI then holds its processes as their subreaper, not in a PID namespace of their
own (that takes CAP_SYS_ADMIN), and its proof says so; the container is one PID namespace as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tether.errors import InvalidError
from tether.processes import machine_boot
from tether_agent.agents import AgentsFile, Environment
from tether_agent.config import AgentSettings, confinement, pace, telemetry
from tether_agent.core.container import Container
from tether_agent.providers.bus_access import BusAccess
from tether_agent.providers.docker_file import DockerFile

WORKSPACE: Final = "/workspace"
FILES: Final = "/run/tether"
CREDENTIALS: Final = "bus.creds"
AGENTS: Final = "/opt/tether/agents"
INIT: Final = ("python3", "-I", "-S", "/opt/tether/app/tether_collector/init/__main__.py")
USER: Final = "65532:65532"  # of the image
LABEL: Final = "dev.tether."
STOP_BEYOND_GRACE_S: Final = 60  # for a checkpoint, after everything has ended
FILES_BYTES: Final = 16 << 20
_UNIX: Final = "unix://"
LOG_SIZE: Final = {"max-size": "8m", "max-file": "2"}


def container_name(prefix: str, tenant: str, workspace: str) -> str:
    """Of the container and of the volume. One per workspace: the engine refuses a second one."""
    return f"{prefix}.{tenant}.{workspace}"


def labels(prefix: str, file: DockerFile) -> dict[str, str]:
    """What identifies a container as ours, whether anything was written down of it or not."""
    return {
        f"{LABEL}prefix": prefix,
        f"{LABEL}tenant": file.tenant,
        f"{LABEL}workspace": file.workspace,
        f"{LABEL}sandbox": file.sandbox,
        f"{LABEL}boot": file.boot,
        f"{LABEL}recovery": "true" if file.recovery else "false",
        f"{LABEL}created": str(file.created_s),
        f"{LABEL}volume": file.volume,
        f"{LABEL}directory": file.directory,
    }


def of_container(found: Container) -> DockerFile:
    """What its labels say of a container of which nothing is written down: a collector may have been ready in it."""
    label = {name.removeprefix(LABEL): value for name, value in found.labels}
    return DockerFile(
        tenant=label["tenant"],
        workspace=label["workspace"],
        sandbox=label["sandbox"],
        boot=label["boot"],
        machine_boot=machine_boot(),
        directory=label["directory"],
        status="running",
        used=True,
        recovery=label["recovery"] == "true",
        container=found.id,
        started_at=found.started_at,
        volume=label["volume"],
        created_s=int(label["created"]),
    )


def user_of(directory: Path | None) -> str:
    """Whose the user's directory is: the sandbox runs as that user. Raises InvalidError for root's."""
    if directory is None or not directory.exists():
        return USER  # what is wrong with it is said where it is checked
    facts = directory.stat()
    if facts.st_uid == 0:
        raise InvalidError("path", "must not be root's: the sandbox runs as the directory's owner; chown it to a user")
    return f"{facts.st_uid}:{facts.st_gid}"


def local_engine() -> bool:
    """Whether the engine runs on this machine, so that this machine's boot is its own."""
    return os.environ.get("DOCKER_HOST", _UNIX).startswith(_UNIX)


def container(settings: AgentSettings, file: DockerFile, user: str = USER) -> dict[str, Any]:
    """Arguments of the engine's create call, as docker-py names them."""
    uid, _, gid = user.partition(":")
    mounts: list[dict[str, Any]] = [
        {"Type": "bind", "Source": file.directory, "Target": WORKSPACE}
        if file.directory
        else {"Type": "volume", "Source": file.volume, "Target": WORKSPACE}
    ]
    if settings.docker_agents_dir is not None:
        mounts.append({"Type": "bind", "Source": str(settings.docker_agents_dir), "Target": AGENTS, "ReadOnly": True})
    return {
        "image": settings.docker_image,
        "name": container_name(settings.docker_prefix, file.tenant, file.workspace),
        "labels": labels(settings.docker_prefix, file),
        "user": user,
        "stop_timeout": int(settings.agent_drain_grace_s) + STOP_BEYOND_GRACE_S,
        "host": {
            "network_mode": settings.docker_network,
            "mounts": mounts,
            "read_only": True,
            "tmpfs": {
                "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={settings.docker_tmp_bytes}",
                FILES: f"rw,noexec,nosuid,nodev,mode=0700,uid={uid},gid={gid},size={FILES_BYTES}",
            },
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "nano_cpus": round(settings.docker_cpus * 1e9),
            "mem_limit": settings.docker_memory_bytes,
            "memswap_limit": settings.docker_memory_bytes,
            "pids_limit": settings.docker_pids,
            "ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "restart_policy": {"Name": "no"},
            "log_config": {"Type": "json-file", "Config": LOG_SIZE},
        },
    }


def facts(file: DockerFile, image: str, environment: Environment) -> dict[str, Any]:
    """What identifies the sandbox, and where its agents' keys came from."""
    found = {
        "provider": "docker",
        "boot": file.boot,
        "container": file.container[:12],
        "image": image,
        "directory": file.directory or f"volume {file.volume}",
        "key_sources": dict(environment.sources),
    }
    return {**found, "before": file.before} if file.before else found


def files(
    settings: AgentSettings,
    agents: AgentsFile,
    file: DockerFile,
    environment: Environment,
    told: Mapping[str, Any],
    access: BusAccess | None = None,
) -> dict[str, str]:
    """The files of FILES: name and text. A recovery collector is told of no agents and has no key of theirs."""
    commands = {} if file.recovery else {kind: list(agent.command) for kind, agent in agents.agents.items()}
    variables = {} if file.recovery else environment.variables
    values = {
        "TETHER_NATS_URL": settings.docker_nats_url or settings.nats_url,
        "TETHER_REPLICAS": str(settings.replicas),
        "TETHER_LOG_FORMAT": settings.log_format,
        "TETHER_LOG_LEVEL": settings.log_level,
        "TETHER_TENANT": file.tenant,
        "TETHER_WORKSPACE": file.workspace,
        "TETHER_SANDBOX": file.sandbox,
        "TETHER_BOOT": file.boot,
        "TETHER_WORKSPACE_DIR": WORKSPACE,
        "TETHER_AGENTS": json.dumps(commands),
        "TETHER_AGENT_ENV_FILE": f"{FILES}/agent-env.json",
        "TETHER_FACTS": json.dumps(dict(told)),
        "TETHER_RECOVERY": "true" if file.recovery else "false",
        "TETHER_COLLECTOR_DRAIN_GRACE_S": str(settings.agent_drain_grace_s),
        "TETHER_COLLECTOR_CHECKPOINT_STORE": settings.agent_checkpoint_store,
        "TETHER_COLLECTOR_CHECKPOINT_INCLUDE": settings.agent_checkpoint_include,
    }
    values |= agents.collector_settings() | confinement(settings)
    if file.restore:
        values["TETHER_COLLECTOR_RESTORE"] = file.restore
    found = {"agent-env.json": json.dumps({kind: dict(names) for kind, names in variables.items()})}
    values |= telemetry(settings) | pace(settings, file.tenant)
    if settings.nats_tls_ca_file is not None:
        found["bus-ca.pem"] = settings.nats_tls_ca_file.read_text(encoding="ascii")
        values["TETHER_NATS_TLS_CA_FILE"] = f"{FILES}/bus-ca.pem"
    access = access or BusAccess()
    values |= access.told()
    if access.credentials is not None:
        found[CREDENTIALS] = access.credentials
        values["TETHER_NATS_CREDS_FILE"] = f"{FILES}/{CREDENTIALS}"
    else:
        values |= _bus_credentials(settings, found)
    return {**found, "environment.json": json.dumps(values)}


def _bus_credentials(settings: AgentSettings, found: dict[str, str]) -> dict[str, str]:
    """The collector's user on the bus; what proves it becomes one of the files."""
    user, password = settings.nats_user, settings.password()
    if settings.agent_collector_user is not None:
        user, password = settings.agent_collector_user, None
        if settings.agent_collector_password_file is not None:
            password = settings.agent_collector_password_file.read_text(encoding="utf-8").strip()
    elif settings.nats_creds_file is not None:
        found[CREDENTIALS] = settings.nats_creds_file.read_text(encoding="utf-8")
        return {"TETHER_NATS_CREDS_FILE": f"{FILES}/{CREDENTIALS}"}
    values = {} if user is None else {"TETHER_NATS_USER": user}
    if password is not None:
        found["bus-password"] = password
        values["TETHER_NATS_PASSWORD_FILE"] = f"{FILES}/bus-password"
    return values
