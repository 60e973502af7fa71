"""The ready file: a service writes its endpoints to it when it is serving, so that its starter can find port 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from holdfast.runtime.files import write_whole


def announce(path: Path | None, endpoints: Mapping[str, str]) -> None:
    """Write `endpoints` as JSON, atomically. Does nothing without a path."""
    if path is not None:
        write_whole(path, json.dumps(dict(endpoints)).encode())
