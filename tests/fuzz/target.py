"""What a fuzzer needs to know about one piece of code that reads input from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hypothesis.strategies import SearchStrategy

CPU_S_MAX = 2.0  # of one input; a usual one takes a millisecond
GROWTH_BYTES_MAX = 96 << 20  # of the process's memory while one input is read


@dataclass(frozen=True)
class Target:
    """`read(value)` must return, or raise one of `allowed`, for every value of `inputs()`.

    `inputs` is called once, when the target is first run: strategies and recorded inputs are made only for targets that run.
    `share`: inputs of this target in a batch, relative to the others; less for a target whose inputs take long.
    """

    name: str
    inputs: Callable[[], SearchStrategy[Any]]
    read: Callable[[Any], object]
    allowed: tuple[type[BaseException], ...] = ()
    cpu_s_max: float = CPU_S_MAX
    growth_bytes_max: int = GROWTH_BYTES_MAX
    share: float = 1.0

    @cached_property
    def strategy(self) -> SearchStrategy[Any]:
        return self.inputs()
