"""Measures how fast a device copies its own memory, for comparison with the other devices of the node and with earlier
results."""

from __future__ import annotations

import time

import torch

CPU_BYTES = 64 << 20  # larger than every cache
CUDA_BYTES = 1 << 30
COPIES = 5


def bandwidth_gb_s(device: torch.device) -> float:
    """Return the bytes read and written per second by the fastest of a few copies, in 10^9."""
    size = CPU_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(CUDA_BYTES, free // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(COPIES):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * size / best_s / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
