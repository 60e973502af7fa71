"""What protection against changed bytes costs: transfers between replicators without digests, with them, and with TLS as well.

* replicate: as in `network`, the third copy of a save, until it is listed in the peer's memory.
* restore from a peer: as in `network`, for a node without preallocated memory.

All three are measured in one round, one after the other, with the same state and without rate limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.checkpoint.network import COPIES, copy_to_peer, restore_from_peer
from benchmarks.checkpoint.protocol import Request
from benchmarks.checkpoint.replicators import Replicator
from benchmarks.checkpoint.results import Measured
from benchmarks.checkpoint.scratch import Scratch
from holdfast.runtime.authority import Authority
from holdfast.runtime.identities import Identity, Role

OFF, DIGESTS, TLS = "unprotected", "digests", "digests_tls"


def measure(request: Request, place: Scratch) -> Measured:
    """Measure one round. Raises TrialFailed."""
    authority = Authority.create(place.sockets / "ca", "bench", 10)
    found: Measured = []
    for name in (OFF, DIGESTS, TLS):
        with (
            Replicator("a", place, unlimited=True, settings=_settings(name, authority, "a")) as holder,
            Replicator("b", place, unlimited=True, settings=_settings(name, authority, "b")) as other,
        ):
            holder.configure((0,))
            other.configure((1,))
            copies = [copy_to_peer(replace(request, mark=step), place, holder, other) for step in range(1, COPIES + 1)]
            record = copies[-1].record
            holder.configure((0,))  # without a peer, so that it does not send the shard again
            other.forget()
            other.configure((1,))
            restored_s = restore_from_peer(record, other, holder)
            found += [
                ("replicate_gb_s", name, record.size / copies[-1].in_memory_s / 1e9),
                ("restore_peer_gb_s", name, record.size / restored_s / 1e9),
            ]
            for node in (holder, other):
                node.forget()
    return found


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
