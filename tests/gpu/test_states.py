"""States on a GPU: what a save keeps, by which way it goes into the image, and what a restore brings back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.domain.mesh import Mesh
from holdfast.shards import Image, ImageSet, Plan, peek
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, RestoreTarget, World
from holdfast.train.saves.checkpoint import Checkpointer
from holdfast.train.saves.device_copies import CudaDriver, DeviceCopies
from holdfast.train.saves.tensors import over, spec_of


def device() -> torch.device:
    return torch.device("cuda", 0)


def checkpointer(images: Path) -> Checkpointer:
    environment = Environment(World(Mesh.of({"dp": 1}), 0, 1), job="t", attempt=1, images=str(images))
    return Checkpointer(environment, device(), Notes(agent="", replicator="", job="t", generation=1, rank=0))


def newest(images: Path) -> RestoreTarget:
    headers = {path: header for path in images.glob("*.image") if (header := peek(path)) is not None}
    path, header = max(headers.items(), key=lambda item: item[1].stamp.key.step)
    return RestoreTarget(header.stamp.key.step, header.stamp.key.attempt, str(path))


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(40_000_000, device=device()),  # more than two buffers
        "half": torch.randn(77, device=device()).bfloat16(),
        "eight": torch.randn(64, device=device()).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7.0, device=device()),
        "empty": torch.empty(0, 3, device=device()),
        "turned": torch.randn(600, 500, device=device()).t(),
        "flags": torch.tensor([True, False, True], device=device()),
        "complex": torch.randn(33, dtype=torch.complex64, device=device()),
        "host": torch.randn(100_000),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    ones, others = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(ones, others)


def image_for(state: dict[str, torch.Tensor], path: Path) -> tuple[Image, list[torch.Tensor]]:
    specs = tuple(spec_of(name, tensor, None) for name, tensor in state.items())
    image = Image.create(path, Plan(specs))
    return image, [over(image.view(spec.fqn), spec) for spec in specs]


class Refusing(CudaDriver):
    """A driver that pins no memory of ours."""

    def register(self, address: int, nbytes: int) -> str:
        return "operation not supported"


@pytest.mark.parametrize("driver", [CudaDriver, Refusing])
def test_every_byte_arrives_by_the_direct_way_and_through_buffers(driver: type[CudaDriver], tmp_path: Path) -> None:
    state = tensors()
    image, targets = image_for(state, tmp_path / "a")
    copies = DeviceCopies(driver(device()))
    for round_ in range(3):
        state["large"].add_(1)
        copies.copy(image, targets, list(state.values()))
        for name, target in zip(state, targets, strict=True):
            assert same(target, state[name]), (round_, name)
    image.close()


def test_memory_is_pinned_by_the_driver_and_released(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Path("/dev/shm") / f"holdfast-test-{tmp_path.parent.name}-{tmp_path.name}"
    state = tensors()
    try:
        image, targets = image_for(state, path)
        copies = DeviceCopies(CudaDriver(device()))
        with caplog.at_level(logging.WARNING):
            copies.adopt(image)
        assert not caplog.records, "the driver refused to pin memory"
        assert targets[0].is_pinned()
        address = targets[0].data_ptr()
        image.close()
        del image, targets
        other, others = image_for(state, tmp_path / "b")
        copies.copy(other, others, list(state.values()))
        assert all(same(target, tensor) for target, tensor in zip(others, state.values(), strict=True)), address
        other.close()
    finally:
        path.unlink(missing_ok=True)


def test_a_save_right_after_a_step_has_the_values_of_that_step(tmp_path: Path) -> None:
    """The step's kernels are still queued when the save begins, on the default stream and on one of the script's own."""
    path = tmp_path / "images"
    path.mkdir()
    weights = torch.zeros(8_000_000, device=device())
    average = torch.zeros(8_000_000, device=device())
    saving = checkpointer(path)
    own = torch.cuda.Stream(device())  # type: ignore[no-untyped-call]
    for step in range(1, 6):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        weights.fill_(step)
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            average.copy_(weights).mul_(2)
        torch.cuda.current_stream().wait_stream(own)
        assert saving.save({"weights": weights, "average": average}, step, wait_s=5.0)
        weights.fill_(-1.0)  # the next step has begun
        found = {"weights": torch.empty_like(weights), "average": torch.empty_like(average)}
        assert checkpointer(path).restore(found, newest(path)).step == step
        assert bool((found["weights"] == step).all())
        assert bool((found["average"] == 2 * step).all())


def test_a_restored_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """Generators of the device, fused Adam with its step on the device, a gradient scaler."""

    def job(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.Linear(256, 1)).to(device())
        optimizer = torch.optim.Adam(model.parameters(), fused=True, amsgrad=True)
        return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cuda"), "seen": 0}

    def train(state: dict[str, Any], steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            with torch.autocast("cuda", torch.float16):
                loss = state["model"](torch.randn(32, 64, device=device())).square().mean()
            state["optimizer"].zero_grad()
            state["scaler"].scale(loss).backward()
            state["scaler"].step(state["optimizer"])
            state["scaler"].update()
            state["seen"] += 32
            losses.append(loss.item())
        return losses

    state = job(1)
    train(state, 3)
    assert checkpointer(tmp_path).save(state, 3)
    expected = train(state, 20)
    other = job(2)
    train(other, 1)
    assert checkpointer(tmp_path).restore(other, newest(tmp_path)).step == 3
    assert train(other, 20) == expected
    for (name, one), two in zip(state["model"].state_dict().items(), other["model"].state_dict().values(), strict=True):
        assert same(one, two), name


def test_images_are_exchanged_while_the_device_trains(tmp_path: Path) -> None:
    """Two images in turn, each pinned once; a third shape makes new ones and releases the old."""
    saving = checkpointer(tmp_path)
    for size in (1_000_000, 3_000_000):
        weights = torch.arange(size, dtype=torch.float32, device=device())
        for step in range(1, 5):
            weights.add_(1)
            assert saving.save({"weights": weights}, size + step, wait_s=5.0)
        found = {"weights": torch.empty_like(weights)}
        checkpointer(tmp_path).restore(found, newest(tmp_path))
        assert same(found["weights"], weights)
    assert isinstance(saving._images, ImageSet)
