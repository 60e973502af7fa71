"""`holdfast nodes show`: what a node found out about itself is shown as a table, with the verdict in its title."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cli.nodes import show_node
from holdfast.domain.nodes import Check, Preflight
from holdfast.supervisor.api import node_views

CHECKS = (Check("disk", False, "/data is 99% full"), Check("peers", None, "no other node is known yet"))


@pytest.mark.parametrize(
    ("preflight", "words"),
    [
        (None, ()),
        (Preflight(), ("pre-flight: in progress",)),
        (Preflight(1_700_000_000.0, 2.5, CHECKS), ("failed at", "2.5 s", "/data is 99% full", "peers")),
        (Preflight(1_700_000_000.0, 2.5, CHECKS[1:]), ("passed at",)),
    ],
)
def test_a_nodes_tests_of_itself(
    preflight: Preflight | None, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {
        "node": "n0",
        "faults": [],
        "incidents": [],
        "preflight": None if preflight is None else node_views.preflight(preflight).model_dump(),
    }
    show_node(row, False)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(word in shown for word in words)
    assert ("pre-flight" in shown) == (preflight is not None)
