"""Runs the detectors of other packages (`holdfast.plugins`) behind a guard. If a detector raises an exception, it starts again
with a new state. If it raises too often, it is left out. Holdfast's own detectors are not affected.

The guard checks only the types of the findings that a plug-in returns. It adds the plug-in's name to the evidence of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import structlog

from holdfast import plugins
from holdfast.diagnostics.detectors.protocol import Detector, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.errors import PluginError
from holdfast.domain.findings import Finding
from holdfast.domain.rules import PLUGIN
from holdfast.plugins import Group, Plugin

FAILURES_MAX = 8  # after this many exceptions the detector is left out until the process restarts

log = structlog.get_logger("holdfast.diagnostics.plugins")


@dataclass(slots=True)
class _Memory:
    state: Any
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Plugged:
    """A detector of another package."""

    name: str
    inner: Detector[Any]
    reads: tuple[type[Observed], ...]

    def initial(self) -> _Memory:
        return _Memory(self.inner.initial())

    def observe(
        self, state: _Memory, item: Observed, now: float, roster: Roster
    ) -> tuple[_Memory, tuple[Finding, ...]]:
        if state.failures >= FAILURES_MAX:
            return state, ()
        try:
            state.state, found = self.inner.observe(state.state, item, now, roster)
            if wrong := [finding for finding in found if not isinstance(finding, Finding)]:
                raise TypeError(f"observe() returned {wrong[0]!r:.200} among its findings")
            return state, tuple(replace(finding, evidence={**finding.evidence, PLUGIN: self.name}) for finding in found)
        except Exception as error:  # code of another package: none of its exceptions may end diagnostics
            state.failures += 1
            log.error(
                "detector of a plug-in failed; the detector starts again with a new state"
                if state.failures < FAILURES_MAX
                else "detector of a plug-in failed too often; the detector is left out until diagnostics restarts",
                plugin=self.name,
                failures=state.failures,
                item=type(item).__name__,
                exc_info=error,
            )
            state.state = self.inner.initial()
            return state, ()


def plugged() -> Iterator[Plugged]:
    """Return all installed detectors of other packages. A detector that cannot be built is logged and left out."""
    for plugin, detector in plugins.build_all(Group.DETECTORS, left_out=_left_out):
        try:
            guarded = Plugged(plugin.name, detector, tuple(detector.reads))
            guarded.initial()
        except Exception as error:  # code of another package
            _left_out(plugin, PluginError(plugin.group, str(plugin), f"{type(error).__name__}: {error}"))
            continue
        log.info("detector of a plug-in loaded", plugin=str(plugin), reads=[kind.__name__ for kind in guarded.reads])
        yield guarded


def _left_out(plugin: Plugin, error: PluginError) -> None:
    log.error("plug-in left out", plugin=str(plugin), reason=str(error), exc_info=error)
