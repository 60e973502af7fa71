"""A campaign of real faults: whatever is killed, in whatever order, the run goes on and is the run that it would have been.

    HOLDFAST_CAMPAIGN_S=600 HOLDFAST_CAMPAIGN_SEED=7 pytest tests/acceptance/test_campaign.py -s

The seed draws the faults and their victims; where exactly a fault strikes depends on the machine. Every fault is struck once
before any is struck again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import DISTURBS, FAULTS, Fault, Victim
from leftovers import MARK, marked, memory_of
from training import Cluster, cluster, gpt_job, losses
from waiting import wait_until

CAMPAIGN_S = float(os.environ.get("HOLDFAST_CAMPAIGN_S", "15"))
SEED = int(os.environ.get("HOLDFAST_CAMPAIGN_SEED", "1"))
INTERVAL_STEPS = 10
ADVANCE_STEPS = 5
REWORK_STEPS_MAX = 4 * INTERVAL_STEPS  # a shard on its way to a peer when its node is lost costs one interval more
NOTICE_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 45.0
GENERATIONS_MAX = 15
CALM_STEP_S_MAX = 0.1
STEPS_MAX = 1_000_000  # it is stopped when the campaign is over


def spec(name: str, out: Path, steps: int) -> dict[str, Any]:
    job = gpt_job(name, out, dp=2, pp=2, steps=steps, interval_steps=INTERVAL_STEPS)
    # A hang of this tiny model shows in two seconds.
    return {**job, "hang": {"floor_s": 2.0, "factor": 3.0, "init_s": 60.0}}


def settle(run: Cluster, job: str, what: str) -> None:
    """Until one generation runs on all ranks, with no incident open, and has stepped on."""
    began: dict[str, Any] = {}

    def settled() -> bool:
        view = run.client.job(job)
        assert view["phase"] not in ("failed", "stopped", "completed"), f"{what} ended the job: {view['reason']}"
        healthy = view["phase"] == "running" and view["incident"] is None and len(view["ranks"]) == 4
        if not healthy or began.get("generation") != view["generation"]:
            began.clear()
            if healthy:
                began.update(generation=view["generation"], step=view["step"] or 0)
            return False
        return bool((view["step"] or 0) >= began["step"] + ADVANCE_STEPS)

    wait_until(settled, description=f"{job} to be healthy after {what}", timeout_s=SETTLE_TIMEOUT_S, poll_s=0.02)


def rounds(chance: random.Random) -> Iterator[Fault]:
    while True:
        yield from chance.sample(FAULTS, len(FAULTS))


def calm_breaker(run: Cluster) -> None:
    """The fleet's breaker rightly opens at 30 generations in five minutes: whoever breaks things on purpose says so."""
    if run.client.breaker()["changes"] > GENERATIONS_MAX:
        run.client.reset_breaker("a campaign of faults made on purpose")


def strike(victim: Victim, fault: Fault) -> None:
    run, job = victim.run, victim.job
    before = run.client.job(job)["generation"]
    began = time.monotonic()
    what = fault(victim)
    if fault in DISTURBS:
        wait_until(
            lambda: run.client.job(job)["generation"] != before,
            description=f"another generation after {what}",
            timeout_s=NOTICE_TIMEOUT_S,
            poll_s=0.02,
        )
    victim.settle(what)
    print(f"{time.monotonic() - began:5.1f} s  step {run.client.job(job)['step']:6d}  {what}", flush=True)


@pytest.mark.timeout(int(3 * CAMPAIGN_S) + 300)
def test_a_run_survives_everything_and_is_none_the_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"{os.getpid()}-{random.random()}"
    monkeypatch.setenv(MARK, mark)
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=5) as run:
        run.client.submit(spec("rough", rough, STEPS_MAX))
        run.wait_step("rough", 2 * INTERVAL_STEPS)
        chance = random.Random(SEED)
        victim = Victim(run, "rough", chance, lambda what: settle(run, "rough", what))
        over = time.monotonic() + CAMPAIGN_S
        for fault in rounds(chance):
            calm_breaker(run)
            strike(victim, fault)
            if time.monotonic() > over:
                break
        incidents = list(run.client.incidents("rough"))
        assert marked(mark)
        run.client.stop("rough", "the campaign is over")
        run.wait("rough", "its stop", lambda view: view["phase"] == "stopped")
        reached = losses(rough)
        run.client.submit(spec("calm", calm, max(reached)))
        assert run.wait_end("calm", timeout_s=90.0 + max(reached) * CALM_STEP_S_MAX)["phase"] == "completed"

    assert set(reached) == set(range(1, max(reached) + 1))  # none skipped, none twice
    different = {step for step, loss in losses(calm).items() if reached[step] != loss}
    assert not different, f"{len(different)} losses differ, the first at step {min(different)}"
    assert max(incident["rework_steps"] or 0 for incident in incidents) <= REWORK_STEPS_MAX, incidents
    assert all(incident["state"] == "resolved" for incident in incidents), incidents
    wait_until(lambda: not marked(mark), description="every process of the stack to be gone")
    assert memory_of(os.getpid()) == []
