"""The real control plane that tests of this directory share, and a warning where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import control_plane
import pytest
from control_plane import MISSING, Cluster, is_built


@pytest.fixture(scope="session")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not is_built():
        pytest.skip(MISSING)
    with control_plane.control_plane(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster


@pytest.fixture
def cluster(_running: Cluster) -> Iterator[Cluster]:
    """Without machines, jobs and pods."""
    yield _running
    _running.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if skipped := [each for each in terminalreporter.stats.get("skipped", []) if MISSING in str(each.longrepr)]:
        terminalreporter.section("NOT TESTED: Kubernetes", sep="!", red=True)
        terminalreporter.line(f"{len(skipped)} tests need a real control plane and were skipped: {MISSING}")
