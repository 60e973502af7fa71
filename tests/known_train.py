"""Training whose values are known in advance, for any number of replicas: integers, summed over the samples of each step.

known_train.py OUT STEPS PAUSE_S

Each rank appends a line per step to OUT/rank-N.jsonl. `wrong` compares the lines with what they must be. The script uses
only what the first version of the trainer library had, so that it runs under each version.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 12
SAMPLES = 1000
FACTOR = 31
MODULUS = 2**31 - 1
SIZE = 4096


def lines(out: Path) -> Iterator[dict[str, Any]]:
    """What the ranks have written; the last line of a killed rank may be in part."""
    for file in sorted(out.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("}\n"):
                yield json.loads(line)


def wrong(out: Path) -> list[str]:
    """Every line with a value that differs from what it must be."""
    found = list(lines(out))
    values = [0]
    for done in range(max((line["step"] for line in found), default=0)):
        samples = sum(number % SAMPLES for number in range(done * GLOBAL_BATCH, (done + 1) * GLOBAL_BATCH))
        values.append((values[-1] * FACTOR + samples) % MODULUS)
    return [
        f"{line}, expected {values[line['step']]}"
        for line in found
        if line["value"] != values[line["step"]] or not line["uniform"]
    ]


def main(run: Any, out: Path, steps: int, pause_s: float) -> None:
    import torch
    import torch.distributed as dist

    import holdfast.train as hf

    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    version = importlib.metadata.version("holdfast-training")
    data = hf.ElasticSampler(SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=1, world=run.world, shuffle=False)
    weights = torch.zeros(SIZE, dtype=torch.int64)
    state = {"weights": weights, "data": data}
    step = restored = run.restore(state)
    with (out / f"rank-{run.rank}.jsonl").open("a", buffering=1) as file:
        while step < steps:
            with run.step(step) as s:
                total = torch.cat(next(data)).sum()
                dist.all_reduce(total)
                weights.mul_(FACTOR).add_(total).remainder_(MODULUS)
                time.sleep(pause_s)
                s.log(loss=1.0 / (step + 1), tokens=GLOBAL_BATCH)
            step += 1
            line = {
                "step": step,
                "value": int(weights[0]),
                "uniform": bool((weights == weights[0]).all()),
                "generation": run.generation,
                "restored": restored,
                "ranks": run.world_size,
                "version": version,
            }
            file.write(json.dumps(line) + "\n")
            run.checkpoint(state, step)


if __name__ == "__main__":
    import holdfast.train

    holdfast.train.launch(lambda run: main(run, Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
