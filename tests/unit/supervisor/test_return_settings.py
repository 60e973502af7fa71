"""The rules by which nodes come back are settings, and the API says where a node stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast.domain.errors import InvalidSpecs
from holdfast.domain.nodes import Check, NodeFacts, NodeState, Preflight
from holdfast.runtime.settings import read_settings
from holdfast.supervisor.api import node_views
from holdfast.supervisor.core import Node, State
from holdfast.supervisor.core.rules.holddown import Cure, Probation, Removal
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.return_rules import ReturnRules
from holdfast.supervisor.settings import SupervisorSettings

FACTS = NodeFacts("n17", "i", "n17", "n17", "", 8, "", 1, "/", "/kmsg", boot_id="b")
AT = 1_800_000_000.0  # 08:00 UTC
DEAD = Removal("Xid 79 on GPU 3", AT, Cure.REBOOT, hardware=True, boot_id="b")
TESTED = Preflight(AT, 0.5, (Check("disk", True, "9 GB free"),))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HOLDFAST_REDIS_URL", "redis://x")
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path))
    return monkeypatch


def test_the_defaults_of_the_settings_are_those_of_the_rules(environment: pytest.MonkeyPatch) -> None:
    assert read_settings(SupervisorSettings).returns == ReturnRules()


def test_each_rule_is_a_setting(environment: pytest.MonkeyPatch) -> None:
    given = {"HOLD_S": 1.0, "HOLD_MAX_S": 2.0, "HOLD_WINDOW_S": 3.0, "LOSSES_FREE": 4, "PROBATION_S": 5.0}
    given |= {"TEST_FAILURES_FREE": 6}
    for name, value in given.items():
        environment.setenv(f"HOLDFAST_NODE_{name}", str(value))
    rules = read_settings(SupervisorSettings).returns
    assert list(dataclasses.astuple(rules)) == list(given.values())
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    assert all(f"`HOLDFAST_NODE_{name}`" in text for name in given)


def test_a_negative_time_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HOLDFAST_NODE_HOLD_S", "-1")
    with pytest.raises(InvalidSpecs, match="HOLDFAST_NODE_HOLD_S"):
        read_settings(SupervisorSettings)


def shown(*, state: NodeState = NodeState.CORDONED, reason: str = "", **row: object) -> tuple[object, ...]:
    node = Node(FACTS, True, state, unschedulable_reason=reason, preflight=TESTED)
    reported = node_views.node(Picture(State(), leading=True), dataclasses.replace(node, **row), AT)  # type: ignore[arg-type]
    return reported.hold_until, reported.probation_until, reported.returns_by, reported.reason


@pytest.mark.parametrize(
    ("removal", "expected"),
    [
        (
            DEAD,
            (
                None,
                None,
                "itself",
                "out of service after Xid 79 on GPU 3; it comes back by itself when its machine has been booted again and has "
                "passed its tests, or by `holdfast nodes repair n17`",
            ),
        ),
        (
            dataclasses.replace(DEAD, back_at=AT - 60, hold_until=AT + 1920),
            (
                AT + 1920,
                None,
                "itself",
                "on hold until 08:32 UTC after Xid 79 on GPU 3; then a spare on probation until 10:32 UTC",
            ),
        ),
        (
            dataclasses.replace(DEAD, final="second fault on probation (i-7)"),
            (
                None,
                None,
                "operator",
                "out of service until `holdfast nodes repair n17`: second fault on probation (i-7); Xid 79 on GPU 3",
            ),
        ),
        (
            dataclasses.replace(DEAD, boot_id=""),
            (
                None,
                None,
                "operator",
                "out of service after Xid 79 on GPU 3; its agent does not report the boot id of its machine, so it comes back "
                "only by `holdfast nodes repair n17`",
            ),
        ),
        (None, (None, None, "operator", "cordoned by an operator: to the workshop")),
    ],
)
def test_a_node_says_what_would_bring_it_back(removal: Removal | None, expected: tuple[object, ...]) -> None:
    reason = removal.cause if removal else "cordoned by an operator: to the workshop"
    assert shown(reason=reason, removal=removal) == expected


def test_a_spare_says_that_it_is_on_probation() -> None:
    reported = shown(state=NodeState.SPARE, probation=Probation(AT - 60, AT + 1920, "Xid 79 on GPU 3"))
    assert reported == (None, AT + 1920, "", "on probation until 08:32 UTC after Xid 79 on GPU 3")


def test_a_spare_that_failed_its_tests_says_what_would_bring_it_back() -> None:
    failed = Preflight(AT, 0.5, (Check("disk", False, "/data is 99% full"),))
    assert shown(preflight=failed) == (
        None,
        None,
        "itself",
        "failed its pre-flight: disk: /data is 99% full; it tests itself again every minute, and may have ranks when it passes",
    )


def test_a_moment_of_another_day_has_its_date() -> None:
    probation = Probation(AT, AT + 86_400.0, "a loss")
    assert "until 2027-01-16 08:00 UTC" in str(shown(state=NodeState.SPARE, probation=probation)[3])
