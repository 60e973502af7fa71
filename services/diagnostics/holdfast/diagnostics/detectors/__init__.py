"""Registry of the detectors, in the order in which they read an item. A new one is a file here and a line in `standard`."""

from __future__ import annotations

from typing import Any

from holdfast.diagnostics.catalogue.xid import Catalogue
from holdfast.diagnostics.detectors.checkpoints import Checkpoints
from holdfast.diagnostics.detectors.degradation import Degradation
from holdfast.diagnostics.detectors.gpu_error import GpuError
from holdfast.diagnostics.detectors.gpu_health import GpuHealth
from holdfast.diagnostics.detectors.gradient_outlier import GradientOutlier
from holdfast.diagnostics.detectors.hang import Hang
from holdfast.diagnostics.detectors.host_pressure import HostPressure
from holdfast.diagnostics.detectors.kernel_fault import KernelFault
from holdfast.diagnostics.detectors.liveness import Liveness
from holdfast.diagnostics.detectors.maintenance import Maintenance
from holdfast.diagnostics.detectors.nic_port import NicPort
from holdfast.diagnostics.detectors.no_progress import NoProgress
from holdfast.diagnostics.detectors.numerical import Numerical
from holdfast.diagnostics.detectors.preflight import Preflight
from holdfast.diagnostics.detectors.protocol import Detector, Observed, TelemetryGap
from holdfast.diagnostics.detectors.second_opinion import SecondOpinion
from holdfast.diagnostics.detectors.silent_corruption import SilentCorruption
from holdfast.diagnostics.detectors.stragglers import Stragglers
from holdfast.diagnostics.detectors.worker_exit import WorkerExit

__all__ = ["Detector", "Observed", "TelemetryGap", "standard"]


def standard(catalogue: Catalogue, *, liveness: Liveness | None = None) -> tuple[Detector[Any], ...]:
    """Return all detectors of production. A detector whose finding explains the signals of another detector comes first: lost
    nodes before exits before hangs."""
    return (
        liveness or Liveness(),
        GpuError(catalogue),
        GpuHealth(),
        KernelFault(),
        NicPort(),
        SecondOpinion(),
        Maintenance(),
        WorkerExit(),
        Hang(),
        NoProgress(),
        HostPressure(),
        Stragglers(),
        Numerical(),
        GradientOutlier(),
        SilentCorruption(),
        Preflight(),
        Degradation(),
        Checkpoints(),
    )
