"""What `run.step` costs a training step: the time of an empty step, with an agent that listens, sleeps, or is not there.

    python benchmarks/step_overhead.py [--steps 20000]

Prints median and 99th percentile in microseconds; the aim is a median of at most 50. No torch work, no process group.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

import holdfast.train as hf
from holdfast.domain.mesh import Mesh
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, World


def measure(agent: Path | str, steps: int) -> list[float]:
    """Seconds of each of `steps` empty steps, with a control channel that stays silent."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
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
