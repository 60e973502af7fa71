"""Modules that the agent learns (`preload: [auto]`), in real templates and workers: what a module does when it is imported, a
package that is upgraded between two starts, and a package that does not survive the fork."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_harness import Agent, prepare_order, running_agent, script, start_job
from waiting import wait_until

from holdfast.agent.workers.learned import MORE_MIN
from holdfast.domain.job import EnvSource, LaunchSpec
from holdfast.domain.orders import PrepareTemplate, RanksStepping, Stop
from holdfast.domain.signals import WorkerExited

TIMEOUT_S = 120.0
_NUMBERS = itertools.count()

# Prints what is there before it imports anything, and makes optimizer steps until it is stopped.
BEGINS = """
import os, sys
print(*sorted(name for name in sys.modules if name.startswith({package!r})), flush=True)
"""
STEPS = """
import time, torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    weight.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.05)
"""

# Module → what its import does, and the reason for which a template must not have it.
EFFECTS: Mapping[str, tuple[str, str]] = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "1 thread",
    ),
    "socket_": ("import socket\nLISTENER = socket.create_server(('127.0.0.1', 0))", "leaves socket:"),
    "file": ("LOG = open('/dev/shm/{package}', 'w')", "leaves /dev/shm/"),
    "lock": ("import multiprocessing\nLOCK = multiprocessing.Lock()", "between processes"),
    "memory": ("import mmap\nSHARED = mmap.mmap(-1, 4096)", "between processes"),
    "handler": ("import signal\nsignal.signal(signal.SIGUSR2, lambda *_: None)", "handles SIGUSR2"),
    "method": ("import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)", "start method"),
    "directory": ("import os\nos.chdir('/')", "changes the working directory to /"),
    "seed": ("import random\nrandom.seed(1)", "seeds a generator"),
    "seeds_torch": ("import torch\ntorch.manual_seed(3)", "torch's generator"),
    "seeds_numpy": ("import numpy\nnumpy.random.seed(3)", "seeds a generator"),
    "patches": ("import torch\ntorch.load = lambda *_: None", "replaces torch.load"),
    "child": ("import subprocess\nsubprocess.Popen(['sleep', '300'])", "leaves 1 process(es) running"),
    "ends": (
        "import os, sys\nif 'torch.optim' in sys.modules and 'WORKER' not in os.environ: os._exit(0)",
        "ends the process",
    ),
    "hungry": ("import os\nA = bytearray(40 << 30) if 'WORKER' not in os.environ else None", "MemoryError"),
    "fails": ("import os\nos.environ['WORKER']", "its import fails: KeyError"),
    "rank": ("import os\nRANK = os.environ.get('RANK')", "it reads RANK"),
    "local": ("import os\nRANK = os.getenv('LOCAL_RANK', '0')", "it reads LOCAL_RANK"),
    "world": ("import os\nHAS = 'WORLD_SIZE' in os.environ", "it reads WORLD_SIZE"),
    "master": ("import os\nHAS = b'MASTER_ADDR' in os.environb", "it reads MASTER_ADDR"),
    "holdfast_": ("import os\nJOB = os.environ.get('HOLDFAST_JOB')", "it reads HOLDFAST_JOB"),
    "slurm": ("import os\nRANK = os.environ.get('SLURM_PROCID')", "it reads SLURM_PROCID"),
    "parent": ("import os\nTRACE = os.environ.get('TRACEPARENT')", "it reads TRACEPARENT"),
    "arguments": ("import argparse\nA = argparse.ArgumentParser().parse_known_args()", "it reads sys.argv"),
    "hub": ("import os\nHOME = os.environ.get('HUB_HOME', 'default')", "it reads HUB_HOME"),
    "secret": ("import os\nKEY = os.environ.get('API_KEY')", "it reads API_KEY"),
    "editable": ("import {package}_edited", "{package}_edited, which is not an installed package"),
}
# What may be there: each worker has it as an interpreter would have it that has just imported the module.
ALLOWED: Mapping[str, str] = {
    "goes_through": "import os\nFOUND = {n: v for n, v in os.environ.items() if n.startswith('fsspec_')}",
    "threads": "import os\nN = os.environ.get('OMP_NUM_THREADS')",  # which every process of this agent has
    "prints": "print('a banner')",
    "handlers_at_exit": "import atexit\natexit.register(lambda: open('{mark}', 'w').close())",
    "sets": "import os\nos.environ['{package}_SET'] = 'here'\nos.environ.setdefault('LEVEL', 'low')",
    "draws": "import random\nDRAWN = random.random()",
    "held": "import threading\nLOCK = threading.RLock()\nLOCK.acquire()",
    "lazy": """
import threading
def use():
    found = []
    thread = threading.Thread(target=found.append, args=(1,))
    thread.start()
    thread.join()
    return found
""",
    "process": "import os\nPID = os.getpid()",
}


@pytest.fixture
def package() -> Iterator[Path]:
    """An installed package: a directory of this environment, with as many modules as justify a template."""
    place = Path(sysconfig.get_path("purelib")) / f"installed_{os.getpid()}_{next(_NUMBERS)}"
    place.mkdir()
    (place / "__init__.py").write_text("VERSION = 1\n")
    for number in range(MORE_MIN):
        (place / f"m{number}.py").write_text("")
    try:
        yield place
    finally:
        shutil.rmtree(place)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with running_agent(tmp_path) as agent:
        yield agent


def imports(package: Path, *more: str) -> str:
    names = [*(f"m{number}" for number in range(MORE_MIN)), *more]
    return "".join(f"import {package.name}.{name}\n" for name in names)


def begin(agent: Agent, path: str, generation: int, **launch: Any) -> list[str]:
    """Start a generation, and return the modules of the package that it has from the start."""
    order = prepare_order("learns", path, generation=generation, preload=("auto",), **launch)
    start_job(agent.plane, order)
    text = wait_until(
        lambda: agent.worker_lines("learns", generation, 0), description="the script's line", timeout_s=TIMEOUT_S
    )
    own = [line for line in text.splitlines() if not line.startswith("holdfast: ")]
    return own[0].split() if own else []


def learned(agent: Agent, count: int = 1) -> dict[str, Any]:
    """The event of the newest template with learned modules, when there have been so many."""

    def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in agent.log().splitlines() if line.startswith("{") and line.endswith("}")]
        ready = [each for each in lines if each["event"] == "worker template ready" and each["learned"]]
        return ready if len(ready) >= count else []

    return wait_until(found, description="a template with learned modules", timeout_s=TIMEOUT_S)[-1]


def stepping(agent: Agent, generation: int) -> None:
    agent.plane.wait_for(RanksStepping, lambda each: each.generation == generation)


def stop(agent: Agent, generation: int) -> None:
    assert agent.plane.ask(Stop("learns", generation)).ok


def test_a_module_with_side_effects_is_left_out_and_the_others_are_as_in_a_new_interpreter(
    agent: Agent, package: Path, tmp_path: Path
) -> None:
    mark, edited = tmp_path / "mark", f"{package.name}_edited"
    (tmp_path / f"{edited}.py").write_text("")
    for name, text in {**{name: text for name, (text, _) in EFFECTS.items()}, **ALLOWED}.items():
        (package / f"{name}.py").write_text(text.replace("{package}", package.name).replace("{mark}", str(mark)) + "\n")
    says = (
        f"print({package.name}.process.PID == os.getpid(), os.environ[{package.name + '_SET'!r}], os.environ['LEVEL'],"
        f" {package.name}.lazy.use(), {package.name}.held.LOCK.acquire(timeout=9), {package.name}.rank.RANK,"
        f" {package.name}.hub.HOME, flush=True)\n"
    )
    sets = "os.environ.update(WORKER='1', HUB_HOME='/data')\n"
    text = BEGINS.format(package=package.name) + sets + imports(package, *EFFECTS, *ALLOWED) + says + STEPS
    path = script(tmp_path, "learns", text)
    env = (("LEVEL", "high"), ("PYTHONPATH", str(tmp_path)))
    launch: dict[str, Any] = {"env": env, "env_from": (EnvSource("API_KEY", command="echo key"),)}
    assert begin(agent, path, 1, **launch) == []
    left_out = learned(agent)["left_out"]
    stop(agent, 1)
    for name, (_, reason) in EFFECTS.items():
        assert reason.replace("{package}", package.name) in left_out.get(f"{package.name}.{name}", ""), name
    present = begin(agent, path, 2, **launch)
    expected = {package.name, *(f"{package.name}.{name}" for name in (*ALLOWED, *(f"m{i}" for i in range(MORE_MIN))))}
    assert {*present} == expected

    def said() -> str:
        lines = agent.worker_log("learns", 2, 0).splitlines()
        return lines[-1] if len(lines) > 1 and lines[-1].endswith("/data") else ""

    answer = wait_until(said, description="what the script says", timeout_s=TIMEOUT_S)
    assert answer == "False here high [1] True 0 /data", "a cached pid is that of the template, which nothing can see"
    stop(agent, 2)
    changed = begin(agent, path, 3, env=(("LEVEL", "other"), env[1]))
    assert changed == [], "a template for another environment is not used"
    learned(agent, 2)
    assert not mark.exists(), (
        "the end of a template runs no exit handler of a module: its workers may need what it deletes"
    )


def test_an_upgraded_package_is_noticed_and_learned_again(agent: Agent, package: Path, tmp_path: Path) -> None:
    uses = f"import {package.name}\nprint({package.name}.VERSION, flush=True)\n"
    path = script(tmp_path, "learns", BEGINS.format(package=package.name) + imports(package) + uses + STEPS)
    begin(agent, path, 1)
    learned(agent)
    stop(agent, 1)
    new = package / "new.py"  # as an installer does it
    new.write_text("VERSION = 22\n")
    new.replace(package / "__init__.py")
    assert begin(agent, path, 2) == [], "the template has the former version"
    log = agent.worker_log("learns", 2, 0)
    assert f"imports are not loaded ahead: the file of {package.name} has changed" in log
    learned(agent, 2)
    stop(agent, 2)
    assert package.name in begin(agent, path, 3)
    said = wait_until(
        lambda: agent.worker_log("learns", 3, 0).splitlines()[1:], description="the version", timeout_s=TIMEOUT_S
    )
    assert said == ["22"]


BREAKS = """
import os
MADE_IN = os.getpid()
def use():
    if os.getpid() != MADE_IN:
        {how}
"""


@pytest.mark.parametrize("how", ["raise RuntimeError('forked')", "os.abort()", "os._exit(3)"])
def test_after_a_failed_start_with_learned_modules_the_next_ones_have_none(
    agent: Agent, package: Path, tmp_path: Path, how: str
) -> None:
    (package / "breaks.py").write_text(BREAKS.format(how=how))
    text = BEGINS.format(package=package.name) + imports(package, "breaks") + f"{package.name}.breaks.use()\n" + STEPS
    path = script(tmp_path, "learns", text)
    begin(agent, path, 1)
    learned(agent)
    stop(agent, 1)
    assert f"{package.name}.breaks" in begin(agent, path, 2)
    exited = agent.plane.wait_for_signal(WorkerExited, lambda each: each.generation == 2)
    assert exited.learned_start, "it does not count against the script"
    assert begin(agent, path, 3) == []
    note = "imports are not loaded ahead: with its imports loaded ahead, generation 2 made no step: rank 0"
    assert note in agent.worker_log("learns", 3, 0)
    wait_until(lambda: "are given up" in agent.log(), description="the verdict", timeout_s=TIMEOUT_S)
    stop(agent, 3)
    os.kill(agent.process.pid, 9)
    agent.process.wait()
    agent.restart()
    # Another run, in which the script would be started with them otherwise.
    assert begin(agent, path, 4, token="another") == []
    assert note in agent.worker_log("learns", 4, 0)
    stop(agent, 4)


# Waits when it is imported by a template or its scout; a worker has a title.
SLOW = """
import os, time
with open('/proc/self/cmdline', 'rb') as cmdline:
    IN_WORKER = cmdline.read().startswith(b'holdfast: ')
if not IN_WORKER:
    os.close(os.open({began!r}, os.O_CREAT))
while not IN_WORKER and not os.path.exists({gate!r}):
    time.sleep(0.01)
"""


def test_no_start_waits_for_a_template_whose_imports_take_long(agent: Agent, package: Path, tmp_path: Path) -> None:
    gate, began = tmp_path / "gate", tmp_path / "began"
    (package / "slow.py").write_text(SLOW.format(gate=str(gate), began=str(began)))
    path = script(tmp_path, "learns", BEGINS.format(package=package.name) + imports(package, "slow") + STEPS)
    assert begin(agent, path, 1) == []
    wait_until(began.exists, description="the template to begin its imports", timeout_s=TIMEOUT_S)
    stop(agent, 1)
    assert begin(agent, path, 2) == [], "while the template imports"
    stepping(agent, 2)
    gate.touch()
    learned(agent)
    stop(agent, 2)
    assert f"{package.name}.slow" in begin(agent, path, 3)
    stop(agent, 3)


def test_modules_of_a_namespace_package_are_learned(agent: Agent, package: Path, tmp_path: Path) -> None:
    (package / "__init__.py").unlink()
    path = script(tmp_path, "learns", BEGINS.format(package=package.name) + imports(package) + STEPS)
    begin(agent, path, 1)
    learned(agent)
    stop(agent, 1)
    assert {package.name, *(f"{package.name}.m{number}" for number in range(MORE_MIN))} == {*begin(agent, path, 2)}
    stepping(agent, 2)
    stop(agent, 2)
    (package / "m0.py").write_text("VERSION = 22\n")
    assert begin(agent, path, 3) == []
    assert f"the file of {package.name}.m0 has changed" in agent.worker_log("learns", 3, 0)
    stop(agent, 3)


def test_ranks_that_import_other_modules_start_with_those_of_the_first(
    agent: Agent, package: Path, tmp_path: Path
) -> None:
    for name in ("first", "other"):
        (package / f"{name}.py").write_text("")
    text = BEGINS.format(package=package.name) + imports(package)
    text += f"if os.environ['RANK'] == '0':\n    import {package.name}.first\nelse:\n    import {package.name}.other\n"
    path = script(tmp_path, "learns", text + STEPS)
    begin(agent, path, 1, nproc=2)
    learned(agent)
    stop(agent, 1)
    for generation in (2, 3):
        names = begin(agent, path, generation, nproc=2)
        lines = partial(agent.worker_lines, "learns", generation, 1)
        other = wait_until(lines, description="rank 1", timeout_s=TIMEOUT_S)
        assert f"{package.name}.first" in names
        assert f"{package.name}.other" not in names
        assert other.split() == names
        stepping(agent, generation)
        stop(agent, generation)


def test_a_job_with_other_modules_leaves_no_template_behind(agent: Agent, package: Path, tmp_path: Path) -> None:
    path = script(tmp_path, "learns", BEGINS.format(package=package.name) + imports(package) + STEPS)
    begin(agent, path, 1)
    learned(agent)
    stop(agent, 1)
    for number in range(3):
        other = script(tmp_path, f"other{number}", "pass\n")
        assert agent.plane.ask(PrepareTemplate(f"other{number}", LaunchSpec(other, preload=("auto",)))).ok
    wait_until(lambda: len(agent.running("holdfast.train.warm.template")) == 2, description="one of each kind")
