"""What the processes of a failed test have logged, shown with the failure.

Agents, workers, services and replicators write to files in the test's directories. A failure that comes once in a hundred runs
is understood from what they said then. This module is a plug-in of pytest.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

LINES = 40  # of each file, the last ones
FILES = 12  # those written last


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        base = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # pytest has no public name for it
        report.sections += [(f"last lines of {path}", text) for path, text in written_since(base, call.start)]
    return report


def written_since(base: Path, began: float) -> list[tuple[Path, str]]:
    """The logs below `base` that have been written to since `began` (Unix time) and are not empty: path, last lines."""
    found: list[tuple[float, Path]] = []
    for path in base.rglob("*.log"):
        try:
            status = path.stat()
        except OSError:  # gone with its process
            continue
        if status.st_mtime >= began and status.st_size:
            found.append((status.st_mtime, path))
    return [(path, _last_lines(path)) for _, path in sorted(found)[-FILES:]]


def _last_lines(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-LINES:])
    except OSError as error:
        return str(error)
