"""SIGKILL at every operation on files of every thing that the replicator does with shards: enumerated, not sampled."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_points.py")


@pytest.mark.parametrize(
    ("scenario", "points_min", "halved_min"),
    [
        ("commit", 10, 0), ("copy", 30, 2), ("through", 30, 2), ("push", 10, 1), ("push to disk", 15, 1), ("fetch", 10, 1),
        ("fetch again", 25, 2), ("upload", 50, 0), ("retrieve", 10, 0), ("prune", 5, 0), ("discard", 10, 0),
    ],
)  # fmt: skip
def test_dying_at_any_operation_leaves_the_checkpoint_before_and_nothing_half(
    scenario: str, points_min: int, halved_min: int
) -> None:
    # What a killed process has written, the next one sees on any file system; in memory it takes a tenth of the time.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        ended = subprocess.run(
            [sys.executable, str(SCRIPT), scenario, directory], check=False, capture_output=True, text=True
        )
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(rf"{scenario}: (\d+) points, (\d+) of them also half done\n", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= points_min
    assert int(found[2]) >= halved_min
