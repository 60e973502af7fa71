"""A script changed as `holdfast init` proposes, in the job that it wrote: the steps are known, also after a killed rank."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from commands import Shell
from training import cluster

from holdfast.cli.demo.course import examples
from holdfast.domain.evolve import evolve
from holdfast.wire.jobfile import load_job, to_body

STEPS = 100_000  # until the job is stopped


def test_the_changed_script_reports_its_steps(tmp_path: Path) -> None:
    shutil.copy(examples() / "torchrun" / "train_ddp.py", tmp_path / "train.py")
    shell = Shell(tmp_path)
    written = shell("init", "train.py", "--nproc-per-node", "2")
    assert written.code == 0, written.err
    diff = shell("init", "train.py", "--diff").out
    subprocess.run(["patch", "-p0"], cwd=tmp_path, input=diff, text=True, check=True, capture_output=True)

    spec = load_job(tmp_path / "job.yaml")
    launch = evolve(spec.launch, args=("--steps", str(STEPS), "--checkpoint", str(tmp_path / "ddp.pt")))
    with cluster(tmp_path / "stack", nodes=1, workers_per_node=2) as running:
        running.client.submit(to_body(evolve(spec, launch=launch)))
        before = running.wait_step("train", 30)
        running.inject.crash("train", rank=1)
        [incident] = running.wait_resolved("train", 1)
        assert incident["action"]["kind"] == "restart"
        after = running.wait_step("train", before["step"] + 30)
        assert {worker["rank"] for worker in after["ranks"]} == {0, 1}
        running.client.stop("train", "the test has seen enough")
        running.wait_end("train")
