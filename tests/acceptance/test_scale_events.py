"""A node is lost and returns: the arguments of `on_resize`, and the learning rate of every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import scaling_train
import torch
from training import cluster
from waiting import wait_until

SCRIPT = Path(scaling_train.__file__)


def scaled_job(name: str, out: Path, script: Path = SCRIPT) -> dict[str, Any]:
    return {
        "name": name,
        "script": str(script),
        # Long enough that load changes the pace little: an order to save says a step by the pace that was measured before.
        "args": ["--steps", "1000000", "--out", str(out), "--step-s", "0.1"],
        "nodes": 3,
        "nproc_per_node": 1,
        "mesh": {"dp": 3},
        "elastic": {"min_dp": 1, "max_dp": 3},
        "checkpoint": {"interval_steps": 5, "keep": 2},
    }


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scheduled(steps: int) -> list[float]:
    """The learning rate of each step of a run that is never resized."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=scaling_train.BASE_LR)
    scheduler = scaling_train.schedule(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def test_the_learning_rate_follows_the_replicas_down_and_up_and_on_resize_is_called(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with cluster(tmp_path / "stack", nodes=3) as run:
        run.client.submit(scaled_job("scaled", out))
        run.wait_step("scaled", 12)
        lost = run.node_of("scaled", 1)
        run.inject.node_loss(lost)
        smaller = run.wait(
            "scaled", "two replicas", lambda view: view["phase"] == "running" and view["mesh"]["dp"] == 2
        )
        run.wait_step("scaled", smaller["step"] + 10)
        run.inject.crash("scaled", 0)  # a restart of the same size, restored from what two replicas saved
        run.wait_resolved("scaled", 2)
        again = run.wait("scaled", "it to run again", lambda view: view["phase"] == "running")
        run.wait_step("scaled", again["step"] + 10)
        run.inject.node_return(lost)
        grown = run.wait(
            "scaled", "three replicas", lambda view: view["phase"] == "running" and view["mesh"]["dp"] == 3
        )
        run.wait_step("scaled", grown["step"] + 10)
        incidents = run.wait_resolved("scaled", 3)
        run.client.stop("scaled", "seen enough")
        run.wait_end("scaled")
    assert [incident["action"]["kind"] for incident in incidents] == ["scale_down", "restart", "scale_up"]
    down, _, up = (incident["restored_step"] for incident in incidents)

    steps = records(out / "steps.jsonl")
    base = scheduled(max(each["step"] for each in steps))
    for each in steps:
        assert each["rate"] == base[each["step"] - 1] * (each["dp"] / 3), f"of step {each['step']}, bit for bit"
    dps = [each["dp"] for each in steps]
    assert sorted(set(dps)) == [2, 3]
    assert dps == [3] * dps.index(2) + [2] * dps.count(2) + [3] * (len(dps) - dps.count(2) - dps.index(2))

    events = records(out / "events.jsonl")
    resizes = [each for each in events if each["event"] == "resize"]
    reported = {(each["when"], each["generation"], each["rank"]): each for each in resizes}
    assert len(reported) == len(resizes), "once per callback and rank"
    assert set(reported) == {
        (when, g, rank) for when in ("restore", "late") for g, dp in ((2, 2), (4, 3)) for rank in range(dp)
    }
    for (_, generation, _), each in reported.items():
        old, new, restored = (3, 2, down) if generation == 2 else (2, 3, up)
        assert (each["old"], each["new"], each["scheduled"]) == (old, new, restored), "after the state was restored"
        assert each["rate"] == base[restored] * (new / 3)
        assert 0 <= each["old_rank"] < old

    leaving = [each for each in events if each["event"] == "leaving"]
    assert {each["generation"] for each in leaving} == {3, 4}, "not for the lost node, nor for the crash"
    before_growth = [each for each in leaving if each["generation"] == 3 and each["step"] == up]
    assert sorted(each["rank"] for each in before_growth) == [0, 1], (
        "every rank, before exactly the step that is restored"
    )
    assert all(each["reason"].startswith("scale_up: ") for each in before_growth)
    stopped = [each for each in leaving if each["generation"] == 4]
    assert sorted(each["rank"] for each in stopped) == [0, 1, 2]
    assert {each["reason"] for each in stopped} == {"stop: seen enough"}
    assert len({each["step"] for each in stopped}) == 1


def test_an_error_of_a_callback_is_the_scripts_error_and_names_the_callback(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        SCRIPT.read_text().replace(
            "    step = run.restore(state)\n",
            "    @run.on_resize\n"
            "    def rescale(old: hf.World, new: hf.World) -> None:\n"
            "        raise LookupError('no learning rate for two replicas')\n\n"
            "    step = run.restore(state)\n",
        )
    )
    with cluster(tmp_path / "stack", nodes=3) as run:
        run.client.submit(scaled_job("broken", tmp_path / "out", script))
        run.wait_step("broken", 12)
        run.inject.node_loss(run.node_of("broken", 1))
        ended = run.wait_failed("broken")

        def decided() -> list[dict[str, Any]]:
            found = list(run.client.incidents("broken"))
            return found if found[0]["action"] else []

        incidents = wait_until(decided, description="the action of the newest incident: the history follows the state")
    assert incidents[0]["action"]["kind"] == "stop"
    assert "LookupError" in ended["reason"]
    assert any("LookupError" in each["cause"] and "rescale (" in json.dumps(each) for each in incidents), incidents
