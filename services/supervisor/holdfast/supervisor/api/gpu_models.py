"""The GPUs of a node, as the API tells them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.domain.gpus import GpuState
from holdfast.supervisor.api.models import Model, fields_of


@fields_of(GpuState)
class Gpu(Model):
    """Values of one GPU as its driver says them; null = it does not say."""


class NodeGpus(Model):
    node: str
    gpus: Annotated[list[Gpu], Field(description="empty: the node has none, or its agent cannot read them")]
