"""Checkpoints without services, under the real torchrun: kills, signals, other numbers of ranks, other nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from losses import losses as logged
from ports import port_of, reserve_port
from waiting import wait_until
from warm_processes import STACK, warm

from holdfast.cli.demo.course import examples
from holdfast.domain.worker import EXIT_INTERRUPTED

SCRIPT = examples() / "torchrun" / "train_checkpoints.py"
STEPS = 60
TIMEOUT_S = 120.0


class Launch:
    """One torchrun (or plain python) with everything below it."""

    def __init__(self, command: Sequence[str], output: Path, port: int, **environ: str) -> None:
        """`command`: what `warm_stack` runs in a fork."""
        self.output = output
        self.port = port
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ}
        with output.open("wb") as log:
            self.process = warm(STACK).start(command, Path.cwd(), environment, log.fileno(), log.fileno())

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def workers(self) -> list[psutil.Process]:
        """Ordered by pid: rank 0 first."""
        children = psutil.Process(self.process.pid).children()
        return sorted((child for child in children if SCRIPT.name in " ".join(child.cmdline())), key=lambda it: it.pid)

    def reaches(self, pattern: str) -> None:
        wait_until(
            lambda: re.search(pattern, self.text) is not None or self.process.poll() is not None,
            description=f"{pattern!r} in the output",
            timeout_s=TIMEOUT_S,
        )
        assert re.search(pattern, self.text), self.text

    def kill(self) -> None:
        """SIGKILL for all of it, in no particular order."""
        if self.process.poll() is not None:
            return
        mine = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in mine:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(TIMEOUT_S)  # first: until then it is a zombie, which `psutil` takes for a process that runs
        _, running = psutil.wait_procs(mine, timeout=TIMEOUT_S)
        assert not running, running


StartLaunch = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[StartLaunch]:
    started: list[Launch] = []
    held = ExitStack()

    def start(
        *,
        ranks: int = 2,
        directory: str = "ckpt",
        steps: int = STEPS,
        step_s: float = 0.0,
        save_every: int = 10,
        nodes: int = 1,
        node: int = 0,
        port: int = 0,
        **environ: str,
    ) -> Launch:
        arguments = [
            str(SCRIPT),
            "--steps",
            str(steps),
            "--step-s",
            str(step_s),
            "--save-every",
            str(save_every),
            "--directory",
            str(tmp_path / directory),
        ]
        port = port or port_of(held.enter_context(reserve_port()))
        run = (
            ["script"]
            if ranks == 0
            else [
                "torch.distributed.run",
                "--nproc-per-node",
                str(ranks),
                "--nnodes",
                str(nodes),
                "--node-rank",
                str(node),
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(port),
            ]
        )
        begun = Launch([*run, *arguments], tmp_path / f"output-{len(started)}.log", port, **environ)
        started.append(begun)
        return begun

    with held:
        yield start
        for each in started:
            each.kill()
    for record in tmp_path.glob("*/run.json"):  # the images that killed runs have left
        shutil.rmtree(images_of(record.parent), ignore_errors=True)


def images_of(directory: Path) -> Path:
    return Path("/dev/shm", f"holdfast-{os.getuid()}", json.loads((directory / "run.json").read_text())["run"])


def losses(*launches: Launch) -> dict[int, str]:
    """The last word on each step, digit for digit."""
    return {int(step): loss for each in launches for step, loss in re.findall(r"step (\d+)  loss (\S+)", each.text)}


def saved_steps(directory: Path) -> dict[int, int]:
    """How many ranks' shards of each step are on disk."""
    return Counter(int(path.parent.name[1:]) for path in directory.glob("a*/s*/rank-*.json"))


def holds_newest(directory: Path, *, after: int, keep: int, ranks: int) -> bool:
    """Whether `keep` complete checkpoints remain, the newest of a step after that one, and nothing older. A rank whose disk is
    late skips a step, also the last one: what others have written of it lies between, or at the end."""
    saved = saved_steps(directory)
    complete = sorted(each for each, shards in saved.items() if shards == ranks)
    return len(complete) == keep and complete[-1] > after and complete[0] == min(saved)


def undisturbed(launch: StartLaunch, steps: int = STEPS) -> dict[int, str]:
    calm = launch(directory="calm", steps=steps)
    assert calm.wait() == 0, calm.text
    return losses(calm)


def test_a_run_killed_in_the_middle_goes_on_bit_for_bit(launch: StartLaunch, tmp_path: Path) -> None:
    expected = undisturbed(launch)
    first = launch(step_s=0.2)  # from step 30 to the last there are seconds in which to kill it
    first.reaches("step 30 ")
    first.kill()
    assert images_of(tmp_path / "ckpt").exists()
    second = launch()
    assert second.wait() == 0, second.text
    found = re.search(r"starts at step (\d+)", second.text)
    assert found is not None
    assert int(found[1]) >= 20
    assert losses(first, second) == expected
    assert holds_newest(tmp_path / "ckpt", after=int(found[1]), keep=2, ranks=2), saved_steps(tmp_path / "ckpt")
    assert not images_of(tmp_path / "ckpt").exists()  # all is on disk: the memory was given back


@pytest.mark.slow
def test_with_its_memory_lost_a_run_goes_on_from_disk(launch: StartLaunch, tmp_path: Path) -> None:
    expected = undisturbed(launch)
    first = launch(step_s=0.05)
    wait_until(
        lambda: len(list((tmp_path / "ckpt").glob("a1/s[2-9]0/rank-*.json"))) >= 2,
        description="a checkpoint of both ranks on disk",
        timeout_s=TIMEOUT_S,
    )
    first.kill()
    shutil.rmtree(images_of(tmp_path / "ckpt"))
    second = launch()
    assert second.wait() == 0, second.text
    assert "starts at step 0" not in second.text
    assert losses(first, second) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_saves_one_step_of_all_and_leaves(launch: StartLaunch, tmp_path: Path, rank: int) -> None:
    first = launch(steps=100_000, step_s=0.02)
    first.reaches("step 10 ")
    first.workers()[rank].send_signal(signal.SIGTERM)
    assert first.wait() != 0
    assert f"exitcode  : {EXIT_INTERRUPTED}" in first.text
    newest = max(saved_steps(tmp_path / "ckpt"))
    assert {path.name for path in (tmp_path / "ckpt").glob(f"a1/s{newest}/*.json")} == {"rank-0.json", "rank-1.json"}
    second = launch(steps=newest + 10)
    assert second.wait() == 0, second.text
    assert f"starts at step {newest}" in second.text


def test_the_others_of_a_killed_rank_leave_without_waiting_for_their_grace(launch: StartLaunch) -> None:
    """torchrun sends them SIGTERM and waits. (What follows in its second life is torchrun's affair, and unsteady there.)"""
    first = launch(step_s=0.05, steps=100_000)
    first.reaches("step 20 ")
    first.workers()[1].kill()
    assert first.wait() != 0, first.text
    assert "the grace of" not in first.text


@pytest.mark.slow
def test_sigusr1_saves_and_training_goes_on(launch: StartLaunch, tmp_path: Path) -> None:
    interval = 40  # the step that the signal saves stays on disk for as long as this takes, at least
    first = launch(steps=100_000, step_s=0.02, save_every=interval)
    first.reaches(f"step {interval} ")
    first.workers()[1].send_signal(signal.SIGUSR1)
    wait_until(
        lambda: any(step % interval for step in saved_steps(tmp_path / "ckpt")),
        description="a step that is no multiple of the interval",
        timeout_s=TIMEOUT_S,
    )
    reached = max(losses(first))
    first.reaches(f"step {reached + interval} ")
    assert first.process.poll() is None


@pytest.mark.slow
def test_fewer_and_more_ranks_take_the_state_of_a_replica(launch: StartLaunch) -> None:
    for ranks, steps, start in ((2, 20, 0), (0, 40, 20), (4, 60, 40)):
        each = launch(ranks=ranks, steps=steps)
        assert each.wait() == 0, each.text
        assert f"starts at step {start}\n" in each.text


@pytest.mark.slow
def test_a_second_run_in_the_directory_is_refused_and_the_first_goes_on(launch: StartLaunch) -> None:
    first = launch(steps=100_000, step_s=0.02)
    first.reaches("step 10 ")
    second = launch(ranks=0)
    assert second.wait() == 1
    assert "Conflict" in second.text
    assert "another run is using" in second.text
    reached = max(losses(first))
    first.reaches(f"step {reached + 20} ")


@pytest.mark.slow
def test_ranks_that_have_changed_places_find_their_shards_on_the_other_node(launch: StartLaunch) -> None:
    """Two nodes with a directory each; the second time each has the other's directory and memory."""
    for steps, names in ((20, ("a", "b")), (40, ("b", "a"))):
        both = two_nodes(launch, names, steps=steps)
        for each in both:
            assert each.wait() == 0, each.text
    assert "starts at step 20\n" in both[0].text


def two_nodes(launch: StartLaunch, names: Sequence[str], *, steps: int, step_s: float = 0.0) -> list[Launch]:
    """One rank each, with a directory each."""
    started: list[Launch] = []
    for i, name in enumerate(names):
        port = started[0].port if started else 0
        began = launch(
            ranks=1, nodes=2, node=i, port=port, steps=steps, step_s=step_s, directory=name, HOLDFAST_NODE=name
        )
        started.append(began)
    return started


@pytest.mark.slow
def test_a_node_that_is_replaced_gets_its_shard_from_its_partner(launch: StartLaunch, tmp_path: Path) -> None:
    expected = undisturbed(launch)
    first = two_nodes(launch, ("a", "b"), steps=STEPS, step_s=0.05)
    wait_until(
        lambda: (
            list((tmp_path / "a").glob("a1/s[2-9]0/rank-1.json"))
            and list((tmp_path / "b").glob("a1/s[2-9]0/rank-0.json"))
        ),
        description="a copy on either node",
        timeout_s=TIMEOUT_S,
    )
    for each in first:
        each.kill()
    shutil.rmtree(images_of(tmp_path / "b"))  # on this one machine both nodes' images lie there
    shutil.rmtree(tmp_path / "b")
    second = two_nodes(launch, ("a", "c"), steps=STEPS)
    for each in second:
        assert each.wait() == 0, each.text
    assert "starts at step 0" not in second[0].text
    assert losses(*first, *second) == expected


@pytest.mark.slow
def test_a_sharded_state_is_put_together_anew_for_another_number_of_ranks(tmp_path: Path) -> None:
    """FSDP2 by environment alone: the script says nothing about checkpoints."""

    def train(ranks: int, steps: int, directory: str) -> None:
        port = port_of(held.enter_context(reserve_port()))
        run = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
        arguments = ["--steps", str(steps), "--layers", "1", "--out", str(tmp_path / f"{directory}-{steps}")]
        done = subprocess.run(
            [sys.executable, *run, str(examples() / "fsdp" / "train.py"), *arguments],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HOLDFAST_CHECKPOINT_DIR": str(tmp_path / directory),
                "HOLDFAST_CHECKPOINT_INTERVAL_STEPS": "5",
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def history(name: str) -> dict[int, float]:
        return logged(tmp_path / name)

    with ExitStack() as held:
        train(2, 15, "calm")
        for ranks, steps in ((2, 5), (1, 10), (2, 15)):
            train(ranks, steps, "resized")
    expected = history("calm-15")
    resized = history("resized-5") | history("resized-10") | history("resized-15")
    assert min(history("resized-10")) > 5
    assert resized == pytest.approx(expected, abs=1e-4)  # sums over other ranks round otherwise
