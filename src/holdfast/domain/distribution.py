"""The name of the distribution. It differs from that of the imports and the command, `holdfast`, because on the package index
`holdfast` is another project."""

from __future__ import annotations

DISTRIBUTION = "holdfast-training"


def install_command(extra: str) -> str:
    """The command that installs one of the optional dependencies in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
