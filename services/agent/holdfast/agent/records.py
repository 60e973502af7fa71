"""Small records of what an injected fault has changed on this machine, so that it is put right by whoever finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.runtime.files import write_whole


class Unreadable(Exception):
    """There is a record, and it is not whole."""


def write_record(path: Path, changed: Mapping[str, Any]) -> None:
    """Durable before it returns, and never half of it. Raises OSError."""
    write_whole(path, json.dumps(dict(changed)).encode(), durable=True)


def read_record(path: Path) -> dict[str, Any] | None:
    """None if there is none. Raises `Unreadable`."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Unreadable(str(path)) from error
    if not isinstance(found, dict):
        raise Unreadable(str(path))
    return found
