"""Names are declared once: no span or metric has an undeclared attribute, and the docs, dashboard and alerts know them all."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from holdfast.domain import tracing
from holdfast.log import durability
from holdfast.runtime.telling import metrics
from holdfast.runtime.telling.metrics import METRICS, Metric

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for top in ("src/holdfast", "services", "tools")
    for path in (ROOT / top).rglob("*.py")
    if "v1" not in path.parts
]
SPANS = ROOT / "src/holdfast/domain/spans.py"
BY_CONSTANT = {name: value for name, value in vars(metrics).items() if isinstance(value, Metric)}
EXPORTED = re.compile(r"\bholdfast_[a-z_]+")


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Sources that speak of telemetry."""
    texts = ((path, path.read_text()) for path in SOURCES)
    return [(path, ast.parse(text)) for path, text in texts if "telemetry" in text]


@cache
def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """Calls of `telemetry.<name>`."""
    return [
        (path, node)
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and ast.unparse(node.func) == f"telemetry.{name}"
    ]


def strings(node: ast.AST, keyword: str = "key") -> set[str]:
    """Keyword names of a call; keys of a dictionary."""
    if isinstance(node, ast.Call):
        return {each.arg for each in node.keywords if each.arg and each.arg != keyword}
    assert isinstance(node, ast.Dict)
    return {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}


def test_spans_have_declared_attributes() -> None:
    used: set[str] = set()
    for path, call in calls("span"):
        assert strings(call) <= set(tracing.ATTRIBUTES), f"{path}:{call.lineno}"
        used |= strings(call)
    assert used, "no call was found: this test looks for something that is called otherwise now"
    functions = [node for node in ast.parse(SPANS.read_text()).body if isinstance(node, ast.FunctionDef)]
    for node in (each for function in functions for each in ast.walk(function) if isinstance(each, ast.Dict)):
        assert strings(node) <= set(tracing.ATTRIBUTES), f"{SPANS}:{node.lineno}"


@pytest.mark.parametrize("verb", ["record", "observe", "show"])
def test_metrics_have_declared_attributes(verb: str) -> None:
    found = calls(verb)
    assert found
    for path, call in found:
        constant = ast.unparse(call.args[0]).removeprefix("metrics.")
        metric = BY_CONSTANT[constant]
        if verb == "show":  # its points may be made elsewhere in the file
            dicts = [strings(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Dict)]
            assert set(metric.attributes) in dicts, f"{path}:{call.lineno}"
            assert set().union(*dicts) <= set(tracing.ATTRIBUTES), path
        else:
            assert strings(call) == set(metric.attributes), f"{path}:{call.lineno}"


def test_every_metric_is_reported_and_its_attributes_are_declared() -> None:
    reported = {ast.unparse(call.args[0]) for verb in ("record", "observe", "show") for _, call in calls(verb)}
    for metric in METRICS:
        [constant] = [name for name, value in BY_CONSTANT.items() if value is metric]
        assert f"metrics.{constant}" in reported, f"{metric.name} is declared and nobody reports it"
        assert set(metric.attributes) <= set(tracing.ATTRIBUTES)
        assert (metric.kind == "histogram") == bool(metric.buckets)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_attribute_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCES if path.name != "tracing.py")
    for name in tracing.ATTRIBUTES:
        assert f'"{name}"' in text or f"{name}=" in text, f"{name} is declared and nobody uses it"


def test_the_docs_list_all_of_them() -> None:
    docs = (ROOT / "docs/telemetry.md").read_text()
    for name, meaning in tracing.ATTRIBUTES.items():
        assert f"| `{name}` | {meaning} |" in docs
    for metric in METRICS:
        attributes = ", ".join(metric.attributes)
        row = (
            f"| `{metric.name}` | {metric.kind} | {metric.unit} | {attributes} | {metric.service} | {metric.meaning} |"
        )
        assert row in docs
    assert docs.count("\n| `") == len(tracing.ATTRIBUTES) + len(METRICS), "a row of something that is gone"


def exported() -> set[str]:
    """Everything that a Prometheus exporter makes of the metrics."""
    names: set[str] = set()
    for metric in METRICS:
        stem = metric.prometheus_name
        names |= {f"{stem}_bucket", f"{stem}_sum", f"{stem}_count"} if metric.kind == "histogram" else {stem}
    return names


def labels() -> set[str]:
    return {f"holdfast_{name}" for metric in METRICS for name in metric.attributes}


def check(expression: str) -> set[str]:
    """The metrics that an expression asks for. Fails for a name that is neither a metric nor a label."""
    found = set(EXPORTED.findall(expression))
    assert found - labels() <= exported(), f"unknown in {expression}: {sorted(found - labels() - exported())}"
    return found & exported()


def test_the_dashboard_shows_all_metrics_and_no_others() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    shown: set[str] = set()
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            found = check(target["expr"])
            assert found, target["expr"]
            assert set(EXPORTED.findall(target["legendFormat"])) <= labels()
            shown |= found
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            check(variable["query"])
    missing = [metric.name for metric in METRICS if not any(name.startswith(metric.prometheus_name) for name in shown)]
    assert not missing, "metrics without a panel"


def test_the_alerts_ask_for_what_there_is() -> None:
    [group] = yaml.safe_load((ROOT / "deploy/grafana/alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    for rule in group["rules"]:
        assert check(rule["expr"]), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        check(" ".join(rule["annotations"].values()))


def test_the_alert_for_the_memory_of_redis_and_the_supervisor_s_warning_have_one_threshold() -> None:
    [group] = yaml.safe_load((ROOT / "deploy/grafana/alerts.yml").read_text())["groups"]
    [rule] = [rule for rule in group["rules"] if rule["alert"] == "HoldfastEventLogFull"]
    used, limit = metrics.LOG_MEMORY.prometheus_name, metrics.LOG_MEMORY_LIMIT.prometheus_name
    assert rule["expr"] == f"{used} / {limit} > {durability.CROWDED:g}"
    assert rule["annotations"]["action"] == durability.ROOM_ADVICE
