"""Settings of the operator. `TETHER_OPERATOR_…`, beside those of every service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from tether.settings import ServiceSettings
from tether_operator.core.render import Template


class OperatorSettings(ServiceSettings):
    """`operator_resources`, `…_tolerations`, `…_egress`, `…_node_selector` are JSON, as Kubernetes has them."""

    operator_namespace: str = Field(default="default", description="where it looks after tasks and makes sandboxes")
    operator_image: str = Field(default="tether-sandbox:local", description="image of a sandbox that names none")
    operator_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="imagePullPolicy of sandboxes"
    )
    operator_pull_secrets: str = Field(default="", description="names of imagePullSecrets, separated by commas")
    operator_resources: str = Field(default="{}", description="resources of a sandbox's container, JSON")
    operator_node_selector: str = Field(default="{}", description="nodeSelector of sandboxes, JSON")
    operator_tolerations: str = Field(default="[]", description="tolerations of sandboxes, JSON")
    operator_runtime_class: str | None = Field(default=None, description="runtimeClassName of sandboxes, as gvisor")
    operator_storage_class: str | None = Field(default=None, description="storageClassName of claims that name none")
    operator_tmp_size: str = Field(default="1Gi", description="size of a sandbox's /tmp")
    operator_network_policy: bool = Field(default=True, description="make a NetworkPolicy for each sandbox")
    operator_bus_port: int = Field(default=4222, ge=1, le=65535, description="port of NATS that sandboxes may reach")
    operator_egress: str = Field(default="[]", description="further egress rules of that policy, JSON")
    operator_nodes: bool = Field(
        default=False, description="read nodes for the out-of-service taint; needs a ClusterRole to get nodes"
    )
    operator_liveness: str | None = Field(default=None, description="HOST:PORT of the liveness probe; unset: none")
    operator_kubeconfig: Path | None = Field(
        default=None, description="a kubeconfig; unset: the pod's own service account"
    )

    @field_validator("operator_resources", "operator_node_selector")
    @classmethod
    def _object(cls, value: str) -> str:
        return _checked(value, dict, "an object")

    @field_validator("operator_tolerations", "operator_egress")
    @classmethod
    def _list(cls, value: str) -> str:
        return _checked(value, list, "an array")

    def template(self) -> Template:
        """What sandboxes have in common."""
        tolerations: list[dict[str, Any]] = json.loads(self.operator_tolerations)
        egress: list[dict[str, Any]] = json.loads(self.operator_egress)
        return Template(
            image=self.operator_image,
            pull_policy=self.operator_pull_policy,
            pull_secrets=tuple(name.strip() for name in self.operator_pull_secrets.split(",") if name.strip()),
            resources=json.loads(self.operator_resources),
            tmp_size=self.operator_tmp_size,
            runtime_class=self.operator_runtime_class,
            node_selector=json.loads(self.operator_node_selector),
            tolerations=tuple(tolerations),
            storage_class=self.operator_storage_class,
            policy=self.operator_network_policy,
            bus_port=self.operator_bus_port,
            egress=tuple(egress),
        )


def _checked(value: str, kind: type, what: str) -> str:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise ValueError(f"must be {what} in JSON")
    return value
