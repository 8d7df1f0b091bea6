"""The Kubernetes API as the operator uses it: one look at a task, and its effects. Every write may be repeated.

Status and annotations are merged (`PATCH`), and only what is the operator's: the agent service writes its annotations
beside. A finalizer is taken away with the object's resourceVersion, so that of two writers one sees the other.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import structlog
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Node, PersistentVolumeClaim, Pod, Secret
from lightkube.resources.networking_v1 import NetworkPolicy
from lightkube.types import CascadeType, PatchType

from tether import kube
from tether.kube import AgentTaskStatus
from tether_operator.config import OperatorSettings
from tether_operator.core import render
from tether_operator.core.phase import PodSeen

MANAGER: Final = "tether-operator"
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
STRIP_TRIES: Final = 5  # of a task that another changes at the same time
NOTES: Final = "tether.dev/operator"  # annotation: what the operator remembers of a task, JSON
AgentTask = create_namespaced_resource(kube.GROUP, kube.VERSION, kube.KIND, kube.PLURAL)
_log = structlog.get_logger("tether_operator")


@dataclass(frozen=True, slots=True)
class Seen:
    """A task and its objects, as the API has them."""

    name: str
    uid: str
    generation: int
    version: str
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    annotations: Mapping[str, str]
    finalizers: tuple[str, ...]
    deleting_since: float | None
    pods: tuple[PodSeen, ...]
    claim: bool
    policy: bool
    told: bool


class Cluster:
    """One namespace."""

    def __init__(self, client: AsyncClient, settings: OperatorSettings) -> None:
        self._client = client
        self._settings = settings
        self._namespace = settings.operator_namespace
        self._template = settings.template()

    async def look(self, name: str) -> Seen | None:
        """None where there is no such task. Raises ApiError."""
        task = await self._get(AgentTask, name)
        if task is None:
            return None
        meta = task.metadata
        annotations = dict(meta.annotations or {})
        boot = annotations.get(kube.BOOT, "")
        policy = not self._template.policy or await self._get(NetworkPolicy, kube.policy_name(name)) is not None
        return Seen(
            name=name,
            uid=meta.uid,
            generation=meta.generation or 0,
            version=meta.resourceVersion,
            spec=dict(task.get("spec") or {}),
            status=dict(task.get("status") or {}),
            annotations=annotations,
            finalizers=tuple(meta.finalizers or ()),
            deleting_since=None if meta.deletionTimestamp is None else meta.deletionTimestamp.timestamp(),
            pods=tuple([await self._pod(pod) async for pod in self.pods_of(meta.uid)]),
            claim=await self._get(PersistentVolumeClaim, kube.claim_name(name)) is not None,
            policy=policy,
            told=bool(boot) and await self._get(Secret, kube.secret_name(name, boot)) is not None,
        )

    async def names(self) -> list[str]:
        return [_meta(task).name or "" async for task in self._client.list(AgentTask, namespace=self._namespace)]

    async def pods_of(self, uid: str) -> AsyncIterator[Pod]:
        async for pod in self._client.list(Pod, namespace=self._namespace, labels={kube.TASK: uid}):
            yield pod

    async def orphans(self, tasks: Sequence[str]) -> list[PodSeen]:
        """Pods whose task is gone; `tasks` are the uids of those that are there."""
        selector: dict[str, Any] = render.SANDBOXES
        found = []
        async for pod in self._client.list(Pod, namespace=self._namespace, labels=selector):
            if (_meta(pod).labels or {}).get(kube.TASK, "") not in tasks:
                found.append(await self._pod(pod))
        return found

    async def uids(self) -> list[str]:
        return [_meta(task).uid or "" async for task in self._client.list(AgentTask, namespace=self._namespace)]

    # --- effects ---

    async def hold(self, seen: Seen) -> None:
        await self._finalizers(AgentTask, seen.name, seen.version, [*seen.finalizers, kube.DRAIN])

    async def release(self, seen: Seen) -> None:
        kept = [one for one in seen.finalizers if one != kube.DRAIN]
        await self._finalizers(AgentTask, seen.name, seen.version, kept)

    async def make_claim(self, seen: Seen) -> None:
        body = render.claim(seen.name, seen.uid, self._namespace, kube.spec_of(seen.spec), self._template)
        await self._create(PersistentVolumeClaim.from_dict(body))

    async def make_policy(self, seen: Seen) -> None:
        await self._create(NetworkPolicy.from_dict(render.policy(seen.name, seen.uid, self._namespace, self._template)))

    async def make_pod(self, seen: Seen, boot: str) -> None:
        spec = kube.spec_of(seen.spec)
        await self._create(Pod.from_dict(render.pod(seen.name, seen.uid, self._namespace, boot, spec, self._template)))

    async def end_pod(self, name: str, *, at_once: bool = False) -> None:
        await self._delete(Pod, name, 1 if at_once else None)  # 0 would take the object away from the kubelet

    async def delete_claim(self, name: str) -> None:
        await self._delete(PersistentVolumeClaim, kube.claim_name(name))

    async def release_pod(self, name: str) -> None:
        pod = await self._get(Pod, name)
        if pod is not None:
            kept = [one for one in pod.metadata.finalizers or () if one != kube.PROOF]
            await self._finalizers(Pod, name, pod.metadata.resourceVersion, kept)

    async def delete_task(self, name: str) -> None:
        await self._delete(AgentTask, name)

    async def strip(self, name: str) -> tuple[str, ...]:
        """Take the finalizers of a task and its pods away, also where nothing proves that the pods have ended. Returns
        those pods' names. A conflict is met with another look."""
        unproven: list[str] = []
        for _ in range(STRIP_TRIES):
            task = await self._get(AgentTask, name)
            if task is None:
                break
            held = []
            async for pod in self.pods_of(task.metadata.uid):
                seen = await self._pod(pod)
                if seen.held:
                    held.append(seen.name)
                    if seen.terminated is None and seen.name not in unproven:
                        unproven.append(seen.name)
                    await self.release_pod(seen.name)
            finalizers = tuple(task.metadata.finalizers or ())
            if kube.DRAIN not in finalizers and not held:
                break
            kept = [one for one in finalizers if one != kube.DRAIN]
            await self._finalizers(AgentTask, name, task.metadata.resourceVersion, kept)
        return tuple(unproven)

    async def tell(self, name: str, status: AgentTaskStatus) -> None:
        """Merge into the status subresource; a field that is None is taken away."""
        body = {"status": status.model_dump(mode="json", by_alias=True)}
        await self._patch(AgentTask.Status, name, body)

    async def note(self, name: str, text: str) -> None:
        await self._patch(AgentTask, name, {"metadata": {"annotations": {NOTES: text}}})

    async def tell_event(self, seen: Seen, kind: str, reason: str, message: str) -> None:
        """The same reason of a task is told once: its name is made of both."""
        now = datetime.datetime.now(datetime.UTC)
        event = Event(
            metadata=ObjectMeta(name=f"{seen.name[:200]}.{seen.uid[:8]}.{reason.lower()}", namespace=self._namespace),
            involvedObject=_reference(seen, self._namespace),
            type=kind,
            reason=reason,
            message=message[:1000],
            count=1,
            firstTimestamp=now,
            lastTimestamp=now,
            source={"component": MANAGER},  # type: ignore[arg-type]
        )
        await self._create(event)

    # --- the API ---

    async def _pod(self, pod: Pod) -> PodSeen:
        status, meta = pod.status, _meta(pod)
        spec = pod.spec
        node = (spec.nodeName if spec is not None else None) or ""
        code: int | None = None
        reason = (status.reason if status is not None else None) or ""
        for one in (status.containerStatuses if status is not None else None) or ():
            if one.name == render.CONTAINER and one.state is not None and one.state.terminated is not None:
                code, reason = one.state.terminated.exitCode, reason or one.state.terminated.reason or ""
        conditions = (status.conditions if status is not None else None) or ()
        return PodSeen(
            name=meta.name or "",
            boot=(meta.annotations or {}).get(kube.BOOT, ""),
            phase=(status.phase if status is not None else None) or "Pending",
            ready=any(one.type == "Ready" and one.status == "True" for one in conditions),
            deleting=meta.deletionTimestamp is not None,
            terminated=code,
            node=node,
            node_out=bool(node) and self._settings.operator_nodes and await self._is_out(node),
            held=kube.PROOF in (meta.finalizers or ()),
            reason="" if reason == "Completed" else reason,
        )

    async def _is_out(self, node: str) -> bool:
        try:
            found = await self._client.get(Node, node)
        except ApiError as error:
            if error.status.code == 404:
                return False  # an absent node proves nothing
            raise
        taints = (found.spec.taints if found.spec is not None else None) or ()
        return any(taint.key == OUT_OF_SERVICE for taint in taints)

    async def _get(self, kind: Any, name: str) -> Any:
        try:
            return await self._client.get(kind, name, namespace=self._namespace)
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise

    async def _create(self, thing: Any) -> None:
        try:
            await self._client.create(thing)
        except ApiError as error:
            if error.status.code != 409:  # it is there from before a crash
                raise

    async def _delete(self, kind: Any, name: str, grace_s: int | None = None) -> None:
        how: dict[str, Any] = {"namespace": self._namespace, "cascade": CascadeType.BACKGROUND, "grace_period": grace_s}
        try:
            await self._client.delete(kind, name, **how)
        except ApiError as error:
            if error.status.code != 404:
                raise

    async def _patch(self, kind: Any, name: str, body: dict[str, Any]) -> None:
        try:
            await self._client.patch(
                kind, name, body, namespace=self._namespace, patch_type=PatchType.MERGE, field_manager=MANAGER
            )
        except ApiError as error:
            if error.status.code != 404:
                raise

    async def _finalizers(self, kind: Any, name: str, version: str, wanted: Sequence[str]) -> None:
        """A conflict is left to the next look."""
        body = {"metadata": {"finalizers": list(wanted), "resourceVersion": version}}
        try:
            await self._patch(kind, name, body)
        except ApiError as error:
            if error.status.code != 409:
                raise
            _log.info("finalizer_conflict", object=name)


def _meta(thing: Any) -> ObjectMeta:
    """What the API has always: the client's types leave it open."""
    meta = thing.metadata
    assert isinstance(meta, ObjectMeta)
    return meta


def _reference(seen: Seen, namespace: str) -> Any:
    return {
        "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
        "kind": kube.KIND,
        "name": seen.name,
        "namespace": namespace,
        "uid": seen.uid,
    }


@asynccontextmanager
async def connected(settings: OperatorSettings) -> AsyncIterator[Cluster]:
    """Raises ConfigError where there is neither a kubeconfig nor a service account."""
    if settings.operator_kubeconfig is not None:
        config = KubeConfig.from_file(settings.operator_kubeconfig)
    else:
        config = KubeConfig.from_service_account()
    client = AsyncClient(config=config, namespace=settings.operator_namespace, field_manager=MANAGER)
    try:
        yield Cluster(client, settings)
    finally:
        await client.close()
