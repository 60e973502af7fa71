"""Collectors of other packages (`holdfast.plugins`). Their output is checked, so a bug in a collector stops only itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from holdfast import plugins
from holdfast.agent.collectors.protocol import Collector, Emit, Surroundings
from holdfast.domain.errors import PluginError
from holdfast.domain.signals import NodeSignal, Tick
from holdfast.plugins import Group, Plugin
from holdfast.wire.telemetry import encode_tick

log = structlog.get_logger("holdfast.agent.collectors")


@dataclass(slots=True)
class Plugged:
    """One collector of another package, under its plug-in's name."""

    name: str
    node: str
    inner: Collector

    async def run(self, emit: Emit) -> None:
        """As `Collector.run`. The collector's call of `emit` raises TypeError or ValueError for a value that is not a signal
        of this node. The collector is then reported and restarted, as after any failure."""

        def checked(signal: NodeSignal) -> None:
            if not isinstance(signal, NodeSignal):
                raise TypeError(f"emit() takes a signal of holdfast.domain.signals, not {type(signal).__name__}")
            encode_tick(Tick(self.node, "checked", 0, 0.0, (signal,)))
            emit(signal)

        await self.inner.run(checked)


def plugged(surroundings: Surroundings) -> Iterator[Collector]:
    """Return the collectors whose source exists on this node. One that cannot be built is logged and left out."""
    for plugin, built in plugins.build_all(Group.COLLECTORS, surroundings, left_out=_left_out):
        if built is None:
            continue
        if not callable(getattr(built, "run", None)):
            _left_out(plugin, PluginError(plugin.group, str(plugin), f"{built!r:.200} has no run(emit)"))
            continue
        log.info("collector of a plug-in", plugin=str(plugin))
        yield Plugged(plugin.name, surroundings.node, built)


def _left_out(plugin: Plugin, error: PluginError) -> None:
    log.error("plug-in left out", plugin=str(plugin), reason=str(error), exc_info=error)
