"""Clocks of processes that a test sets, without the machine's own: a preloaded library keeps an offset for each of them
(benchmarks/soak/clock.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.clock import Clocks, Unbuildable


def clocks_in(directory: Path) -> Clocks:
    """Build the library. Without a C compiler, the test is skipped."""
    try:
        return Clocks(directory)
    except Unbuildable as error:
        pytest.skip(f"a clock that jumps cannot be built: {error}")
