"""The environment of the supervisor, read once in `__main__`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr

from holdfast.domain.links import LinkLimits
from holdfast.kubernetes.api import ACCOUNT, IN_CLUSTER, Access
from holdfast.kubernetes.bridge import Options
from holdfast.kubernetes.machines import LEAVING_TAINTS, ZONE_LABELS, Rules
from holdfast.kubernetes.replace import Mark, Replacer
from holdfast.runtime.settings import ServiceSettings
from holdfast.supervisor.fault_rules import LeaderKill, OwnFaultRules, RedisKill
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.providers import name_of
from holdfast.supervisor.providers.demand import DemandRules
from holdfast.supervisor.return_rules import DAY_S, TEST_FAILURES_MAX, ReplacementRules, ReturnRules

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SupervisorSettings(ServiceSettings):
    redis_url: str
    fleet: str = "main"
    supervisor_listen: str = "127.0.0.1:8471"  # for agents; port 0 takes a free one
    api_listen: str = "127.0.0.1:8470"  # HTTP
    api_url: str = ""  # how others reach the API, when that is not where it listens; told to those who ask a standby
    api_token: SecretStr = SecretStr("")  # bearer token of the admin; empty = none
    api_tokens_file: Path | None = (
        None  # tokens with roles, of `holdfast tokens`; without either, everybody is an admin
    )
    data_dir: Path
    diagnostics: str = ""  # endpoints of diagnostics, comma-separated, best first; told to agents
    supervisor_name: str = Field(default_factory=socket.gethostname, min_length=1)
    # Return of nodes after a fault: docs/policies.md. Equal on all supervisors of a fleet; those of the leader apply.
    node_hold_s: float = Field(default=600.0, ge=0)  # hold-down after the first fault; doubled by each further one
    node_hold_max_s: float = Field(default=21_600.0, ge=0)  # … up to this
    node_hold_window_s: float = Field(default=7 * DAY_S, ge=0)  # faults count for so long
    node_losses_free: int = Field(default=1, ge=0)  # losses within the window that cost no hold-down
    node_probation_s: float = Field(default=7200.0, ge=0)  # a second fault within this time sends the node away
    node_test_failures_free: int = Field(default=2, ge=0, lt=TEST_FAILURES_MAX)  # … failed tests when idle

    # Nodes that keep failing, and the choice between spares: docs/diagnostics.md. Equal on all supervisors, too.
    quarantine_limit: Positive = 2.5  # faults, each worth less the older it is; above 16: never
    quarantine_half_life_s: Positive = 3.5 * DAY_S  # after which a fault is worth half
    quarantine_window_s: Positive = 28 * DAY_S  # faults count for so long
    quarantine_maybe_weight: float = Field(default=0.5, ge=0, lt=1)  # of a fault that may be the script's
    quarantine_together_s: float = Field(default=60.0, ge=0)  # faults of several nodes within it have a common cause
    quarantine_fraction_max: float = Field(default=0.1, ge=0, le=1)  # of the fleet; one node in any case
    spare_prior_faults: Positive = 0.5  # expected of every node …
    spare_prior_s: Positive = 77 * DAY_S  # … in this time, before it has shown anything

    # Another machine for a node that does not come back: docs/policies.md. Equal on all supervisors, too.
    provider: str = ""  # who is asked: "command", or the name of a plug-in; empty = nobody
    replace_command: str = ""  # run without a shell; {node}, {hostname}, {address}, {reason} and {request} are replaced
    replace_after_s: float = Field(default=1800.0, ge=0)  # out of service for so long
    replacements_per_day: int = Field(default=10, ge=0)  # of the fleet

    # More nodes where jobs lack some: docs/policies.md. Those of the leader apply.
    more_command: str = ""  # run without a shell; {pool}, {wanted}, {missing}, {jobs} and {reason} are replaced
    more_after_s: float = Field(default=300.0, ge=0)  # of lacking nodes
    more_every_s: float = Field(
        default=900.0, ge=60
    )  # until the same is asked for again; then twice as long, and so on
    more_nodes_max: int = Field(default=0, ge=0)  # of a pool; 0 = nobody is asked

    # The cluster that the machines belong to: docs/kubernetes.md. Equal on all supervisors, too; the leader watches.
    kubernetes_watch: bool = False  # whether notices and failure domains are taken from its API server
    kubernetes_api: str = IN_CLUSTER
    kubernetes_token_file: Path = ACCOUNT / "token"  # read for each request
    kubernetes_ca_file: Path = ACCOUNT / "ca.crt"
    kubernetes_namespaces: str = ""  # of jobs, comma-separated: where the pods of agents are
    kubernetes_node_selector: str = ""  # labels of the machines to watch; empty = all
    kubernetes_taints: str = ",".join(LEAVING_TAINTS)  # keys of taints with which a machine leaves, comma-separated
    kubernetes_zone_labels: str = ",".join(ZONE_LABELS)  # the first that a machine has names its failure domain
    kubernetes_mark: Mark = (
        Mark.CORDON
    )  # what the provider `kubernetes` does to a condemned machine before its pod is deleted

    # Faults of the control plane that `holdfast inject` may cause, for jobs with `chaos: true`: docs/fault-injection.md. Those
    # of the leader apply. restarted: something starts the part again, and nobody else needs this Redis; standby: one takes over
    fault_redis_kill: RedisKill = "no"
    fault_leader_kill: LeaderKill = "no"

    @property
    def own_faults(self) -> OwnFaultRules:
        return OwnFaultRules(redis_kill=self.fault_redis_kill, leader_kill=self.fault_leader_kill)

    # Tests of the network between nodes without ranks: docs/diagnostics.md. Equal on all supervisors, too.
    link_tests_every_s: float = Field(default=600.0, ge=0)  # of each node, on average; 0 = none
    link_test_bytes_max: int = Field(default=64 << 20, ge=1 << 20, le=1 << 30)  # in each of the two directions
    link_test_s_max: float = Field(default=0.5, ge=0.05, le=5)  # likewise

    @property
    def links(self) -> LinkRules:
        limits = LinkLimits(self.link_test_bytes_max, self.link_test_s_max)
        return LinkRules(every_s=self.link_tests_every_s, limits=limits)

    @property
    def bridge(self) -> Options:
        return Options(
            access=self._access,
            rules=Rules(_names(self.kubernetes_taints), _names(self.kubernetes_zone_labels)),
            namespaces=_names(self.kubernetes_namespaces),
            selector=self.kubernetes_node_selector,
        )

    def replacer(self) -> Replacer:
        """Raises `InvalidSpec` if it has no namespaces."""
        return Replacer(self._access, _names(self.kubernetes_namespaces), self.kubernetes_mark)

    @property
    def _access(self) -> Access:
        return Access(url=self.kubernetes_api, token_file=self.kubernetes_token_file, ca_file=self.kubernetes_ca_file)

    @property
    def replacements(self) -> ReplacementRules:
        """Raises `InvalidSpec` if the settings contradict each other."""
        return ReplacementRules(
            provider=name_of(self.provider, self.replace_command),
            after_s=self.replace_after_s,
            per_day_max=self.replacements_per_day,
        )

    @property
    def demand(self) -> DemandRules:
        return DemandRules(after_s=self.more_after_s, every_s=self.more_every_s, nodes_max=self.more_nodes_max)

    @property
    def returns(self) -> ReturnRules:
        return ReturnRules(
            hold_s=self.node_hold_s,
            hold_s_max=self.node_hold_max_s,
            window_s=self.node_hold_window_s,
            losses_free=self.node_losses_free,
            probation_s=self.node_probation_s,
            test_failures_free=self.node_test_failures_free,
        )

    @property
    def offenders(self) -> OffenderRules:
        return OffenderRules(
            limit=self.quarantine_limit,
            half_life_s=self.quarantine_half_life_s,
            window_s=self.quarantine_window_s,
            maybe_weight=self.quarantine_maybe_weight,
            together_s=self.quarantine_together_s,
            fraction_max=self.quarantine_fraction_max,
            prior_faults=self.spare_prior_faults,
            prior_s=self.spare_prior_s,
        )

    @property
    def diagnostics_endpoints(self) -> tuple[str, ...]:
        return _names(self.diagnostics)


def _names(text: str) -> tuple[str, ...]:
    """Those that are separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
