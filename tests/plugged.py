"""Installing the example plug-ins as a user would, but into a directory of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.demo.course import examples

PLUGINS = examples() / "plugins"
ALL = ("collector", "detector", "store", "provider", "policy", "notifier")


def install(into: Path, names: Sequence[str] = ALL) -> dict[str, str]:
    """`pip install` the packages into a directory; returns the environment in which processes find them."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", into, *(PLUGINS / name for name in names)], check=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(into), os.environ.get("PYTHONPATH", ""))))}


def pretend(site: Path, package: str, entries: dict[str, dict[str, str]], modules: dict[str, str]) -> None:
    """What an installed package leaves below a directory of sys.path: `entries` is group → name → target."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        line
        for group, names in entries.items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
