"""Durations on a command line: `30s`, `2m`, `1h`, `7d`, or a number of seconds."""

from __future__ import annotations

import re

import typer

DAY_S = 86_400.0

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)", re.ASCII)


def seconds(text: str) -> float:
    """Parse a time to wait. Raises `typer.BadParameter`."""
    return _parse(text, DAY_S, "30s, 2m or 1h, at most one day")


def period(text: str) -> float:
    """Parse the length of a period in the past, in seconds. Raises `typer.BadParameter`."""
    return _parse(text, 3660 * DAY_S, "12h or 7d, at most ten years")


def _parse(text: str, most_s: float, example: str) -> float:
    match = _DURATION.fullmatch(str(text).strip())
    duration_s = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < duration_s <= most_s:
        raise typer.BadParameter(f"{text!r} is not a duration; use for example {example}")
    return duration_s
