"""Measures the cost of Holdfast in a training step.

    python benchmarks/step_overhead.py [--steps 20000]        run.step: an empty step, with an agent that receives, does not
                                                              receive, or is missing. No torch work, no process group
    python benchmarks/step_overhead.py --observed              the observation of a script that reports no steps: DDP on two
                                                              ranks with gloo, alternating steps with and without it

The first prints median and 99th percentile in microseconds; the goal is a median of at most 50. The second prints the medians
of the steps with and without the observation, by the length of a step; the goal is at most 0.5 % of a step. Every other block
of steps is observed, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as hf
from holdfast.domain.mesh import Mesh
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, World
from holdfast.train.observing.ddp_waits import DDPWaits
from holdfast.train.observing.observed_steps import StepObserver


def measure(agent: Path | str, steps: int) -> list[float]:
    """Return the seconds of each of `steps` empty steps, with a control channel without orders."""
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    notes = Notes(agent=str(agent), replicator="", job="bench", generation=1, rank=0)
    control = Control(worker.detach())
    run = hf.Run(
        environment=Environment(World(Mesh.of({"dp": 1}), 0, 1), job="bench"),
        device=torch.device("cpu"),
        notes=notes,
        control=control,
        process_group_s=0.0,
    )
    took = []
    for step in range(steps):
        began = time.perf_counter()
        with run.step(step) as s:
            s.log(loss=1.25, tokens=4096)
        took.append(time.perf_counter() - began)
    for end in (notes, control, supervisor):
        end.close()
    return took


def listener(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.bind(str(path))
    return bound


def drain(bound: socket.socket) -> None:
    while bound.recv(65536):
        pass


# ---------------------------------------------------------------- the observation of unmodified scripts

BLOCK = 20  # steps in a row with the observation, or without it


def observed_rank(rank: int, path: str, widths: tuple[int, ...], steps: int, answer: Connection) -> None:
    """Run one rank. Sends the seconds of the steps with and without the observation, for each width."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    results = []
    for width in widths:
        waits = DDPWaits()
        model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(32, width)
        took: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
        notes = Notes(agent=path, replicator="", job="bench", generation=1, rank=rank)
        observer = PausedObserver(notes, waits)
        for block in range(2 * (1 + steps // BLOCK)):
            on = block % 2
            observer.turn(bool(on))
            for step in range(BLOCK):
                began, began_cpu = time.perf_counter(), time.thread_time()
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if block > 1 and step:  # the first block, and the first step of each block, include initialisation
                    took[on].append((time.perf_counter() - began, time.thread_time() - began_cpu))
        observer.close()
        waits.close()
        results.append(took)
    answer.send(results)
    dist.barrier()
    dist.destroy_process_group()


class PausedObserver(StepObserver):
    """The production observer, which can be switched off."""

    _on = False

    def turn(self, on: bool) -> None:
        self._on = on
        self._steps = self._samples = 0
        self._waited_s, self._started_at = 0.0, time.time()
        if not on:
            self._waits.rest()

    def _observe(self) -> None:
        if self._on:
            super()._observe()


def compare_observed(steps: int, widths: tuple[int, ...] = (128, 512, 1536)) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "agent"
        with listener(path) as reading:
            reader = threading.Thread(target=drain, args=(reading,))
            reader.start()
            pipes = [context.Pipe() for _ in range(2)]
            ranks = [
                context.Process(target=observed_rank, args=(rank, str(path), widths, steps, pipes[rank][1]))
                for rank in range(2)
            ]
            for process in ranks:
                process.start()
            results = pipes[0][0].recv(), pipes[1][0].recv()
            for process in ranks:
                process.join()
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(b"", str(path))
            reader.join()
    for off, on in results[0]:
        (plain, plain_cpu), (watched, watched_cpu) = (
            map(statistics.median, zip(*each, strict=True)) for each in (off, on)
        )
        print(
            f"step {plain * 1e3:7.2f} ms, observed {watched * 1e3:7.2f} ms: {watched / plain - 1:+7.2%}     "
            f"CPU time of its thread {plain_cpu * 1e3:7.2f} ms, {watched_cpu * 1e3:7.2f} ms: "
            f"{(watched_cpu - plain_cpu) * 1e6:+.0f} µs = {(watched_cpu - plain_cpu) / plain:+.2%} of the step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default 20000, with --observed 1000 with and 1000 without it")
    parser.add_argument(
        "--observed", action="store_true", help="measure the observation of scripts that report no steps"
    )
    arguments = parser.parse_args()
    if arguments.observed:
        compare_observed(arguments.steps or 1_000)
        return
    steps = arguments.steps or 20_000
    with tempfile.TemporaryDirectory() as directory:
        awake, asleep = Path(directory) / "awake", Path(directory) / "asleep"
        with listener(awake) as reading, listener(asleep):
            reader = threading.Thread(target=drain, args=(reading,))
            reader.start()
            for name, agent in (
                ("listening", awake),
                ("asleep", asleep),
                ("gone", Path(directory) / "gone"),
                ("none", ""),
            ):
                took = sorted(measure(agent, steps))
                median, p99 = statistics.median(took) * 1e6, took[int(0.99 * len(took))] * 1e6
                print(f"agent {name:10s} median {median:6.1f} µs   p99 {p99:6.1f} µs")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(b"", str(awake))
            reader.join()


if __name__ == "__main__":
    main()
