"""Elastic data: which samples each replica takes at each step, for any number of replicas.

The samples of a run form one endless sequence: epoch after epoch, each a permutation of `range(n_samples)` that depends
only on the seed and the epoch's number. A global step takes the next `global_batch` samples of that sequence, for any
number of replicas. They are cut into micro-batches, which are assigned to the replicas in turn. The position in the
sequence is the sampler's only state. After a resize, therefore, no sample is skipped or repeated, and the global batch
stays the same: with fewer replicas each one takes more micro-batches (gradient accumulation).

Replicas may get different numbers of micro-batches. The gradient stays the global mean if every loss is divided by the
*global* number of samples (`global_batch`) and gradients are summed, not averaged, over the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.train.environment import World


class ElasticSampler:
    """Iterate for this replica's micro-batches, one list of index tensors (int64, `micro_batch` each) per global step.

    Keeps the permutation of one epoch: 8 bytes per sample.
    """

    def __init__(
        self,
        n_samples: int,
        *,
        global_batch: int,
        world: World,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """`micro_batch` defaults to `global_batch` divided by the number of replicas.

        Raises `InvalidSpec` if the micro-batches do not fill the global batch, or if there are fewer than replicas.
        """
        if n_samples < 1:
            raise InvalidSpec("n_samples", n_samples, "at least one sample")
        if global_batch < 1:
            raise InvalidSpec("global_batch", global_batch, "at least one sample")
        if micro_batch is None:
            micro_batch = max(1, global_batch // world.dp_size)
        if micro_batch < 1 or global_batch % micro_batch:
            raise InvalidSpec("micro_batch", micro_batch, f"a divisor of global_batch ({global_batch})")
        if global_batch // micro_batch < world.dp_size:
            raise InvalidSpec(
                "global_batch",
                global_batch,
                f"at least one micro-batch of {micro_batch} for each of the {world.dp_size} replicas",
            )
        self.n_samples = n_samples
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.consumed = 0  # samples taken by all replicas together since the start of the run
        self._world = world
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, counted from 0."""
        return self.consumed // self.n_samples

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return self

    def __next__(self) -> list[torch.Tensor]:
        """Return this replica's micro-batches of the next global step. The sequence has no end."""
        micro_batches = self.peek()
        self.consumed += self.global_batch
        return micro_batches

    def peek(self, ahead: int = 0) -> list[torch.Tensor]:
        """Return the micro-batches of the step `ahead` steps after the next one without advancing, for loaders that
        prefetch."""
        batch = self._take(self.consumed + ahead * self.global_batch, self.global_batch)
        return list(batch.view(-1, self.micro_batch))[self._world.dp_index :: self._world.dp_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sequence, for the state of a checkpoint: plain values, valid for any number of replicas.
        `next`: the numbers of up to 8 following samples, by which `load_state_dict` recognises another sequence."""
        return {
            "consumed": self.consumed,
            "n_samples": self.n_samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "next": self._take(self.consumed, min(8, self.n_samples)).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises `InvalidSpec` if this sampler's parameters give another sequence than the saved one, and `IntegrityError`
        if equal parameters do (another build of torch permutes differently), because training would skip and repeat
        samples.
        """
        for name, mine in (("n_samples", self.n_samples), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != mine:
                raise InvalidSpec(f"sampler.{name}", mine, f"{state[name]!r} as in the checkpoint, or a new run")
        upcoming = self._take(state["consumed"], min(8, self.n_samples)).tolist()
        if upcoming != state["next"]:
            raise IntegrityError(
                f"the sampler would continue with samples {upcoming}, the checkpoint with {state['next']}: "
                "this build of torch shuffles differently; restore with the build that saved"
            )
        self.consumed = state["consumed"]

    def _take(self, start: int, count: int) -> torch.Tensor:
        """Return `count` elements of the sequence from position `start`; a batch may span epochs."""
        parts = []
        while count:
            epoch, offset = divmod(start, self.n_samples)
            part = self._permutation(epoch)[offset : offset + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            if self._shuffle:
                generator = torch.Generator().manual_seed((self._seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
                self._order = torch.randperm(self.n_samples, generator=generator)
            else:
                self._order = torch.arange(self.n_samples)
            self._epoch = epoch
        return self._order
