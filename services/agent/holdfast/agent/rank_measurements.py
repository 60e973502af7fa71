"""The current measurements of this node's ranks, for requests of the API: duration of steps, temperature of GPUs.

The GPU of the rank with local rank n is GPU n of the node or, if the job sets CUDA_VISIBLE_DEVICES, the n-th entry of that
variable. If the entry is not a number (a UUID, MIG), the temperature is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from holdfast.agent.workers.generation import LocalGeneration
from holdfast.domain.gpus import GpuState
from holdfast.domain.rank_reads import MeasuredRanks

VISIBLE = "CUDA_VISIBLE_DEVICES"


class RankMeasurements:
    """`newest`: the newest generation of a job that runs here, with the environment of its ranks."""

    def __init__(
        self,
        newest: Callable[[str], tuple[LocalGeneration, Mapping[str, str]] | None],
        gpus: Callable[[], Sequence[GpuState]],
    ) -> None:
        self._newest, self._gpus = newest, gpus

    def read(self, job: str) -> MeasuredRanks:
        found = self._newest(job)
        if found is None or found[0].progress is None:
            return MeasuredRanks()
        generation, environment = found
        progress, placement = found[0].progress, generation.order.placement
        ranks = tuple(placement.ranks)
        durations = [progress.duration_of(rank) for rank in ranks]
        gpus = rank_gpus(placement.nproc, environment.get(VISIBLE))
        known = {each.gpu: each.temperature_c for each in self._gpus() if each.temperature_c is not None}
        return MeasuredRanks(
            generation.order.generation,
            ranks,
            tuple(step_s for step_s, _ in durations),
            tuple(wait_s for _, wait_s in durations),
            tuple(math.nan if gpu is None else known.get(gpu, math.nan) for gpu in gpus),
        )


def rank_gpus(nproc: int, visible: str | None) -> list[int | None]:
    """Return the number of each rank's GPU, by place on the node. `visible`: value of CUDA_VISIBLE_DEVICES."""
    if visible is None:
        return list(range(nproc))
    listed = [part.strip() for part in visible.split(",") if part.strip()]
    numbers = [int(part) if part.isascii() and part.isdecimal() else None for part in listed]
    return [numbers[place] if place < len(numbers) else None for place in range(nproc)]
