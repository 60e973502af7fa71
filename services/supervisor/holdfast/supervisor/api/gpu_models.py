"""The GPUs of a node, as the API tells them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.supervisor.api.models import Model


class Gpu(Model):
    """Values of one GPU as its driver says them; null = it does not say."""

    gpu: int
    uuid: str
    at: Annotated[float, Field(description="Unix seconds, when they were read")]
    lost: Annotated[bool, Field(description="the driver does not reach it: nothing else is known")]
    temperature_c: float | None
    margin_c: Annotated[float | None, Field(description="degrees below the first slowdown")]
    power_w: float | None
    memory_used: Annotated[int | None, Field(description="bytes")]
    utilization: Annotated[int | None, Field(description="percent of the time in which a kernel ran")]
    ecc_corrected: Annotated[int | None, Field(description="since the driver was loaded")]
    ecc_uncorrected: Annotated[int | None, Field(description="since the driver was loaded")]
    ecc_uncorrected_ever: Annotated[int | None, Field(description="over the life of the board")]
    remapped_rows: Annotated[int | None, Field(description="for uncorrectable errors")]
    remap_pending: Annotated[bool | None, Field(description="a reset is needed to finish the remapping")]
    remap_failed: Annotated[bool | None, Field(description="no spare row is left")]
    nvlinks_up: int | None
    nvlinks_down: int | None
    nvlink_errors: int | None
    pcie_replays: int | None
    pcie_width: Annotated[int | None, Field(description="lanes")]
    pcie_width_max: int | None
    pcie_gen: Annotated[int | None, Field(description="idle GPUs shift down")]
    pcie_gen_max: int | None


class NodeGpus(Model):
    node: str
    gpus: Annotated[list[Gpu], Field(description="empty: the node has none, or its agent cannot read them")]
