"""Durations as people write them."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli.durations import seconds
from holdfast.cli.main import application


@pytest.mark.parametrize(
    ("text", "expected"), [("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("45", 45.0), (" 0.5 s", 0.5)]
)
def test_what_is_a_duration(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0s", "2d", "25h", "nan", "1e3s"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="use for example 30s, 2m or 1h"):
        seconds(text)


def test_a_grace_that_is_none_is_refused_before_anything_is_asked() -> None:
    result = CliRunner().invoke(application("jobs"), ["jobs", "checkpoint", "llm", "--grace", "soon"])
    assert result.exit_code == 2
    assert "is not a duration" in result.output
