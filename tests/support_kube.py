"""A real Kubernetes API (etcd, kube-apiserver) for tests, and a kubelet that is ours: it runs each pod's collector as a
process of this machine, ends it when the pod is deleted, and reports its end as a kubelet does.

The API is real, so are schema, finalizers, conflicts and garbage; nodes are not. Binaries are found in
`TETHER_TEST_KUBE_BIN` or `~/.cache/tether-k8s/bin` (etcd on PATH); without them the tests skip and say so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from support_nats import wait_until
from tether import kube, topology
from tether.bus import NatsBus, connect
from tether.client import Client
from tether_agent.agents import AgentConfig, AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.providers.kubernetes import KubernetesProvider
from tether_agent.service import working
from tether_operator.core import render
from tether_router.config import RouterSettings
from tether_router.service import route

ROOT: Final = Path(__file__).resolve().parents[1]
NAMESPACE: Final = "agents"
NODE: Final = "node1"
DEADLINE_S: Final = 60.0
_INIT: Final = ROOT / "services" / "tether_collector" / "init" / "__main__.py"


def binaries() -> tuple[str, str]:
    """etcd and kube-apiserver; skips where they are not there."""
    folder = Path(os.environ.get("TETHER_TEST_KUBE_BIN", Path.home() / ".cache" / "tether-k8s" / "bin"))
    etcd = shutil.which("etcd") or str(folder / "etcd")
    server = folder / "kube-apiserver"
    if not Path(etcd).exists() or not server.exists():
        pytest.skip("no etcd and kube-apiserver are installed here: see tools/k8s/README.md")
    return etcd, str(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(eq=False)
class Api:
    """The API over plain requests: what a test does and asks as its own user. `kubeconfig` is for others."""

    url: str
    token: str
    kubeconfig: Path

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """None where there is no such object. Raises urllib.error.HTTPError otherwise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        request.add_header("Content-Type", kind)
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()[:500]}") from None

    async def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        return await asyncio.to_thread(self.call, method, path, body, kind)

    async def merge(self, path: str, body: Any) -> Any:
        return await self.ask("PATCH", path, body, "application/merge-patch+json")


def core_path(kind: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/{kind}" + (f"/{name}" if name else "")


def task_path(name: str = "") -> str:
    return f"/apis/{kube.GROUP}/{kube.VERSION}/namespaces/{NAMESPACE}/{kube.PLURAL}" + (f"/{name}" if name else "")


@contextmanager
def running_api(root: Path) -> Iterator[Api]:
    """With the resource and the namespace in it."""
    etcd, server = binaries()
    root.mkdir(parents=True, exist_ok=True)
    peer, client, port, token = _free_port(), _free_port(), _free_port(), secrets.token_hex(16)
    (root / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    key = root / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    public = subprocess.run(["openssl", "rsa", "-in", str(key), "-pubout"], check=True, capture_output=True).stdout
    (root / "sa.pub").write_bytes(public)
    store = [etcd, f"--data-dir={root / 'etcd'}", f"--listen-client-urls=http://127.0.0.1:{client}"]
    store += [f"--advertise-client-urls=http://127.0.0.1:{client}", f"--listen-peer-urls=http://127.0.0.1:{peer}"]
    store += [f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}", "--unsafe-no-fsync"]
    store += [f"--initial-cluster=default=http://127.0.0.1:{peer}"]
    serve = [server, f"--etcd-servers=http://127.0.0.1:{client}", "--bind-address=127.0.0.1"]
    serve += [f"--secure-port={port}", f"--cert-dir={root / 'certs'}", f"--token-auth-file={root / 'tokens.csv'}"]
    serve += [f"--service-account-key-file={root / 'sa.pub'}", f"--service-account-signing-key-file={key}"]
    serve += ["--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC"]
    serve += ["--service-cluster-ip-range=10.96.0.0/16", "--disable-admission-plugins=ServiceAccount"]
    url = f"https://127.0.0.1:{port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "current-context": "x",
    }
    (root / "kubeconfig").write_text(yaml.safe_dump(config))
    api = Api(url, token, root / "kubeconfig")
    with contextlib.ExitStack() as stack:
        for name, command in (("etcd", store), ("apiserver", serve)):
            log = stack.enter_context((root / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_until(lambda: _ready(api), "the API", 60.0)
        crd = yaml.safe_load((ROOT / "deploy" / "crds" / "agenttask.yaml").read_text(encoding="utf-8"))
        api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        wait_until(lambda: api.call("GET", task_path()) is not None, "the resource", 30.0)
        yield api


def _ready(api: Api) -> bool:
    try:
        api.call("GET", "/api/v1/namespaces/default")
    except (OSError, AssertionError):
        return False
    return True


@dataclass(eq=False)
class _Pod:
    process: asyncio.subprocess.Process
    folder: Path
    code: int | None = None


@dataclass(eq=False)
class Kubelet:
    """Runs the pods of the namespace. `away`: it neither looks nor reports, as behind a cut network; what it has
    started lives on."""

    api: Api
    root: Path
    prefix: str
    away: bool = False
    pods: dict[str, _Pod] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    overlaps: list[set[str]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            if not self.away:
                found = await self.api.ask("GET", core_path("pods"))
                for pod in found["items"]:
                    if pod["metadata"]["name"].startswith(self.prefix):  # one API serves several tests
                        await self._look(pod)
            living = {name for name, one in self.pods.items() if one.code is None}
            for group in self._by_claim(living).values():
                if len(group) > 1 and group not in self.overlaps:
                    self.overlaps.append(group)
            await asyncio.sleep(0.1)

    def _by_claim(self, names: set[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in names:
            found.setdefault(str(self.pods[name].folder), set()).add(name)
        return found

    async def _look(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        known = self.pods.get(name)
        if known is None:
            if "deletionTimestamp" not in pod["metadata"] or pod["spec"].get("nodeName"):
                await self._start(pod)
        elif known.code is None:
            if "deletionTimestamp" in pod["metadata"] and known.process.returncode is None:
                if pod["metadata"].get("deletionGracePeriodSeconds") == 1:
                    _end(known.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    known.process.send_signal(signal.SIGTERM)
            if known.process.returncode is not None:
                known.code = known.process.returncode
                await self._report(name, {"terminated": {"exitCode": known.code, "reason": "Completed"}}, "Failed")
        elif "deletionTimestamp" in pod["metadata"] and pod["metadata"].get("deletionGracePeriodSeconds") != 0:
            await self.api.ask("DELETE", core_path("pods", name), {"gracePeriodSeconds": 0})  # as a kubelet does

    async def _start(self, pod: dict[str, Any]) -> None:
        name, spec = pod["metadata"]["name"], pod["spec"]
        volumes = {one["name"]: one for one in spec["volumes"]}
        claim = volumes["workspace"]["persistentVolumeClaim"]["claimName"]
        if await self.api.ask("GET", core_path("persistentvolumeclaims", claim)) is None:
            return
        told = await self.api.ask("GET", core_path("secrets", volumes["told"]["secret"]["secretName"]))
        if told is None:
            return
        await self.api.ask(
            "POST",
            core_path("pods", f"{name}/binding"),
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"kind": "Node", "name": NODE},
            },
        )
        files, workspace = self.root / "told" / name, self.root / "claims" / claim
        for folder in (files, workspace):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for key, value in told["data"].items():
            text = base64.b64decode(value).decode()
            text = text.replace(render.TOLD, str(files)).replace(f'"{render.WORKSPACE}"', f'"{workspace}"')
            (files / key).write_text(text)
            (files / key).chmod(0o600)
        log = (self.root / f"{name}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(_INIT), "run", str(files), "--", sys.executable, "-m", "tether_collector"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
        log.close()
        self.pods[name] = _Pod(process, workspace)
        self.started.append(name)
        await self._report(name, {"running": {}}, "Running")

    async def _report(self, name: str, state: dict[str, Any], phase: str) -> None:
        ready = "True" if "running" in state else "False"
        container = {"name": render.CONTAINER, "state": state, "ready": ready == "True", "restartCount": 0}
        status = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{**container, "image": "i", "imageID": "i"}],
        }
        await self.api.ask(
            "PATCH", core_path("pods", f"{name}/status"), {"status": status}, "application/strategic-merge-patch+json"
        )

    def kill(self, name: str) -> None:
        """The whole pod, at once."""
        _end(self.pods[name].process.pid)

    def close(self) -> None:
        for one in self.pods.values():
            if one.process.returncode is None:
                _end(one.process.pid)


def _end(pid: int) -> None:
    """A process and all below it: with a pod's first process everything in it ends."""
    below = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in below:
        _end(int(child))


@dataclass(eq=False)
class Cluster:
    """Everything that a task needs: API, kubelet, bus, router, agent service; the operator is the test's to kill."""

    api: Api
    kubelet: Kubelet
    bus: NatsBus
    nats_url: str
    tenant: str
    root: Path
    client: Client
    agent_over: asyncio.Event
    operator: asyncio.subprocess.Process | None = None
    lines_of: list[Path] = field(default_factory=list)

    async def start_operator(self, **variables: str) -> None:
        log = self.root / f"operator-{len(self.lines_of)}.log"
        self.lines_of.append(log)
        with log.open("ab") as file:
            self.operator = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tether_operator"),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "TETHER_NATS_URL": self.nats_url,
                    "TETHER_OPERATOR_NAMESPACE": NAMESPACE,
                    "TETHER_OPERATOR_KUBECONFIG": str(self.api.kubeconfig),
                    "TETHER_OPERATOR_NODES": "true",
                    **variables,
                },
                stdout=file,
                stderr=file,
            )

    async def stop_operator(self) -> None:
        if self.operator is not None and self.operator.returncode is None:
            self.operator.kill()
            await self.operator.wait()

    @property
    def operator_log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.lines_of)[-6000:]

    async def apply(self, name: str, spec: dict[str, Any]) -> None:
        body = {
            "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
            "kind": kube.KIND,
            "metadata": {"name": name, "namespace": NAMESPACE, "finalizers": [kube.DRAIN]},
            "spec": {"tenant": self.tenant, **spec},
        }
        await self.api.ask("POST", task_path(), body)

    async def task(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self.api.ask("GET", task_path(name))
        return found

    async def until(self, condition: Any, what: str, timeout_s: float = DEADLINE_S) -> Any:
        """The first true answer of an async condition."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := await condition()):  # noqa: ASYNC110 - conditions of other processes
                    await asyncio.sleep(0.1)
        except TimeoutError:
            tasks = await self.api.ask("GET", task_path())
            states = [(one["metadata"]["name"], one.get("status")) for one in tasks["items"]]
            raise TimeoutError(f"{what} did not happen: {states}\n{self.operator_log}") from None
        return found

    async def phase(self, name: str, *wanted: str) -> dict[str, Any]:
        async def there() -> Any:
            task = await self.task(name)
            return task if task is not None and task.get("status", {}).get("phase") in wanted else None

        found: dict[str, Any] = await self.until(there, f"{name} in {wanted}")
        return found

    async def gone(self, name: str, timeout_s: float = DEADLINE_S) -> None:
        async def there() -> bool:
            return await self.task(name) is None

        await self.until(there, f"the end of {name}", timeout_s)

    async def events(self, name: str) -> dict[str, str]:
        """Reason → message."""
        found = await self.api.ask("GET", core_path("events"))
        return {one["reason"]: one["message"] for one in found["items"] if one["involvedObject"]["name"] == name}


@asynccontextmanager
async def cluster(api: Api, nats_url: str, tenant: str, root: Path) -> AsyncIterator[Cluster]:
    """Router and agent service in this process; no operator yet."""
    settings = AgentSettings(
        nats_url=nats_url,
        tenants=tenant,
        agent_provider="kubernetes",
        agent_state_dir=root / "agent",
        agent_workspaces_dir=root / "workspaces",
        kubernetes_namespace=NAMESPACE,
        kubernetes_kubeconfig=api.kubeconfig,
        agent_ready_wait_s=DEADLINE_S,
    )
    scripted = AgentConfig(command=(sys.executable, "-I", "-S", str(ROOT / "tools" / "scripted_agent")))
    agents = AgentsFile(agents={"scripted": scripted})
    async with await connect(nats_url, name="kube-test") as bus:
        await bus.ensure(topology.base())
        await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
        provider = KubernetesProvider(settings, agents, Environment({}, {}, {}), bus)
        kubelet = Kubelet(api, root / "node", f"task-{tenant}")
        kubelet.root.mkdir(parents=True)
        async with Client.nats(bus, tenant=tenant) as client:
            found = Cluster(api, kubelet, bus, nats_url, tenant, root, client, asyncio.Event())
            stop, serves = asyncio.Event(), asyncio.Event()

            async def serve_agents() -> None:
                async with provider.running(), working(bus, provider, settings):
                    serves.set()
                    await found.agent_over.wait()

            router = RouterSettings(nats_url=nats_url, tenants=tenant)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(kubelet.run(), name="kubelet")]
                tasks.append(group.create_task(route(bus, router, stop), name="router"))
                tasks.append(group.create_task(serve_agents(), name="agent-service"))
                await serves.wait()
                try:
                    yield found
                finally:
                    await found.stop_operator()
                    tasks[0].cancel()
                    kubelet.close()
                    found.agent_over.set()
                    stop.set()
