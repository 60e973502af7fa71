"""The script of suite `hang_gloo`: steps of dp × pp × tp communication, in which one rank fails in one way at one step.

python gloo_train.py WAY RANK STEP
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import holdfast.train as hf

_FOREVER_S = 3600
_STEP_S = 0.02  # of computation


def _spin() -> None:
    while True:
        pass


WAYS: dict[str, Callable[[], object]] = {
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "GIL lock": lambda: ctypes.PyDLL(None).sleep(_FOREVER_S),  # a foreign call that does not release the lock
    "endless loop": _spin,
    "data never comes": lambda: time.sleep(_FOREVER_S),
    "exit": lambda: os._exit(3),
    "mismatch": lambda: None,  # see `_reduce`
}


def main(run: hf.Run) -> None:
    way, culprit, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    mesh, names = run.mesh, run.mesh.mesh_dim_names or ()
    groups = {name: mesh.get_group(name) for name in names if mesh.size(names.index(name)) > 1}
    step = run.restore({})
    while step < at + 1000:
        with run.step(step) as s:
            time.sleep(_STEP_S)
            fails = run.rank == culprit and step == at
            if fails:
                WAYS[way]()
            if "pp" in groups:
                _pass_on(groups["pp"])
            for name in ("tp", "dp"):
                if name in groups:
                    _reduce(groups[name], odd=fails and way == "mismatch")
            s.log(tokens=1)
        step += 1


def _reduce(group: dist.ProcessGroup, *, odd: bool) -> None:
    value = torch.ones(8)
    if odd:
        dist.barrier(group)
    else:
        dist.all_reduce(value, group=group)


def _pass_on(group: dist.ProcessGroup) -> None:
    """Send one message along the pipeline and one back."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    value = torch.ones(8)
    for before, after in ((rank - 1, rank + 1), (rank + 1, rank - 1)):
        if 0 <= before < size:
            dist.recv(value, group=group, group_src=before)
        if 0 <= after < size:
            dist.send(value, group=group, group_dst=after)


if __name__ == "__main__":
    hf.launch(main)
