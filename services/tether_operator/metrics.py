"""Metrics of the operator."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter

from tether.metrics import REGISTRY

looks: Final = Counter("tether_operator_looks", "Looks at a task that were carried through", registry=REGISTRY)
failures: Final = Counter(
    "tether_operator_failures", "Looks at a task that the Kubernetes API refused or did not answer", registry=REGISTRY
)
