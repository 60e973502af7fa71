"""The environment of the supervisor, read once in `__main__`."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field, SecretStr

from holdfast.runtime.settings import ServiceSettings
from holdfast.supervisor.providers import name_of
from holdfast.supervisor.return_rules import DAY_S, ReplacementRules, ReturnRules


class SupervisorSettings(ServiceSettings):
    redis_url: str
    fleet: str = "main"
    supervisor_listen: str = "127.0.0.1:8471"  # for agents; port 0 takes a free one
    api_listen: str = "127.0.0.1:8470"  # HTTP
    api_url: str = ""  # how others reach the API, when that is not where it listens; told to those who ask a standby
    api_token: SecretStr = SecretStr("")  # bearer token that requests must carry; empty = none
    data_dir: Path
    diagnostics: str = ""  # endpoints of diagnostics, comma-separated, best first; told to agents
    supervisor_name: str = Field(default_factory=socket.gethostname, min_length=1)
    # Return of nodes after a fault: docs/policies.md. Equal on all supervisors of a fleet; those of the leader apply.
    node_hold_s: float = Field(default=600.0, ge=0)  # hold-down after the first fault; doubled by each further one
    node_hold_max_s: float = Field(default=21_600.0, ge=0)  # … up to this
    node_hold_window_s: float = Field(default=7 * DAY_S, ge=0)  # faults count for so long
    node_losses_free: int = Field(default=1, ge=0)  # losses within the window that cost no hold-down
    node_probation_s: float = Field(default=7200.0, ge=0)  # a second fault within this time sends the node away

    # Another machine for a node that does not come back: docs/policies.md. Equal on all supervisors, too.
    provider: str = ""  # who is asked: "command", or the name of a plug-in; empty = nobody
    replace_command: str = ""  # run without a shell; {node}, {hostname}, {address}, {reason} and {request} are replaced
    replace_after_s: float = Field(default=1800.0, ge=0)  # out of service for so long
    replacements_per_day: int = Field(default=10, ge=0)  # of the fleet

    @property
    def replacements(self) -> ReplacementRules:
        """Raises `InvalidSpec` if the settings contradict each other."""
        return ReplacementRules(
            provider=name_of(self.provider, self.replace_command),
            after_s=self.replace_after_s,
            per_day_max=self.replacements_per_day,
        )

    @property
    def returns(self) -> ReturnRules:
        return ReturnRules(
            hold_s=self.node_hold_s,
            hold_s_max=self.node_hold_max_s,
            window_s=self.node_hold_window_s,
            losses_free=self.node_losses_free,
            probation_s=self.node_probation_s,
        )

    @property
    def diagnostics_endpoints(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.diagnostics.split(",") if part.strip())
