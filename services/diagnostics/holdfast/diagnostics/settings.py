"""The environment of diagnostics, read once in `__main__`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from holdfast.diagnostics.detectors.liveness import RECONNECT_GRACE_S
from holdfast.runtime.settings import ServiceSettings


class DiagnosticsSettings(ServiceSettings):
    redis_url: str
    fleet: str = "main"
    diagnostics_listen: str = "127.0.0.1:7410"  # host:port; port 0 takes a free one
    xid_overrides: Path | None = None  # a CSV with rows that replace rows of the Xid catalogue
    # A broken stream becomes a lost node after this; agents try again at least once a second.
    reconnect_grace_s: float = Field(default=RECONNECT_GRACE_S, gt=0, le=60)
    silence_s: float = Field(default=5.0, ge=1, le=600)  # an open stream without ticks becomes a lost node after this
