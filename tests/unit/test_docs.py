"""The documentation names only files, tests and sections that exist, and what it says about registration is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from holdfast.agent.collectors import BUILDERS

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / name for name in ("README.md", "deploy/README.md")),
    *ROOT.glob("services/*/README.md"),
]
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
MODULE = re.compile(r"`((?:src|services|tools)/[\w/.-]+\.py)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_tests_and_sections_exist(page: Path) -> None:
    text = page.read_text()
    for path, name in TEST.findall(text):
        assert (ROOT / path).exists(), path
        assert not name or re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path}::{name}"
    for path in MODULE.findall(text):
        assert (ROOT / path).exists(), path
    for target, anchor in LINK.findall(text):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_every_collector_is_registered() -> None:
    """The rule of docs/architecture.md: a new collector is one file and one line."""
    registered = {(build.__module__, build.__name__) for build in BUILDERS}
    for path in (ROOT / "services/agent/holdfast/agent/collectors").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.FunctionDef)
                and "Surroundings" in ast.unparse(node.args)
                and path.stem not in ("__init__", "plugged")  # `plugged` brings those of other packages
            ):
                assert (f"holdfast.agent.collectors.{path.stem}", node.name) in registered, f"{path.name}: {node.name}"
