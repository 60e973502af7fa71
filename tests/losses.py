"""The loss log of the example scripts: one JSON object per line, every digit of the loss as Python writes it."""

from __future__ import annotations

import json
from pathlib import Path


def parse(text: str) -> dict[int, float]:
    """step → loss; a step that was done again keeps its last value."""
    records = [json.loads(line) for line in text.splitlines()]
    return {record["step"]: record["loss"] for record in records}


def losses(out: Path) -> dict[int, float]:
    """Of the script that wrote to the directory `out`."""
    return parse((out / "loss.jsonl").read_text())
