"""What tests of several files here need."""

from __future__ import annotations

from pathlib import Path

import certificates
import pytest


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `certificates.make` leaves it."""
    return certificates.make(tmp_path_factory.mktemp("pki"))
