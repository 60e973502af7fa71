"""The trainer library: what a training script imports. Standard library and torch only.

    import holdfast.train as hf

    def main(run: hf.Run) -> None:
        model, optim, data = build(run.mesh)
        state = {"model": model, "optim": optim, "data": data}
        step = run.restore(state)
        while step < total_steps:
            with run.step(step) as s:
                s.log(loss=..., tokens=...)
            step += 1
            run.checkpoint(state, step)

    hf.launch(main)

The same file runs as plain `python train.py` (one process, no services), under `torchrun`, and under `holdfast run`.
`hf.launch(main, checkpoint=hf.Checkpoints(directory="…"))` makes `run.checkpoint` save in the first two as well.
`hf.attach()` returns the run in a process whose `main` and process group belong to a framework.
`hf.prepared(function)` returns what the function has loaded ahead of time, for all workers of a node.
The step loop never waits for a service: it sends datagrams without blocking, and continues if no service receives them.
"""

import importlib.util
import sys

from holdfast.domain.distribution import install_command

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        f"holdfast.train needs torch, which {sys.executable} does not have: {install_command('train')}", name="torch"
    )

from holdfast.train import scaling
from holdfast.train.attach import attach
from holdfast.train.environment import World
from holdfast.train.launch import launch
from holdfast.train.run import Run
from holdfast.train.sampler import ElasticSampler
from holdfast.train.scale_events import Leaving
from holdfast.train.standalone import Checkpoints
from holdfast.train.step import Interrupted, Step
from holdfast.train.warm.preparation import prepared

__all__ = [
    "Checkpoints",
    "ElasticSampler",
    "Interrupted",
    "Leaving",
    "Run",
    "Step",
    "World",
    "attach",
    "launch",
    "prepared",
    "scaling",
]
