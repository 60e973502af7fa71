"""The random number generators of a process as one plain value, so that a restored rank continues their sequences."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Return the states of the generators of Python, torch, NumPy and the current CUDA device, as builtins and bytes."""
    states: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "python": random.getstate(),
        "torch": _to_bytes(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = (str(name), keys.tobytes(), int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available():
        states["cuda"] = _to_bytes(torch.cuda.get_rng_state())
    return states


def restore(states: dict[str, Any]) -> None:
    """Set every generator to its state at `capture`."""
    random.setstate(states["python"])
    torch.default_generator.manual_seed(states["seed"])  # so that initial_seed() returns the run's seed
    torch.set_rng_state(_from_bytes(states["torch"]))
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_bytes(states["cuda"]))


def derive(seed: int, step: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank): for a rank that did not exist before the resize."""
    digest = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1  # torch requires a signed 64-bit integer
    random.seed(derived)
    torch.manual_seed(derived)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(derived & 0xFFFF_FFFF)


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _from_bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
