"""What the provider `docker` needs before a set starts: its extra, an engine, the image, a network with the bus in it.

Each finding is what is wrong and the remedy; the settings are those of the shell, which a set's agent service takes.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tether_agent.config import AgentSettings
from tether_cli.output import CliError, Exit

ENGINE_S: Final = 10.0
HOST: Final = "host"
_PREFIX: Final = "TETHER_"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name`: engine, image or network. `problem`, `remedy`: empty where all is well."""

    name: str
    detail: str
    problem: bool = False
    remedy: str = ""


def chosen(environ: Mapping[str, str]) -> bool:
    return _setting(environ, "agent_provider") == "docker"


def check(environ: Mapping[str, str]) -> None:
    """Raises CliError with the first thing that keeps a set's sandboxes from starting."""
    for found in findings(environ) if chosen(environ) else ():
        if found.problem:
            raise CliError(f"provider docker: {found.detail}", remedy=found.remedy, exit_code=Exit.FAILED)


def findings(environ: Mapping[str, str]) -> list[Finding]:
    try:
        import docker  # type: ignore[import-untyped]
        import requests
        from docker.constants import DEFAULT_UNIX_SOCKET  # type: ignore[import-untyped]
        from docker.errors import DockerException, NotFound  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        detail = f"the module {error.name} is missing"
        return [Finding("engine", detail, True, "install the extra: `pip install 'tether[docker]'`")]
    away = (DockerException, requests.RequestException, OSError)
    try:
        _reach(environ.get("DOCKER_HOST") or DEFAULT_UNIX_SOCKET)
        client = docker.from_env(timeout=ENGINE_S, environment=dict(environ))
    except away as error:
        return [_away(error)]
    try:
        found = [Finding("engine", f"version {client.version()['Version']}")]
        image, network = _setting(environ, "docker_image"), _setting(environ, "docker_network")
        try:
            client.images.get(image)
            found.append(Finding("image", image))
        except NotFound:
            remedy = "`make images` in a clone builds it; or pull one, and name it in TETHER_DOCKER_IMAGE"
            found.append(Finding("image", f"the engine has no image {image}", True, remedy))
        return [*found, _network(client, network, _setting(environ, "docker_nats_url"), NotFound)]
    except away as error:
        return [_away(error)]
    finally:
        client.close()


def _reach(host: str) -> None:
    """Raises OSError. Where nobody listens the SDK leaves a socket open."""
    path = re.sub(r"^(http\+)?unix:/*", "/", host)
    if path == host:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ENGINE_S)
        probe.connect(path)


def _network(client: Any, network: str, nats_url: str, missing: type[Exception]) -> Finding:
    if network == HOST:
        return Finding("network", "that of this machine: sandboxes reach the set's bus")
    try:
        client.networks.get(network)
    except missing:
        remedy = f"`docker network create {network}`, or TETHER_DOCKER_NETWORK=host for the bus of `tether up`"
        return Finding("network", f"the engine has no network {network}", True, remedy)
    if nats_url:
        return Finding("network", f"{network}; sandboxes reach the bus at {nats_url}")
    remedy = "TETHER_DOCKER_NETWORK=host, or TETHER_DOCKER_NATS_URL with an address that sandboxes reach"
    detail = f"in the network {network} a sandbox does not reach the bus of `tether up`, which listens on loopback"
    return Finding("network", detail, True, remedy)


def _away(error: Exception) -> Finding:
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return Finding("engine", f"it does not answer: {first}", True, "start it; DOCKER_HOST names another one")


def _setting(environ: Mapping[str, str], field: str) -> str:
    """As the agent service would read it."""
    default = AgentSettings.model_fields[field].default
    return environ.get(f"{_PREFIX}{field.upper()}") or ("" if default is None else str(default))
