"""The last checkpoint of a completed job reaches its object store, though the interval would not have sent it there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from training import cluster, gpt_job

from holdfast.stores import open_store, transfer
from holdfast.stores.layout import load, steps

EVERY, LAST = 10, 200


@pytest.mark.slow
def test_the_last_checkpoint_of_a_completed_job_is_in_its_store_and_on_its_node(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    spec = gpt_job("gpt", tmp_path / "out", dp=1, pp=1, steps=LAST, interval_steps=EVERY, pause_s=0.02)
    spec["checkpoint"] |= {"store": url, "store_interval_s": 3600}  # by itself only the first save would go there
    with cluster(tmp_path / "stack", nodes=1) as run, closing(open_store(url)) as store:

        def rows() -> list[dict[str, Any]]:
            return list(run.client.checkpoints("gpt"))

        run.client.submit(spec)
        assert run.wait_end("gpt")["phase"] == "completed"
        run.wait("gpt", "its farewell", lambda view: not view["leaving"])
        stored = steps(store, "gpt")
        assert len(stored) == 2, "the first of the run, and the last: twenty were saved"
        assert stored[0][1] == LAST
        checkpoint = load(store, "gpt", *stored[0])
        assert not list(transfer.verify(store, checkpoint))

        run.wait("gpt", "its memory to be given back", lambda _: not any(row["tiers"]["memory"] for row in rows()))
        assert rows()[0]["step"] == LAST
        assert rows()[0]["complete"], "the last step stays on the node, too"
