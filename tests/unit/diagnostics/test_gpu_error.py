"""Xids: one finding per physical fault, the catalogue's first action, and no node condemned by a program's error."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosing import CATALOGUE, T0, Fleet

from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.detectors.gpu_error import GpuError
from holdfast.diagnostics.engine import Engine
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import CollectorSilent, GpuSample, KernelLine


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(nodes=2, ranks_per_node=1)
    fleet.start()
    fleet.run(until=5.0)
    return fleet


def test_off_the_bus_is_fatal_and_names_the_job(fleet: Fleet) -> None:
    fleet.xid(79, "n1", gpu=3)
    found = fleet.only()
    assert (found.kind, found.severity, found.node, found.gpu) == (FindingKind.GPU_ERROR, Severity.FATAL, "n1", 3)
    assert found.recommended_actions == (Remedy.REPLACE_NODE,)
    assert (found.job, found.generation) == ("gpt", 1)
    assert found.evidence["xid"] == "79"
    assert "Xid 79" in found.summary


def test_one_fault_makes_many_lines_and_one_finding(fleet: Fleet) -> None:
    fleet.xid(79, gpu=3)
    for gpu in range(8):
        fleet.now += 1.0
        fleet.xid(
            154, gpu=gpu, text="Xid: 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
        )
        fleet.xid(45, gpu=gpu)
        fleet.xid(43, gpu=gpu)
    fleet.xid(79, gpu=3)
    assert fleet.only().evidence["xid"] == "79"


def test_154_alone_is_obeyed_once(fleet: Fleet) -> None:
    for gpu in range(8):
        fleet.xid(
            154, gpu=gpu, text="Xid: 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
        )
    found = fleet.only()
    assert (found.severity, found.recommended_actions[0]) == (Severity.ERROR, Remedy.RESET_GPU)


def test_154_back_to_none_is_nothing(fleet: Fleet) -> None:
    fleet.xid(154, text="Xid: 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert fleet.found == []


def test_fallen_off_the_bus_without_a_code(fleet: Fleet) -> None:
    fleet.fold(KernelLine("n0", T0 + 5, "NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus."))
    assert fleet.only().severity is Severity.FATAL


@pytest.mark.parametrize("code", [13, 31, 43, 45, 69, 8, 11, 66, 137])
def test_a_programs_error_never_condemns_a_node_however_often(fleet: Fleet, code: int) -> None:
    for _ in range(20):
        fleet.now += 120.0
        fleet.xid(code)
    assert fleet.found
    assert {finding.severity for finding in fleet.found} == {Severity.INFO}
    assert all(finding.recommended_actions in ((Remedy.WATCH,), (Remedy.RESTART_PROCESS,)) for finding in fleet.found)


def test_our_own_kill_makes_a_45(fleet: Fleet) -> None:
    fleet.exits(0, signal=9, expected=True)
    fleet.now += 0.5
    fleet.xid(45)
    assert fleet.found == []


@pytest.mark.parametrize(
    ("code", "severity", "first"),
    [
        (94, Severity.ERROR, Remedy.RESTART_PROCESS),
        (95, Severity.ERROR, Remedy.RESET_GPU),
        (119, Severity.ERROR, Remedy.RESET_GPU),
        (48, Severity.ERROR, Remedy.RESET_GPU),
        (64, Severity.FATAL, Remedy.REPLACE_NODE),
        (63, Severity.WARNING, Remedy.WATCH),
        (92, Severity.WARNING, Remedy.WATCH),
        (9999, Severity.WARNING, Remedy.WATCH),
    ],
)
def test_first_actions(fleet: Fleet, code: int, severity: Severity, first: Remedy) -> None:
    fleet.xid(code)
    assert (fleet.only().severity, fleet.only().recommended_actions[0]) == (severity, first)


def test_a_second_time_within_a_day_goes_one_rung_further(fleet: Fleet) -> None:
    fleet.xid(119)
    fleet.now += 30.0
    fleet.xid(119)  # the same burst
    fleet.now += 7200.0
    fleet.xid(119)
    fleet.xid(119, gpu=5)  # another GPU: its first
    assert [f.severity for f in fleet.found] == [Severity.ERROR, Severity.FATAL, Severity.ERROR]
    assert "second time" in fleet.found[1].summary


def test_a_double_bit_error_after_a_failed_remap_is_fatal(fleet: Fleet) -> None:
    fleet.xid(64)
    fleet.now += 90_000.0
    fleet.xid(64, gpu=7)
    fleet.now += 100.0
    fleet.xid(48, gpu=7)
    assert fleet.found[-1].severity is Severity.FATAL


@pytest.mark.parametrize(("word", "severity"), [("Nonfatal", Severity.INFO), ("Fatal", Severity.ERROR)])
def test_nvlink5_says_itself_whether_it_is_fatal(fleet: Fleet, word: str, severity: Severity) -> None:
    fleet.xid(145, text=f"NVRM: Xid (PCI:0000:03:00): 145, RLW {word} XC0 i0 Link 02 (0x00000005 0x00000000)")
    assert fleet.only().severity is severity


def test_every_code_of_the_catalogue_gets_a_judgement() -> None:
    assert len(CATALOGUE) > 150
    for code, row in CATALOGUE.items():
        engine = Engine([GpuError(CATALOGUE)])
        line = KernelLine("n0", T0, f"NVRM: Xid (PCI:0000:03:00): {code}, x", xid=code, pci="0000:03:00")
        findings = engine.fold(line, T0).findings
        assert len(findings) == 1, code
        if not row.is_hardware:
            assert findings[0].severity in (Severity.INFO, Severity.WARNING), code


# ------------------------------------------------------------------ the driver's own word


def sample(at: float, *, lost: bool = False, action: int = 0) -> GpuSample:
    return GpuSample("n0", T0 + at, (0,), ("GPU-a",), (50.0,), (300.0,), (1,), (0,), (action,), (lost,))


def samples(*items: GpuSample) -> list[Finding]:
    engine = Engine([GpuError(CATALOGUE)])
    return [finding for item in items for finding in engine.fold(item, item.at).findings]


def test_a_lost_gpu_is_found_once() -> None:
    (found,) = samples(sample(0), sample(5, lost=True), sample(10, lost=True))
    assert (found.severity, found.gpu) == (Severity.FATAL, 0)


@pytest.mark.parametrize(
    ("action", "severity"), [(1, Severity.ERROR), (2, Severity.FATAL), (3, Severity.WARNING), (99, Severity.WARNING)]
)
def test_the_recovery_action_is_followed(action: int, severity: Severity) -> None:
    (found,) = samples(sample(0), sample(5, action=action), sample(10, action=action))
    assert found.severity is severity


def test_unknown_is_not_an_action() -> None:
    assert samples(sample(0, action=-1), sample(5, action=-1)) == []


def test_the_xid_and_the_sample_of_one_fault_are_one_finding(fleet: Fleet) -> None:
    fleet.xid(79)
    fleet.fold(sample(fleet.now + 3.0, lost=True))
    assert len(fleet.found) == 1


def test_a_wedged_driver_is_a_signal(fleet: Fleet) -> None:
    fleet.fold(CollectorSilent("n0", T0 + 5, "nvml", 3))
    assert (fleet.only().kind, fleet.only().severity) == (FindingKind.GPU_ERROR, Severity.WARNING)


def test_a_broken_gpu_supersedes_the_crash_that_it_caused(fleet: Fleet) -> None:
    fleet.exits(1, signal=6)
    fleet.xid(79, "n1")
    crash, gpu = fleet.found
    assert gpu.evidence["supersedes"] == crash.id


# ------------------------------------------------------------------ the catalogue


def test_an_operators_row_replaces_ours(tmp_path: Path) -> None:
    overrides = tmp_path / "xid.csv"
    overrides.write_text("xid,proposed_first_action\n13,REPLACE_NODE\n")
    catalogue = xid.load(overrides)
    engine = Engine([GpuError(catalogue)])
    (found,) = engine.fold(KernelLine("n0", T0, "Xid", xid=13), T0).findings
    assert found.severity is Severity.FATAL
    assert found.evidence["source"] == str(overrides)
    assert catalogue[13].name == CATALOGUE[13].name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("xid,proposed_first_action\nabc,WATCH\n", ":2: xid: 'abc'"),
        ("xid,proposed_first_action\n13,PANIC\n", "'PANIC' is not valid; expected one of IGNORE"),
        ("code,action\n13,WATCH\n", "a header with the columns proposed_first_action, xid"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    overrides = tmp_path / "mine.csv"
    overrides.write_text(text)
    with pytest.raises(InvalidSpec) as caught:
        xid.load(overrides)
    assert words in str(caught.value)
    assert "mine.csv" in str(caught.value)


def test_a_missing_override_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="HOLDFAST_XID_OVERRIDES"):
        xid.load(tmp_path / "none.csv")
