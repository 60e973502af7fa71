"""The supervisor's settings from the environment, read once in `__main__`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.links import LinkLimits
from holdfast.kubernetes.api import ACCOUNT, IN_CLUSTER, Access
from holdfast.kubernetes.bridge import Options
from holdfast.kubernetes.machines import LEAVING_TAINTS, ZONE_LABELS, Rules
from holdfast.kubernetes.replace import Mark, Replacer
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.api_certificate import ApiCertificate, Use, of_listener
from holdfast.runtime.trust.api_trust import Trust
from holdfast.runtime.trust.oidc import OidcRules, OidcTokens
from holdfast.runtime.trust.oidc_keys import IssuerKeys
from holdfast.supervisor.alerts.alert import Topic
from holdfast.supervisor.enrolment import crl_of
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
    api_url: str = ""  # the API's address for clients, if it is not where it listens; a standby refers clients to it
    api_token: SecretStr = SecretStr("")  # bearer token of the admin; empty = none
    # TLS of the API. auto: with the certificate named here, or with the service's where other machines reach the API. on: with
    # either, in any case. off: plain HTTP, for a proxy in front. docs/security.md
    api_tls: Use = "auto"
    api_tls_cert: Path | None = None
    api_tls_key: Path | None = None
    # CA that signs certificates of invited nodes: docs/security.md; None = nobody is invited
    ca_dir: Path | None = None
    node_certificate_s: float = Field(default=7 * DAY_S, ge=30.0, le=365 * DAY_S)  # life of such a certificate
    api_ca: Path | None = None  # of the other supervisors' APIs; without it those of the system, and HOLDFAST_TLS_CA
    # tokens with roles, of `holdfast tokens`; without any of the three kinds, everybody is an admin
    api_tokens_file: Path | None = None
    # Tokens of an OpenID Connect issuer: docs/security.md. The first three together or none
    api_oidc_issuer: str = ""
    api_oidc_audience: str = ""  # which a token must be for, comma-separated: any of them
    api_oidc_roles: str = ""  # CLAIM:VALUE=ROLE and *=ROLE, comma-separated
    api_oidc_name: str = ""  # claim that names who has a token; empty = sub
    api_oidc_ca: Path | None = None  # only CA of the issuer's certificate; without it those of the system
    data_dir: Path
    diagnostics: str = ""  # endpoints of diagnostics, comma-separated, best first; sent to agents
    supervisor_name: str = Field(default_factory=socket.gethostname, min_length=1)
    # Return of nodes after a fault: docs/policies.md. Equal on all supervisors of a fleet; those of the leader apply.
    node_hold_s: float = Field(default=600.0, ge=0)  # hold-down after the first fault; doubled by each further one
    node_hold_max_s: float = Field(default=21_600.0, ge=0)  # … up to this
    node_hold_window_s: float = Field(default=7 * DAY_S, ge=0)  # faults count for this long
    node_losses_free: int = Field(default=1, ge=0)  # losses within the window that cost no hold-down
    node_probation_s: float = Field(default=7200.0, ge=0)  # after a second fault within it, an operator must repair it
    node_test_failures_free: int = Field(default=2, ge=0, lt=TEST_FAILURES_MAX)  # … failed tests when idle

    # Nodes that keep failing, and the choice between spares: docs/diagnostics.md. Equal on all supervisors, too.
    quarantine_limit: Positive = 2.5  # faults, each worth less the older it is; above 16: never
    quarantine_half_life_s: Positive = 3.5 * DAY_S  # after which a fault is worth half
    quarantine_window_s: Positive = 28 * DAY_S  # faults count for this long
    quarantine_maybe_weight: float = Field(default=0.5, ge=0, lt=1)  # of a fault that may be the script's
    quarantine_together_s: float = Field(default=60.0, ge=0)  # faults of several nodes within it have a common cause
    quarantine_fraction_max: float = Field(default=0.1, ge=0, le=1)  # of the fleet; one node in any case
    spare_prior_faults: Positive = 0.5  # expected of every node …
    spare_prior_s: Positive = 77 * DAY_S  # … in this time, as a prior

    # Another machine for a node that does not return: docs/policies.md. Equal on all supervisors, too.
    provider: str = ""  # "command", "kubernetes", or the name of a plug-in; empty = none
    replace_command: str = ""  # run without a shell; {node}, {hostname}, {address}, {reason} and {request} are replaced
    replace_after_s: float = Field(default=1800.0, ge=0)  # time out of service before the request
    replacements_per_day: int = Field(default=10, ge=0)  # of the fleet

    # More nodes if jobs lack some: docs/policies.md. Those of the leader apply.
    more_command: str = ""  # run without a shell; {pool}, {wanted}, {missing}, {jobs} and {reason} are replaced
    more_after_s: float = Field(default=300.0, ge=0)  # time for which nodes must be lacking
    more_every_s: float = Field(default=900.0, ge=60)  # until the request is repeated; then twice as long, and so on
    more_nodes_max: int = Field(default=0, ge=0)  # of a pool; 0 = no requests

    # Alerts: docs/alerts.md. Equal on all supervisors, too: each alert is sent by one of them.
    alert_urls: SecretStr = SecretStr("")  # addresses, separated by white space
    alert_urls_file: Path | None = None  # the same, one per line; lines that begin with # are left out
    alert_topics: str = ",".join(topic for topic in Topic if topic not in (Topic.TEST, Topic.COMPLETED))
    alert_secret: SecretStr = SecretStr("")  # with which requests to webhooks are signed; empty = they are not
    alert_link: str = ""  # address of the dashboard, as people reach it; empty = that of the API

    # The cluster that the machines belong to: docs/kubernetes.md. Equal on all supervisors, too; the leader watches.
    kubernetes_watch: bool = False  # whether notices and failure domains are taken from its API server
    kubernetes_api: str = IN_CLUSTER
    kubernetes_token_file: Path = ACCOUNT / "token"  # read for each request
    kubernetes_ca_file: Path = ACCOUNT / "ca.crt"
    kubernetes_namespaces: str = ""  # of jobs, comma-separated: where the pods of agents are
    kubernetes_node_selector: str = ""  # labels of the machines to watch; empty = all
    kubernetes_taints: str = ",".join(LEAVING_TAINTS)  # keys of taints with which a machine leaves, comma-separated
    kubernetes_zone_labels: str = ",".join(ZONE_LABELS)  # the first that a machine has names its failure domain
    # done by the provider `kubernetes` to a condemned machine before its pod is deleted
    kubernetes_mark: Mark = Mark.CORDON

    # Faults of the control plane that `holdfast inject` may cause, for jobs with `chaos: true`: docs/fault-injection.md. Those
    # of the leader apply. restarted: the part is restarted, and this Redis has no other users; standby: a standby takes over
    fault_redis_kill: RedisKill = "no"
    fault_leader_kill: LeaderKill = "no"

    @property
    def own_faults(self) -> OwnFaultRules:
        return OwnFaultRules(redis_kill=self.fault_redis_kill, leader_kill=self.fault_leader_kill)

    # Network tests between nodes without ranks: docs/diagnostics.md. Equal on all supervisors, too.
    link_tests_every_s: float = Field(default=600.0, ge=0)  # of each node, on average; 0 = none
    link_test_bytes_max: int = Field(default=64 << 20, ge=1 << 20, le=1 << 30)  # in each of the two directions
    link_test_s_max: float = Field(default=0.5, ge=0.05, le=5)  # of each of the two directions

    def api_certificate(self, listener: socket.socket) -> tuple[ApiCertificate | None, str]:
        """Return the certificate of the API, None = plain HTTP, and a host for its URL. Raises `InvalidSpec`."""
        own, of_service = (self.api_tls_cert, self.api_tls_key), (self.tls_cert, self.tls_key)
        return of_listener(self.api_tls, own, of_service, listener)

    @property
    def crl(self) -> Path | None:
        """That of the CA in `ca_dir`, if no other one is named."""
        return self.tls_crl or crl_of(self.ca_dir)

    @property
    def api_trust(self) -> Trust:
        return Trust(self.api_ca, self.tls_ca)

    @property
    def api_oidc(self) -> OidcTokens | None:
        """None = no issuer is trusted. Raises `InvalidSpec`."""
        rules = OidcRules.of(
            issuer=self.api_oidc_issuer,
            audience=self.api_oidc_audience,
            roles=self.api_oidc_roles,
            name=self.api_oidc_name,
            ca=self.api_oidc_ca,
        )
        if rules is None:
            return None
        keys = IssuerKeys(rules.issuer, rules.ca)
        keys.require_usable()
        return OidcTokens(rules, keys)

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
    def alert_addresses(self) -> tuple[str, ...]:
        """Raises `InvalidSpec` if the file cannot be read."""
        found = self.alert_urls.get_secret_value().split()
        if self.alert_urls_file is not None:
            try:
                lines = self.alert_urls_file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidSpec(
                    "HOLDFAST_ALERT_URLS_FILE", str(self.alert_urls_file), f"a text file that can be read ({error})"
                ) from error
            found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return tuple(found)

    @property
    def alerts_about(self) -> frozenset[Topic]:
        """Raises `InvalidSpec` for a topic that does not exist."""
        known = {topic.value: topic for topic in Topic if topic is not Topic.TEST}
        names = _names(self.alert_topics)
        if unknown := [name for name in names if name not in known]:
            raise InvalidSpec("HOLDFAST_ALERT_TOPICS", unknown[0], f"topics of {', '.join(known)}, separated by commas")
        return frozenset(known[name] for name in names)

    @property
    def diagnostics_endpoints(self) -> tuple[str, ...]:
        return _names(self.diagnostics)


def _names(text: str) -> tuple[str, ...]:
    """The comma-separated names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
