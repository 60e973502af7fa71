"""Tests on a real GPU (`make gpu-test`). Each is skipped where torch sees none. No test resets a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(HERE):  # pytest passes the items of all directories
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
