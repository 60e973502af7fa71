"""Entry points that other packages call: they cost nothing outside of a worker of Holdfast."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from holdfast.domain import worker

CALLED = """
import sys
from holdfast.integrations.activation import lightning_callbacks
assert lightning_callbacks() == []
print(*(name for name in ("torch", "lightning", "holdfast.train") if name in sys.modules))
"""


def test_lightning_gets_no_callback_outside_of_a_worker_and_nothing_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLED], env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    assert worker.ENV_JOB == "HOLDFAST_JOB"


def test_lightning_finds_the_entry_point() -> None:
    (found,) = (each for each in entry_points(group="lightning.pytorch.callbacks_factory") if each.name == "holdfast")
    assert found.value == "holdfast.integrations.activation:lightning_callbacks"
