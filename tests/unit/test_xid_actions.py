"""Every code of the Xid catalogue, from the kernel's line to the ranks: the agent's reader, all detectors, the core with its
default policy, and agents that answer.

The action is the first safe rung of what the catalogue recommends, and no rank starts on a GPU that must be reset first.
"""

from __future__ import annotations

import csv
from importlib import resources

import pytest
from fleet import Fleet, job

from holdfast.agent.collectors.kernel_lines import recognise
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, Remedy
from holdfast.domain.incidents import ActionKind
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import ResetGpu
from holdfast.domain.signals import GenerationStarted, KernelLine
from holdfast.supervisor.protocol import FindingArrived, JobPhase

CATALOGUE = xid.load()
_TEXT = resources.files("holdfast.diagnostics.catalogue").joinpath("xid.csv").read_text(encoding="utf-8")
ROWS = list(csv.DictReader(_TEXT.splitlines()[1:]))
T0 = 1_700_000_000.0
GPU = 2
NOT_THE_MACHINE = ("app", "driver_or_app", "side_effect", "info", "unused")
# By the row's words alone: what the default policy does about a code of the hardware class, with a spare.
WITH_RESETS = {
    "IGNORE": None,
    "REPORT": None,
    "WATCH": None,
    "DIAG": None,
    "DRAIN_THEN_GPU_RESET": None,
    "FOLLOW_NVML_RECOVERY_ACTION": None,
    "RESTART_PROCESS": ActionKind.RESTART,
    "GPU_RESET": ActionKind.GPU_RESET,
    "BY_SUBCODE": ActionKind.GPU_RESET,
    "FOLLOW_48": ActionKind.GPU_RESET,
    "NODE_REBOOT": ActionKind.HOT_SWAP,
    "REPLACE_NODE": ActionKind.HOT_SWAP,
}
WITHOUT = {**WITH_RESETS, **dict.fromkeys(("GPU_RESET", "BY_SUBCODE", "FOLLOW_48"), ActionKind.HOT_SWAP)}


def findings(*codes: int, node: str = "n1") -> list[Finding]:
    """What diagnostics concludes from the lines of these codes on one GPU, a second apart."""
    engine = Engine(detectors.standard(CATALOGUE))
    for rank in range(3):
        engine.fold(GenerationStarted(f"n{rank}", T0, "job", 1, Mesh.of({"dp": 3}), (rank,), HangSpec()), T0)
    found = list[Finding]()
    for second, code in enumerate(codes, start=1):
        text = f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4242, name=python, Ch 00000001"
        line = recognise(text)
        assert line is not None
        signal = KernelLine(node, T0 + second, line.text, line.xid, line.pci, GPU, line.event)
        found += engine.fold(signal, T0 + second).findings
    return found


def running(spares: int, *, resets_gpus: bool) -> Fleet:
    fleet = Fleet(3 + spares, resets_gpus=resets_gpus, snapshots=False)
    fleet.submit(job(dp=3))
    fleet.run()
    fleet.train(20, save=True)
    return fleet


def tell(fleet: Fleet, found: list[Finding]) -> ActionKind | None:
    """The action that was decided; None = the run goes on undisturbed."""
    before = fleet.job.number
    for finding in found:
        fleet.now += 0.1
        fleet.fold(FindingArrived(fleet.now, finding))
    if (fleet.job.phase, fleet.job.number) == (JobPhase.RUNNING, before):
        return None
    action = fleet.incident.action
    assert action is not None
    assert action.reason
    return action.kind


def ranks_run(fleet: Fleet) -> tuple[str, ...]:
    """The nodes of the generation that runs once everybody has answered."""
    fleet.now += 5.0
    fleet.answer_orders()
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    return fleet.nodes()


@pytest.mark.parametrize("row", ROWS, ids=[row["xid"] for row in ROWS])
def test_every_code_leads_to_the_first_safe_rung(row: dict[str, str]) -> None:
    is_hardware = not row["proposed_class"].startswith(NOT_THE_MACHINE)
    for resets_gpus, table in ((True, WITH_RESETS), (False, WITHOUT)):
        wanted = table[row["proposed_first_action"]] if is_hardware else None
        fleet = running(1, resets_gpus=resets_gpus)
        assert tell(fleet, findings(int(row["xid"]))) is wanted
        orders = fleet.orders(ResetGpu)
        nodes = ranks_run(fleet) if wanted is not None else fleet.nodes()
        assert ("n1" in nodes) is (wanted is not ActionKind.HOT_SWAP)
        was_reset = fleet.state.nodes["n1"].reset_at > 0
        assert was_reset is (wanted is ActionKind.GPU_RESET)
        assert not orders, "no GPU is reset under its workers"


@pytest.mark.parametrize("code", [48, 95, 119, 120, 140])
@pytest.mark.parametrize("spares", [0, 1])
def test_a_code_of_the_reset_class_never_restarts_on_the_gpu_as_it_is(code: int, spares: int) -> None:
    fleet = running(spares, resets_gpus=True)
    assert tell(fleet, findings(code)) is ActionKind.GPU_RESET
    assert fleet.incident.action is not None
    assert f"GPU {GPU} of n1 must be reset before it is used again" in fleet.incident.action.reason
    assert ranks_run(fleet) == ("n0", "n1", "n2")
    assert fleet.state.nodes["n1"].reset_at > 0

    fleet = running(spares, resets_gpus=False)
    assert tell(fleet, findings(code)) is (ActionKind.HOT_SWAP if spares else ActionKind.SCALE_DOWN)
    assert "n1" not in ranks_run(fleet)


def test_a_code_that_needs_more_than_a_reset_takes_the_place_of_one_that_does_not() -> None:
    """48, and then 64 on the same GPU a second later: no spare row is left, so the board is to be replaced."""
    found = findings(48, 64)
    assert [finding.recommended_actions[0] for finding in found] == [Remedy.RESET_GPU, Remedy.REPLACE_NODE]
    fleet = running(1, resets_gpus=True)
    assert tell(fleet, found) is ActionKind.HOT_SWAP
    assert ranks_run(fleet) == ("n0", "n3", "n2")
