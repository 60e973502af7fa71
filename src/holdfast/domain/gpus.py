"""The newest values of a node's GPUs, for whoever looks at the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

GPUS_MAX = 64  # of one node


@dataclass(frozen=True, slots=True)
class GpuState:
    """Values of one GPU as its driver says them. None = the driver does not say. The texts describe the fields in the API."""

    gpu: int
    uuid: str
    at: Annotated[float, "Unix seconds, when they were read"]
    lost: Annotated[bool, "the driver does not reach it: nothing else is known"]
    temperature_c: float | None = None
    margin_c: Annotated[float | None, "degrees below the first slowdown"] = None
    power_w: float | None = None
    memory_used: Annotated[int | None, "bytes"] = None
    utilization: Annotated[int | None, "percent of the time in which a kernel ran"] = None
    ecc_corrected: Annotated[int | None, "since the driver was loaded"] = None
    ecc_uncorrected: Annotated[int | None, "since the driver was loaded"] = None
    ecc_uncorrected_ever: Annotated[int | None, "over the life of the board"] = None
    remapped_rows: Annotated[int | None, "for uncorrectable errors"] = None
    remap_pending: Annotated[bool | None, "a reset is needed to finish the remapping"] = None
    remap_failed: Annotated[bool | None, "no spare row is left"] = None
    nvlinks_up: int | None = None
    nvlinks_down: int | None = None
    nvlink_errors: int | None = None
    pcie_replays: int | None = None
    pcie_width: Annotated[int | None, "lanes"] = None
    pcie_width_max: int | None = None
    pcie_gen: Annotated[int | None, "idle GPUs shift down"] = None
    pcie_gen_max: int | None = None
