"""Restarts and swaps leave no mark: every loss and the final weights are those of the uninterrupted run, bit for bit.

A collector listens meanwhile: telemetry changes no bit either, and each incident is one trace across all services.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from losses import losses
from traces import parents_of, root_of
from training import cluster, gpt_job
from waiting import wait_until

from holdfast.domain.tracing import ATTRIBUTE_PREFIX, ATTRIBUTES
from holdfast.runtime.telling.fake_collector import FakeCollector, collecting
from holdfast.runtime.telling.telemetry import ENV_ENDPOINT

INTERVAL_STEPS = 20  # peers keep up on a busy machine: one step has all copies
STEPS = 160
PAUSE_S = 0.3  # until the last fault: the run must outlast the faults, whatever is quicker


def check_trace(incident: dict[str, Any], record: dict[str, Any], collector: FakeCollector, ranks: int) -> None:
    """What the collector got of one incident hangs together, from the first span to the last, and is what the record says."""
    spans = collector.trace(incident["trace_id"])
    parents = parents_of(spans)
    root = root_of(spans)
    signalled = root.name == "worker exited"
    assert signalled or (root.name == "finding" and incident["kind"] == "node_lost"), "nobody announces a lost node"
    chain = {"finding": "worker exited"} if signalled else {}
    chain |= {"incident": "finding", "decision": "incident", "generation change": "incident"}
    chain |= {"prepare": "generation change", "first step": "generation change"}
    chain |= {"stop": "prepare", "fork": "prepare", "stage": "prepare"}
    chain |= dict.fromkeys(("script", "process group", "build", "restore", "step"), "first step")
    chain |= {"fetch": "stage"} if incident["action"]["kind"] == "hot_swap" else {}
    assert parents == chain
    last = [span for span in spans if span.attributes.get("holdfast.generation") == incident["new_generation"]]
    assert sorted(span.attributes["holdfast.rank"] for span in last if span.name == "first step") == [*range(ranks)]
    assert len([span for span in last if span.name == "prepare"]) == ranks, "one rank per node"
    [decision] = [span for span in spans if span.name == "decision"]
    assert decision.attributes["holdfast.reason"] == incident["action"]["reason"]
    assert {span.attributes["holdfast.job"] for span in spans} == {"rough"}
    used = {name.removeprefix(ATTRIBUTE_PREFIX) for span in spans for name in span.attributes}
    assert used <= set(ATTRIBUTES)
    ids = {span.span_id: span for span in spans}
    recorded = {span["span_id"]: span for span in record["spans"]}
    assert recorded.keys() <= ids.keys()
    assert {each.name for key, each in ids.items() if key not in recorded} <= {"fetch"}
    for key, span in recorded.items():
        assert span["parent_id"] == ids[key].parent_id


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.stem}.{name}": tensor
        for path in sorted(out.glob("stage-*.pt"))
        for name, tensor in torch.load(path).items()
    }


def test_losses_and_weights_are_bit_identical_after_restarts_and_a_swap(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with (
        collecting() as collector,
        cluster(tmp_path / "stack", nodes=5, environment={ENV_ENDPOINT: collector.endpoint}) as run,
    ):
        run.client.submit(gpt_job("calm", calm, dp=2, pp=2, steps=STEPS, interval_steps=INTERVAL_STEPS, pause_s=0))
        assert run.wait_end("calm")["phase"] == "completed"

        run.client.submit(
            gpt_job("rough", rough, dp=2, pp=2, steps=STEPS, interval_steps=INTERVAL_STEPS, pause_s=PAUSE_S)
        )
        run.wait_step("rough", 8)
        saved = [run.saved_step("rough")]
        run.inject.crash("rough", 1)
        run.wait_resolved("rough", 1)
        run.wait_step("rough", 22)
        lost = run.node_of("rough", 2)
        # A node that is lost takes with it what it has not sent within the last second.
        wait_until(
            lambda: [span.name for span in collector.spans].count("step") == 4, description="each rank's last span"
        )
        saved.append(run.saved_step("rough", without=lost))
        run.inject.node_loss(lost)
        run.wait_resolved("rough", 2)
        run.wait_step("rough", 38)
        saved.append(run.saved_step("rough"))
        run.inject.crash("rough", 0)
        incidents = run.wait_resolved("rough", 3)
        (rough / "hurry").touch()
        assert run.wait_end("rough")["phase"] == "completed"
        records = [run.client.trace(incident["id"]) for incident in incidents]

    assert [incident["action"]["kind"] for incident in incidents] == ["restart", "hot_swap", "restart"]
    assert incidents[1]["node"] == lost
    assert all(incident["restored_step"] >= step for incident, step in zip(incidents, saved, strict=True)), (
        "no saved work is lost"
    )
    for incident, record in zip(incidents, records, strict=True):
        check_trace(incident, record, collector, ranks=4)
    assert {"holdfast.incidents", "holdfast.recovery.duration", "holdfast.nodes"} <= collector.metrics.keys()
    assert losses(calm) == losses(rough)
    assert set(losses(calm)) == set(range(1, STEPS + 1))
    before, after = weights(calm), weights(rough)
    assert before.keys() == after.keys()
    assert before
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
