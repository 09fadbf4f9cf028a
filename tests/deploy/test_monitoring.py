"""Rules and dashboard ask for metrics, labels and values that a scrape really has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from actors.accounting import SlotTotals
from actors.telemetry import CHANGE_PHASES, WEIGHT_SOURCES, WORKER_STATES, Telemetry
from placement.samples import FinishReason
from placement.views import WidthReason
from service.metrics import NATIVE, ServiceMetrics
from tests.deploy.conftest import ROOT, Objects, RunTool

RULES = ROOT / "deploy" / "prometheus" / "flexfloor.rules.yaml"
RULE_TESTS = Path(__file__).parent / "flexfloor.rules.test.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "flexfloor.json"
# As Grafana replaces its variables; any duration and selection do.
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$instance": ".*"}
TARGET_LABELS = {"instance", "job", "namespace", "pod"}


@pytest.fixture(scope="module")
def exposed() -> list[Metric]:
    """One scrape of a service to which everything has happened."""
    telemetry = Telemetry(lambda: SlotTotals(*[1.0] * 3, *[1] * 3))
    for reason in (WidthReason.CONSOLIDATE,):
        telemetry.releases.labels(reason).inc()
        telemetry.changes.labels(reason).inc()
    for phase in ("lease", *CHANGE_PHASES, "leave"):
        telemetry.phase_s.labels(phase).observe(0.1)
    telemetry.lease_wait_s.observe(1.0)
    telemetry.weight_update_s.labels(WEIGHT_SOURCES[0]).observe(1.0)
    service = ServiceMetrics()
    service.request_s.labels(NATIVE).observe(1.0)
    service.first_event_s.labels(NATIVE).observe(0.1)
    text = (telemetry.text(list(WORKER_STATES)) + service.text()).decode()
    return list(text_string_to_metric_families(text))


@pytest.fixture(scope="module")
def labels_of(exposed: list[Metric]) -> dict[str, set[str]]:
    """Series name -> its labels."""
    return {s.name: set(s.labels) for family in exposed for s in family.samples}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return read_dashboard()


def read_dashboard() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return tree


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries_of(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(expression with Grafana's variables replaced, legend)."""
    queries = []
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression
            queries.append((expression, target["legendFormat"]))
    return queries


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series_in(expression: str) -> set[str]:
    return set(re.findall(r"\bflexfloor_\w+", expression))


def test_every_query_and_rule_uses_series_that_are_exposed(
    labels_of: dict[str, set[str]], dashboard: dict[str, Any]
) -> None:
    for expression in [q for q, _ in queries_of(dashboard)] + [rule["expr"] for rule in rules()]:
        used = series_in(expression)
        assert used
        assert used <= set(labels_of), expression


def test_every_label_that_is_grouped_by_or_shown_is_there(
    labels_of: dict[str, set[str]], dashboard: dict[str, Any]
) -> None:
    for expression, legend in queries_of(dashboard):
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        wanted = {name.strip() for names in grouped for name in names.split(",")}
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert shown <= wanted
        for series in series_in(expression):
            assert wanted <= labels_of[series], expression


def test_label_values_in_rules_are_values_that_occur(exposed: list[Metric]) -> None:
    values = {value for family in exposed for s in family.samples for value in s.labels.values()}
    for rule in rules():
        assert set(re.findall(r'=~?"(\w+)"', rule["expr"])) <= values


def test_series_by_reason_and_phase_are_there_before_their_first_event() -> None:
    telemetry = Telemetry(lambda: SlotTotals(*[0.0] * 3, *[0] * 3))
    text = telemetry.text([]).decode()
    for reason in FinishReason:
        assert f'flexfloor_ended_samples_total{{reason="{reason}"}} 0.0' in text
    for phase in CHANGE_PHASES:
        assert f'flexfloor_rolled_back_changes_total{{phase="{phase}"}} 0.0' in text


def test_the_dashboard_shows_everything_that_is_exposed(
    exposed: list[Metric], dashboard: dict[str, Any]
) -> None:
    shown = " ".join(expression for expression, _ in queries_of(dashboard))
    names = {family.name for family in exposed if not family.name.endswith("_created")}
    assert {name for name in names if name not in shown} == set()


def test_the_dashboard_is_laid_out_without_overlaps(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels_of(dashboard):
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_every_alert_says_what_and_what_to_look_at() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}
        named = re.findall(r"\$labels\.(\w+)", alert["annotations"]["description"])
        assert set(named) <= TARGET_LABELS
    tested = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    assert {alert["alert"] for alert in alerts} == {
        case["alertname"] for test in tested for case in test.get("alert_rule_test", [])
    }


def test_the_chart_ships_these_very_files(everything: Objects) -> None:
    (rule,) = (item for item in everything if item["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    (shipped,) = (item for item in everything if item["kind"] == "ConfigMap")
    assert json.loads(shipped["data"]["flexfloor.json"]) == json.loads(DASHBOARD.read_text())


def test_prometheus_takes_every_rule_and_query(
    run_tool: RunTool, dashboard: dict[str, Any], tmp_path: Path
) -> None:
    assert "SUCCESS" in run_tool("promtool", "check", "rules", RULES)
    queries = [
        {"record": f"panel:query:{number}", "expr": expression}
        for number, (expression, _) in enumerate(queries_of(dashboard))
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": queries}]}))
    assert f"{len(queries)} rules found" in run_tool("promtool", "check", "rules", path)


def test_alerts_fire_when_they_should_and_only_then(run_tool: RunTool) -> None:
    assert "SUCCESS" in run_tool("promtool", "test", "rules", RULE_TESTS)
