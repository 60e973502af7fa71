"""The view of a job that a policy receives: immutable, created when the policy is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.domain.incidents import Incident
from holdfast.domain.job import Param
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Notice


@dataclass(frozen=True, slots=True)
class PendingReset:
    """GPUs of a node that must be reset before the node gets ranks again."""

    gpus: tuple[int, ...]  # empty: the GPU is not known, so all of the node
    obstacle: str = ""  # why the reset is not possible, one clause; empty if it is

    def __str__(self) -> str:
        return f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else "a GPU"


@dataclass(frozen=True, slots=True)
class JobView:
    """The job at `at` (Unix seconds). A policy reads the time here; it has no clock of its own."""

    at: float
    name: str
    mesh: Mesh  # of the newest generation
    target_dp: int  # desired replicas: from the job file, or from an operator's resize
    min_dp: int
    max_dp: int
    generation: int
    nodes: tuple[str, ...]  # of the newest generation, by slot
    unusable: tuple[str, ...]  # those of `nodes` that are lost or cordoned, or have GPUs that must be reset first
    spares: tuple[str, ...]  # free nodes that could take ranks now
    # maximum number of replicas that the available nodes can run, at most `target_dp`; 0 = fewer than `min_dp`
    reachable_dp: int
    step: int = 0  # newest step finished by all ranks
    checkpoint_step: int = 0  # newest step that every rank has saved
    checkpoint_interval_steps: int = 0
    # Generations in a row that ended by a fault of a worker before they finished or saved a step beyond the restored one.
    restarts_without_progress: int = 0
    restarts_without_progress_max: int = 3
    # Faults of workers since the job last passed its furthest step from the checkpoint that it restores.
    restarts_without_advance: int = 0
    furthest_step: int = 0  # the furthest step that it reached
    outages: int = 0  # failures of a file system or a service since the job last advanced; not in the counts above
    # how long the job will still run; as long as it has run so far if its file names no `steps`
    remaining_s: float = 0.0
    # cost of a planned change of this job, measured on past changes; an assumption before the first
    change_s: float = 0.0
    recent: tuple[Incident, ...] = ()  # closed incidents of this job, oldest first
    # Open incidents of this job, oldest first, including the current one. An incident closes when every rank has finished a
    # step.
    standing: tuple[Incident, ...] = ()
    notices: Mapping[str, Notice] = field(default_factory=dict)  # node → maintenance notice
    params: Mapping[str, Param] = field(default_factory=dict)  # `policy.params` of the job file
    # those of `nodes` with GPUs that must be reset first
    resets: Mapping[str, PendingReset] = field(default_factory=dict)
    # Those nodes of `resets`, of `standing`, and of a warning that recommends a reset whose agents can reset GPUs now.
    resettable: tuple[str, ...] = ()
    reports_steps: bool = True  # False: an unmodified script, which cannot save on request

    @property
    def dp(self) -> int:
        return self.mesh.dp

    @property
    def healthy_replicas(self) -> int:
        """Replicas of the newest generation without unusable nodes."""
        return self.replicas_without(*self.unusable)

    def replicas_without(self, *nodes: str) -> int:
        """Replicas of the newest generation that have ranks on none of `nodes`."""
        per_node = self.mesh.world_size / len(self.nodes) if self.nodes else 1
        broken: set[int] = set()
        for slot, node in enumerate(self.nodes):
            if node in nodes:
                first, last = int(slot * per_node), int((slot + 1) * per_node) - 1
                broken.update(map(self.mesh.replica_of, range(first, last + 1)))
        return self.dp - len(broken) if self.nodes else 0

    def recent_on(self, node: str, window_s: float, *kinds: str) -> tuple[Incident, ...]:
        """Closed incidents with their root on `node` in the last `window_s`, of these kinds (none given: every fault)."""
        return self._on(self.recent, node, window_s, kinds)

    def before_on(self, incident: Incident, window_s: float, *kinds: str) -> tuple[Incident, ...]:
        """Earlier incidents, open or closed, on the node of `incident` within `window_s`."""
        others = (*self.recent, *(each for each in self.standing if each.id != incident.id))
        return self._on(others, incident.node, window_s, kinds) if incident.node else ()

    def _on(
        self, incidents: tuple[Incident, ...], node: str, window_s: float, kinds: tuple[str, ...]
    ) -> tuple[Incident, ...]:
        return tuple(
            each
            for each in incidents
            if each.node == node
            and self.at - each.fault_at <= window_s
            and (each.kind in kinds if kinds else not each.planned)
        )
