"""What the kernel says of its machine becomes one warning per fault, of the right kind; noise becomes nothing."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from diagnosing import CATALOGUE, T0

from holdfast.agent.collectors.kernel_lines import recognise
from holdfast.diagnostics import detectors
from holdfast.diagnostics.detectors.kernel_fault import KernelFault
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, Severity
from holdfast.domain.signals import KernelEvent, KernelLine

DATA = Path(__file__).parents[2] / "data/kernel/lines.csv"
LINES = list(csv.DictReader(DATA.read_text(encoding="utf-8").splitlines()))


def fold(engine: Engine, text: str, at: float = 0.0) -> tuple[Finding, ...]:
    found = recognise(text)
    if found is None:
        return ()
    line = KernelLine("n0", T0 + at, found.text, found.xid, found.pci, None, found.event)
    return engine.fold(line, T0 + at).findings


@pytest.mark.parametrize("row", LINES, ids=[row["text"][:40] for row in LINES])
def test_a_line_leads_to_the_finding_of_its_kind(row: dict[str, str]) -> None:
    found = fold(Engine(detectors.standard(CATALOGUE)), row["text"])
    assert [finding.kind.value for finding in found] == ([row["kind"]] if row["kind"] else [])


def test_one_kill_in_two_lines_is_one_finding_and_another_process_another() -> None:
    engine = Engine([KernelFault()])
    lines = (
        "oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=4242,uid=0",
        "Out of memory: Killed process 4242 (python)",
        "Out of memory: Killed process 4343 (python)",
    )
    found = [finding for text in lines for finding in fold(engine, text)]
    assert [finding.evidence["subject"] for finding in found] == ["4242", "4343"]


def test_a_stall_that_lasts_is_repeated_every_ten_minutes_and_is_another_one_after_quiet() -> None:
    engine = Engine([KernelFault(quiet_s=600.0)])
    text = "INFO: task python:4242 blocked for more than 120 seconds."
    found = [[finding.repeat for finding in fold(engine, text, at)] for at in (0, 120, 240, 700, 1200, 1400, 2100)]
    assert found == [[0], [], [], [1], [], [2], [0]]


def test_no_line_of_the_kernel_alone_stops_a_run() -> None:
    for row in LINES:
        if row["event"] not in ("", "xid", "off_the_bus"):
            (finding,) = fold(Engine(detectors.standard(CATALOGUE)), row["text"])
            assert finding.severity in (Severity.INFO, Severity.WARNING)


def test_an_event_of_a_newer_agent_is_passed_over() -> None:
    line = KernelLine("n0", T0, "something new", event=KernelEvent.OTHER)
    assert Engine([KernelFault()]).fold(line, T0).findings == ()
