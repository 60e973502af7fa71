"""A process ends when its gloo threads have nothing left to do."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from holdfast.train import gloo_threads

# torch's own names of threads, and a group that is alive at the exit. `states` is asked while the threads are idle.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from holdfast.train import gloo_threads
assert gloo_threads.states() == []
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(20):
    dist.all_reduce(torch.ones(1000))
assert gloo_threads.wait_until_idle()
assert gloo_threads.states() == ["S"] * 2, gloo_threads.states()
"""


def test_the_threads_of_a_real_group_are_found_and_get_idle() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("looks", "reached"),
    [
        ([[]], True),
        ([["S"], ["S"], ["S"]], True),
        ([["R"], ["R"], ["S"], ["R"], ["S"], ["S"]], True),
        ([["R"], ["R"], []], False),  # never idle twice in a row within the limit
    ],
)
def test_it_waits_for_two_looks_without_a_thread_that_could_run(
    monkeypatch: pytest.MonkeyPatch, looks: list[list[str]], reached: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(gloo_threads, "states", lambda: looks.pop(0) if looks else ["R"])
    assert gloo_threads.wait_until_idle() is reached
    assert now[0] <= gloo_threads.WAIT_S_MAX + gloo_threads.LOOK_S
    assert not looks or reached
