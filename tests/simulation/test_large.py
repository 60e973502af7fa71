"""One job of 256 nodes, 2,048 ranks, recovers from each fault; and a fault that it does not recover from is found."""

from __future__ import annotations

import pytest

from holdfast.diagnostics.detectors.worker_exit import WorkerExit
from holdfast.sim.large import LargeJob
from holdfast.sim.world import Violation


def test_every_fault_of_a_large_job_is_recovered() -> None:
    result = LargeJob(256, 20).run()
    assert result.recovered == 20
    assert set(result.kinds) == {"worker crash", "lost node", "GPU off the bus"}


def test_a_fault_that_is_not_recovered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerExit, "_exited", lambda *of: ())
    with pytest.raises(Violation, match="no finding about the worker_crash"):
        LargeJob(16, 20).run()
