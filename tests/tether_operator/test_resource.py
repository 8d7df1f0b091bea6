"""The resource's schema and its models are one contract: what the API lets in, the operator understands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from tether import kube
from tether.errors import InvalidError
from tether_operator.core import render

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "deploy" / "crds" / "agenttask.yaml").read_text(encoding="utf-8"))
[VERSION] = CRD["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]["properties"]
TASK = "tidy-1"
UID = "0b5f3c2e-1111-2222-3333-444455556666"


def fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


@pytest.mark.parametrize(
    ("model", "schema"),
    [
        (kube.AgentTaskSpec, SCHEMA["spec"]),
        (kube.WorkspaceSpec, SCHEMA["spec"]["properties"]["workspace"]),
        (kube.AgentSpecOfTask, SCHEMA["spec"]["properties"]["agent"]),
        (kube.TaskSpec, SCHEMA["spec"]["properties"]["task"]),
        (kube.LifecycleSpec, SCHEMA["spec"]["properties"]["lifecycle"]),
        (kube.AgentTaskStatus, SCHEMA["status"]),
        (kube.Ended, SCHEMA["status"]["properties"]["ended"]),
        (kube.Condition, SCHEMA["status"]["properties"]["conditions"]["items"]),
    ],
)
def test_the_schema_has_the_models_fields_and_defaults(model: type[BaseModel], schema: dict[str, Any]) -> None:
    known = fields(model)
    assert set(schema["properties"]) == set(known)
    for name, part in schema["properties"].items():
        if "default" in part and part["type"] != "object":
            assert known[name].default == part["default"], name


def test_the_phases_are_the_same_ones() -> None:
    assert SCHEMA["status"]["properties"]["phase"]["enum"] == list(get_args(kube.Phase))


def test_the_names_are_the_ones_that_the_code_uses() -> None:
    assert CRD["spec"]["group"] == kube.GROUP
    assert (VERSION["name"], CRD["spec"]["names"]["kind"], CRD["spec"]["names"]["plural"]) == (
        kube.VERSION,
        kube.KIND,
        kube.PLURAL,
    )
    assert VERSION["subresources"] == {"status": {}}


def test_the_schema_is_structural() -> None:
    def check(part: dict[str, Any], place: str) -> None:
        assert "type" in part, f"{place}: a structural schema says the type of everything"
        assert not {"anyOf", "oneOf", "allOf", "$ref"} & set(part), place
        for name, inner in part.get("properties", {}).items():
            check(inner, f"{place}.{name}")
        if part["type"] == "array":
            check(part["items"], f"{place}[]")

    check(VERSION["schema"]["openAPIV3Schema"], "task")


def test_a_task_that_the_agent_service_makes_is_one_that_the_api_takes_and_is_held_from_its_first_moment() -> None:
    spec = kube.AgentTaskSpec(tenant="acme", workspace=kube.WorkspaceSpec(name="ws_1", size="2Gi"))
    made = kube.manifest(kube.task_name("acme", "ws_1"), "agents", spec, {kube.BOOT: "boot_1"})
    Draft202012Validator(SCHEMA["spec"]).validate(made["spec"])
    assert made["metadata"]["finalizers"] == [kube.DRAIN]
    assert kube.check_name(made["metadata"]["name"], "name")
    assert kube.spec_of(made["spec"]) == spec


def test_a_spec_that_cannot_be_used_is_refused_by_the_fields_name() -> None:
    with pytest.raises(InvalidError, match=r"spec\.lifecycle\.onDelete"):
        kube.spec_of({"lifecycle": {"onDelete": "keep"}})


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("1h30m", 5400.0), ("0s", 0.0)])
def test_durations_are_read_in_seconds(text: str, seconds: float) -> None:
    assert kube.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1d", "-1s", "s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        kube.seconds(text)


def test_names_of_a_tasks_objects_are_labels_however_long_the_task_is_and_differ_between_tasks() -> None:
    long = "a" * 60
    boots = ("boot_5b1338daf70c", "boot_5b1338daf70d")
    found = {kube.pod_name(task, boot) for task in (long + "aaa", long + "aab", "short") for boot in boots}
    assert len(found) == 6
    for name in [*found, kube.claim_name(long + "aaa"), kube.policy_name(long + "aab")]:
        assert kube.check_name(name, "name") == name


def test_a_sandboxs_pod_is_confined_holds_no_key_and_stays_until_its_end_is_proven() -> None:
    spec = kube.AgentTaskSpec(agent=kube.AgentSpecOfTask(model_secret="keys"))
    pod = render.pod(TASK, UID, "agents", "boot_1", spec, render.Template(image="tether-sandbox:1"))
    assert pod["metadata"]["finalizers"] == [kube.PROOF]
    body = pod["spec"]
    assert body["restartPolicy"] == "Never"
    assert body["automountServiceAccountToken"] is False
    assert body["terminationGracePeriodSeconds"] > kube.seconds(spec.lifecycle.drain_grace)
    assert body["securityContext"]["runAsNonRoot"] is True
    [container] = body["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "env" not in container and "envFrom" not in container, "a key in a pod's environment is in its spec"
    told = {volume["name"]: volume for volume in body["volumes"]}["told"]
    assert told["secret"]["secretName"] == kube.secret_name(TASK, "boot_1")


def test_the_volume_is_owned_by_nobody_and_nobody_reaches_a_sandbox() -> None:
    spec, template = kube.AgentTaskSpec(), render.Template(image="tether-sandbox:1")
    assert "ownerReferences" not in render.claim(TASK, UID, "agents", spec, template)["metadata"]
    policy = render.policy(TASK, UID, "agents", template)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and policy["ingress"] == []
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 4222}
