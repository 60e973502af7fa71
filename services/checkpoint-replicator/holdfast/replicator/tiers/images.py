"""The workers' memory images: `<memory>/<job>/w<local rank>/{a,b}.image`. Written by the trainers, only read here.

If memory has no room, a worker creates them in `<disk>/<job>/overflow/w<local rank>/`. Both are treated in the same
way.

The workers can write anything into these directories, and may run as another user than this process (`owners`). What this
process opens there is then a file of the worker alone, not a link to another one; the directories themselves are the agent's.

The header describes the content of an image. The manifest next to it, written by this module, confirms that the content was
seen complete. If the header has changed since, the manifest is stale and ignored."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound
from holdfast.domain.generations import ShardKey
from holdfast.domain.names import is_job_name
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.names import label
from holdfast.replicator.tiers import Damaged, OpenShard, find, set_aside, survey
from holdfast.replicator.tiers.pending_commit import Seen
from holdfast.shards import Header, Manifest, Reader, peek
from holdfast.shards.crc import summarise
from holdfast.shards.manifest import temporary_of
from holdfast.shards.opening import open_stored, remove

BLOCK = 512  # of st_blocks
IMAGES_MAX = 256  # per job and node; further images are ignored


class ImageTier:
    """The image half of the memory tier."""

    name = "memory"

    def __init__(
        self,
        root: Path,
        node: str,
        checksummer: Checksummer,
        *,
        overflow: Path,
        owners: frozenset[int] | None = None,
    ) -> None:
        """`overflow` is the disk directory of the node. `owners`: whose files are images, if workers run as another user than
        this process; None = their files are those of this user."""
        self._owners = owners
        self._root = root
        self._overflow = overflow
        self._node = node
        self._checksummer = checksummer
        # Image → manifest that could not be written, and the reason.
        self._unwritten: dict[Path, tuple[Manifest, str]] = {}
        # Job → where each key was when the images were last read: the first place to look.
        self._places: dict[str, dict[ShardKey, Path]] = {}

    def jobs(self) -> list[str]:
        names = {path.parent.parent.name for path in find(self._root, "*/w*/[!.]*.image")}
        names |= {path.parents[2].name for path in find(self._overflow, "*/overflow/w*/[!.]*.image")}
        return sorted(filter(is_job_name, names))

    def scan(self, job: str) -> list[Seen]:
        """Return the present images, reading one page of each. Damaged images are neither listed nor changed."""
        seen: list[Seen] = []
        for path in self.paths(job):
            with suppress(OSError, HoldfastError):
                if (header := self._peek(path)) is not None:
                    seen.append(Seen(path, header, self._owners))
        self._places[job] = {each.header.stamp.key: each.path for each in seen}
        return seen

    def look(self, job: str) -> tuple[list[Seen], list[Damaged]]:
        """Return the present images and the damaged ones, which are renamed if possible, so that their workers can save
        again."""
        seen: list[Seen] = []
        paths, damaged = self._survey(job)
        for path in paths:
            try:
                if (header := self._peek(path)) is not None:
                    seen.append(Seen(path, header, self._owners))
            except FileNotFoundError:
                continue  # replaced since the listing
            except IntegrityError:
                damaged += _set_aside(path, self._peek, self._owners)
            except (HoldfastError, OSError) as error:
                damaged.append(Damaged(path, str(error), aside=False))
        self._places[job] = {each.header.stamp.key: each.path for each in seen}
        return seen, damaged

    def commit(self, job: str, seen: Seen) -> Manifest:
        """Checksum an image and write its manifest, which commits the shard.

        If an earlier process has written a manifest for the same save, the bytes are verified against it. If there is no room
        for the manifest, it is kept in this process (see `unwritten`). Raises Conflict if the image is being
        overwritten, and IntegrityError if it is damaged.
        """
        with seen.open() as reader:
            known = self._manifest(job, seen.path, reader.header)
            if known is not None:
                self._checksummer.verify(known, reader.data, reader.prefault)
                return known
            sums = self._checksummer.sums(reader.data, reader.header.tensors_end, reader.prefault)
            digest, crc = summarise(sums.spans, sums.crc32c, reader.header.tensors_end)
            if not reader.still_whole():
                raise Conflict(f"{seen.path} was overwritten in spite of its lock")
            manifest = Manifest.of(
                reader.header,
                job=job,
                node=self._node,
                digest=digest,
                crc32c=crc,
                spans=sums.crc32c,
                blake3=sums.blake3,
            )
            self._write(seen.path, manifest)
            return manifest

    @property
    def lacks_manifests(self) -> bool:
        """Whether `unwritten` has anything to do."""
        return bool(self._unwritten)

    def unwritten(self, job: str) -> dict[Path, str]:
        """Retry to write manifests, and return the images whose manifest still cannot be written, with the reason. Their
        shards are committed only for this process; the next process computes the checksums again."""
        for path in self.paths(job) if self._unwritten else ():
            if (pending := self._unwritten.get(path)) is not None:
                self._write(path, pending[0])
        return {path: reason for path, (manifest, reason) in list(self._unwritten.items()) if manifest.job == job}

    def _write(self, image: Path, manifest: Manifest) -> None:
        place = _manifest_path(image)
        try:
            # An existing manifest is of an overwritten save; reuse its space.
            if not temporary_of(place).exists() and place.is_file():
                place.rename(temporary_of(place))
            manifest.write(place)
        except OSError as error:
            self._unwritten[image] = (manifest, str(error))
        else:
            self._unwritten.pop(image, None)

    def shards(self, job: str) -> list[Manifest]:
        found = (self._manifest(job, seen.path, seen.header) for seen in self.scan(job))
        return [manifest for manifest in found if manifest is not None]

    def open(self, job: str, key: ShardKey) -> OpenShard:
        path = self._path(job, key)
        reader = Reader(path, owners=self._owners)
        manifest = self._manifest(job, path, reader.header)
        if reader.key != key or manifest is None:
            reader.close()
            raise NotFound(f"{label(key)} is not in memory, or not committed yet")
        return OpenShard(manifest, reader)

    def quarantine(self, job: str, key: ShardKey) -> None:
        try:
            path = self._path(job, key)
        except NotFound:
            return
        set_aside(path, _manifest_path(path))

    def delete(self, job: str, key: ShardKey) -> None:
        """Delete the image and its manifest. The memory is freed when the worker no longer has the image open."""
        try:
            path = self._path(job, key)
        except NotFound:
            return
        _manifest_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def forget(self, job: str) -> None:
        for directory in (*find(self._root, f"{job}/w*"), *find(self._overflow, f"{job}/overflow")):
            # Rename first, because workers of a new run may create their directories during the deletion.
            directory.rename(directory.with_name(f".{directory.name}.gone"))
        for directory in (*find(self._root, f"{job}/.w*.gone"), *find(self._overflow, f"{job}/.overflow.gone")):
            remove(directory)
        self._unwritten = {path: kept for path, kept in self._unwritten.items() if kept[0].job != job}
        self._places.pop(job, None)

    def paths(self, job: str) -> list[Path]:
        """Return the paths of all images."""
        return self._survey(job)[0]

    def _survey(self, job: str) -> tuple[list[Path], list[Damaged]]:
        in_memory, unsearched = survey(self._root, f"{job}/w*/[!.]*.image")
        on_disk, others = survey(self._overflow, f"{job}/overflow/w*/[!.]*.image")
        return (in_memory + on_disk)[:IMAGES_MAX], unsearched + others

    def _peek(self, path: Path) -> Header | None:
        """As `peek`. Also raises IntegrityError for an image whose memory is not allocated, because reading the image would
        allocate it, and a damaged header can describe more memory than the machine has."""
        header = peek(path, owners=self._owners)
        if header is None or path.is_relative_to(self._overflow):
            return header
        if (allocated := path.stat().st_blocks * BLOCK) < header.size:
            raise IntegrityError(f"{path} has {allocated} bytes, but its header describes {header.size}")
        return header

    def _path(self, job: str, key: ShardKey) -> Path:
        if (place := self._places.get(job, {}).get(key)) is not None:
            with suppress(OSError, HoldfastError):
                if (header := self._peek(place)) is not None and header.stamp.key == key:
                    return place
        for seen in self.scan(job):
            if seen.header.stamp.key == key:
                return seen.path
        raise NotFound(f"{label(key)} is not in memory")

    def _manifest(self, job: str, path: Path, header: Header) -> Manifest | None:
        """Return the manifest of this save, if there is one."""
        known: list[Manifest] = []
        with suppress(OSError, HoldfastError):
            known.append(Manifest.read(_manifest_path(path), owners=self._owners))
        if (pending := self._unwritten.get(path)) is not None:
            known.append(pending[0])
        return next((each for each in known if each.job == job and each.describes(header)), None)


def _set_aside(path: Path, look: Callable[[Path], Header | None], owners: frozenset[int] | None) -> list[Damaged]:
    """Rename a damaged image, unless a process uses it now."""
    try:
        with _for_ourselves(path, owners):
            try:
                look(path)
            except IntegrityError as error:
                return [_moved(path, str(error))]
    except IntegrityError as error:  # not a regular file
        return [_moved(path, str(error))]
    except (BlockingIOError, FileNotFoundError):
        return []  # the image is being written, read or replaced
    except (HoldfastError, OSError) as error:
        return [Damaged(path, str(error), aside=False)]
    return []


def _moved(path: Path, reason: str) -> Damaged:
    try:
        set_aside(path, _manifest_path(path))
    except OSError as error:
        return Damaged(path, f"{reason}; the file cannot be renamed: {error}", aside=False)
    return Damaged(path, reason, aside=True)


@contextmanager
def _for_ourselves(path: Path, owners: frozenset[int] | None) -> Iterator[None]:
    """Lock the file exclusively. Raises BlockingIOError if it is locked, and as `open_stored` does."""
    fd = open_stored(path, owners=owners)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _manifest_path(image: Path) -> Path:
    return image.with_name(f"{image.name}.json")
