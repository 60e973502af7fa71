"""The way from a device into an image, with a driver that only plays and tensors that say they are on a device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.shards import Image, Plan
from holdfast.train.saves import device_copies
from holdfast.train.saves.device_copies import DeviceCopies
from holdfast.train.saves.tensors import over, spec_of


class Source(torch.Tensor):
    """Host memory that says it is on a device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


class PlayedDriver:
    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.registered: dict[int, int] = {}
        self.finished = 0
        self.buffers = 0
        self.queued: list[int] = []  # marks not waited for

    def register(self, address: int, nbytes: int) -> str:
        if not self.refuses:
            assert address not in self.registered
            self.registered[address] = nbytes
        return self.refuses

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> Callable[[], None]:
        number = len(self.queued)
        self.queued.append(number)
        assert len(self.queued) <= device_copies.BUFFERS, "a buffer is filled again before it was emptied"

        def wait() -> None:
            self.queued.remove(self.queued[0])

        return wait

    def finish(self) -> None:
        self.finished += 1


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(1000, 10),
        "half": torch.randn(77).bfloat16(),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(6, 5).t(),
        "flags": torch.tensor([True, False, True]),
    }


def image_for(tensors: dict[str, torch.Tensor], path: Path) -> tuple[Image, list[torch.Tensor]]:
    specs = tuple(spec_of(name, tensor, None) for name, tensor in tensors.items())
    image = Image.create(path, Plan(specs))
    return image, [over(image.view(spec.fqn), spec) for spec in specs]


@pytest.mark.parametrize("refuses", ["", "operation not supported"])
def test_every_byte_arrives_whether_the_image_is_pinned_or_not(
    tmp_path: Path, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", 1024)
    tensors = state()
    image, targets = image_for(tensors, tmp_path / "a")
    driver = PlayedDriver(refuses)
    copies = DeviceCopies(driver)
    on_device = [tensor.as_subclass(Source) for tensor in tensors.values()]
    for sources in (on_device, [*on_device[:2], *list(tensors.values())[2:]]):
        for target in targets:
            target.zero_()
        copies.copy(image, targets, sources)
        assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors.values(), strict=True))
    assert driver.finished == 2
    assert not driver.queued
    assert driver.buffers == (device_copies.BUFFERS if refuses else 0)
    image.close()


def test_an_image_is_pinned_once_as_a_whole_and_given_back_before_its_memory_is(tmp_path: Path) -> None:
    tensors = state()
    image, targets = image_for(tensors, tmp_path / "a")
    driver = PlayedDriver()
    copies = DeviceCopies(driver)
    copies.adopt(image)
    copies.copy(image, targets, list(tensors.values()))
    assert list(driver.registered.values()) == [len(image.buffer)]
    assert all(address % 4096 == 0 for address in driver.registered)
    image.close()
    del image
    gc.collect()
    assert not driver.registered
    assert torch.equal(targets[0], tensors["large"]), "whoever still looks at the memory has it"


def test_a_refusal_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = state()
    image, targets = image_for(tensors, tmp_path / "a")
    copies = DeviceCopies(PlayedDriver("out of memory"))
    for _ in range(3):
        copies.copy(image, targets, list(tensors.values()))
    assert [record.message for record in caplog.records] == [
        f"cannot pin {tmp_path / 'a'} (out of memory): saves into it use a buffer"
    ]
    image.close()
