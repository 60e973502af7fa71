"""What a step takes while nothing happens: one short run of the benchmark's training under a launcher."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.recovery.launchers import ONE_NODE, Start

STEPS = 300
SKIP = 50  # first steps: caches and clocks settle
TIMEOUT_S = 90.0


def step_ms(start: Start, *, steps: int = STEPS) -> float:
    """Median step time of rank 0, without the first steps. Ends the program when the run does not get there."""
    with tempfile.TemporaryDirectory(prefix="hfb-") as name, ExitStack() as cleanup:
        out = Path(name)
        start(ONE_NODE, out, ["--out", str(out), "--steps", str(steps)], cleanup)
        path = out / "rank-0.jsonl"
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) >= steps:
                step_ms: list[float] = [json.loads(line)["ms"] for line in lines[SKIP:steps]]
                return statistics.median(step_ms)
            time.sleep(0.1)
    raise SystemExit(f"a healthy run did not finish {steps} steps within {TIMEOUT_S:.0f} s")
