"""The set under chaos: each service behind a proxy of its own, or a cluster of three nats-servers; starts noted.

one nats-server      router, agent service (and through it its collectors), backend: a `NatsProxy` each
three, as a cluster  streams have three replicas; services know all three; "nats" is whichever of them is chosen
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from tether.nats_authority import Keys
from tether.processes import ProcessId
from tether.service import write_whole
from tether_chaos.proxy import NatsProxy
from tether_cli import nats_server
from tether_cli.nats_server import EmbeddedServer
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import Paths
from tether_cli.supervise import ChildSpec, inherited

PROXIED: Final = ("router", "agent", "backend")
NODES: Final = 3
PLACES: Final = 64  # for running executions: enough for every round, so that places are taken and freed under fault


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _ClusterNode(EmbeddedServer):
    """One server of the cluster, with a folder of its own below the set's."""

    def __init__(self, paths: Paths, own: Keys, tenants: Sequence[str], number: int, routes: list[int]) -> None:
        super().__init__(paths, own, tenants)
        self._folder = paths.nats / f"n{number}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.port = _free_port()
        self._number = number
        self._routes = routes

    def write_config(self) -> None:
        super().write_config()
        peers = ", ".join(json.dumps(f"nats://127.0.0.1:{port}") for port in self._routes)
        text = self.config.read_text(encoding="utf-8")
        text = text.replace('server_name: "tether"', f'server_name: "n{self._number}"')
        listen = f"127.0.0.1:{self._routes[self._number]}"
        text += f'cluster {{ name: "tether", listen: "{listen}", routes: [{peers}], no_advertise: true }}\n'
        write_whole(self.config, text.encode())


class _ClusterView(EmbeddedServer):
    """What services are told: all servers."""

    def __init__(self, paths: Paths, own: Keys, tenants: Sequence[str], nodes: list[_ClusterNode]) -> None:
        super().__init__(paths, own, tenants)
        self._nodes = nodes

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{node.port}" for node in self._nodes)


class ChaosSet(ServiceSet):
    """`nodes`: 1 or 3 nats-servers. `backend_environment`: further settings of the backend. `ups`: when each start of a
    child was ready (unix seconds), by name."""

    def __init__(
        self, options: SetOptions, *, nodes: int = 1, backend_environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(options)
        self.nodes = nodes
        self._backend_environment = dict(backend_environment or {})
        self.ups: dict[str, dict[ProcessId, float]] = defaultdict(dict)
        self.proxies: dict[str, NatsProxy] = {}
        self._server: EmbeddedServer | None = None
        self._network = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self.nodes == 1:
            for tier in PROXIED:
                proxy = NatsProxy(tier, self._server_port)
                self.proxies[tier] = await self._network.enter_async_context(proxy.running())
        try:
            return await super().__aenter__()
        except BaseException:
            await self._network.aclose()
            raise

    async def _stop(self) -> None:
        await super()._stop()
        await self._network.aclose()

    def _server_port(self) -> int:
        assert self._server is not None
        return self._server.port

    async def _start_bus(self, own: Keys) -> EmbeddedServer:
        if self.nodes == 1:
            self._server = await super()._start_bus(own)
            return self._server
        routes = [_free_port() for _ in range(self.nodes)]
        nodes = [_ClusterNode(self.paths, own, self.bus_tenants, number, routes) for number in range(self.nodes)]
        for node in nodes:
            node.prepare()
        async with asyncio.TaskGroup() as group:
            for number, node in enumerate(nodes):
                group.create_task(self._run(self._node_spec(number, node)), name=f"start-nats{number}")
        return _ClusterView(self.paths, own, self.bus_tenants, nodes)

    def _node_spec(self, number: int, node: _ClusterNode) -> ChildSpec:
        def started(facts: dict[str, Any]) -> None:
            node.started(facts)
            self._note_children()

        return ChildSpec(
            name=f"nats{number}",
            argv=(str(nats_server.find_binary()), "-c", str(node.config)),
            env=inherited(os.environ, everything=False),
            log=self.paths.logs / f"nats{number}.log",
            ready=node.ready,
            restarted=started,
            json_lines=False,
            file_only="[INF]",
        )

    def _service_spec(self, name: str, server: EmbeddedServer, own: Keys) -> ChildSpec:
        spec = super()._service_spec(name, server, own)
        if name in self.proxies:
            spec.env["TETHER_NATS_URL"] = self.proxies[name].url
        if name == "backend":
            spec.env.update(self._backend_environment)
        if name == "router":
            spec.env["TETHER_ROUTER_QUOTA_RUNNING_EXECUTIONS"] = str(PLACES)
        if self.nodes > 1:
            spec.env["TETHER_REPLICAS"] = str(self.nodes)
        return spec

    def _note_children(self) -> None:
        now_s = time.time()
        for name, child in self._children.items():
            if child.identity is not None:
                self.ups[name].setdefault(child.identity, now_s)
        super()._note_children()

    async def _stop_child(self, name: str) -> None:
        if name == "nats" and self.nodes > 1:
            for number in range(self.nodes):
                await super()._stop_child(f"nats{number}")
            return
        await super()._stop_child(name)
