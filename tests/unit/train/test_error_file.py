"""What a failing rank writes down of itself: the collectives that it has entered, so that one that skipped one is known."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from warm_processes import SCRIPTS, warm

from holdfast.agent.workers.errors import read_error_file
from holdfast.train import error_file

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from holdfast.train import error_file
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(12):
    dist.all_reduce(torch.zeros(3))
dist.broadcast(torch.zeros(2, 2), 0)
try:
    raise ValueError("the script's own")
except ValueError as error:
    error_file.write(sys.argv[1], error)
os._exit(0)  # as workers end: past the teardown of a C++ runtime whose threads may still be running
"""


def written_by(text: str, file: Path, environment: Mapping[str, str]) -> object:
    script = file.with_name("script.py")
    script.write_text(text)
    code, out, err = warm(SCRIPTS)([str(script), str(file)], Path.cwd(), environment, 100.0)
    assert code == 0, out + err
    return json.loads(file.read_text())


def test_the_last_collectives_of_each_group_are_in_the_error_file(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    written = written_by(SCRIPT, file, environment)
    calls = _find(written, "collectives")
    assert isinstance(calls, list)
    assert len(calls) == 8
    assert {group for group, _, _ in calls} == {"0"}
    numbers = [number for _, number, _ in calls]
    assert numbers == list(range(numbers[0], numbers[0] + 8))
    assert [what.partition(" ")[0] for _, _, what in calls] == ["all_reduce"] * 7 + ["broadcast"]


def test_without_torch_there_is_nothing_to_say_of_them(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    script = "import sys\nfrom holdfast.train import error_file\nerror_file.write(sys.argv[1], ValueError('x'))"
    assert _find(written_by(script, file, os.environ), "collectives") == []


def _find(tree: object, name: str) -> object:
    """The value of `name`, wherever it stands."""
    if isinstance(tree, dict):
        if name in tree:
            return tree[name]
        return next((found for value in tree.values() if (found := _find(value, name)) is not None), None)
    return None


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("M" * 3_000_000), "MMM"),
        (RuntimeError("\U0001f525" * 3_000_000), "\U0001f525"),
        (Unprintable(), "could not be made: ValueError"),
    ],
    ids=["long", "long in JSON", "unprintable"],
)
def test_the_agent_reads_the_file_of_any_exception(tmp_path: Path, error: Exception, message: str) -> None:
    """A tensor or a whole batch in the message makes megabytes."""
    try:
        raise error
    except Exception as caught:
        error_file.write(str(tmp_path / "error.json"), caught)
    read = read_error_file(tmp_path / "error.json")
    assert read is not None
    assert message in read.message
    assert "test_the_agent_reads_the_file_of_any_exception" in read.frames[-1]
