"""AgentTasks and the Secrets of their boots, over lightkube: bounded in time, its errors one kind.

The client is the extra `kubernetes`; without it this module cannot be imported, and the service says so. The agent
service writes what is its own of a task (see `tether.kube`): the task itself where a workspace has none, the
annotations that ask for compute, and the Secret. Pods are the operator's.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Secret
from lightkube.types import PatchType

from tether import kube
from tether.errors import InvalidError
from tether.kube import AgentTaskSpec, AgentTaskStatus
from tether_agent.providers import NotReadyError

CALL_S: Final = 10.0  # of one request
MANAGER: Final = "tether-agent"
_AgentTask = create_namespaced_resource(kube.GROUP, kube.VERSION, kube.KIND, kube.PLURAL)


class KubeError(NotReadyError):
    """The API did not do it: it is away, slow, or refuses, and may do it later."""


@dataclass(frozen=True, slots=True)
class Task:
    """An AgentTask as far as compute is concerned."""

    name: str
    uid: str
    tenant: str
    workspace: str
    spec: AgentTaskSpec
    status: AgentTaskStatus
    annotations: Mapping[str, str]
    deleting: bool

    @property
    def boot(self) -> str:
        return self.annotations.get(kube.BOOT, "")

    @property
    def asked(self) -> bool:
        """Compute of its boot is asked for."""
        return self.annotations.get(kube.COMPUTE) == "run"

    def proof(self, boot: str) -> tuple[str, int | None] | None:
        """How it is known that nothing of this boot runs, and its collector's exit code; None where it is not."""
        ended = self.status.ended
        return None if ended is None or ended.boot != boot else (ended.proof, ended.code)

    def condition(self, kind: str) -> str:
        """What a condition says: `reason: message`, empty where it is not there."""
        return next((f"{one.reason}: {one.message}" for one in self.status.conditions if one.type == kind), "")


class Kube:
    """One namespace. Raises KubeError throughout."""

    def __init__(self, namespace: str, kubeconfig: Path | None) -> None:
        self._namespace = namespace
        self._kubeconfig = kubeconfig
        self._client: AsyncClient | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Raises KubeError where there is neither a kubeconfig nor a service account."""
        try:
            named = self._kubeconfig
            config = KubeConfig.from_service_account() if named is None else KubeConfig.from_file(named)
        except (ConfigError, OSError) as error:
            raise KubeError(f"no access to the Kubernetes API: {error}") from None
        timeout = httpx2.Timeout(CALL_S)
        client = AsyncClient(config, namespace=self._namespace, timeout=timeout, field_manager=MANAGER)
        self._client = client
        try:
            yield
        finally:
            self._client = None
            await client.close()

    async def tasks(self) -> list[Task]:
        """All of the namespace whose spec can be used."""
        try:
            found = [one async for one in self._api.list(_AgentTask, namespace=self._namespace)]
        except (ApiError, httpx2.HTTPError) as error:
            raise _refused("AgentTasks cannot be listed", error) from None
        return [task for one in found if (task := _task(one)) is not None]

    async def task(self, name: str) -> Task | None:
        try:
            return _task(await self._api.get(_AgentTask, name, namespace=self._namespace))
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise _refused(f"AgentTask {name} cannot be read", error) from None
        except httpx2.HTTPError as error:
            raise _refused(f"AgentTask {name} cannot be read", error) from None

    async def make_task(self, name: str, spec: AgentTaskSpec) -> Task:
        """One that is there already is taken as it is."""
        body = _AgentTask.from_dict(kube.manifest(name, self._namespace, spec, {}))
        try:
            await self._api.create(body)
        except ApiError as error:
            if error.status.code != 409:
                raise _refused(f"AgentTask {name} cannot be made", error) from None
        except httpx2.HTTPError as error:
            raise _refused(f"AgentTask {name} cannot be made", error) from None
        found = await self.task(name)
        if found is None:
            raise KubeError(f"AgentTask {name} was deleted in between")
        return found

    async def annotate(self, name: str, values: Mapping[str, str | None]) -> None:
        """None takes one away."""
        body = {"metadata": {"annotations": dict(values)}}
        try:
            await self._api.patch(_AgentTask, name, body, namespace=self._namespace, patch_type=PatchType.MERGE)
        except (ApiError, httpx2.HTTPError) as error:
            raise _refused(f"AgentTask {name} cannot be annotated", error) from None

    async def put_secret(self, task: Task, boot: str, files: Mapping[str, str]) -> None:
        """What the collectors of a boot are told; it goes with its task."""
        owner = {
            "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
            "kind": kube.KIND,
            "name": task.name,
            "uid": task.uid,
        }
        body: Any = Secret.from_dict(
            {
                "metadata": {
                    "name": kube.secret_name(task.name, boot),
                    "namespace": self._namespace,
                    "labels": {"app.kubernetes.io/managed-by": MANAGER, kube.TASK: task.uid},
                    "ownerReferences": [owner],
                },
                "type": kube.SECRET_TYPE,
                "stringData": dict(files),
            }
        )
        try:
            await self._api.apply(body, field_manager=MANAGER, force=True)
        except (ApiError, httpx2.HTTPError) as error:
            raise _refused(f"the Secret of boot {boot} cannot be written", error) from None

    async def drop_secret(self, task: str, boot: str) -> None:
        """Nothing where there is none."""
        try:
            await self._api.delete(Secret, kube.secret_name(task, boot), namespace=self._namespace)
        except ApiError as error:
            if error.status.code != 404:
                raise _refused(f"the Secret of boot {boot} cannot be deleted", error) from None
        except httpx2.HTTPError as error:
            raise _refused(f"the Secret of boot {boot} cannot be deleted", error) from None

    async def secret(self, name: str) -> dict[str, str] | None:
        """Its entries as texts; None where there is none."""
        try:
            found = await self._api.get(Secret, name, namespace=self._namespace)
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise _refused(f"Secret {name} cannot be read", error) from None
        except httpx2.HTTPError as error:
            raise _refused(f"Secret {name} cannot be read", error) from None
        return {key: base64.b64decode(value).decode("utf-8", "replace") for key, value in (found.data or {}).items()}

    @property
    def _api(self) -> AsyncClient:
        assert self._client is not None, "not connected"
        return self._client


def _task(found: Any) -> Task | None:
    """None where its spec cannot be used: the operator says so in its status."""
    meta = found.metadata
    assert isinstance(meta, ObjectMeta) and meta.name is not None
    try:
        spec = kube.spec_of(found.get("spec") or {})
    except InvalidError:
        return None
    return Task(
        name=meta.name,
        uid=meta.uid or "",
        tenant=spec.tenant,
        workspace=kube.workspace_of(meta.name, spec),
        spec=spec,
        status=kube.status_of(found.get("status")),
        annotations=dict(meta.annotations or {}),
        deleting=meta.deletionTimestamp is not None,
    )


def _refused(what: str, error: Exception) -> KubeError:
    why = error.status.message if isinstance(error, ApiError) else f"the API does not answer: {type(error).__name__}"
    return KubeError(f"{what}: {why}")
