"""The catalogue as a table: every code gets the action that its row proposes, and no physical fault is counted twice."""

from __future__ import annotations

import csv
from importlib import resources

import pytest
from diagnosing import CATALOGUE, T0, Fleet

from holdfast.diagnostics.catalogue.xid import FirstAction, Role
from holdfast.diagnostics.detectors.gpu_error import GpuError
from holdfast.diagnostics.detectors.xid_judgement import details_of, gpu_key
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, Remedy, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, GpuSample, KernelLine

_TEXT = resources.files("holdfast.diagnostics.catalogue").joinpath("xid.csv").read_text(encoding="utf-8")
ROWS = list(csv.DictReader(_TEXT.splitlines()[1:]))

# By the row's words alone: the severity that stops or does not stop a run, and the first rung.
HARDWARE = {
    "IGNORE": (Severity.INFO, Remedy.WATCH),
    "REPORT": (Severity.WARNING, Remedy.WATCH),
    "WATCH": (Severity.WARNING, Remedy.WATCH),
    "DIAG": (Severity.WARNING, Remedy.WATCH),
    "RESTART_PROCESS": (Severity.ERROR, Remedy.RESTART_PROCESS),
    "GPU_RESET": (Severity.ERROR, Remedy.RESET_GPU),
    "DRAIN_THEN_GPU_RESET": (Severity.WARNING, Remedy.WATCH),
    "NODE_REBOOT": (Severity.FATAL, Remedy.REBOOT_NODE),
    "REPLACE_NODE": (Severity.FATAL, Remedy.REPLACE_NODE),
    "BY_SUBCODE": (Severity.ERROR, Remedy.RESET_GPU),
    "FOLLOW_48": (Severity.ERROR, Remedy.RESET_GPU),
    "FOLLOW_NVML_RECOVERY_ACTION": (Severity.WARNING, Remedy.WATCH),
}
NOT_THE_MACHINE = ("app", "driver_or_app", "side_effect", "info", "unused")


def judge(*lines: KernelLine) -> list[Finding]:
    engine = Engine([GpuError(CATALOGUE)])
    return [finding for line in lines for finding in engine.fold(line, line.at).findings]


def line(xid: int, *, at: float = 0.0, gpu: int = 0, text: str = "") -> KernelLine:
    pci = f"0000:{gpu:02x}:00"
    return KernelLine("n0", T0 + at, text or f"NVRM: Xid (PCI:{pci}): {xid}, Ch 00000001", xid=xid, pci=pci, gpu=gpu)


@pytest.mark.parametrize("row", ROWS, ids=[row["xid"] for row in ROWS])
def test_every_code_gets_the_action_of_its_row(row: dict[str, str]) -> None:
    (found,) = judge(line(int(row["xid"])))
    action = row["proposed_first_action"]
    if row["proposed_class"].startswith(NOT_THE_MACHINE):
        wanted = Remedy.RESTART_PROCESS if action == "RESTART_PROCESS" else Remedy.WATCH
        assert found.severity in (Severity.INFO, Severity.WARNING), "a program's error stops nobody else"
        assert found.recommended_actions == (wanted,)
    else:
        assert (found.severity, found.recommended_actions[0]) == HARDWARE[action]
    assert found.evidence["recommended_actions"]
    assert found.evidence["catalogue"] == CATALOGUE.version


def test_the_data_is_versioned_and_whole() -> None:
    assert CATALOGUE.version == "2026.11"
    assert len(CATALOGUE) == len(ROWS)
    assert {row.role for row in CATALOGUE.values()} == set(Role)
    for row in CATALOGUE.values():
        assert [rule.count for rule in row.escalations] == sorted((r.count for r in row.escalations), reverse=True)
        assert all(rule.then in FirstAction and rule.source for rule in row.escalations)


# ------------------------------------------------------------------ one physical fault


def test_a_gpu_that_goes_down_in_many_lines_is_one_finding() -> None:
    codes = (79, 119, 62, 109, 154, 45, 43, 79)
    (found,) = judge(*(line(xid, at=i) for i, xid in enumerate(codes)))
    assert found.evidence["xid"] == "79"


def test_a_worse_line_of_the_same_fault_replaces_the_finding() -> None:
    first, second = judge(line(48, at=0), line(171, at=0.1), line(95, at=0.2), line(64, at=0.5), line(63, at=0.6))
    assert (first.severity, second.severity) == (Severity.ERROR, Severity.FATAL)
    assert second.evidence["supersedes"] == first.id


def test_the_fault_itself_replaces_a_verdict_that_was_read_before_it() -> None:
    text = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    verdicts = [line(154, at=0.1 * gpu, gpu=gpu, text=text) for gpu in range(8)]
    first, second = judge(*verdicts, line(79, at=1.0, gpu=3))
    assert (second.gpu, second.evidence["xid"]) == (3, "79")
    assert second.evidence["supersedes"] == first.id


def test_a_verdict_that_nvml_gives_on_every_gpu_is_one_finding_and_the_xid_replaces_it() -> None:
    def sample(at: float, *actions: int) -> GpuSample:
        gpus = tuple(range(len(actions)))
        zeros = (0,) * len(actions)
        uuids = tuple(f"GPU-{gpu}" for gpu in gpus)
        lost = tuple(gpu == 3 and any(actions) for gpu in gpus)
        return GpuSample("n0", T0 + at, gpus, uuids, zeros, zeros, zeros, zeros, actions, lost)

    engine = Engine([GpuError(CATALOGUE)])
    items = (
        sample(0, *(0,) * 8),
        sample(5, *(2,) * 8),
        sample(10, *(2,) * 8),
        line(79, at=11, gpu=3),
        line(154, at=12),
    )
    verdict, xid = (finding for item in items for finding in engine.fold(item, item.at).findings)
    assert (verdict.severity, xid.gpu) == (Severity.FATAL, 3)
    assert (verdict.gpu, verdict.evidence["other_gpus"]) == (3, "0, 1, 2, 4, 5, 6, 7"), "the one that is gone"
    assert xid.evidence["supersedes"] == verdict.id


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_words_without_an_address_are_about_the_gpu_that_has_one(order: tuple[int, int]) -> None:
    words = KernelLine("n0", T0, "NVRM: fallen off the bus and is not responding to commands.", xid=79)
    pair = (line(79, gpu=3), words)
    assert len(judge(*(pair[i] for i in order))) == 1


def test_two_gpus_that_fail_are_two_faults() -> None:
    assert [found.gpu for found in judge(line(79, gpu=1), line(79, gpu=2, at=1.0))] == [1, 2]


def test_a_pci_address_is_one_gpu_however_it_is_written() -> None:
    assert gpu_key("0000:3B:00", None) == gpu_key("00000000:3b:00.0", None) == gpu_key("PCI:0000:3b:00", 4)


# ------------------------------------------------------------------ escalation


def test_corrected_errors_that_repeat_are_reported_and_stop_nothing() -> None:
    found = judge(*(line(63, at=i * 3600.0) for i in range(3)))
    assert [f.severity for f in found] == [Severity.WARNING] * 3
    assert found[-1].recommended_actions == (Remedy.REPLACE_NODE,)


def test_a_link_counts_by_itself() -> None:
    def fatal(link: int, at: float) -> KernelLine:
        text = f"NVRM: Xid (PCI:0000:00:00): 145, RLW_CTRL Fatal XC0 i0 Link {link:02d} (0x00000005 0x00000000)"
        return line(145, at=at, text=text)

    found = judge(fatal(1, 0), fatal(2, 7200), fatal(3, 14400), fatal(2, 21600))
    assert [f.severity for f in found] == [Severity.ERROR] * 3 + [Severity.FATAL]
    assert found[-1].evidence["link"] == "02"


@pytest.mark.parametrize(
    ("words", "severity", "blame"),
    [
        ("NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000)", Severity.ERROR, ""),
        ("NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000)", Severity.ERROR, "peer"),
        ("NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000)", Severity.INFO, "software"),
        ("NETIR_LINK_DOWN Nonfatal XC1 i2 Link 17 (0xdeadbeef)", Severity.INFO, ""),
        ("NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]", Severity.ERROR, ""),
    ],
)
def test_sub_codes_of_nvlink5(words: str, severity: Severity, blame: str) -> None:
    (found,) = judge(line(149, text=f"NVRM: Xid (PCI:0009:01:00): 149, {words}"))
    assert (found.severity, found.evidence.get("blame", "")) == (severity, blame)
    assert Remedy.REPLACE_NODE not in found.recommended_actions or not blame


def test_the_parts_of_an_nvlink5_line() -> None:
    details = details_of("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x0)")
    assert (details.unit, details.link, details.subcode, details.nonfatal) == ("NETIR_LINK_EVT", "01", 33, False)


# ------------------------------------------------------------------ whose error


def run_job(fleet: Fleet, name: str, *codes: tuple[int, int]) -> list[Finding]:
    """A job of this name on n0, and application errors in it: (code, GPU)."""
    fleet.now += 3600.0
    started = GenerationStarted("n0", T0 + fleet.now, name, 1, Mesh.of({"dp": 1}), (0,), HangSpec())
    fleet.fold(started)
    before = len(fleet.found)
    for code, gpu in codes:
        fleet.now += 200.0
        fleet.xid(code, gpu=gpu)
    return [found for found in fleet.found[before:] if found.evidence.get("xid") in {str(code) for code, _ in codes}]


def test_a_program_error_on_the_same_gpu_in_job_after_job_is_the_gpus() -> None:
    fleet = Fleet(nodes=1)
    fleet.start()
    (first,) = run_job(fleet, "a", (31, 2))
    (second,) = run_job(fleet, "b", (13, 2))
    (third,) = run_job(fleet, "c", (31, 2))
    assert [first.severity, second.severity, third.severity] == [Severity.INFO, Severity.ERROR, Severity.FATAL]
    assert "job" in second.evidence["rule"]


def test_a_program_that_fails_on_many_gpus_is_at_fault_itself() -> None:
    fleet = Fleet(nodes=1)
    fleet.start()
    for name in ("a", "b", "c"):
        found = run_job(fleet, name, (31, 2), (31, 3))
        assert found[-1].severity is Severity.INFO
    assert "error of the program" in fleet.found[-1].summary
