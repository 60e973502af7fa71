"""When a node that keeps failing is quarantined is a setting, and operators are shown how far a node is from it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from holdfast.cli.nodes import show_node
from holdfast.domain.errors import InvalidSpecs
from holdfast.domain.nodes import NodeFacts, NodeState
from holdfast.runtime.settings import read_settings
from holdfast.supervisor.api import node_views
from holdfast.supervisor.core import Node, State, step
from holdfast.supervisor.core.model.state import Config
from holdfast.supervisor.core.rules.offenders import Fault
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.protocol import LeaderStarted
from holdfast.supervisor.settings import SupervisorSettings

AT = 1_800_000_000.0
FIELDS = {
    "QUARANTINE_LIMIT": "limit",
    "QUARANTINE_HALF_LIFE_S": "half_life_s",
    "QUARANTINE_WINDOW_S": "window_s",
    "QUARANTINE_MAYBE_WEIGHT": "maybe_weight",
    "QUARANTINE_TOGETHER_S": "together_s",
    "QUARANTINE_FRACTION_MAX": "fraction_max",
    "SPARE_PRIOR_FAULTS": "prior_faults",
    "SPARE_PRIOR_S": "prior_s",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://x")
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path))
    return monkeypatch


def test_the_defaults_of_the_settings_are_those_of_the_rules(environment: pytest.MonkeyPatch) -> None:
    assert read_settings(SupervisorSettings).offenders == OffenderRules()


@pytest.mark.parametrize("name", FIELDS)
def test_each_rule_is_a_setting(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.setenv(f"HOLDFAST_{name}", "0.25")
    rules = asdict(read_settings(SupervisorSettings).offenders)
    assert rules == {**asdict(OffenderRules()), FIELDS[name]: 0.25}


def test_the_docs_name_each_setting_and_its_default() -> None:
    assert set(FIELDS.values()) == {each.name for each in fields(OffenderRules)} - {"kept_max"}
    text = (Path(__file__).parents[3] / "docs" / "diagnostics.md").read_text()
    for name, field in FIELDS.items():
        [row] = [line for line in text.splitlines() if line.startswith("|") and f"`HOLDFAST_{name}`" in line]
        default = f"{getattr(OffenderRules(), field):.10g}"
        assert default in row.split("|")[2].replace(",", " ").split(), name
    assert f"above {OffenderRules().kept_max} turns quarantine off" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUARANTINE_LIMIT", "0"),
        ("QUARANTINE_HALF_LIFE_S", "0"),
        ("QUARANTINE_WINDOW_S", "-1"),
        ("QUARANTINE_MAYBE_WEIGHT", "1"),
        ("QUARANTINE_TOGETHER_S", "-1"),
        ("QUARANTINE_FRACTION_MAX", "10"),
        ("SPARE_PRIOR_FAULTS", "0"),
        ("SPARE_PRIOR_S", "a week"),
        ("SPARE_PRIOR_S", "inf"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(f"HOLDFAST_{name}", value)
    with pytest.raises(InvalidSpecs, match=f"HOLDFAST_{name}"):
        read_settings(SupervisorSettings)


def test_those_of_the_leader_apply() -> None:
    before = State(config=Config(offenders=OffenderRules(limit=7.0)))
    kept, _ = step(before, LeaderStarted(AT, 1))
    assert kept.config.offenders.limit == 7.0
    after, _ = step(before, LeaderStarted(AT, 1, offenders=OffenderRules(limit=1.5)))
    assert after.config.offenders == OffenderRules(limit=1.5)


def test_a_node_shows_what_its_faults_weigh_and_may_weigh(capsys: pytest.CaptureFixture[str]) -> None:
    rules = OffenderRules(limit=3.0, half_life_s=3600.0)
    facts = NodeFacts("n17", "i", "n17", "n17", "", 8, "", 1, "/", "/kmsg")
    node = Node(
        facts, True, NodeState.SPARE, faults=(Fault(AT - 3600.0, "i-1", "gpt", 1.0), Fault(AT, "i-2", "gpt", 1.0))
    )
    picture = Picture(State(config=Config(offenders=rules)), leading=True)
    detail = node_views.node_detail(picture, node, AT, ())
    assert (detail.faults_weigh, detail.quarantine_limit) == (1.5, 3.0)
    show_node(json.loads(detail.model_dump_json()), as_json=False)
    shown = capsys.readouterr().out
    assert "faults weigh" in shown
    assert "quarantine limit" in shown
