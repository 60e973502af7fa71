"""A job goes on where another one was saved in an object store, under another name and with fewer replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import cluster, gpt_job, losses
from waiting import wait_until

from holdfast.domain.errors import InvalidSpec


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_starts_from_the_last_save_of_another_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    before, after = tmp_path / "before", tmp_path / "after"
    with cluster(tmp_path / "stack", nodes=2) as run:
        first = gpt_job("before", before, dp=2, pp=1, steps=100_000)
        first["checkpoint"] |= {"store": url, "store_interval_s": 3600}
        run.client.submit(first)
        run.wait_step("before", 20)
        saved = run.client.checkpoint("before", grace_s=60.0)
        assert "the object store" in saved["reason"]
        assert "not all of it yet" not in saved["reason"]
        step = int(saved["reason"].split()[1])
        run.client.stop("before", "enough")
        run.wait("before", "the end", lambda view: view["phase"] == "stopped")

        heir = gpt_job("after", after, dp=1, pp=1, steps=step + 30, min_dp=1)
        heir["checkpoint"] |= {"resume": f"{url}/before@{step}"}
        with pytest.raises(InvalidSpec, match=f"a complete step of before in .*: .*{step} "):
            run.client.submit({**heir, "checkpoint": {"resume": f"{url}/before@3"}})
        run.client.submit(heir)
        assert run.wait_end("after")["phase"] == "completed"
    wait_until(lambda: losses(after), description="the losses")
    assert min(losses(after)) == step + 1
    assert losses(after)[step + 1] == pytest.approx(losses(before)[step + 1], rel=1e-3)
