"""Healthy runs with realistic noise are neither stopped nor restarted, and no node of theirs is put out of service.

`make bench-detection ARGS='--only healthy'` has 1,000 virtual hours of this; here are a few.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection import healthy, healthy_run
from holdfast.domain.signals import WorkerExited

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_run_is_left_alone(seed: int) -> None:
    score = healthy.suite(DATA, np.random.default_rng(seed), {4: 3.0})
    assert score.facts["virtual_hours"] == 3.0
    names = "false_stops", "false_evictions", "false_restarts", "false_errors"
    wrong = {name: score.facts[name] for name in names}
    assert wrong == dict.fromkeys(wrong, 0), score.mistakes


def test_the_suite_can_say_no() -> None:
    run = healthy_run.Run(4, healthy.recorded_noise(DATA), np.random.default_rng(1))
    run.train(600.0)
    run._see(WorkerExited(run.names[0], run.now, healthy_run.JOB, 1, 0, 1, None, 11, run.steps_done, False))
    end = run.train(600.0)
    assert end.wrong == Counter(false_restarts=1)
    assert "SIGSEGV" in end.why
