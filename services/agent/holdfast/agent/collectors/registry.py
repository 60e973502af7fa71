"""The collectors of an agent. To add a collector, list the `build` function of a new file in `BUILDERS`, or use a plug-in."""

from __future__ import annotations

from holdfast.agent.collectors import host, infiniband, kernel_log, maintenance, nvml, nvrx
from holdfast.agent.collectors.plugged import plugged
from holdfast.agent.collectors.protocol import Collector, Surroundings

BUILDERS = (
    host.build,
    infiniband.build,
    kernel_log.build,
    maintenance.build_file,
    maintenance.build_url,
    nvml.build,
    nvrx.build,
)


def build_all(surroundings: Surroundings) -> list[Collector]:
    """Return the collectors whose source exists on this node."""
    built: list[Collector | None] = [build(surroundings) for build in BUILDERS]
    return [*(collector for collector in built if collector is not None), *plugged(surroundings)]
