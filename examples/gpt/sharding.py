"""An optimizer whose state is divided over the replicas (ZeRO 1).

All weights and all gradients of a stage are on every replica, as before. But each replica updates only its share of the
weights and keeps moments for that share alone; after the update the replicas exchange their shares. Adam's moments, two
thirds of what a checkpoint would hold otherwise, exist once, and change places when replicas leave or return.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class SharedWeights:
    """The weights of a stage as one flat tensor, cut into one share per replica.

    `parameter` is this replica's share, for an optimizer: a DTensor, so that whoever saves it knows what it is a part of.
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
        """After an update: every replica gets the shares of the others."""
        sent = [
            dist.broadcast(share, group=self._group, group_src=owner, async_op=True)
            for owner, share in enumerate(self._shares)
        ]
        for work in sent:
            if work is not None:
                work.wait()


def _share_of(flat: Tensor, share: Tensor, replicas: DeviceMesh) -> DTensor:
    return DTensor.from_local(share, replicas, [Shard(0)], run_check=False, shape=flat.shape, stride=flat.stride())
