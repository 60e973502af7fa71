"""When idle nodes test their network, and what that may cost, are settings; and operators are shown what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from idle_links import USUAL, Idle

from holdfast.cli.nodes import show_node
from holdfast.domain.errors import InvalidSpecs
from holdfast.domain.links import LinkLimits
from holdfast.runtime.settings import read_settings
from holdfast.supervisor.api import node_views
from holdfast.supervisor.core import LINK_STANDINGS, link_standing
from holdfast.supervisor.core.repair import link_tests
from holdfast.supervisor.core.rules import links
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.settings import SupervisorSettings
from holdfast.supervisor.telemetry import meters

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://x")
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path))
    return monkeypatch


def test_the_settings_are_the_rules_and_are_in_the_docs(environment: pytest.MonkeyPatch) -> None:
    assert read_settings(SupervisorSettings).links == LinkRules()
    given = {"LINK_TESTS_EVERY_S": 60.0, "LINK_TEST_BYTES_MAX": 1 << 20, "LINK_TEST_S_MAX": 0.25}
    for name, value in given.items():
        environment.setenv(f"HOLDFAST_{name}", str(value))
    assert read_settings(SupervisorSettings).links == LinkRules(every_s=60.0, limits=LinkLimits(1 << 20, 0.25))
    text = (DOCS / "diagnostics.md").read_text()
    assert all(f"`HOLDFAST_{name}`" in text for name in given)


@pytest.mark.parametrize(
    ("name", "value"), [("LINK_TESTS_EVERY_S", "-1"), ("LINK_TEST_BYTES_MAX", "1"), ("LINK_TEST_S_MAX", "60")]
)
def test_what_would_cost_too_much_is_refused(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(f"HOLDFAST_{name}", value)
    with pytest.raises(InvalidSpecs, match=f"HOLDFAST_{name}"):
        read_settings(SupervisorSettings)


def test_the_docs_say_the_numbers() -> None:
    """That is, those of the code."""
    text = (DOCS / "diagnostics.md").read_text()
    rules = LinkRules()
    per_s = 2 * rules.limits.bytes_max / rules.every_s
    assert f"{per_s / 1e6:.2f} MB/s of an idle node's network" in text
    assert f"At most {rules.limits.bytes_max >> 20} MiB and {rules.limits.seconds_max:g} s in each direction" in text
    assert rules.every_s == 600, "for each node once in ten minutes"
    assert link_tests.PAIRS_SHARE == 0.01, "of a hundred idle nodes, two are in a test"
    assert link_tests.OUT_SHARE_MAX == 0.1, "a tenth of the idle nodes"
    assert (links.SLOW_SHARE, links.SPREAD_MAX, links.WINDOW) == (0.5, 5.5, 12)
    assert (links.RESULTS_MIN, links.OTHERS_MIN, links.BLAMES_MIN, links.KEPT_MAX) == (3, 3, 2, 8)


def test_operators_are_shown_the_tests_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Idle(6)
    fleet.play(6 * LinkRules().every_s)
    fleet.bad["n2"] = USUAL / 10
    fleet.play(3 * LinkRules().every_s)
    picture = Picture(fleet.state, leading=True)
    detail = node_views.node_detail(picture, fleet.state.nodes["n2"], fleet.now, ())
    assert detail.returns_by == "itself"
    assert "its network is slow with 2 nodes that are well with others" in detail.reason
    newest = detail.links[-1]
    assert newest.verdict == "slow"
    assert newest.expected_bytes_per_s == pytest.approx(0.97 * USUAL)
    show_node(json.loads(detail.model_dump_json()), False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "network tests with other idle nodes" in shown
    assert "0.194 GB/s" in shown or "0.2 GB/s" in shown
    fleet.bad["n2"] = 0.0
    fleet.play(3 * LinkRules().every_s)
    detail = node_views.node_detail(picture, fleet.state.nodes["n2"], fleet.now, ())
    show_node(json.loads(detail.model_dump_json()), False)
    assert "it does not" in " ".join(capsys.readouterr().out.split())


def test_the_metric_counts_idle_nodes_by_their_newest_test() -> None:
    fleet = Idle(6)
    assert meters._links(fleet.state) == [], "nobody leads here"
    fleet.play(6 * LinkRules().every_s)
    fleet.bad["n2"] = 0.0
    fleet.play(3 * LinkRules().every_s)
    assert link_standing(fleet.state.nodes["n2"]) == "out"
    counted = {about["verdict"]: value for value, about in meters._links(replace(fleet.state, epoch=1))}
    assert counted.keys() == set(LINK_STANDINGS)
    assert counted["out"] == 1
    assert sum(counted.values()) == 6
