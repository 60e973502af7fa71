"""The YAML of the documentation: job files load, and so do parts of job files."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_blocks import NOT_A_JOB
from markdown_pages import DOCUMENTS, Block

from holdfast.wire.jobfile import load_job

YAML = [block for block in DOCUMENTS.blocks if block.language == "yaml"]
JOBS = [block for block in YAML if block.name not in NOT_A_JOB]
POLICY = "from holdfast.policy import default as decide\n"


def whole(part: dict[str, Any]) -> dict[str, Any]:
    """A job with this part, of as many ranks as its mesh or its number of replicas asks for."""
    elastic = part.get("elastic", {})
    mesh = part.get("mesh", {"dp": elastic.get("max_dp", 1)})
    return {"name": "llm", "script": "train.py", "nodes": prod(mesh.values()), "mesh": mesh} | part


def test_a_block_that_is_no_job_is_there() -> None:
    assert NOT_A_JOB.keys() <= {block.name for block in YAML}


@pytest.mark.parametrize("block", JOBS, ids=lambda block: block.name)
def test_a_job_file_loads(block: Block, tmp_path: Path) -> None:
    body = yaml.safe_load(block.text.replace("/shared/", f"{tmp_path}/"))  # a directory that exists
    (tmp_path / "train.py").write_text("")
    (tmp_path / "policy.py").write_text(POLICY)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(body if "name" in body else whole(body)))
    spec = load_job(tmp_path / "job.yaml")
    assert spec.mesh.world_size == spec.nodes * spec.nproc_per_node
    assert spec.min_dp <= spec.max_dp


@pytest.mark.parametrize("name", NOT_A_JOB)
def test_other_yaml_is_yaml(name: str) -> None:
    (block,) = (block for block in YAML if block.name == name)
    assert isinstance(yaml.safe_load(block.text), dict)
