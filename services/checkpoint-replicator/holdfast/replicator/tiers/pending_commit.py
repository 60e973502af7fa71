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
    """An image that holds something whole, as its header says without any lock."""

    path: Path
    header: Header

    def open(self) -> Reader:
        """The image, locked. Raises Conflict when it holds something else by now, which is everyday life when saves come fast;
        IntegrityError when it is damaged."""
        try:
            reader = Reader(self.path)
        except FileNotFoundError as error:
            raise Conflict(f"{self.path} has been taken away") from error
        if reader.header != self.header:
            reader.close()
            raise Conflict(f"{self.path} has been saved into again")
        return reader


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """`promised` is kept by whoever computes the checksums: a manifest, or the reason why there is none."""

    seen: Seen
    promised: Future[Manifest] = field(default_factory=Future)

    def manifest_of(self, reader: Reader) -> Manifest:
        """Waits for the checksums. Raises Conflict when they are not of what `reader` has open, and why there are none."""
        manifest = self.promised.result()
        if not manifest.describes(reader.header) or not reader.still_whole():
            raise Conflict(f"{self.seen.path} was overwritten in spite of its lock")
        return manifest

    def fail(self, error: HoldfastError) -> None:
        """Nobody has to wait any more; nothing happens when the promise has been kept."""
        if not self.promised.done():
            self.promised.set_exception(error)
