"""Durations on a command line: `30s`, `2m`, `1h`, or a number of seconds."""

from __future__ import annotations

import re

import typer

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)", re.ASCII)


def seconds(text: str) -> float:
    """Parse a duration. Raises `typer.BadParameter`."""
    match = _DURATION.fullmatch(text.strip())
    duration_s = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < duration_s <= 86_400:
        raise typer.BadParameter(f"{text!r} is not a duration; use for example 30s, 2m or 1h, at most one day")
    return duration_s
