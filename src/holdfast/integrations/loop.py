"""What the runs of frameworks have in common whose users write the loop themselves. Imports no framework.

A save that is due only by the interval, at the last batch of an epoch, is *deferred*: it is made when the next epoch begins, at
the end of the next step, or at the end of the run, whichever comes first. A checkpoint of the last batch itself would be
continued by an epoch without batches, whose evaluation is repeated and may use names that only the loop defines. All ranks
defer the same saves, because their loaders have the same length. A save that was asked for is never deferred."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import holdfast.train as hf
from holdfast.domain.signals import Phase


class Position(Protocol):
    """Where a rank is in its data. `on_epoch` is called when an epoch begins, before its first batch is asked for."""

    epoch: int
    on_epoch: Callable[[], None]

    @property
    def at_end(self) -> bool:
        """Whether the script has got the last batch of the epoch; False if the length of the epoch is not known."""
        ...


class LoopRun(ABC):
    """An `hf.Run` for a user's own loop over epochs and batches. `run` is the run itself."""

    def __init__(self, run: hf.Run, data: Position) -> None:
        self.run = run
        self._position = data
        self._deferred = False
        data.on_epoch = self._save_deferred
        run.on_finish(self._save_deferred)

    @abstractmethod
    def _given_state(self) -> Mapping[str, Any]:
        """The state of the run, for its checkpoints."""

    def _save(self) -> None:
        """Save at the end of a step if a save is due."""
        deferred, self._deferred = self._deferred, False
        if self._position.at_end and not deferred and self.run.due_by_interval_only():
            self._deferred = True
        else:
            self.run.checkpoint(self._given_state(), self.run.steps_finished, force=deferred)

    def _save_deferred(self) -> None:
        if self._deferred:
            self._deferred = False
            self.run.checkpoint(self._given_state(), self.run.steps_finished)

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
