"""Formats lists and times for messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

LISTED_MAX = 8


def listed(names: Sequence[object]) -> str:
    """The first `LISTED_MAX` names, with "…" if there are more."""
    return ", ".join(map(str, names[:LISTED_MAX])) + (" …" if len(names) > LISTED_MAX else "")


def moment(at: float, now: float) -> str:
    """`at`, in Unix seconds, as "14:32 UTC", with the date if it is not today."""
    then, today = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now, UTC).date()
    return then.strftime("%H:%M UTC" if then.date() == today else "%Y-%m-%d %H:%M UTC")
