"""`benchmarks.checkpoint` runs and writes what it promises. Whether the numbers are good is not a test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    out = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--size", "0.02", "--trials", "1", "--out", str(out)]
    only = "holdfast,copy,dcp_async_cached,network,store"
    environment = {name: value for name, value in os.environ.items() if name != "PEERS_DIR"}
    ended = subprocess.run(
        [*command, "--only", only],
        check=False,
        cwd=REPOSITORY,
        env=environment,
        text=True,
        capture_output=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not list(out.glob("trial-*")), "a trial left its files behind"
    written: dict[str, dict[str, list[float]]] = json.loads((out / "checkpoint.json").read_text())
    assert written["failed_trials"] == {}, ended.stdout
    return written


@pytest.mark.parametrize(
    ("measure", "contenders"),
    [
        ("stall_s", {"holdfast", "copy", "dcp_async_cached"}),
        ("durable_s", {"holdfast", "dcp_async_cached"}),
        ("slowdown_median", {"holdfast", "dcp_async_cached"}),
        ("slowdown_p99", {"holdfast", "dcp_async_cached"}),
        ("restore_local_gb_s", {"holdfast", "copy", "dcp_async_cached"}),
        ("replicate_gb_s", {"holdfast", "socket"}),
        ("restore_peer_gb_s", {"holdfast", "socket"}),
        ("store_up_gb_s", {"file"}),
        ("store_down_gb_s", {"file"}),
        ("peak_extra_bytes", {"holdfast", "dcp_async_cached", "state"}),
    ],
)
def test_every_measure_has_its_contenders(
    result: dict[str, dict[str, list[float]]], measure: str, contenders: set[str]
) -> None:
    values = result[measure]
    assert contenders <= values.keys()
    for name, trials in values.items():
        assert trials, f"{measure} of {name} is empty"
        assert all(value > 0 for value in trials) or measure == "peak_extra_bytes", f"{measure} of {name}: {trials}"


def test_two_images_are_what_memory_is_spent_on(result: dict[str, dict[str, list[float]]]) -> None:
    (peak,) = result["peak_extra_bytes"]["holdfast"]
    assert peak > 2 * result["peak_extra_bytes"]["state"][0]  # near zero, were shared memory not counted
