"""Copies a state from a GPU into a memory image.

A copy from a device reaches the speed of the bus only with memory that the driver has pinned. So an image is registered with
the driver when it is created (`cudaHostRegister`, in the background), and copies go directly into it. If the driver refuses
(an image on a disk, a limit on locked memory), copies use two pinned buffers: one is filled while the other is emptied.

`copy` returns when every byte is in the image. It could return as soon as the copies are queued, and make the next optimizer
step wait for them. But not every change of a state is an optimizer step: buffers change in a forward pass, a script may
compute averages, or use its own streams. A save with values of a later step is worse than a stall of one copy."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from holdfast.shards import Image
from holdfast.train.saves.copying import copy_all

log = logging.getLogger("holdfast.train")

BUFFER_BYTES = 32 << 20
BUFFERS = 2
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]  # target, source


class Driver(Protocol):
    """The calls of the CUDA runtime that are used."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin memory. Returns "" or the reason of the failure."""

    def unregister(self, address: int) -> None: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return a pinned buffer of bytes."""

    def mark(self) -> Callable[[], None]:
        """Record the present end of the queue. The returned function waits until all earlier work is done."""

    def finish(self) -> None:
        """Wait for the device."""


class CudaDriver:
    """torch's binding of the runtime. Memory is registered by a separate thread: CUDA stores the error of a failed call for
    the calling thread, so on the training thread the next kernel launch would report the error."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = self._on_thread(lambda: cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        return str(cudart.cudaGetErrorString(failed)) if int(failed) else ""

    def unregister(self, address: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._on_thread(lambda: cudart.cudaHostUnregister(address))

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def _on_thread(self, call: Callable[[], T]) -> T:
        answers: list[T] = []

        def run() -> None:
            with torch.cuda.device(self._device):  # otherwise a context on the first GPU would be created
                answers.append(call())

        thread = threading.Thread(target=run, name="holdfast-pin")
        thread.start()
        thread.join()
        return answers[0]


class DeviceCopies:
    """Copies from one worker's device into its images."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pinned: weakref.WeakKeyDictionary[Image, bool] = weakref.WeakKeyDictionary()
        self._buffers: list[torch.Tensor] = []

    def adopt(self, image: Image) -> None:
        """Pin an image, once. This takes at least 0.1 s per gigabyte, so it should not run on the training thread."""
        if image in self._pinned:
            return
        address, nbytes = torch.frombuffer(image.buffer, dtype=torch.uint8).data_ptr(), len(image.buffer)
        why_not = self._driver.register(address, nbytes)
        self._pinned[image] = not why_not
        if why_not:
            log.warning("cannot pin %s (%s): saves into it use a buffer", image.path, why_not)
            return
        # Unpin before the unmapping, because other memory may be mapped at this address later. An image keeps its mapping
        # until its finalizer has run. Not at exit, because forked children run exit handlers as well.
        weakref.finalize(image, self._driver.unregister, address).atexit = False

    def copy(self, image: Image, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source, on the device or on the host, to its target in `image`. Returns when all bytes are in the
        image."""
        self.adopt(image)
        pairs = list(zip(targets, sources, strict=True))
        from_device = [(target, source) for target, source in pairs if source.device.type != "cpu"]
        from_host = [(target, source) for target, source in pairs if source.device.type == "cpu"]
        if self._pinned[image]:
            _copy(from_device)  # these are only queued; the copies on the host run at the same time
            _copy(from_host)
        else:
            _copy(from_host)
            for target, source in from_device:
                self._through(target, source)
        self._driver.finish()

    def _through(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one tensor through the pinned buffers."""
        if not source.is_contiguous():
            target.copy_(source)
            return
        self._buffers = self._buffers or [self._driver.pinned(BUFFER_BYTES) for _ in range(BUFFERS)]
        free = list(self._buffers)
        coming: deque[tuple[Callable[[], None], torch.Tensor, torch.Tensor]] = deque()
        with torch.no_grad():
            into = torch.split(target.reshape(-1).view(torch.uint8), BUFFER_BYTES)
            for piece, part in zip(into, torch.split(_bytes(source), BUFFER_BYTES), strict=True):
                if not free:
                    free.append(_arrived(*coming.popleft()))
                buffer = free.pop()
                buffer[: len(part)].copy_(part, non_blocking=True)
                coming.append((self._driver.mark(), buffer, piece))
            while coming:
                _arrived(*coming.popleft())


def _copy(pairs: Sequence[Pair]) -> None:
    """Copy with one thread, because another thread would not use the stream of the last step's kernels."""
    copy_all([target for target, _ in pairs], [source for _, source in pairs], 1)


def _arrived(done: Callable[[], None], buffer: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Wait until a buffer is filled, and copy it to `piece` of the image, which frees the buffer."""
    done()
    piece.copy_(buffer[: len(piece)])
    return buffer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
