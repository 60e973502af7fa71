"""A collector: the temperature of the air that enters the node, read from a file once a second."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import anyio

from holdfast.agent.collectors.protocol import Emit, Surroundings
from holdfast.domain.signals import Measurements

EVERY_S = 1.0


def build(surroundings: Surroundings) -> Inlet | None:
    """None where nobody says which file: this node has nothing to watch."""
    path = os.environ.get("EXAMPLE_INLET_FILE")
    return Inlet(surroundings.node, Path(path)) if path else None


@dataclass
class Inlet:
    node: str
    path: Path
    name: str = "inlet"

    async def run(self, emit: Emit) -> None:
        """An OSError (no such file) or ValueError (no number) that leaves here is reported, and the collector started again."""
        while True:
            celsius = float(await anyio.Path(self.path).read_text())
            emit(Measurements(self.node, time.time(), self.name, ("inlet_c",), (celsius,)))
            await anyio.sleep(EVERY_S)
