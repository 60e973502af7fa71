"""The values of a node's GPUs, from the agent through the supervisor to the command."""

from __future__ import annotations

import json
from pathlib import Path

from commands import Shell, refused
from training import WarmStack
from waiting import wait_until

from holdfast.cli.client import Client
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack_options import StackOptions

RECORDED = Path(__file__).parents[2] / "data/nvml/two_gpus.jsonl"


def test_the_gpus_of_a_node_are_asked_of_its_agent(tmp_path: Path) -> None:
    options = StackOptions(directory=tmp_path / "stack", nodes=1, environment={"HOLDFAST_NVML_REPLAY": str(RECORDED)})
    with WarmStack(options) as stack, Client(stack.api_url) as client:
        wait_for_nodes(client, stack, 1)
        shell = Shell(tmp_path, stack.for_commands)

        def read() -> list[dict[str, object]]:
            done = shell("nodes", "gpus", "node-0", "--json")
            assert done.code == 0, done.err
            found: list[dict[str, object]] = json.loads(done.out)
            return found

        wait_until(
            lambda: [gpu["ecc_uncorrected_ever"] for gpu in read()] == [0, 5], description="values of both kinds"
        )
        first, second = read()
        assert (first["gpu"], first["uuid"], first["nvlinks_up"]) == (0, "GPU-aaaa", 18)
        assert (second["temperature_c"], second["remap_pending"], second["pcie_replays"]) == (61.0, True, None)
        table = shell("nodes", "gpus", "node-0").out
        assert "reset needed" in table
        assert "650 W" in table
        refused(shell("nodes", "gpus", "other"), "there is no node other")
