"""What the documentation says about registration is true; its blocks and links are checked by tests/documents."""

from __future__ import annotations

import ast
from pathlib import Path

from holdfast.agent.collectors.registry import BUILDERS

ROOT = Path(__file__).parents[2]


def test_every_collector_is_registered() -> None:
    """The rule of docs/architecture.md: a new collector is one file and one line."""
    registered = {(build.__module__, build.__name__) for build in BUILDERS}
    for path in (ROOT / "services/agent/holdfast/agent/collectors").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.FunctionDef)
                and "Surroundings" in ast.unparse(node.args)
                and path.stem not in ("registry", "plugged")  # `plugged` brings those of other packages
            ):
                assert (f"holdfast.agent.collectors.{path.stem}", node.name) in registered, f"{path.name}: {node.name}"
