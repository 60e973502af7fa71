"""How long a save of a state on a GPU stops training: Holdfast, torch.distributed.checkpoint, torch.save, and the bus itself.

    python -m benchmarks.checkpoint.device --size 4 --trials 7        GB; prints a table, writes out/bench/device.json

The contenders alternate in each trial, in one process, on the same state. Holdfast's save ends when every byte is in shared
memory. `dcp async_save` ends when it has staged the state on the host, and writes to memory in the background; it is waited for
before the next contender, outside of the time. The limit is one copy of the same bytes into one pinned buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from holdfast.domain.mesh import Mesh
from holdfast.shards import peek
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, RestoreTarget, World
from holdfast.train.saves.checkpoint import Checkpointer

WARM_UPS = 3  # both images of Holdfast exist and are pinned
TENSOR_BYTES = 64 << 20

Contender = Callable[[dict[str, torch.Tensor], int], Callable[[], None]]  # returns what waits for the rest, untimed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=4.0, help="GB of state (default %(default)s)")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    torch.cuda.set_device(0)
    scratch = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm"))
    try:
        results = measure(int(arguments.size * 1e9), arguments.trials, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table = {name: _figures(times) for name, times in results.items()}
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "size_gb": arguments.size,
    }
    print(json.dumps(about))
    limit = table["limit: one pinned copy"]["median"]
    for name, figures in table.items():
        if not figures:
            continue
        shown = "  ".join(f"{key} {value:8.4f}" for key, value in figures.items())
        print(f"{name:32} {shown}  × limit {figures['median'] / limit:6.2f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "device.json").write_text(json.dumps({"about": about, "seconds": table}, indent=2))


def measure(nbytes: int, trials: int, scratch: Path) -> dict[str, list[float]]:
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    count = max(1, nbytes // TENSOR_BYTES)
    state = {f"layer.{index}": torch.randn(TENSOR_BYTES // 4, device=device) for index in range(count)}
    images = scratch / "images"
    images.mkdir()
    environment = Environment(World(Mesh.of({"dp": 1}), 0, 1), job="bench", attempt=1, images=str(images))
    notes = Notes(agent="", replicator="", job="bench", generation=1, rank=0)
    ours = Checkpointer(environment, device, notes)
    pinned = torch.empty(count * TENSOR_BYTES // 4, pin_memory=True)

    def holdfast(state: dict[str, torch.Tensor], step: int) -> Callable[[], None]:
        if not ours.save(state, step, wait_s=60.0):
            raise SystemExit("a save was skipped: both images are in use, or no memory is left")
        return lambda: None

    def limit(state: dict[str, torch.Tensor], step: int) -> Callable[[], None]:
        for part, tensor in zip(torch.split(pinned, TENSOR_BYTES // 4), state.values(), strict=True):
            part.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(device)
        return lambda: None

    def torch_save(state: dict[str, torch.Tensor], step: int) -> Callable[[], None]:
        torch.save(state, scratch / "state.pt")
        return (scratch / "state.pt").unlink

    def dcp_async(state: dict[str, torch.Tensor], step: int) -> Callable[[], None]:
        place = scratch / f"dcp-{step}"
        future = async_save(state, checkpoint_id=place)
        if isinstance(future, AsyncSaveResponse):
            future.staging_completion.result()  # only then the state may change
            future = future.upload_completion
        written = future

        def finish() -> None:
            written.result()
            shutil.rmtree(place)

        return finish

    contenders: Mapping[str, Contender] = {
        "limit: one pinned copy": limit,
        "holdfast": holdfast,
        "dcp async_save": dcp_async,
        "torch.save to memory": torch_save,
    }
    times: dict[str, list[float]] = {name: [] for name in (*contenders, "holdfast, restore", "holdfast, first save")}
    step = 0
    failed: Counter[str] = Counter()
    ours.prepare(state)  # as a run does before its first save: images are made and pinned by another thread
    for trial in range(WARM_UPS + trials):
        for name, contender in contenders.items():
            step += 1
            for tensor in state.values():
                tensor.add_(1)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            try:
                finish = contender(state, step)
            except Exception as error:  # a peer's, of any kind
                failed[name] += 1
                print(f"{trial - WARM_UPS:3} {name:32} failed: {type(error).__name__}: {error}", flush=True)
                continue
            took = time.perf_counter() - began
            finish()
            if trial >= WARM_UPS:
                times[name].append(took)
            elif name == "holdfast" and not trial:
                times["holdfast, first save"].append(took)
            print(f"{trial - WARM_UPS:3} {name:32} {took:.4f} s", flush=True)
    if failed:
        print("failed trials:", dict(failed))
    for _ in range(trials):
        times["holdfast, restore"].append(_restore(environment, device, notes, state, images))
    return times


def _restore(
    environment: Environment, device: torch.device, notes: Notes, state: dict[str, Any], images: Path
) -> float:
    headers = {path: header for path in images.glob("*.image") if (header := peek(path)) is not None}
    path, header = max(headers.items(), key=lambda item: item[1].stamp.key.step)
    target = RestoreTarget(header.stamp.key.step, header.stamp.key.attempt, str(path))
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    Checkpointer(environment, device, notes).restore(found, target)
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _figures(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "min": min(times), "max": max(times)} if times else {}


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of a stager would wait
