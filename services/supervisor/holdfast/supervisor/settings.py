"""The environment of the supervisor, read once in `__main__`."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field, SecretStr

from holdfast.runtime.settings import ServiceSettings


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

    @property
    def diagnostics_endpoints(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.diagnostics.split(",") if part.strip())
