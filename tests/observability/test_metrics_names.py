"""Names of figures: by convention, told in the document, and the only ones that dashboard and rules use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from tether.sandbox import DrainOrder
from tether_agent.waking import Cause
from tether_metrics import figures, unknown_names, with_tables

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/tether.json"
RULES = ROOT / "deploy/prometheus/alerts.yaml"
# Of the service-supplied labels: what can be a value is decided by code or configuration, never by a user's text.
LABELS = {"outcome", "state", "reason", "verb", "status", "route", "method", "tenant", "purpose", "cause", "limit"}
UNITS = ("_seconds", "_bytes", "_messages", "_prompts")


def test_the_document_tells_every_figure_and_no_other() -> None:
    document = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert with_tables(document) == document, "run `python -m tether_metrics docs/metrics.md`"


def test_no_figure_has_a_name_twice() -> None:
    names = [one.name for found in figures().values() for one in found]
    assert len(names) == len(set(names))


def test_labels_are_of_a_known_and_bounded_kind() -> None:
    assert {label for found in figures().values() for one in found for label in one.labels} <= LABELS


def test_a_drains_purpose_and_the_cause_of_a_wake_are_one_of_a_few_words() -> None:
    documented = {one.name: one.help for one in figures()["agent service"]}
    purposes = get_args(DrainOrder.model_fields["purpose"].annotation)
    assert f"by purpose ({', '.join(purposes)})" in documented["tether_agent_drains"]
    assert f"by cause: {', '.join(get_args(Cause))}" in documented["tether_agent_resumes"]


def test_what_is_measured_has_its_unit_in_the_name() -> None:
    for found in figures().values():
        for one in found:
            assert one.name.startswith(("tether_", "process_"))
            assert not one.name.endswith(("_total", "_ms", "_s", "_count"))
            if one.type == "histogram":
                assert one.name.endswith(UNITS), one.name


@pytest.mark.parametrize("path", [DASHBOARD, RULES], ids=["dashboard", "rules"])
def test_it_uses_only_figures_that_exist(path: Path) -> None:
    assert unknown_names(path.read_text(encoding="utf-8").replace('"uid": "tether"', "")) == []


def test_a_figure_that_does_not_exist_is_found() -> None:
    text = "rate(tether_router_prompts[5m]) + tether_bus_probe_seconds_bucket + tether_none_total"
    assert unknown_names(text) == ["tether_none_total", "tether_router_prompts"]


def test_the_dashboard_asks_the_chosen_data_source_and_has_a_panel_for_each_part() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert board["templating"]["list"][0]["type"] == "datasource"
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert targets and {target["datasource"]["uid"] for target in targets} == {"${datasource}"}
    titles = {panel["title"] for panel in board["panels"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {"Prompts", "Admission", "Readers", "Projection lag", "Collectors: publish", "Spool", "Controls"} <= titles
    assert "Recoveries" in titles
