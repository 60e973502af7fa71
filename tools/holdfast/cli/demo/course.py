"""The two forms of the demo, the expected results of its faults, and the losses of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.domain.errors import HoldfastError, NotFound

JOB = "gpt"
UNEVEN_JOB = "uneven"
BEREFT_JOB = "bereft"
FAULTY_JOB = "faulty"
CHECKPOINT_STEPS = 10
PACE = ("--step-s-min", "0.1")  # steps are counted once a second: a fast machine would finish before the faults
REFERENCE_TIMEOUT_S = 600.0
View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Course:
    """The main job of a demo, and the ranks that get a fault. One node is a spare."""

    faults: int
    steps: int  # default
    steps_min: int  # needed by the faults
    dp: int
    pp: int
    crash_rank: int
    lost_rank: int
    hung_rank: int
    dp_min: int
    layers: int  # of the model

    @property
    def active(self) -> int:
        return self.dp * self.pp

    @property
    def nodes(self) -> int:
        return self.active + 1

    @property
    def is_short(self) -> bool:
        return self is SHORT


LONG = Course(
    faults=9, steps=400, steps_min=150, dp=3, pp=3, crash_rank=4, lost_rank=7, hung_rank=2, dp_min=2, layers=6
)
SHORT = Course(
    faults=3, steps=200, steps_min=100, dp=2, pp=2, crash_rank=1, lost_rank=3, hung_rank=2, dp_min=1, layers=2
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected result of a fault."""

    fault: str
    kind: str
    action: str
    node: str = ""
    rank: int | None = None
    source: str = ""  # tier from which at least one shard must be restored
    outcome: str = ""  # text that the outcome must contain

    def check(self, incident: View | None) -> str:
        """Return the differences in one sentence; empty if the incident is as expected."""
        if incident is None:
            return f"{self.fault}: no incident was opened"
        action = (incident.get("action") or {}).get("kind")
        wrong = [
            f"{what} {found!r} instead of {wanted!r}"
            for what, found, wanted in (
                ("kind", incident["kind"], self.kind),
                ("action", action, self.action),
                ("node", incident.get("node"), self.node or incident.get("node")),
                ("rank", incident.get("rank"), incident.get("rank") if self.rank is None else self.rank),
            )
            if found != wanted
        ]
        if self.source and self.source not in incident["restored_from"]:
            wrong.append(f"restored from {incident['restored_from']}, no shard from the {self.source}")
        if self.outcome not in incident["outcome"]:
            wrong.append(f"outcome {incident['outcome']!r}, not {self.outcome!r}")
        return f"{self.fault}: {', '.join(wrong)} ({incident['cause']})" if wrong else ""


@dataclass(slots=True)
class Outcome:
    """The data of the report."""

    target: int
    job: View
    goodput: View
    incidents: list[View]
    losses: dict[int, float]
    others: Mapping[str, tuple[View, list[View]]]  # the other jobs, with their incidents; none in the short form
    failures: list[str] = field(default_factory=list)


def examples() -> Path:
    """Return the directory of the example trainers, in the source tree or in the wheel."""
    for root in (Path(__file__).parents[4] / "examples", Path(__file__).parents[2] / "examples"):
        if (root / "gpt" / "train.py").exists():
            return root
    raise NotFound("the example scripts are not installed; run the demo from a checkout or reinstall the wheel")


def training_arguments(out: Path, steps: int, layers: int = LONG.layers) -> list[str]:
    return ["--steps", str(steps), "--layers", str(layers), "--out", str(out), "--shard-optimizer"]


def reference_losses(out: Path, course: Course, steps: int) -> dict[int, float]:
    """Return the loss per step of the same training without faults: plain `python train.py` in one process."""
    directory = out / "reference"
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.jsonl"):
        old.unlink()
    arguments = training_arguments(directory, steps, course.layers)
    command = [sys.executable, str(examples() / "gpt" / "train.py"), *arguments]
    with (directory / "train.log").open("wb") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=REFERENCE_TIMEOUT_S, check=False)
    if code.returncode:
        raise HoldfastError(f"the reference run exited with code {code.returncode}; see {directory / 'train.log'}")
    return read_losses(directory)


def read_losses(directory: Path) -> dict[int, float]:
    """Return step → loss; a repeated step has its last value."""
    losses: dict[int, float] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the last line of a killed process may be incomplete
                continue
            if "step" in record and "loss" in record:
                losses[int(record["step"])] = float(record["loss"])
    return losses
