"""The two memory images of one worker. One contains the newest complete save while the other is being written.

The newest complete save is never overwritten: a save that finds no other free image is *skipped* with the reason, and
training continues. The same applies to the save that training was restored from, until this worker has made a newer one.

Images are in memory (`directory` on a tmpfs). If memory is full and a `fallback` directory on disk is given, an image is
created there instead: its saves then cost as much as writing to the disk's page cache."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IncompatibleVersion, IntegrityError, OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards.image import Image
from holdfast.shards.layout import Stamp
from holdfast.shards.manifest import Manifest
from holdfast.shards.opening import make_way
from holdfast.shards.slots import Layout, Plan, aligned, lay_out

log = logging.getLogger("holdfast.shards")

IMAGE_NAMES = ("a.image", "b.image")
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Staged:
    """A save that is complete in memory. `path` is sent in the `saved` message."""

    path: Path
    key: ShardKey
    nbytes: int
    sequence: int
    waited_s: float = 0.0  # for an image that was in use


@dataclass(frozen=True, slots=True)
class Skipped:
    """A save that did not happen, and why; nothing was lost by it."""

    reason: str
    in_use: bool = False  # an image is being copied or restored from: it will be free


class ImageSet:
    """The images below `directory`, or, where that has no room, `fallback` (created when needed). One owner at a time:
    the worker.

    `restored` is the (attempt, step) that this worker started from, None = from scratch. Saves of an older attempt beyond
    it belong to an abandoned lineage and are overwritten first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        restored: CheckpointId | None = None,
        producer: str = "",
        fallback: Path | None = None,
    ) -> None:
        self._directories = [directory] if fallback is None else [directory, fallback]
        directory.mkdir(parents=True, exist_ok=True)
        self._restored = restored
        self._producer = producer
        self._images: dict[str, Image | None] = {name: self._reopen(name) for name in IMAGE_NAMES}
        self._laid_out: tuple[Plan, Layout] | None = None  # the latest: it is the same from save to save
        self._attempt = 0  # of the latest save
        self._reserve = 0  # grows with the largest extra seen

    def stage(
        self,
        plan: Plan,
        attempt: int,
        step: int,
        rank: int,
        mesh: Mesh | Mapping[str, int],
        fill: Callable[[Image], None],
        extra: bytes,
        *,
        wait_s: float = 0.0,
    ) -> Staged | Skipped:
        """Save once: `fill` copies every tensor into `image.view(fqn)`. While both images are in use, wait for one for at most
        `wait_s`.

        An exception of `fill` comes out as it is; the image it was writing then holds nothing, the other is untouched.
        """
        mesh = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh)
        self._attempt = max(self._attempt, attempt)
        layout = self._lay_out(replace(plan, extra_reserve=self._reserve_for(plan, extra)))
        began, waited_s = time.monotonic(), 0.0
        while isinstance(image := self._take(layout), Skipped):
            if not image.in_use or waited_s >= wait_s:
                return image
            time.sleep(POLL_S)
            waited_s = time.monotonic() - began
        stamp = Stamp(ShardKey(attempt, step, rank), mesh, self._restored, time.time(), self._producer)
        try:
            image.begin(stamp)
            fill(image)
            image.write_extra(extra)
            header = image.complete()
        except BaseException:
            image.abandon()
            raise
        return Staged(image.path, stamp.key, header.size, header.sequence, waited_s)

    def prepare(self, plan: Plan) -> str:
        """Allocate the images of the first two saves. Returns "" if both are ready, else the reason.

        Worth a call before the first step: allocating takes about ten times as long as copying.
        """
        layout = self._lay_out(replace(plan, extra_reserve=self._reserve_for(plan, b"")))
        newest = self._newest()
        for name, image in list(self._images.items()):
            if name == newest or (image is not None and image.fits(layout)):
                continue
            if image is not None and not image.try_lock():
                return f"{name} is still being copied or restored from"
            try:
                self._replace(name, layout).unlock()
            except OutOfSpace as error:
                return str(error)
        return ""

    @property
    def images(self) -> tuple[Image, ...]:
        """Those that exist now."""
        return tuple(image for image in self._images.values() if image is not None)

    def close(self) -> None:
        for image in self._images.values():
            if image is not None:
                image.close()
        self._images = dict.fromkeys(self._images)

    # ------------------------------------------------------------ choosing

    def _take(self, layout: Layout) -> Image | Skipped:
        """A locked image for this layout that does not hold the newest complete save."""
        self._drop_displaced()
        newest = self._newest()
        reasons: list[str] = []
        in_use = False
        for name in sorted(self._images, key=self._age):
            if name == newest:
                reasons.append(f"{name} holds the newest complete save")
                continue
            image = self._images[name]
            if image is not None and not image.try_lock():
                reasons.append(f"{name} is still being copied or restored from")
                in_use = True
                continue
            if image is not None and image.fits(layout):
                return image
            try:
                return self._replace(name, layout)
            except OutOfSpace as error:
                reasons.append(str(error))
        return Skipped("no image is free: " + "; ".join(reasons), in_use)

    def _replace(self, name: str, layout: Layout) -> Image:
        """A new, locked image. The old file goes first: memory may not hold three. Raises OutOfSpace."""
        old, self._images[name] = self._images[name], None
        if old is not None:
            old.close()
        for directory in self._directories:
            make_way(directory / name)
        image = self._create(name, layout)
        self._images[name] = image
        return image

    def _create(self, name: str, layout: Layout) -> Image:
        plan = Plan(layout.tensors, layout.extra_reserve)
        first, *others = self._directories
        try:
            return _born(first / name, plan)
        except OutOfSpace as error:
            if not others:
                raise
            log.warning("%s; this worker's %s goes to %s instead, and saves into it are slower", error, name, others[0])
        try:
            others[0].mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutOfSpace(f"{others[0]} cannot be used instead: {error.strerror or error}") from error
        return _born(others[0] / name, plan)

    def _newest(self) -> str | None:
        held = [name for name in self._images if self._age(name)[0] > 0]
        return max(held, key=self._age, default=None)

    def _age(self, name: str) -> tuple[int, int, int]:
        """Sort key, best victims first: no complete content, then an abandoned lineage, then by attempt and step."""
        image = self._images[name]
        header = image.header if image is not None else None
        if header is None:
            return (0, 0, 0)
        key = header.stamp.key
        return (1 if self._given_up(header.stamp) else 2, key.attempt, key.step)

    def _given_up(self, stamp: Stamp) -> bool:
        """Saved beyond the step that training went back to, by an attempt that is over."""
        if stamp.key.attempt >= self._attempt:
            return False
        return self._restored is None or (stamp.key.attempt, stamp.key.step) > self._restored

    def _drop_displaced(self) -> None:
        """Drop images whose file was renamed or deleted, because a save into them would be lost."""
        for name, image in self._images.items():
            if image is not None and not image.in_place:
                image.close()
                self._images[name] = None

    def _reopen(self, name: str) -> Image | None:
        """The image that an earlier process left, if it is of any use; a torn or foreign one is replaced in its turn."""
        for directory in self._directories:
            try:
                return Image.open(directory / name)
            except (FileNotFoundError, PermissionError, IntegrityError, IncompatibleVersion):
                continue
        return None

    def _lay_out(self, plan: Plan) -> Layout:
        if self._laid_out is None or self._laid_out[0] != plan:
            self._laid_out = (plan, lay_out(plan))
        return self._laid_out[1]

    def _reserve_for(self, plan: Plan, extra: bytes) -> int:
        """Room for twice the extra that does not fit, so that slow growth does not mean a new image at each save."""
        self._reserve = max(self._reserve, plan.extra_reserve)
        if len(extra) > aligned(self._reserve, 4096):
            self._reserve = 2 * len(extra)
        return self._reserve


def _born(path: Path, plan: Plan) -> Image:
    unborn = path.with_name(f".{path.name}.new")
    make_way(unborn)
    image = Image.create(unborn, plan)
    try:
        Manifest.reserve(path.with_name(f"{path.name}.json"), len(image.buffer))
    except OSError as error:
        image.close()
        unborn.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(f"no room for the manifest of {path}: what fills {path.parent} has to go") from error
    image.try_lock()  # before anybody can know its name
    unborn.rename(path)
    image.path = path
    return image
