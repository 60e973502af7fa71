"""`holdfast init` writes a job file that the loader accepts, replaces none unasked, and says what comes next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast.cli.main import application
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec
from holdfast.wire.jobfile import load_job

SCRIPT = "import torch\n\nfor batch in loader:\n    optimizer.step()\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def init(*arguments: str) -> Result:
    result = CliRunner().invoke(application("init"), ["init", *arguments])
    if isinstance(result.exception, HoldfastError):
        raise result.exception
    return result


def test_it_writes_a_job_file_beside_the_script_and_names_the_next_two_commands(script: Path) -> None:
    out = init("train.py", "--nnodes", "2", "--nproc-per-node", "8").output
    spec = load_job(script.with_name("job.yaml"))
    assert (spec.name, spec.nodes, spec.nproc_per_node) == ("train", 2, 8)
    assert spec.launch.script == str(script)
    assert spec.hang.floor_s == 60  # the script announces no evaluations
    assert script.read_text() == SCRIPT
    assert "+    run.end_step()" in out
    assert 'run.phase("eval")' in out
    assert out.endswith(
        "written: job.yaml\nnext:\n    holdfast init train.py --diff | patch -p0\n    holdfast run --local job.yaml\n"
    )


def test_every_key_that_is_off_can_be_switched_on(script: Path) -> None:
    init("train.py", "--nnodes", "1", "--nproc-per-node", "8")
    path = script.with_name("job.yaml")
    head, text = path.read_text().split("job-file.md\n")
    path.write_text(re.sub(r"(?m)^# ", "", text))
    script.with_name("policy.py").write_text("from holdfast.policy import default as decide\n")
    spec = load_job(path)
    assert (spec.spares, spec.min_dp, dict(spec.mesh.dims)) == (1, 1, {"dp": 2, "tp": 4})
    assert spec.checkpoint.store == "gs://bucket/prefix"
    assert head.startswith("# Written by")


def test_it_replaces_a_job_file_only_with_the_option_for_it(script: Path) -> None:
    script.with_name("job.yaml").write_text("mine\n")
    with pytest.raises(Conflict, match="--force replaces it"):
        init("train.py")
    assert script.with_name("job.yaml").read_text() == "mine\n"
    init("train.py", "--force")
    assert load_job(script.with_name("job.yaml")).name == "train"


def test_another_place_and_an_odd_name(script: Path) -> None:
    odd = script.with_name("my: train #1.py")
    script.rename(odd)
    script.with_name("jobs").mkdir()
    init(odd.name, "--out", "jobs/a.yaml")
    assert Path(load_job(Path("jobs/a.yaml")).launch.script).resolve() == odd


def test_the_diff_alone_writes_nothing(script: Path) -> None:
    out = init("train.py", "--diff").output
    assert out.startswith("--- train.py\n+++ train.py\n@@")
    assert not script.with_name("job.yaml").exists()


def test_without_a_diff_it_says_why_and_that_the_script_runs_all_the_same(script: Path) -> None:
    script.write_text("print(1)\n")
    result = init("train.py", "--diff")
    assert result.exit_code == 1
    assert "no call of an optimizer's step() was found" in result.output
    out = init("train.py").output
    assert "It runs all the same" in out
    assert "--diff" not in out.partition("next:")[2]


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "a readable file"), (b"\xff", "UTF-8")], ids=["missing", "not-utf-8"]
)
def test_a_script_that_cannot_be_read(script: Path, content: bytes | None, expected: str) -> None:
    if content is None:
        script.unlink()
    else:
        script.write_bytes(content)
    with pytest.raises(InvalidSpec, match=expected):
        init("train.py")
