"""Tests of frameworks that are not installed are not collected: `make frameworks-test` installs them."""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {
    "test_lightning.py": ("lightning", "torchdata"),
    "test_accelerate.py": ("accelerate", "torchdata"),
    "test_deepspeed.py": ("deepspeed",),
    "test_torchtitan.py": ("torchtitan",),
    "test_megatron.py": ("megatron",),
    "test_fabric.py": ("lightning",),
}

collect_ignore = [name for name, modules in NEEDS.items() if any(find_spec(module) is None for module in modules)]
