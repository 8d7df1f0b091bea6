"""The chart renders to what the API takes, refuses what it should, and is what its README says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from support_chart import CHART, NAMES, ROOT, VERSIONS, helm, named, objects, refusal, rendered
from tether_k8s import values_table

OTHERS = {"ScaledObject", "PodMonitor", "PrometheusRule"}  # their schemas are their projects'


def test_the_linter_has_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_each_set_of_values_renders_to_objects_that_each_kubernetes_knows(name: str, version: str) -> None:
    known = 0
    for one in objects(rendered(name, version)):
        if one["kind"] in OTHERS:
            continue
        kubernetes_validate.validate(one, version, strict=True)
        known += 1
    assert known > 20


@pytest.mark.parametrize("name", NAMES)
def test_no_object_is_rendered_twice_and_each_port_says_its_protocol(name: str) -> None:
    found = objects(rendered(name))
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found]
    assert len(names) == len(set(names))
    for one in found:
        if one["kind"] not in ("CustomResourceDefinition", "Ingress"):
            assert all("protocol" in port for port in _ports(one)), one["metadata"]["name"]


def _ports(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "ports" and isinstance(part, list):
                yield from part
            else:
                yield from _ports(part)
    elif isinstance(value, list):
        for part in value:
            yield from _ports(part)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("backend.replicas=2",), "need PostgreSQL"),
        (("backend.hpa.enabled=true",), "need PostgreSQL"),
        (("router.hpa.enabled=true", "router.keda.enabled=true"), "exclude each other"),
        (("nats.enabled=false",), "externalNats.url"),
        (
            ("nats.enabled=false", "externalNats.url=nats://n:4222", "externalNats.user=u"),
            "externalNats.existingSecret",
        ),
        (("agent.authoritySecret=keys",), "agent.authorityAccount"),
        (("backend.ingress.enabled=true",), "http.hosts"),
        (("nats.replicas=2",), "/nats/replicas"),
        (("router.replicas=two",), "/router/replicas"),
        (("unknown=1",), "unknown"),
        (("router.unknown=1",), "unknown"),
        (("log.level=loud",), "/log/level"),
        (("image.pullPolicy=Sometimes",), "/image/pullPolicy"),
        (("router.quotas.running_total=many",), "/router/quotas"),
        (("database.url=mysql://db",), "/database/url"),
        (("backend.digest=latest",), "/backend/digest"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_name(sets: tuple[str, ...], words: str) -> None:
    assert words in refusal(*sets)


def test_the_schema_knows_every_value_and_no_other() -> None:
    def differences(schema: dict[str, Any], value: dict[str, Any], where: str) -> list[str]:
        if "properties" not in schema:
            return []
        known = set(schema["properties"]) - ({"global"} if where == ".nats" else set())
        found = [f"{where}.{name}" for name in known ^ set(value)]
        assert schema["additionalProperties"] is False, where
        for name in known & set(value):
            if isinstance(value[name], dict):
                found += differences(schema["properties"][name], value[name], f"{where}.{name}")
        return found

    schema = json.loads((CHART / "values.schema.json").read_bytes())
    assert differences(schema, yaml.safe_load((CHART / "values.yaml").read_bytes()), "") == []


def test_the_subcharts_values_are_all_offered() -> None:
    offered = yaml.safe_load((CHART / "values.yaml").read_bytes())["nats"]
    own = yaml.safe_load((CHART / "charts" / "nats" / "values.yaml").read_bytes())
    assert {name: value for name, value in offered.items() if name != "enabled"} == own


def test_the_readme_tells_every_value() -> None:
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert values_table.replaced(readme, values_table.table(CHART / "values.yaml")) == readme


@pytest.mark.parametrize(
    ("source", "copy"),
    [
        ("deploy/crds/agenttask.yaml", "agenttask.yaml"),
        ("deploy/prometheus/alerts.yaml", "alerts.yaml"),
        ("deploy/grafana/tether.json", "tether.json"),
    ],
)
def test_what_the_chart_has_a_copy_of_is_the_same_as_the_source(source: str, copy: str) -> None:
    assert (CHART / "files" / copy).read_bytes() == (ROOT / source).read_bytes()


def test_the_resource_is_installed_as_its_source_says_and_left_out_where_asked() -> None:
    source = yaml.safe_load((ROOT / "deploy/crds/agenttask.yaml").read_bytes())
    found = named(rendered("default"), "CustomResourceDefinition", "agenttasks.tether.dev")
    assert found == source
    assert found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    without = objects(rendered("default", "1.37", "crds.install=false"))
    assert not any(one["kind"] == "CustomResourceDefinition" for one in without)
