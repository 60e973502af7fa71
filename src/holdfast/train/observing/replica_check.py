"""Checksums of the parameters that must be bit-for-bit equal in all data-parallel replicas.

After the all-reduce every replica applies the same gradient to the same parameters, so ranks with the same model-parallel
index have equal bits. A flipped bit in memory, or a wrongly computed update, makes one of them differ permanently, without an
error. A wrong gradient that was reduced to all ranks is not detected, because all replicas then have the same wrong bits.

Each rank computes its own checksum and sends it to its agent; diagnostics compares them. There is no collective, no rank
waits, and a lost checksum is skipped. The cost is one pass over the parameters every `every_steps` steps and before every
save, so that every checkpoint has a result.

The checksum is a sum of 64-bit words modulo 2^64, each row of words weighted by an odd number. An odd multiple of a power of
two is never 0 modulo 2^64, so a single flipped bit always changes it. It runs on the device that holds the tensor."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.domain.mesh import DATA_PARALLEL
from holdfast.train.channels import Notes
from holdfast.train.saves.sharded import is_sharded

WORD_BYTES = 8
ROW_WORDS = 1024
DEPTH_MAX = 8  # nested dicts that are searched for modules


class ReplicaCheck:
    """One rank's checks. `every_steps` 0 = never."""

    def __init__(self, every_steps: int, notes: Notes, rank: int) -> None:
        self._every_steps = every_steps
        self._notes = notes
        self._rank = rank
        self._checked_at = 0.0  # monotonic seconds of the last check; 0 = none yet
        self._cost_logged = False

    def before_checkpoint(self, state: Mapping[str, Any], step: int, *, saving: bool) -> None:
        """Check if it is time. The first check is made at the first step, as the base for later ones."""
        if self._every_steps and (saving or not self._checked_at or step % self._every_steps == 0):
            self._check(state, step, restored=False)

    def after_restore(self, state: Mapping[str, Any], step: int) -> None:
        """Check the restored parameters: a difference at this point was saved in the checkpoint, so no node is
        responsible for it."""
        if self._every_steps:
            self._check(state, step, restored=True)

    def _check(self, state: Mapping[str, Any], step: int, *, restored: bool) -> None:
        began = time.monotonic()
        parameters = list(comparable_parameters(state))
        value = digest(parameters)
        duration_s = time.monotonic() - began
        self._notes.replica_check(step=step, digest=value, duration_s=duration_s, restored=restored)
        if self._checked_at and not self._cost_logged and self._rank == 0:
            self._cost_logged = True
            megabytes = sum(parameter.nbytes for parameter in parameters) / 1e6
            share = duration_s / max(began - self._checked_at, 1e-9)
            print(  # noqa: T201 - into the worker's log, for the user who enables the check
                f"holdfast: {megabytes:.1f} MB of parameters are compared across replicas every {self._every_steps} steps: "
                f"{1e3 * duration_s:.1f} ms, {share:.3%} of the time since the last comparison",
                flush=True,
            )
        self._checked_at = began


def comparable_parameters(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Return this rank's part of each parameter that other replicas hold as well, of every module in `state`, in order.

    Left out: an optimizer's moments, which may be sharded over the replicas without being DTensors; buffers, in which each
    replica may count its own batches; and parameters that are sharded over a data-parallel dimension.
    """
    for module in _modules(state, 0):
        for parameter in module.parameters():
            tensor = parameter.detach()
            if is_sharded(tensor):
                dims = tensor.device_mesh.mesh_dim_names
                if dims is None or any(
                    not placement.is_replicate() and name.startswith(DATA_PARALLEL)
                    for name, placement in zip(dims, tensor.placements, strict=True)
                ):
                    continue
                tensor = tensor.to_local()
            yield tensor


def _modules(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping) and depth < DEPTH_MAX:
        for item in value.values():
            yield from _modules(item, depth + 1)


def digest(tensors: list[torch.Tensor]) -> str:
    """Return 16 hexadecimal digits; empty if there are no tensors. Waits for the device."""
    with torch.no_grad():
        sums = [word_sum(tensor) for tensor in tensors if tensor.numel()]
        if not sums:
            return ""
        values = torch.stack(sums).tolist()
    return hashlib.blake2b(struct.pack(f"<{len(values)}q", *values), digest_size=8).hexdigest()


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit sum of the tensor's bytes, computed on its device, that changes with every single bit."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.storage_offset() % WORD_BYTES:
        raw = raw.clone()  # words must begin at the tensor's first byte on every rank
    whole = raw.numel() // WORD_BYTES
    words = raw[: whole * WORD_BYTES].view(torch.int64)
    total = raw[whole * WORD_BYTES :].sum(dtype=torch.int64)
    rows = whole // ROW_WORDS
    if rows:
        sums = words[: rows * ROW_WORDS].view(rows, ROW_WORDS).sum(1)
        total += (sums * torch.arange(1, 2 * rows, 2, device=tensor.device)).sum()
    return total + words[rows * ROW_WORDS :].sum()
