"""The name of the distribution. On the package index `holdfast` is another project; imports and the command are called so."""

from __future__ import annotations

DISTRIBUTION = "holdfast-training"


def install_command(extra: str) -> str:
    """What installs one of the optional dependencies in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
