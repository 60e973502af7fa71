"""The ready file: a service writes its endpoints to it when it is serving, so that its starter can find port 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import structlog

from holdfast.runtime.files import write_whole

log = structlog.get_logger("holdfast.ready")


def announce(path: Path | None, endpoints: Mapping[str, str]) -> None:
    """Write `endpoints` as JSON, atomically. Does nothing without a path. A full disk is logged and ends no service: one that
    is started again has the same endpoints."""
    if path is not None:
        try:
            write_whole(path, json.dumps(dict(endpoints)).encode())
        except OSError as error:
            log.warning("the ready file cannot be written", path=str(path), reason=str(error))
