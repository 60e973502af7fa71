"""What follows from a node's tests of itself: a wrong product condemns it, the rest is said once and taken back."""

from __future__ import annotations

from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.preflight import Preflight as Detector
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.signals import NodeTested

T0 = 1_700_000_000.0
WELL = (Check("products", True, "90 exact products"), Check("peers", None, "no other node is known yet"))
FULL = Check("disk", False, "/data is 99% full")
WRONG = Check("products", False, "cuda:3: 1 of 90 tf32 products are wrong")


def watch(*results: tuple[Check, ...]) -> list[list[Finding]]:
    detector, found = Alone(Detector()), []
    for number, checks in enumerate(results):
        at = T0 + 60 * number
        found.append([*detector.observe(NodeTested("n0", at, Preflight(at, 1.0, checks)), at + 0.1)])
    return found


def test_a_node_that_passes_says_nothing() -> None:
    assert watch(WELL, WELL) == [[], []]


def test_a_failure_is_said_once_and_taken_back() -> None:
    first, again, well, after = watch((FULL,), (FULL,), WELL, WELL)
    assert [(f.kind, f.severity, f.node) for f in first] == [(FindingKind.PREFLIGHT, Severity.WARNING, "n0")]
    assert "/data is 99% full" in first[0].summary
    assert again == after == []
    assert [(f.severity, f.evidence["products"]) for f in well] == [(Severity.INFO, "90 exact products")]


def test_a_wrong_product_condemns_the_node() -> None:
    ((finding,),) = watch((WRONG,))
    assert (finding.kind, finding.severity, finding.node) == (FindingKind.SILENT_CORRUPTION, Severity.FATAL, "n0")
    assert "cuda:3" in finding.evidence["detail"]


def test_a_wrong_product_and_a_full_disk_are_two_findings() -> None:
    ((corrupt, full),) = watch((WRONG, FULL))
    assert (corrupt.severity, full.severity) == (Severity.FATAL, Severity.WARNING)
    assert corrupt.id != full.id
