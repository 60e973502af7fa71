"""The real control plane that tests of this directory share, and a warning where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import control_plane
import pytest
from control_plane import MISSING, Cluster, is_built

# httpcore 1.0 does not close a connection whose TLS handshake is cancelled (`start_tls` catches Exception only). Python does
# when the connection is collected, in whichever test that happens.
_OF_A_CANCELLED_HANDSHAKE = ("ignore:unclosed transport:ResourceWarning", "ignore:unclosed <socket:ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for each in _OF_A_CANCELLED_HANDSHAKE:
                item.add_marker(pytest.mark.filterwarnings(each))


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
