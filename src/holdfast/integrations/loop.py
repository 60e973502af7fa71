"""What the runs of frameworks have in common whose users write the loop themselves. Imports no framework."""

from __future__ import annotations

import contextlib
from typing import Protocol

import holdfast.train as hf
from holdfast.domain.signals import Phase


class Position(Protocol):
    """Where a rank is in its data."""

    epoch: int


class LoopRun:
    """An `hf.Run` for a user's own loop over epochs and batches. `run` is the run itself."""

    def __init__(self, run: hf.Run, data: Position) -> None:
        self.run = run
        self._position = data

    @property
    def epoch(self) -> int:
        """The epoch to continue with: number of finished passes through `batches`."""
        return self._position.epoch

    @property
    def steps_finished(self) -> int:
        """Number of finished optimizer steps, including those before the restored checkpoint."""
        return self.run.steps_finished

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Context of an evaluation, so that it is not reported as a hang."""
        return self.run.phase(Phase.EVAL)

    def close(self) -> None:
        """End the run, as `hf.Run.close`; a script that does not call it is ended at its exit."""
        self.run.close()
