"""Weights & Biases: metrics and texts in the user's own run.

Metrics get an axis of their own, `holdfast/step`, and are added to the row that the script logs next: rows and their steps stay
those of the script. If the script logs less often than this module, the newest values are kept. Incidents are counted in
that row (`holdfast/incident`), and their texts are in the run's summary, which keeps one per entry."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import holdfast.train as hf
from holdfast.domain.errors import InvalidSpec
from holdfast.integrations.loggers.package import imported
from holdfast.integrations.loggers.sink import MARKER, PREFIX, Entry

STEP = f"{PREFIX}step"


def wandb_run(run: hf.Run, **settings: Any) -> Any:
    """`wandb.init(**settings)` on rank 0: the same run in all generations of this submission of the job. None on other ranks.

    The run has `run.submission` as its id and resume="allow". An `id` in `settings` or `WANDB_RUN_ID` takes precedence, and
    without an agent, where no submission is known, `wandb.init` chooses. Raises `ModuleNotFoundError` if wandb is missing, and
    the exceptions of `wandb.init`."""
    if run.rank != 0:
        return None
    wandb = imported("wandb", "wandb")
    if run.submission and "id" not in settings and not os.environ.get("WANDB_RUN_ID"):
        settings["id"] = run.submission
    if "id" in settings or os.environ.get("WANDB_RUN_ID"):
        settings.setdefault("resume", "allow")
    return wandb.init(**settings)


class Wandb:
    """Log to `run`, which `wandb_run` or `wandb.init` has returned; None on ranks other than 0. The caller
    finishes it."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._incidents = 0  # not in a row yet

    def check(self) -> None:
        """Raise `InvalidSpec` if rank 0 was given no run."""
        if self._run is None:
            raise InvalidSpec("run", None, "on rank 0 the run that loggers.wandb_run or wandb.init has returned")

    def open(self, restored_step: int) -> None:
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        marked = {MARKER: self._incidents} if self._incidents else {}
        self._run.log({**values, **marked, STEP: step}, commit=False)
        self._incidents = 0

    def entry(self, entry: Entry) -> None:
        # one key per entry: the summary of a resumed run keeps those of earlier processes
        self._run.summary[f"{entry.topic}/{entry.id}"] = f"step {entry.step}: {entry.title}. {entry.text}"
        self._incidents += entry.is_incident

    def flush(self) -> None:
        """Nothing to do: wandb sends on its own."""

    def close(self) -> None:
        """Nothing to do: the run is the caller's."""
