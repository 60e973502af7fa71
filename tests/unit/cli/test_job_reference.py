"""The reference of the job file: each key of the model is in it, with a meaning and an example that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.cli.job_reference import BEGIN, END, keys, part_of, tables, written_into
from holdfast.wire.job_sections import Checkpoint, Elastic, JobFile
from holdfast.wire.jobfile import load_job

KEYS = {key: info for key, info, _ in keys()}
LEAVES = [key for key, info in KEYS.items() if part_of(info) is None]
# What a key needs beside it to be accepted.
BESIDE: dict[str, dict[str, Any]] = {
    "mesh": {"nodes": 16, "nproc_per_node": 8},
    "elastic.min_dp": {"nodes": 16, "elastic": {"max_dp": 16}},
    "elastic.max_dp": {"nodes": 8},
    "checks.replica_every_steps": {"nodes": 2},
    "policy.source": {"policy": {"file": "policy.py"}},
}


def test_every_key_of_the_model_is_there() -> None:
    assert {key.partition(".")[0] for key in KEYS} == set(JobFile.model_fields)
    parts: dict[str, type[BaseModel]] = {"checkpoint": Checkpoint, "elastic": Elastic}
    for part, model in parts.items():
        assert {key.removeprefix(f"{part}.") for key in KEYS if key.startswith(f"{part}.")} == set(model.model_fields)
    written = tables()
    for key in LEAVES:
        assert f"\n| `{key.rpartition('.')[2]}` | " in written


@pytest.mark.parametrize("key", LEAVES)
def test_each_has_a_meaning_and_an_example_that_is_accepted(key: str, tmp_path: Path) -> None:
    info = KEYS[key]
    assert info.description
    assert info.examples
    for name, text in {"train.py": "", "policy.py": "from holdfast.policy import default as decide\n"}.items():
        (tmp_path / name).write_text(text)
    body: dict[str, Any] = {"name": "llm", **BESIDE.get(key, {})}
    above, _, name = key.rpartition(".")
    (body.setdefault(above, {}) if above else body)[name] = info.examples[0]
    if not {"script", "module", "command"} & body.keys():
        body["script"] = "train.py"
    if key == "cwd":
        body["cwd"] = str(tmp_path)
    (tmp_path / "job.yaml").write_text(str(body).replace("True", "true"))  # Python's notation of these is YAML
    load_job(tmp_path / "job.yaml")


def test_a_document_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no line <!-- job file: begin"):
        written_into("# The job file\n")
    with pytest.raises(ValueError, match="there is no line <!-- job file: end"):
        written_into(f"{BEGIN}\n")
    assert written_into(f"a\n{BEGIN}\nold\n{END}\nz\n") == f"a\n{BEGIN}\n{tables()}{END}\nz\n"
