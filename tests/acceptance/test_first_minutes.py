"""The first ten minutes of a new user: built packages in a fresh environment, an empty directory, a script of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
from commands import read_until
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from ports import NO_LOCAL_API
from waiting import TIMEOUT_S, wait_until

REPOSITORY = Path(__file__).parents[2]
INSTALL_TIMEOUT_S = 600
COMMAND_TIMEOUT_S = 600  # `demo --short` takes a minute on an idle machine, and more than five on a busy one

# README's loop around a model of their own, under the name that README gives it.
SCRIPT = """
import pathlib

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as hf


def main(run: hf.Run) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optim": optim}
    step = run.restore(state)
    print(f"rank {run.rank} begins at step {step}", flush=True)
    while not pathlib.Path("enough").exists() or step % 10:
        with run.step(step) as s:
            loss = model(torch.randn(64, 8)).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            s.log(loss=loss.item())
        step += 1
        run.checkpoint(state, step)


hf.launch(main)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class User:
    """Types commands in an empty directory, with the programs of an environment."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs, self._directory = programs, directory
        directory.mkdir()
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HOLDFAST_", "PYTHON", "VIRTUAL_"))
        }
        own = {"PATH": f"{programs}:{kept['PATH']}", "HOME": str(directory), "COLUMNS": "140"}
        self.environment = kept | NO_LOCAL_API | own

    def __call__(self, *command: str) -> str:
        """Return what was printed. It must succeed."""
        done = subprocess.run(
            command,
            cwd=self._directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout

    def step_of(self, job: str) -> int:
        found = re.search(r"step\W+([\d,]+)", self("holdfast", "jobs", "show", job))
        return int(found[1].replace(",", "")) if found else 0

    def begun_at(self, job: str) -> int | None:
        """The step at which its newest generation began, by its own words."""
        said = re.findall(r"begins at step (\d+)", self("holdfast", "logs", job, "--rank", "0"))
        return int(said[-1]) if said else None

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self._directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def _environment(directory: Path, package: str, extras: str, *options: str) -> Path:
    """A fresh environment with the package; its programs."""
    venv.create(directory, with_pip=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", *options]
    constraints = ["-c", str(REPOSITORY / "constraints.txt")]
    subprocess.run([*pip, *constraints, f"{package}{extras}"], check=True, timeout=INSTALL_TIMEOUT_S)
    return directory / "bin"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = str(tmp_path_factory.mktemp("dist"))
    (wheel,) = WheelBuilder(str(REPOSITORY)).build(directory=out, versions=["standard"])
    (sdist,) = SdistBuilder(str(REPOSITORY)).build(directory=out, versions=["standard"])
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture
def user(packages: dict[str, str], tmp_path: Path) -> User:
    return User(_environment(tmp_path / "environment", packages["wheel"], "[train,demo]"), tmp_path / "empty")


def test_from_the_wheel_to_a_run_that_was_broken_stopped_and_resumed(user: User, tmp_path: Path) -> None:
    assert user("holdfast", "--version").strip()
    assert "torch" in user("holdfast", "doctor")
    assert "all 3 faults were detected, attributed and recovered as expected" in user("holdfast", "demo", "--short")

    (tmp_path / "empty" / "mine.py").write_text(SCRIPT)
    with user.start(
        "holdfast", "up", "--nodes", "3", "--port", "0", "--control-port", "0", "--diagnostics-port", "0"
    ) as up:
        try:
            user.environment["HOLDFAST_API"] = read_until(up, r"API\s+(http://\S+)")[1]
            user("holdfast", "run", "--detach", "--nnodes", "2", "mine.py")
            wait_until(lambda: user.step_of("mine") > 50, description="steps")

            user("holdfast", "inject", "crash", "--job", "mine", "--rank", "1")
            wait_until(lambda: "resolved" in user("holdfast", "incidents", "list"), description="a restart")
            found = re.search(r"\bi-[\w-]+", user("holdfast", "incidents", "list"))
            assert found
            explained = user("holdfast", "explain", found[0])
            assert "SIGKILL" in explained
            assert "restart" in explained
            restarted_at = user.begun_at("mine")
            assert restarted_at is not None
            assert restarted_at > 0, "it went on, and did not begin anew"

            user("holdfast", "jobs", "stop", "mine")
            wait_until(
                lambda: json.loads(user("holdfast", "jobs", "show", "mine", "--json"))["phase"] == "stopped",
                description="the stop",  # the reason has the word already while the last checkpoint is saved
                timeout_s=60,
            )
            user("holdfast", "jobs", "resume", "mine")
            wait_until(lambda: user.begun_at("mine") not in (None, restarted_at), description="the resumed run")
            resumed_at = user.begun_at("mine")
            assert resumed_at is not None
            assert resumed_at > restarted_at, "a stop saves, and a resume goes on from there"
            (tmp_path / "empty" / "enough").touch()
            wait_until(lambda: "completed" in user("holdfast", "jobs", "show", "mine"), description="its end")
        finally:
            up.terminate()
            said, _ = up.communicate(timeout=TIMEOUT_S)
    assert up.returncode == 0, said
    assert "Traceback" not in said


def test_the_source_package_makes_the_same_wheel(packages: dict[str, str], tmp_path: Path) -> None:
    """Whoever installs from source gets every module and the examples."""
    programs = _environment(tmp_path / "environment", packages["sdist"], "", "--no-deps")
    listed = zipfile.ZipFile(packages["wheel"]).namelist()
    (installed,) = (programs.parent / "lib").glob("python*/site-packages")
    missing = [name for name in listed if not name.endswith("RECORD") and not (installed / name).exists()]
    assert missing == []
