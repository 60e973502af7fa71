"""Small records of the changes that an injected fault makes on this machine, from which a later process can undo them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.runtime.files import write_whole


class Unreadable(Exception):
    """The record exists but is damaged."""


def write_record(path: Path, changed: Mapping[str, Any]) -> None:
    """Write the record atomically and durably. Raises OSError."""
    write_whole(path, json.dumps(dict(changed)).encode(), durable=True)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record; None if it does not exist. Raises `Unreadable`."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(path)) from error
    if not isinstance(found, dict):
        raise Unreadable(str(path))
    return found
