"""Suite `xid`: every code of the catalogue in the notation of the driver, and recorded kinds of kernel lines, from the text
through the agent's reader to the finding of the whole engine.

`xid.csv` (of DATA, otherwise the shipped one) contains the first action for each code. `kernel/lines.csv` contains the kind of
finding for each line, which is empty for noise. A case is right if the kind, the severity and the first recommended action are.
"""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path

from benchmarks.detection.score import Score
from holdfast.agent.collectors.kernel_lines import recognise
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, Remedy, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, KernelLine

_T0 = 1_700_000_000.0
_NOT_THE_MACHINE = ("app", "driver_or_app", "side_effect", "info", "unused")
# The severity and the first recommended action for each first action of the catalogue, for codes of the hardware class.
_HARDWARE = {
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


def suite(data: Path) -> Score:
    score = Score("xid")
    codes, lines = score.row("codes"), score.row("lines")
    for row in _table(data):
        _code(codes, row)
    path = data / "kernel" / "lines.csv"
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                _line(lines, row["text"], row["kind"] or "")
    return score.total()


def _table(data: Path) -> list[dict[str, str]]:
    path = data / "xid.csv"
    shipped = resources.files("holdfast.diagnostics.catalogue").joinpath("xid.csv")
    text = path.read_text("utf-8") if path.exists() else shipped.read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _code(score: Score, row: dict[str, str]) -> None:
    code, action = int(row["xid"]), row["proposed_first_action"]
    found = read(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4242, name=python, Ch 00000001")
    if row["proposed_class"].startswith(_NOT_THE_MACHINE):
        rung = Remedy.RESTART_PROCESS if action == "RESTART_PROCESS" else Remedy.WATCH
        right = (
            len(found) == 1
            and found[0].severity in (Severity.INFO, Severity.WARNING)
            and found[0].recommended_actions == (rung,)
        )
    else:
        right = [(one.severity, one.recommended_actions[0]) for one in found] == [_HARDWARE[action]]
    if right:
        score.hit()
    else:
        answer = ", ".join(f"{one.severity} {one.recommended_actions[0]}" for one in found) or "nothing"
        score.fail(f"{code} {row['proposed_class']} {action}: {answer}", wrong=bool(found), missed=1)


def _line(score: Score, text: str, kind: str) -> None:
    found = {one.kind.value for one in read(text)}
    if not kind and not found:
        score.clean += 1
    elif found == {kind}:
        score.hit()
    else:
        score.fail(
            f"{text!r}: {found or 'nothing'}, not {kind or 'nothing'}",
            wrong=bool(found),
            missed=bool(kind),
            spoiled=not kind,
        )


def read(text: str) -> tuple[Finding, ...]:
    """The findings of a new engine with one node after one line."""
    recognised = recognise(text)
    if recognised is None:
        return ()
    engine = Engine(detectors.standard(xid.load()))
    engine.fold(GenerationStarted("n0", _T0, "job", 1, Mesh.of({"dp": 1}), (0,), HangSpec()), _T0)
    line = KernelLine(
        "n0", _T0 + 1, recognised.text, recognised.xid, recognised.pci, 0 if recognised.pci else None, recognised.event
    )
    return engine.fold(line, _T0 + 1).findings
