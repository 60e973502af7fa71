"""What protection against changed bytes costs: transfers between replicators without digests, with them, and with TLS as well.

* replicate: as in `network`, the third copy of a save, until it is listed in the peer's memory; and until it is on the peer's
  disk. With TLS, digests are compared in the second part (docs/adr/0075-digests-of-copies-in-memory.md).
* restore from a peer: as in `network`, for a node without preallocated memory.

* replicate, default limits: the same copy with the rate limits that a replicator has by default.

All are measured in one round, one after the other, with the same state, and without rate limits except in the last row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.checkpoint.network import COPIES, Copied, copy_to_peer, restore_from_peer
from benchmarks.checkpoint.protocol import Request
from benchmarks.checkpoint.replicators import Replicator
from benchmarks.checkpoint.results import Measured
from benchmarks.checkpoint.scratch import Scratch
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.identities import Identity, Role

OFF, DIGESTS, TLS = "unprotected", "digests", "digests_tls"
_COPY = "replicate_gb_s"
_COPY_TO_DISK = "replicate_to_disk_gb_s"
_COPY_LIMITED = "replicate_by_default_gb_s"


def measure(request: Request, place: Scratch) -> Measured:
    """Measure one round. Raises TrialFailed."""
    authority = Authority.create(place.sockets / "ca", "bench", 10)
    found: Measured = []
    for name in (OFF, DIGESTS, TLS):
        with pair(place, authority, name, unlimited=True) as (holder, other):
            copied = _copy(request, place, holder, other)
            record = copied.record
            holder.configure((0,))  # without a peer, so that it does not send the shard again
            other.forget()
            other.configure((1,))
            restored_s = restore_from_peer(record, other, holder)
            found += [
                (_COPY, name, record.size / copied.in_memory_s / 1e9),
                (_COPY_TO_DISK, name, record.size / copied.on_disk_s / 1e9),
                ("restore_peer_gb_s", name, record.size / restored_s / 1e9),
            ]
        with pair(place, authority, name, unlimited=False) as (holder, other):
            copied = _copy(request, place, holder, other)
            found.append((_COPY_LIMITED, name, copied.record.size / copied.in_memory_s / 1e9))
    return found


@contextmanager
def pair(
    place: Scratch, authority: Authority, name: str, *, unlimited: bool
) -> Iterator[tuple[Replicator, Replicator]]:
    """Start the holder of a shard and its peer; leave nothing of theirs in memory."""
    with (
        Replicator("a", place, unlimited=unlimited, settings=_settings(name, authority, "a")) as holder,
        Replicator("b", place, unlimited=unlimited, settings=_settings(name, authority, "b")) as other,
    ):
        holder.configure((0,))
        other.configure((1,))
        yield holder, other
        for node in (holder, other):
            node.forget()


def _copy(request: Request, place: Scratch, holder: Replicator, other: Replicator) -> Copied:
    """Save and copy several times; return the last copy."""
    copies = [copy_to_peer(replace(request, mark=step), place, holder, other) for step in range(1, COPIES + 1)]
    return copies[-1]


def _settings(name: str, authority: Authority, node: str) -> Mapping[str, str]:
    settings = {"HOLDFAST_REPLICATOR_DIGESTS": str(name != OFF)}
    if name == TLS:
        pair = authority.issue([Identity("bench", Role.AGENT, node)], ["127.0.0.1"], 1)
        files = {"CERT": pair.certificate, "KEY": pair.key, "CA": authority.certificate}
        for kind, content in files.items():
            path = Path(authority.directory, f"{node}.{kind}")
            path.write_bytes(content)
            settings[f"HOLDFAST_TLS_{kind}"] = str(path)
    return settings
