"""The ready file: a service that serves writes its real endpoints, so that whoever started it on port 0 can find it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def announce(path: Path | None, endpoints: Mapping[str, str]) -> None:
    """Write `endpoints` as JSON, whole or not at all. Nothing happens without a path: nobody asked."""
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(dict(endpoints)))
    temporary.replace(path)
