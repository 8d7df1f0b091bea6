"""What every pod of the chart must be, and what the services are told: settings that they know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support_chart import NAMES, named, objects, pods, rendered
from tether.settings import ServiceSettings, load
from tether_agent.config import AgentSettings
from tether_backend.config import BackendSettings
from tether_operator.config import OperatorSettings
from tether_router.config import RouterSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "backend": BackendSettings,
    "router": RouterSettings,
    "agent": AgentSettings,
    "operator": OperatorSettings,
    "topology": RouterSettings,
    "release-all": OperatorSettings,
}
TALKS_TO_THE_API = {"Deployment/demo-tether-agent", "Deployment/demo-tether-operator", "Job/demo-tether-uninstall"}


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_is_restricted_and_has_a_token_of_the_api_only_where_it_needs_one(name: str) -> None:
    for pod, spec in pods(rendered(name)).items():
        assert spec["automountServiceAccountToken"] is (pod in TALKS_TO_THE_API), pod
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod
        assert context["runAsUser"] == 65532, pod
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, pod
        assert not any("hostPath" in volume for volume in spec.get("volumes", ())), pod


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_for_long_is_asked_whether_it_is_ready_and_alive_and_has_time_to_end(name: str) -> None:
    for pod, spec in pods(rendered(name)).items():
        if pod.startswith(("Deployment/", "StatefulSet/")):
            assert spec["terminationGracePeriodSeconds"] >= 30, pod
            for container in spec["containers"]:
                assert {"readinessProbe", "livenessProbe"} <= set(container), pod


@pytest.mark.parametrize("name", NAMES)
def test_services_know_every_setting_that_they_are_given(name: str) -> None:
    seen = set()
    for spec in pods(rendered(name)).values():
        for container in spec["containers"]:
            model = SETTINGS.get(container["name"])
            if model is not None:
                load(model, {one["name"]: one.get("value", "from-a-secret") for one in container["env"]})
                seen.add(container["name"])
    assert {"backend", "router", "agent", "operator", "release-all"} <= seen


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_stands_in_a_pod_or_a_configuration(name: str) -> None:
    for one in objects(rendered(name)):
        if one["kind"] != "Secret":
            assert "tether:secret@" not in str(one), one["metadata"]["name"]
    for spec in pods(rendered(name)).values():
        for container in spec["containers"]:
            for env in container.get("env", ()):
                if env["name"] in ("TETHER_NATS_PASSWORD", "BUS_PASSWORD"):
                    assert "value" not in env


@pytest.mark.parametrize("name", NAMES)
def test_a_selector_finds_the_pods_of_its_own_workload_and_holds_no_version(name: str) -> None:
    found = [one for one in objects(rendered(name)) if one["kind"] in ("Deployment", "StatefulSet")]
    for one in found:
        selector = one["spec"]["selector"]["matchLabels"]
        assert "app.kubernetes.io/version" not in selector
        matched = [
            other["metadata"]["name"]
            for other in found
            if selector.items() <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert matched == [one["metadata"]["name"]]


def _strategy(text: str, name: str) -> dict[str, Any]:
    found = named(text, "Deployment", name)["spec"]["strategy"]
    assert isinstance(found, dict)
    return found


def test_rollouts_lose_no_replica_but_where_one_at_a_time_holds_a_volume() -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert _strategy(rendered("default"), "demo-tether-router") == rolling
    assert _strategy(rendered("postgres"), "demo-tether-backend") == rolling
    for name in ("agent", "operator", "backend"):
        assert _strategy(rendered("default"), f"demo-tether-{name}") == {"type": "Recreate"}


def test_budgets_are_made_for_several_replicas_and_never_for_one() -> None:
    def budgets(name: str) -> set[str]:
        found = objects(rendered(name))
        return {one["metadata"]["name"] for one in found if one["kind"] == "PodDisruptionBudget"}

    assert budgets("default") == set()
    assert budgets("ha") == {"demo-tether-backend", "demo-tether-router", "demo-nats"}


def test_what_is_scaled_by_another_has_no_replicas_of_its_own() -> None:
    assert "replicas" not in named(rendered("ha"), "Deployment", "demo-tether-router")["spec"]
    assert "replicas" not in named(rendered("postgres"), "Deployment", "demo-tether-backend")["spec"]
    assert named(rendered("default"), "Deployment", "demo-tether-router")["spec"]["replicas"] == 1


def test_rights_are_of_one_namespace_unless_nodes_are_read() -> None:
    assert not any(one["kind"].startswith("ClusterRole") for one in objects(rendered("default")))
    found = [one for one in objects(rendered("restricted")) if one["kind"] == "ClusterRole"]
    assert [one["rules"] for one in found] == [[{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]]
    roles = [one for one in objects(rendered("restricted")) if one["kind"] == "Role"]
    assert {one["metadata"]["namespace"] for one in roles} == {"sandboxes"}
    assert not any("*" in verb for one in roles for rule in one["rules"] for verb in rule["verbs"])


def test_all_is_denied_to_the_sets_pods_before_anything_is_allowed() -> None:
    deny = named(rendered("default"), "NetworkPolicy", "demo-tether-deny")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    for one in objects(rendered("default")):
        if one["kind"] == "Deployment":
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert deny["podSelector"]["matchLabels"].items() <= labels.items()


def test_streams_have_as_many_replicas_as_nats_has_nodes() -> None:
    for name, replicas in (("default", "1"), ("ha", "3"), ("external-nats", "3")):
        env = named(rendered(name), "Deployment", "demo-tether-router")["spec"]["template"]["spec"]["containers"][0][
            "env"
        ]
        assert next(one["value"] for one in env if one["name"] == "TETHER_REPLICAS") == replicas


@pytest.mark.parametrize("name", ["default", "ha"])
def test_nats_takes_the_configuration_that_its_pod_would_give_it(name: str, tmp_path: Path) -> None:
    text = rendered(name)
    for folder in ("etc/nats", "run/nats", "data"):
        (tmp_path / folder).mkdir(parents=True)
    config = named(text, "ConfigMap", "demo-nats")["data"]["nats.conf"]
    (tmp_path / "etc/nats/nats.conf").write_text(
        config.replace("/data", f"{tmp_path}/data").replace("pid_file: /run", f"pid_file: {tmp_path}/run")
    )
    container = pods(text)["StatefulSet/demo-nats"]["containers"][0]
    script = container["command"][2].replace("/run/nats", f"{tmp_path}/run/nats")
    script = script.replace("--config /etc", f"-t --config {tmp_path}/etc")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"POD_NAME": "demo-nats-0", "BUS_PASSWORD": "p123456789012345678", "PATH": path}
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/nats/cluster.conf").exists() is (name == "ha")


def test_before_an_uninstall_every_task_is_released_by_the_operators_own_image_and_rights() -> None:
    job = named(rendered("default"), "Job", "demo-tether-uninstall")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    spec = job["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "demo-tether-operator"
    assert "release-all" in spec["containers"][0]["command"]
    role = named(rendered("default"), "Role", "demo-tether-operator")
    verbs = next(rule["verbs"] for rule in role["rules"] if rule["resources"] == ["agenttasks"])
    assert "delete" in verbs
    without = rendered("default", "1.37", "uninstall.drain=false")
    assert "Job/demo-tether-uninstall" not in pods(without)
