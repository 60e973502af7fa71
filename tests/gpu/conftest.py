"""Tests on a real GPU (`make gpu-test`). Each is skipped where torch sees none. No test resets a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
