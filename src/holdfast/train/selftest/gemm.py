"""Matrix products whose result is known in advance, bit for bit.

The factors are 7-bit integers (divided by a power of two, so that a product fits float16). Every partial sum is exact in a
32-bit accumulator, whatever the order of the additions, the tiling, tensor cores or TF32. The product, rounded once to its
type, is therefore the same on every device. Its hash is a constant in this file, so no device is compared with itself, and one
wrong bit is detected.

A device that is wrong once in 10^9 operations passes a single product most of the time (AEGIS, OSDI'26, found only such
devices). Products are therefore repeated until the time is over, and a node is tested again whenever it has no ranks. To use
every unit of a large device, its product is a grid of equal blocks."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

SIDE: Final = 512  # of a block; 512 × 127² < 2^24, so sums are exact integers in float32
GRID_CUDA: Final = 8  # blocks along each side of the product: 4096 × 512 by 512 × 4096
SCALE: Final = 64  # 127 / 64 squared and summed 512 times stays below float16's 65504
VARIANTS: Final = 2  # sets of factors, used in turn
FIRST_WRONG_CHARS_MAX: Final = 200

# (type, variant) → hash of a block. Computed by `block_hash(reference(…))`; a test computes them again with integers
# only.
GOLDEN: Final = {
    (torch.float32, 0): "155ff6fea9f7fa5a0b3d8849dc722654",
    (torch.float32, 1): "316e9dbcd92dcdd7addaedb8ea87494d",
    (torch.bfloat16, 0): "97104d39a42ed19ba62b16214e8b9b8d",
    (torch.bfloat16, 1): "33698720e1cc64c38277484213adcd75",
    (torch.float16, 0): "233898e18d32fd5c99698e95355f35cf",
    (torch.float16, 1): "7bf1589fd00c35dd5ac0f40b7f487de9",
}


@dataclass(frozen=True, slots=True)
class Products:
    """Result of one kind of arithmetic on one device. `wrong` counts products with at least one wrong bit."""

    kind: str
    made: int
    wrong: int
    first_wrong: str = ""


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    dtype: torch.dtype
    tf32: bool = False


_CPU_KINDS = (_Kind("float32", torch.float32),)  # other types are emulated on the CPU, with different rounding
_CUDA_KINDS = (
    _Kind("float32", torch.float32),
    _Kind("tf32", torch.float32, tf32=True),
    _Kind("bfloat16", torch.bfloat16),
    _Kind("float16", torch.float16),
)


def multiply(device: torch.device, budget_s: float) -> list[Products]:
    """Multiply for `budget_s` in total, at least once per kind and variant."""
    kinds = _CUDA_KINDS if device.type == "cuda" else _CPU_KINDS
    return [_of_kind(device, kind, budget_s / len(kinds)) for kind in kinds]


def factors(variant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices of integers in ±127, as int64."""
    row, column = torch.arange(SIDE)[:, None], torch.arange(SIDE)[None, :]

    def numbers(salt: int) -> torch.Tensor:
        mixed = (row * 7919 + column * 104_729 + salt * 1_299_709 + 1) * 2_654_435_761
        return (mixed % 2**32 >> 11) % 255 - 127

    return numbers(2 * variant), numbers(2 * variant + 1)


def reference(variant: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the block computed on the CPU: exactly in float64, then rounded once."""
    a, b = factors(variant)
    return rounded(a.double() @ b.double(), dtype)


def rounded(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a product of integers in `dtype`: exact in float32, then rounded once."""
    return (product.to(torch.float32) / SCALE**2).to(dtype)


def block_hash(block: torch.Tensor) -> str:
    values = block.to(torch.float32).flatten().tolist()
    return hashlib.blake2b(struct.pack(f"<{len(values)}f", *values), digest_size=16).hexdigest()


def wrong_elements(product: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements of `product`, a grid of blocks, that differ from `block` in any bit."""
    rows, columns = product.shape[0] // SIDE, product.shape[1] // SIDE
    bits = {2: torch.int16, 4: torch.int32}[product.element_size()]
    grid = product.view(bits).view(rows, SIDE, columns, SIDE)
    return (grid != block.view(bits).view(1, SIDE, 1, SIDE)).view(product.shape)


def _of_kind(device: torch.device, kind: _Kind, budget_s: float) -> Products:
    blocks = [reference(variant, kind.dtype) for variant in range(VARIANTS)]
    for variant, block in enumerate(blocks):
        if block_hash(block) != GOLDEN[kind.dtype, variant]:
            return Products(kind.name, 1, 1, f"the CPU's own product, variant {variant}, has the wrong hash")
    grid = GRID_CUDA if device.type == "cuda" else 1
    pairs = [_on_device(variant, kind.dtype, device, grid) for variant in range(VARIANTS)]
    expected = [block.to(device) for block in blocks]
    made = wrong = 0
    first = ""
    deadline = time.monotonic() + budget_s
    with _exact_arithmetic(kind.tf32):
        while made < VARIANTS or time.monotonic() < deadline:
            a, b = pairs[made % VARIANTS]
            product = a @ b
            mask = wrong_elements(product, expected[made % VARIANTS])
            if bool(mask.any()):  # waits for the device
                wrong += 1
                first = first or _describe(product, mask, expected[made % VARIANTS], made)
            made += 1
    return Products(kind.name, made, wrong, first)


def _on_device(variant: int, dtype: torch.dtype, device: torch.device, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ((whole.to(torch.float32) / SCALE).to(dtype).to(device) for whole in factors(variant))
    return a.repeat(grid, 1), b.repeat(1, grid)


def _describe(product: torch.Tensor, mask: torch.Tensor, block: torch.Tensor, number: int) -> str:
    row, column = mask.nonzero()[0].tolist()
    got, want = product[row, column].item(), block[row % SIDE, column % SIDE].item()
    count = int(mask.sum())
    text = f"product {number}: {count} wrong elements, the first at ({row}, {column}): {got!r} instead of {want!r}"
    return text[:FIRST_WRONG_CHARS_MAX]


@contextlib.contextmanager
def _exact_arithmetic(tf32: bool) -> Iterator[None]:
    """Require sums in 32 bits; libraries may otherwise add partial sums in the type of the product."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, tf32 and name == "allow_tf32")
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
