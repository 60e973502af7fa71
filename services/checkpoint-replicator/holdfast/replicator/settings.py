"""The replicator's settings, from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from holdfast.runtime.settings import ServiceSettings


class ReplicatorSettings(ServiceSettings):
    """`HOLDFAST_` + the field's name. Rates are bytes per second, 0 = no limit."""

    node: str
    memory_dir: Path  # on a memory file system; the agent puts the workers' images below it
    disk_dir: Path
    replicator_socket: Path  # gRPC
    replicator_notes: Path  # datagrams of the workers
    replicator_listen: str = "127.0.0.1:0"  # data plane
    address: str = ""  # address for peers if `replicator_listen` is a wildcard

    # Workers send a datagram per save. A rescan finds saves with a lost datagram, and incomplete images of killed workers.
    replicator_rescan_interval_s: float = Field(5.0, gt=0)
    replicator_disk_bytes_per_s_max: int = Field(2 << 30, ge=0)
    replicator_peer_bytes_per_s_max: int = Field(1 << 30, ge=0)
    replicator_store_bytes_per_s_max: int = Field(512 << 20, ge=0)
    replicator_scrub_bytes_per_s_max: int = Field(16 << 20, ge=0)
    replicator_scrub_interval_s: float = Field(6 * 3600.0, gt=0)  # for each shard on disk
    replicator_store_scrub_bytes_per_s_max: int = Field(8 << 20, ge=0)
    replicator_store_scrub_interval_s: float = Field(24 * 3600.0, gt=0)  # for all objects in the object store
    replicator_connections_max: int = Field(128, ge=1, le=1024)
    # Connections per shard to or from a peer. At most the number of processors: each uses a thread at both ends, and many
    # threads of low priority slow training as much as one of normal priority.
    replicator_streams_per_shard_max: int = Field(
        default_factory=lambda: min(4, len(os.sched_getaffinity(0))), ge=1, le=16
    )
    # On a spare: preallocated memory for the shards of a hot swap, one per rank that the spare would run.
    replicator_preallocated_shards: int = Field(0, ge=0, le=256)
    replicator_preallocated_shard_bytes: int = Field(1 << 30, ge=1)
    # How long checkpoints of finished jobs are retained, counted while the replicator runs; 0 = unlimited.
    replicator_retention_s: float = Field(7 * 86400.0, ge=0)
    replicator_checksum_threads: int = Field(4, ge=1, le=64)
    # With the three TLS files: whether transfers with replicators that do not speak TLS are refused.
    replicator_tls: Literal["required", "optional"] = "required"
    # Compute cryptographic digests of saves, so that bytes which are changed on their way to another machine are found.
    replicator_digests: bool = True
    replicator_connect_timeout_s: float = Field(3.0, gt=0)
    replicator_io_timeout_s: float = Field(10.0, gt=0)
