"""The compile cache with the real compiler: a restart takes every graph from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import torch
import holdfast.train as hf
from torch._dynamo.utils import counters

@torch.compile
def loss_of(x):
    return (x.sin() * 2).square().sum()

def main(run):
    state = {"seen": 0}
    step = run.restore(state)
    last = step + 4
    while step < last:
        with run.step(step) as s:
            s.log(loss=loss_of(torch.ones(100)))
        step += 1
        run.checkpoint(state, step)
    print("graphs from the cache:", counters["inductor"]["fxgraph_cache_hit"], flush=True)

hf.launch(main, checkpoint=hf.Checkpoints(directory=sys.argv[1], interval_steps=2))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_a_restart_compiles_nothing_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(name: str) -> str:
        """Each with an empty inductor cache, as on a fresh node."""
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "ckpt")],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "graphs from the cache: 0" in run("first")
    assert len(list((tmp_path / "ckpt" / "compile").iterdir())) == 1
    again = run("second")
    assert "bytes loaded" in again
    assert "graphs from the cache: 1" in again
