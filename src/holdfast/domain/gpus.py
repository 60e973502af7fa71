"""The newest values of a node's GPUs, for whoever looks at the node."""

from __future__ import annotations

from dataclasses import dataclass

GPUS_MAX = 64  # of one node


@dataclass(frozen=True, slots=True)
class GpuState:
    """Values of one GPU as its driver says them, at Unix time `at`. None = the driver does not say."""

    gpu: int
    uuid: str
    at: float
    lost: bool  # the driver does not reach it
    temperature_c: float | None = None
    margin_c: float | None = None  # degrees below the first slowdown
    power_w: float | None = None
    memory_used: int | None = None  # bytes
    utilization: int | None = None  # percent of the time in which a kernel ran
    ecc_corrected: int | None = None  # since the driver was loaded, as the next
    ecc_uncorrected: int | None = None
    ecc_uncorrected_ever: int | None = None  # over the life of the board
    remapped_rows: int | None = None  # for uncorrectable errors
    remap_pending: bool | None = None  # a reset is needed to finish the remapping
    remap_failed: bool | None = None  # no spare row is left
    nvlinks_up: int | None = None
    nvlinks_down: int | None = None
    nvlink_errors: int | None = None
    pcie_replays: int | None = None
    pcie_width: int | None = None  # lanes
    pcie_width_max: int | None = None
    pcie_gen: int | None = None  # idle GPUs shift down
    pcie_gen_max: int | None = None
