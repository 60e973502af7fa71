"""Settings of diagnostics: environment variables with the prefix `HOLDFAST_`, read once in `__main__`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from holdfast.diagnostics.detectors.liveness import RECONNECT_GRACE_S, UNWITNESSED_GRACE_S
from holdfast.runtime.settings import ServiceSettings


class DiagnosticsSettings(ServiceSettings):
    redis_url: str
    fleet: str = "main"
    diagnostics_listen: str = "127.0.0.1:8472"  # host:port; port 0 = any free port
    xid_overrides: Path | None = None  # a CSV with rows that replace rows of the Xid catalogue
    # Time between the break of a node's stream and the report that the node is lost, unless its agent reconnects. Agents try
    # at least once a second. `unwitnessed_grace_s` applies if the steps of other nodes are no evidence about the node's ranks
    # (see `detectors/liveness.py`).
    reconnect_grace_s: float = Field(default=RECONNECT_GRACE_S, gt=0, le=60)
    unwitnessed_grace_s: float = Field(default=UNWITNESSED_GRACE_S, gt=0, le=600)
    # time without ticks on an open stream after which a node is lost
    silence_s: float = Field(default=5.0, ge=1, le=600)
