"""Ports of a recorded /sys/class/infiniband, and what a broken one does to the reader: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.collectors.infiniband import COUNTERS, Ports, build
from holdfast.agent.collectors.protocol import Surroundings


def write(root: Path, text: str) -> Path:
    """A tree of files from lines "path=content"."""
    for line in text.strip().splitlines():
        name, _, content = line.strip().partition("=")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


RECORDED = Path(__file__).parents[2] / "data/infiniband/node.txt"


def test_a_recorded_node(tmp_path: Path) -> None:
    found = Ports("n", write(tmp_path, RECORDED.read_text())).sample()
    assert found.device == ("mlx5_0", "mlx5_1", "mlx5_bond_0")
    assert found.port == (1, 1, 1)
    assert found.state == ("ACTIVE", "DOWN", "ACTIVE")
    assert found.phys_state == ("LinkUp", "Polling", "LinkUp")
    assert found.link_layer == ("InfiniBand", "InfiniBand", "Ethernet")
    assert found.link_downed == (2, 7, 0)
    assert found.slow_restarts == (-1, -1, 12), "a counter that a device does not have is not zero"


def test_what_is_excluded_is_not_touched(tmp_path: Path) -> None:
    root = write(tmp_path, RECORDED.read_text())
    (root / "mlx5_1/ports/1/state").chmod(0)
    ports = Ports("n", root, ("mlx5_1", "*bond*"))
    assert ports.sample().device == ("mlx5_0",)
    assert not ports.rejections


@pytest.mark.parametrize("content", ["", "N/A (no PMA)", "-1", "0x10", "9" * 400, "\x00\x01", "12 13"])
def test_a_counter_that_is_no_number_is_counted_and_unknown(tmp_path: Path, content: str) -> None:
    root = write(tmp_path, RECORDED.read_text())
    (root / "mlx5_0/ports/1" / COUNTERS["symbol_errors"]).write_text(content)
    ports = Ports("n", root)
    for _ in range(3):
        assert ports.sample().symbol_errors[0] == -1
    assert ports.rejections["mlx5_0/ports/1/counters/symbol_error"] == 3


def test_strange_trees_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    root = write(
        tmp_path, "mlx5_0/ports/x/state=4: ACTIVE\nmlx5_0/ports/99999999/state=4: ACTIVE\nmlx5_2/node_type=1: CA"
    )
    (root / "file").write_text("not a device")
    (root / "mlx5_3/ports/1/state").mkdir(parents=True)
    assert Ports("n", root).sample().device == ()


def test_a_node_without_such_devices_has_no_collector(tmp_path: Path) -> None:
    around = Surroundings("n", tmp_path, tmp_path, tmp_path, tmp_path / "k", infiniband=tmp_path / "none")
    assert build(around) is None
