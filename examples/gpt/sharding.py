"""An optimizer whose state is sharded over the replicas (ZeRO-1).

All weights and all gradients of a stage are on every replica. But each replica updates only its part of the weights and keeps
moments for that part alone; after the update the replicas exchange their parts. Adam's moments, two thirds of an unsharded
checkpoint, exist only once, and are redistributed when replicas are removed or added.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class SharedWeights:
    """The weights of a stage as one flat tensor, divided into one part per replica.

    `parameter` is this replica's part, for an optimizer: a DTensor, so that a save knows the global tensor.
    `gradients` is flat as well, in the order of the parameters; it may be longer.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], gradients: Tensor, replicas: DeviceMesh) -> None:
        parameters = list(parameters)
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        offset = 0
        for parameter in parameters:
            parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._group = replicas.get_group()
        self._shares = flat.chunk(replicas.size())
        own = replicas.get_local_rank()
        self.parameter = nn.Parameter(_share_of(flat, self._shares[own], replicas))
        self.parameter.grad = _share_of(flat, gradients[:offset].chunk(replicas.size())[own], replicas)

    def exchange(self) -> None:
        """After an update, exchange the parts of all replicas."""
        sent = [
            dist.broadcast(share, group=self._group, group_src=owner, async_op=True)
            for owner, share in enumerate(self._shares)
        ]
        for work in sent:
            if work is not None:
                work.wait()


def _share_of(flat: Tensor, share: Tensor, replicas: DeviceMesh) -> DTensor:
    return DTensor.from_local(share, replicas, [Shard(0)], run_check=False, shape=flat.shape, stride=flat.stride())
