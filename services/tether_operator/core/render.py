"""The objects that a task needs, as the API takes them. Pure.

A pod is what the provider `docker` makes as a container: the init over the collector, a read-only root, no capability,
no privilege to be gained, no token of the API; the workspace is the volume, what its collector is told is the boot's
Secret, also the model's keys: none stands in the pod. It is restarted by nobody: another boot is another pod.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from tether import kube
from tether.kube import AgentTaskSpec

WORKSPACE: Final = "/workspace"
TOLD: Final = "/run/tether"
USER: Final = 65532
CONTAINER: Final = "sandbox"
SANDBOXES: Final = {"app.kubernetes.io/component": "sandbox", "app.kubernetes.io/managed-by": "tether-operator"}
GRACE_BEYOND_DRAIN_S: Final = 60  # a drain's grace, then the checkpoint and the tail


@dataclass(frozen=True, slots=True)
class Template:
    """What this installation's sandboxes have in common. `resources`: requests and limits as in a container's spec.
    `egress`: rules of a NetworkPolicy beside DNS and the bus. `bus_port`: of NATS."""

    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    resources: dict[str, Any] = field(default_factory=dict)
    tmp_size: str = "1Gi"
    runtime_class: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    storage_class: str | None = None
    policy: bool = True
    bus_port: int = 4222
    egress: tuple[dict[str, Any], ...] = ()


def labels(task: str, uid: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "tether",
        **SANDBOXES,
        kube.TASK: uid,
        "tether.dev/name": task if len(task) <= 63 else task[:60].rstrip("-.") + "-x",
    }


def owner(task: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
        "kind": kube.KIND,
        "name": task,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def claim(task: str, uid: str, namespace: str, spec: AgentTaskSpec, template: Template) -> dict[str, Any]:
    """Owned by nobody: whether it goes with the task is decided at the task's deletion."""
    volume: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": spec.workspace.size}},
    }
    storage_class = spec.workspace.storage_class_name or template.storage_class
    if storage_class is not None:
        volume["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": kube.claim_name(task), "namespace": namespace, "labels": labels(task, uid)},
        "spec": volume,
    }


def policy(task: str, uid: str, namespace: str, template: Template) -> dict[str, Any]:
    """Nobody reaches the sandbox; it reaches names, the bus, and what the installation allows beside."""
    egress: list[dict[str, Any]] = [
        {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        {"ports": [{"port": template.bus_port, "protocol": "TCP"}]},
        *template.egress,
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": kube.policy_name(task),
            "namespace": namespace,
            "labels": labels(task, uid),
            "ownerReferences": [owner(task, uid)],
        },
        "spec": {
            "podSelector": {"matchLabels": {kube.TASK: uid}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }


def pod(task: str, uid: str, namespace: str, boot: str, spec: AgentTaskSpec, template: Template) -> dict[str, Any]:
    grace_s = int(kube.seconds(spec.lifecycle.drain_grace)) + GRACE_BEYOND_DRAIN_S
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.agent.image or template.image,
        "imagePullPolicy": template.pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "workspace", "mountPath": WORKSPACE},
            {"name": "told", "mountPath": TOLD, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if template.resources:
        container["resources"] = template.resources
    found: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {
                "name": "workspace",
                "persistentVolumeClaim": {"claimName": spec.workspace.claim or kube.claim_name(task)},
            },
            {"name": "told", "secret": {"secretName": kube.secret_name(task, boot), "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {"sizeLimit": template.tmp_size}},
        ],
    }
    optional = {
        "imagePullSecrets": [{"name": name} for name in template.pull_secrets],
        "runtimeClassName": template.runtime_class,
        "nodeSelector": template.node_selector,
        "tolerations": list(template.tolerations),
    }
    found.update({name: value for name, value in optional.items() if value})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": kube.pod_name(task, boot),
            "namespace": namespace,
            "labels": labels(task, uid),
            "annotations": {kube.BOOT: boot},
            "finalizers": [kube.PROOF],
            "ownerReferences": [owner(task, uid)],
        },
        "spec": found,
    }
