"""Load, memory and the disks that matter, every five seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from holdfast.agent.collectors.protocol import Probe, Surroundings
from holdfast.domain.signals import HostSample

INTERVAL_S = 5.0
DEADLINE_S = 5.0


def build(surroundings: Surroundings) -> Probe:
    disks = tuple(dict.fromkeys((surroundings.agent_dir, surroundings.disk_dir, surroundings.memory_dir)))
    return Probe(
        "host",
        surroundings.node,
        lambda: (sample(surroundings.node, disks),),
        interval_s=INTERVAL_S,
        deadline_s=DEADLINE_S,
    )


def sample(node: str, disks: tuple[Path, ...]) -> HostSample:
    """Raises OSError naming the path when a file system does not answer."""
    memory = psutil.virtual_memory()
    usages = [(path, psutil.disk_usage(str(path))) for path in disks]
    return HostSample(
        node=node,
        at=time.time(),
        load1=os.getloadavg()[0],
        cpus=os.cpu_count() or 1,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        disks=tuple((str(path), usage.used, usage.total) for path, usage in usages),
    )
