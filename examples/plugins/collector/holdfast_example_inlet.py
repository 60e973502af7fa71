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
    """Return the collector; None if no file is set, because this node then has nothing to watch."""
    path = os.environ.get("EXAMPLE_INLET_FILE")
    return Inlet(surroundings.node, Path(path)) if path else None


@dataclass
class Inlet:
    node: str
    path: Path
    name: str = "inlet"

    async def run(self, emit: Emit) -> None:
        """Read the temperature. If this raises OSError (no such file) or ValueError (not a number), the error is reported and
        the collector is restarted."""
        while True:
            celsius = float(await anyio.Path(self.path).read_text())
            emit(Measurements(self.node, time.time(), self.name, ("inlet_c",), (celsius,)))
            await anyio.sleep(EVERY_S)
