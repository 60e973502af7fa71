"""A job goes on where another one was saved in an object store, under another name and with fewer replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from losses import losses
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training import Cluster, cluster, gpt_job
from typer.testing import CliRunner, Result
from waiting import wait_until

from holdfast.cli.main import application
from holdfast.domain.errors import Conflict, InvalidSpec


@pytest.mark.slow
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

        heir = gpt_job("after", after, dp=1, pp=1, steps=step + 30, min_dp=1, pause_s=0)
        heir["checkpoint"] |= {"resume": f"{url}/before@{step}"}
        with pytest.raises(InvalidSpec, match=f"a complete step of before in .*: .*{step} "):
            run.client.submit({**heir, "checkpoint": {"resume": f"{url}/before@3"}})
        run.client.submit(heir)
        assert run.wait_end("after")["phase"] == "completed"
    wait_until(lambda: losses(after), description="the losses")
    assert min(losses(after)) == step + 1
    assert losses(after)[step + 1] == pytest.approx(losses(before)[step + 1], rel=1e-3)


def holdfast(*arguments: str) -> Result:
    return CliRunner().invoke(application(arguments[0]), arguments)


def test_a_job_that_was_stopped_goes_on_under_its_name_as_if_it_had_never_been(tmp_path: Path) -> None:
    """Without an object store. Until somebody says what is to become of its checkpoints, nothing runs under the name."""
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(gpt_job("x", rough, dp=2, pp=1, steps=100_000))
        run.wait_step("x", 12)
        run.client.stop("x", "enough")
        over = run.wait("x", "its last save on disk", lambda view: bool(view["kept"] and view["kept"]["on_disk"]))
        step = over["kept"]["step"]
        assert step == over["checkpoint_step"] > 0
        assert all(Path(directory).is_dir() for directory in over["kept"]["directories"].values())

        due = step + 10  # one save: of several, one may be skipped while others are still being copied
        longer = gpt_job("x", rough, dp=2, pp=1, steps=step + 15, interval_steps=due, pause_s=0)
        with pytest.raises(Conflict, match=rf"x has checkpoints, the newest of step {step} .* --resume .* --fresh"):
            run.client.submit(longer)
        run.client.submit(longer, resume=True)
        assert run.client.job("x")["goes_on_from"] == step
        assert run.wait_end("x")["phase"] == "completed"

        resumed = exported(run, "x", due, tmp_path)
        deleted = holdfast("checkpoints", "prune", "x", "--yes", "--api", run.stack.api_url)
        assert deleted.exit_code == 0, deleted.output
        run.wait("x", "its checkpoints to be gone", lambda view: view["kept"] is None)

        run.client.submit(gpt_job("calm", calm, dp=2, pp=1, steps=step + 15, interval_steps=due, pause_s=0))
        assert run.wait_end("calm")["phase"] == "completed"
        undisturbed = exported(run, "calm", due, tmp_path)
    assert losses(rough) == losses(calm), "bit for bit"
    assert resumed.keys() == undisturbed.keys()
    assert all(same(resumed[name], undisturbed[name]) for name in resumed), "what the nodes export is the trained state"


def exported(run: Cluster, job: str, step: int, directory: Path) -> dict[str, Any]:
    """The checkpoint of a job that is over, the newest and of this step, from its nodes, as torch reads it without Holdfast."""
    wait_until(lambda: run.saved_step(job) == step, description=f"{job}: its nodes' reports of step {step}")
    to, flat = directory / f"{job}-exported", directory / f"{job}.pt"
    result = holdfast("checkpoints", "export", job, "--to", str(to), "--api", run.stack.api_url)
    assert result.exit_code == 0, result.output
    dcp_to_torch_save(to, flat)
    return flattened(torch.load(flat, weights_only=False))


def flattened(state: Any, path: str = "") -> dict[str, Any]:
    children = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    below = [flattened(child, f"{path}/{key}") for key, child in children]
    return {path: state} if not below else {name: value for each in below for name, value in each.items()}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
