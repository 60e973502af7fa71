"""Where and how often to save, from the script or the environment."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.domain.errors import InvalidSpec
from holdfast.train import Checkpoints
from holdfast.train.environment import Environment


def test_the_environment_names_a_directory_for_scripts_that_do_not() -> None:
    assert Checkpoints.of_environment({}, 0) is None
    named = Checkpoints.of_environment({"HOLDFAST_CHECKPOINT_DIR": "/data/run"}, 0)
    assert named == Checkpoints(directory="/data/run")
    often = Checkpoints.of_environment({"HOLDFAST_CHECKPOINT_DIR": "/data/run"}, 7)
    assert often == Checkpoints(directory="/data/run", interval_steps=7)


@pytest.mark.parametrize("wrong", [{"directory": ""}, {"interval_steps": -1}, {"keep": 0}, {"grace_s": 0.0}])
def test_nonsense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=next(iter(wrong))):
        Checkpoints(**{"directory": "/data/run", **wrong})


def test_a_node_is_a_host_and_torchruns_group() -> None:
    one, other = (Environment.read({"GROUP_RANK": group}).node for group in "01")
    assert one != other
    assert Environment.read({"HOLDFAST_NODE": "n7", "GROUP_RANK": "3"}).node == "n7"
