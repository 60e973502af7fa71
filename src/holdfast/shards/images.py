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
    waited_s: float = 0.0  # time that the save waited for an image in use


@dataclass(frozen=True, slots=True)
class Skipped:
    """A save that was skipped, with the reason. Earlier saves are intact."""

    reason: str
    in_use: bool = False  # an image is being copied or restored from, and will be free later


class ImageSet:
    """The images below `directory` or, if that has no room, below `fallback` (created when needed). Only one worker uses
    them.

    `restored` is the (attempt, step) from which this worker started, None = from scratch. Saves of an older attempt beyond
    this step belong to an abandoned lineage and are overwritten first.
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
        self._laid_out: tuple[Plan, Layout] | None = None  # of the latest save; it seldom changes
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
        """Save once: `fill` copies every tensor into `image.view(fqn)`. If both images are in use, wait for at most `wait_s`
        seconds.

        An exception of `fill` is raised unchanged. The image that it was filling then has no content; the other is unchanged.
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
        """Allocate the images of the first two saves. Returns "" if both are ready, otherwise the reason.

        Call it before the first step, because an allocation takes about ten times as long as a copy.
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
        """The images that exist now."""
        return tuple(image for image in self._images.values() if image is not None)

    def close(self) -> None:
        """Close both images. Their files, and the saves in them, remain."""
        for image in self._images.values():
            if image is not None:
                image.close()
        self._images = dict.fromkeys(self._images)

    # ------------------------------------------------------------ choosing

    def _take(self, layout: Layout) -> Image | Skipped:
        """Return a locked image for this layout that does not contain the newest complete save."""
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
        """Create a new, locked image. The old file is deleted first, because memory may not have room for three images. Raises
        OutOfSpace."""
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
            return _create_locked(first / name, plan)
        except OutOfSpace as error:
            if not others:
                raise
            log.warning("%s; this worker's %s goes to %s instead, and saves into it are slower", error, name, others[0])
        try:
            others[0].mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutOfSpace(f"{others[0]} cannot be used instead: {error.strerror or error}") from error
        return _create_locked(others[0] / name, plan)

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
        return (1 if self._is_abandoned(header.stamp) else 2, key.attempt, key.step)

    def _is_abandoned(self, stamp: Stamp) -> bool:
        """Whether an earlier attempt saved it, beyond the step from which training was restored."""
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
        """Return the image that an earlier process has left, if it can be used. An incomplete or foreign image is replaced by a
        later save."""
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
        """Return the reserve, which is set to twice the size of an extra that does not fit, so that slow growth does not
        require a new image at each save."""
        self._reserve = max(self._reserve, plan.extra_reserve)
        if len(extra) > aligned(self._reserve, 4096):
            self._reserve = 2 * len(extra)
        return self._reserve


def _create_locked(path: Path, plan: Plan) -> Image:
    temporary = path.with_name(f".{path.name}.new")
    make_way(temporary)
    image = Image.create(temporary, plan)
    try:
        Manifest.reserve(path.with_name(f"{path.name}.json"), len(image.buffer))
    except OSError as error:
        image.close()
        temporary.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(f"no room for the manifest of {path}: delete other files in {path.parent}") from error
    image.try_lock()  # before another process can find the image by its name
    temporary.rename(path)
    image.path = path
    return image
