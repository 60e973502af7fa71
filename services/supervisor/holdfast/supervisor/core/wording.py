"""How lists are told to people."""

from __future__ import annotations

from collections.abc import Sequence

LISTED_MAX = 8


def listed(names: Sequence[object]) -> str:
    """The first of them, and whether there are more."""
    return ", ".join(map(str, names[:LISTED_MAX])) + (" …" if len(names) > LISTED_MAX else "")
