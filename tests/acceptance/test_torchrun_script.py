"""`holdfast run` on a script that knows nothing of Holdfast: a killed rank costs a restart, no more."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from leftovers import MARK, marked, memory_of
from waiting import wait_until
from warm_processes import COMMANDS, warm

from holdfast.cli.demo.course import examples

SCRIPT = examples() / "torchrun" / "train_ddp.py"
STEPS = 400
# Before the script's first import: as if a device worked meanwhile, until the file exists. The run must outlast the commands.
PACE = """
import pathlib, time
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: pathlib.Path({hurry!r}).exists() or time.sleep(0.15))
"""


def asked(home: Path, *arguments: str) -> Any:
    """What a command in another terminal prints, without the setting HOLDFAST_URL."""
    environment = {name: value for name, value in os.environ.items() if name != "HOLDFAST_API"}
    code, out, err = warm(COMMANDS)([*arguments, "--json"], Path.cwd(), {**environment, "HOME": str(home)}, 60.0)
    assert code == 0, err
    assert "the local run train-ddp, at http://127.0.0.1:" in err
    return json.loads(out)


def workers(mark: str) -> list[psutil.Process]:
    """The forked workers: processes whose parent is a template, and whose grandparent is an agent."""
    templates = {process.pid for process in marked(mark) if "holdfast.train.warm.template" in process.cmdline()}
    return [process for process in marked(mark) if process.ppid() in templates]


def test_an_unmodified_script_survives_a_killed_rank(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{random.random()}"
    checkpoint, hurry, script = tmp_path / "ddp.pt", tmp_path / "hurry", tmp_path / SCRIPT.name
    script.write_text(
        SCRIPT.read_text().replace("\nimport argparse", PACE.format(hurry=str(hurry)) + "import argparse")
    )
    arguments = [str(script), "--steps", str(STEPS), "--save-every", "10", "--checkpoint", str(checkpoint)]
    with (tmp_path / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "run", "--local", "--nproc-per-node", "2", *arguments],
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    output = tmp_path / "output.log"
    wait_until(
        lambda: checkpoint.exists() or process.poll() is not None,
        description="the script's first checkpoint",
    )
    assert process.poll() is None, output.read_text()
    wait_until(lambda: asked(tmp_path, "jobs", "list")[0]["observed_steps"], description="observed optimizer steps")
    [job] = asked(tmp_path, "jobs", "list")
    assert (job["name"], job["phase"], job["step"]) == ("train-ddp", "running", None)
    assert len(workers(mark)) == 2
    [victim] = [each for each in workers(mark) if "rank 1" in " ".join(each.cmdline())]
    victim.send_signal(signal.SIGKILL)
    hurry.touch()
    assert process.wait(150) == 0, output.read_text()
    text = output.read_text()
    assert re.search(r"Rank 1 on node-0 was killed by SIGKILL after \d+ optimizer steps \(observed", text)
    assert "step 0" not in text
    steps = [int(step) for step in re.findall(r"step (\d+)  loss", text)]
    assert steps[-1] == STEPS
    assert steps.count(steps[0]) == 1  # from its own checkpoint, not from the start
    wait_until(lambda: not marked(mark), description="every process of the run to be gone")
    assert memory_of(process.pid) == []
