"""A save that is being committed: its checksums are computed while it is being copied to the disk.

Both read the same locked bytes in parallel, so the durable copy takes as long as the slower of the two, not as long as both.
Neither copy is listed before the checksums have been computed.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.shards import Header, Manifest, Reader


@dataclass(frozen=True, slots=True)
class Seen:
    """An image whose header, read without a lock, describes a complete save. `owners`: as of `open_stored`."""

    path: Path
    header: Header
    owners: frozenset[int] | None = None

    def open(self) -> Reader:
        """Open and lock the image. Raises Conflict if it contains another save by now, which is normal if saves are frequent,
        and IntegrityError if it is damaged."""
        try:
            reader = Reader(self.path, owners=self.owners)
        except FileNotFoundError as error:
            raise Conflict(f"{self.path} has been deleted") from error
        if reader.header != self.header:
            reader.close()
            raise Conflict(f"{self.path} contains a newer save")
        return reader


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A save whose checksums are being computed. `promised` receives the manifest or the error."""

    seen: Seen
    promised: Future[Manifest] = field(default_factory=Future)

    def manifest_of(self, reader: Reader) -> Manifest:
        """Wait for the checksums. Raises Conflict if they are not those of the save that `reader` has open, and the error of a
        failed computation."""
        manifest = self.promised.result()
        if not manifest.describes(reader.header) or not reader.still_whole():
            raise Conflict(f"{self.seen.path} was overwritten in spite of its lock")
        return manifest

    def fail(self, error: HoldfastError) -> None:
        """End the wait with an error, unless there is a result already."""
        if not self.promised.done():
            self.promised.set_exception(error)
