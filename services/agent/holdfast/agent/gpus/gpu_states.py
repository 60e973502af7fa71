"""The newest values of this node's GPUs, from the signals of the collectors, for requests of the API."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.domain.gpus import GpuState
from holdfast.domain.signals import GpuHealth, GpuSample, NodeSignal

NOT_KNOWN = -1
# Values of `GpuState` that are columns of `GpuHealth`.
_SLOW = (
    *("utilization", "ecc_corrected", "ecc_uncorrected_ever", "remapped_rows"),
    *("nvlinks_up", "nvlinks_down", "nvlink_errors"),
    *("pcie_replays", "pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max"),
)


class LastReadings:
    """NVML's last readings."""

    def __init__(self) -> None:
        self._sample: GpuSample | None = None
        self._health: GpuHealth | None = None

    def watch(self, signal: NodeSignal) -> None:
        match signal:
            case GpuSample():
                self._sample = signal
            case GpuHealth():
                self._health = signal
            case _:
                pass


class GpuStates(LastReadings):
    def newest(self) -> tuple[GpuState, ...]:
        """Return the state of each GPU, in the order of the newest sample. Empty if this node has no GPU, or no collector reads
        them."""
        if (sample := self._sample) is None:
            return ()
        return tuple(self._state(sample, place) for place in range(len(sample.gpu)))

    def _state(self, sample: GpuSample, place: int) -> GpuState:
        gpu, health = sample.gpu[place], self._health
        state = GpuState(gpu, sample.uuid[place], sample.at, sample.lost[place])
        if state.lost:
            return state  # its last readings are out of date
        row = health.gpu.index(gpu) if health is not None and gpu in health.gpu else None

        def slow(column: str) -> int | None:
            return None if row is None else _known(getattr(health, column), row)

        pending, failed = slow("remap_pending"), slow("remap_failed")
        margin = math.inf if health is None or row is None else health.margin_c[row]
        return GpuState(
            gpu,
            state.uuid,
            state.at,
            lost=False,
            temperature_c=sample.temperature_c[place],
            margin_c=margin if math.isfinite(margin) else None,
            power_w=sample.power_w[place],
            memory_used=_known(sample.memory_used, place),
            ecc_uncorrected=_known(sample.ecc_uncorrected, place),
            remap_pending=None if pending is None else bool(pending),
            remap_failed=None if failed is None else bool(failed),
            **{column: slow(column) for column in _SLOW},
        )


def _known(column: Sequence[int], place: int) -> int | None:
    return None if column[place] == NOT_KNOWN else column[place]
