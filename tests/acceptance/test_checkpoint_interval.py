"""`interval_steps: auto` on a real stack: chosen from what saves cost, the same on every rank, kept over a restart; and a
checkpoint that an operator asks for is answered with how far it came."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import cluster, gpt_job
from waiting import wait_until


@pytest.mark.slow
def test_the_interval_is_chosen_announced_and_kept(tmp_path: Path) -> None:
    spec = gpt_job("auto", tmp_path / "out", dp=2, pp=1, steps=100_000)
    spec["checkpoint"] = {"interval_steps": "auto", "interval_min_s": 0.2, "interval_max_s": 1.0, "keep": 2}
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(spec)
        first = run.wait("auto", "an interval", lambda view: view["interval"] is not None)
        assert first["interval"]["auto"]
        chosen = run.wait("auto", "a measured interval", lambda view: "a save stalls" in view["interval"]["reason"])
        steps = chosen["interval"]["steps"]

        def both_ranks_save_at_multiples() -> bool:
            now = run.client.job("auto")["interval"]["steps"]
            whole = [each["step"] for each in run.client.checkpoints("auto") if each["tiers"]["memory"] == 2]
            return len(whole) >= 2 and all(step % now == 0 for step in whole)

        wait_until(both_ranks_save_at_multiples, description="whole steps at the chosen interval")

        operation = run.client.checkpoint("auto")
        assert "memory (all of 2 ranks), disk (all of 2 ranks), a peer (all of 2 ranks)" in operation["reason"]

        run.inject.crash("auto", 1)
        [incident] = run.wait_resolved("auto", 1)
        assert incident["restored_step"] > 0
        after = run.client.job("auto")["interval"]
        assert after["steps"] <= 4 * steps
        assert "to begin with" not in after["reason"]
        run.client.stop("auto", "seen enough")
        run.wait_end("auto")
