"""The alert rules, as Prometheus itself evaluates them: each one fires when it should, and not otherwise.

Skipped where promtool is not installed (Debian's package `prometheus`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[3] / "deploy/grafana/alerts.yml"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: the Debian package `prometheus` has it"
)

MINUTES = 90  # after which each rule is looked at; all `for` are shorter
DAY_S = 86_400
Series = dict[str, str]  # a series → its values, one a minute, as promtool writes them


def constant(value: float) -> str:
    return f"{value}x{2 * MINUTES}"


def growing(by: float) -> str:
    return f"0+{by}x{2 * MINUTES}"


def times(useful: float, badput: float, running: float = 0.0) -> Series:
    name = 'holdfast_job_time_seconds{holdfast_job="llm",holdfast_class="%s"}'
    return {name % "useful": constant(useful), name % "restore": constant(badput), name % "running": constant(running)}


def nodes(spare: int, lost: int) -> Series:
    return {
        f'holdfast_nodes{{holdfast_state="{state}"}}': constant(count)
        for state, count in (("spare", spare), ("lost", lost))
    }


def durations(name: str, label: str, slow: bool) -> Series:
    """A histogram of which all values lie between 60 and 120 s, or below 30 s."""
    below = {"10": 0 if slow else 1, "30": 0 if slow else 1, "60": 0 if slow else 1, "120": 1, "+Inf": 1}
    return {f'{name}_bucket{{{label},le="{bound}"}}': growing(count) for bound, count in below.items()}


RECOVERY, ORDER = "holdfast_recovery_duration_seconds", "holdfast_command_duration_seconds"
INCIDENTS = 'holdfast_incidents_total{holdfast_job="llm",holdfast_kind="hang",holdfast_action="%s"}'
AGE = 'holdfast_checkpoint_age_seconds{holdfast_job="llm",holdfast_tier="%s"}'
MEMORY, LIMIT = "holdfast_log_memory_bytes", "holdfast_log_memory_limit_bytes"
EXPIRY = 'holdfast_certificate_expiry_seconds{job="supervisor"}'

# alert → (series with which it fires, its labels besides alertname and severity, series with which it does not)
CASES: dict[str, tuple[Series, dict[str, str], Series]] = {
    "HoldfastJobNotRunning": (
        {'holdfast_job_world_size{holdfast_job="llm"}': constant(0)}, {"holdfast_job": "llm"},
        {'holdfast_job_world_size{holdfast_job="llm"}': constant(8)},
    ),
    "HoldfastGoodputLow": (times(5000, 1000), {"holdfast_job": "llm"}, times(5000, 1000, running=9)),
    "HoldfastIncidentsFrequent": (
        {INCIDENTS % "restart": growing(1)}, {"holdfast_job": "llm"}, {INCIDENTS % "notify": growing(1)},
    ),
    "HoldfastRecoverySlow": (
        durations(RECOVERY, 'holdfast_phase="total"', slow=True), {}, durations(RECOVERY, 'holdfast_phase="total"', slow=False),
    ),
    "HoldfastNoSpare": (nodes(0, 1), {"holdfast_state": "spare"}, nodes(0, 0)),
    "HoldfastCheckpointOld": (
        {AGE % "memory": constant(2000), AGE % "store": constant(9000)}, {"holdfast_job": "llm"},
        {AGE % "memory": constant(60), AGE % "store": constant(9000)},
    ),
    "HoldfastCheckpointBehind": (
        {'holdfast_checkpoint_lag{holdfast_job="llm"}': constant(5)}, {"holdfast_job": "llm"},
        {'holdfast_checkpoint_lag{holdfast_job="llm"}': constant(1)},
    ),
    "HoldfastCheckpointTrouble": (
        {'holdfast_checkpoint_troubles_total{holdfast_job="llm",holdfast_kind="damaged"}': growing(1)},
        {"holdfast_job": "llm", "holdfast_kind": "damaged"},
        {'holdfast_checkpoint_troubles_total{holdfast_job="llm",holdfast_kind="damaged"}': constant(3)},
    ),
    "HoldfastEventLogBehind": (
        {'holdfast_log_lag_seconds{holdfast_stream="inbox"}': constant(9)}, {"holdfast_stream": "inbox"},
        {'holdfast_log_lag_seconds{holdfast_stream="inbox"}': constant(0.1)},
    ),
    "HoldfastEventLogFull": (
        {MEMORY: constant(9), LIMIT: constant(10)}, {}, {MEMORY: constant(9)},  # without a limit there is no share of it
    ),
    "HoldfastNoLeader": ({"up": constant(1)}, {}, nodes(1, 0)),
    "HoldfastOrdersSlow": (
        durations(ORDER, 'holdfast_order="Prepare"', slow=True), {"holdfast_order": "Prepare"},
        durations(ORDER, 'holdfast_order="Prepare"', slow=False),
    ),
    "HoldfastTelemetryDropped": (
        {'holdfast_telemetry_dropped_total{holdfast_what="signals"}': growing(1)}, {"holdfast_what": "signals"},
        {'holdfast_telemetry_dropped_total{holdfast_what="signals"}': constant(4)},
    ),
    "HoldfastCertificateExpires": (
        {EXPIRY: constant(2 * DAY_S)}, {"job": "supervisor"}, {EXPIRY: constant(30 * DAY_S)},
    ),
}  # fmt: skip


def rules() -> dict[str, dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def promtool(*arguments: str) -> str:
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def objections(directory: Path, alert: str, series: Series, expected: list[dict[str, Any]]) -> str:
    """What promtool has to say against it; empty if the alert is as expected."""
    file = directory / "rules_test.json"
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": expected}],
    }
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    return promtool("test", "rules", str(file))


def test_promtool_accepts_the_file() -> None:
    assert promtool("check", "rules", str(RULES)) == ""


def test_each_rule_has_its_cases() -> None:
    assert set(CASES) == set(rules())


@pytest.mark.parametrize("alert", CASES)
def test_it_fires_and_says_what_to_do(alert: str, tmp_path: Path) -> None:
    fires, labels, _ = CASES[alert]
    said = objections(
        tmp_path, alert, fires, [{"exp_labels": {"severity": rules()[alert]["labels"]["severity"], **labels}}]
    )
    # None of its annotations is expected here, so promtool objects and prints them with the labels: texts are for people, and
    # what counts is that each template was filled in.
    found = said.partition("got:")[2]
    assert 'alertname="' + alert + '"' in found, said
    for name, value in labels.items():
        assert f'{name}="{value}"' in found
    assert "action=" in found
    assert "<no value>" not in found
    assert "{{" not in found


@pytest.mark.parametrize("alert", CASES)
def test_it_does_not_fire_for_what_is_right(alert: str, tmp_path: Path) -> None:
    assert objections(tmp_path, alert, CASES[alert][2], []) == ""
