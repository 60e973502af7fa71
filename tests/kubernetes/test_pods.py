"""What the pods of a job run, as processes of this machine beside a real control plane: environments, arguments, exit codes.

This test is their kubelet and their Job controller, as far as these processes can tell: it resolves names and fields, deletes a
pod by SIGTERM, replaces one that has failed, and starts the launcher again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import charts
import pytest
import scaling_train
import yaml
from kube_schemas import Manifest, component, containers, pods
from kubelet import Kubelet
from scaling_losses import records
from waiting import wait_until

from holdfast.cli.client import Client
from holdfast.cli.endings import COMPLETED, SUSPENDED
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.runtime.probe import probe

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

JOB = "llm"
UID = "7d0e6cf1-4a36-4f0c-9f4e-0f3bd6f3f6aa"  # of the JobSet


@dataclass
class Cluster:
    kubelet: Kubelet
    by_component: dict[str, Manifest]
    client: Client

    def node(self, name: str) -> subprocess.Popen[bytes]:
        return self.kubelet.start(self.by_component["agent"], name, {"spec.nodeName": name})

    def launcher(self, attempt: int) -> subprocess.Popen[bytes]:
        label = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
        return self.kubelet.start(self.by_component["launcher"], f"launcher-{attempt}", {label: UID})

    def job(self) -> dict[str, Any]:
        return next(
            (self.client.job(JOB) for job in self.client.jobs() if job["name"] == JOB), {"phase": "", "step": 0}
        )

    @property
    def steps(self) -> list[int]:
        return [int(record["step"]) for record in records(self.kubelet.root / "out")]


@contextmanager
def cluster(root: Path, memory: Path, *, steps: int) -> Iterator[Cluster]:
    body = {
        "name": JOB,
        "script": scaling_train.__file__,
        "args": ["--steps", str(steps), "--out", str(root / "out"), "--step-s", "0.05"],
        "nodes": 2,
        "mesh": {"dp": 2},
        "spares": 1,
        "checkpoint": {"interval_steps": 20, "store": f"file://{root}/store"},
    }
    (root / "job.yaml").write_text(yaml.safe_dump(body))
    (root / "api-token").write_text("0123456789abcdef")
    render = ["render", str(root / "job.yaml"), "--gpus", "0", "--supervisors", "1", "--grace", "30", "--image", "any"]
    printed = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "kubernetes", *render], check=True, capture_output=True, text=True
    ).stdout
    config, jobset = yaml.safe_load_all(printed)
    etc = root / "etc"
    etc.mkdir()
    for name, text in config["data"].items():
        (etc / name).write_text(text)
    options = StackOptions(directory=root / "stack", environment={"HOLDFAST_API_TOKEN": "0123456789abcdef"})
    with LocalStack(options) as stack, Client(stack.api_url, token="0123456789abcdef") as client:
        places = {
            "holdfast-supervisor-0.holdfast-supervisor.default.svc:8471": stack.control_endpoint,
            "http://holdfast-api.default.svc:8470": stack.api_url,
            "/etc/holdfast/fleet/join-token": stack.joining["HOLDFAST_JOIN_TOKEN_FILE"],
            "/etc/holdfast/job": str(etc),
            "/var/lib/holdfast": str(root / "disk"),
            "/dev/shm/holdfast": str(memory),
        }
        kubelet = Kubelet(root, places, {"HOLDFAST_API_TOKEN": "0123456789abcdef"})
        try:
            yield Cluster(kubelet, {component(pod): pod for pod in pods(jobset)}, client)
        finally:
            kubelet.stop()


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """On a tmpfs, as the volume of a pod is."""
    with tempfile.TemporaryDirectory(prefix="holdfast-pods-", dir="/dev/shm") as path:
        yield Path(path)


def test_a_pod_that_is_deleted_leaves_at_a_saved_step_and_the_launcher_may_be_started_again(
    tmp_path: Path, memory_dir: Path
) -> None:
    with cluster(tmp_path, memory_dir, steps=300) as run:
        nodes = {name: run.node(name) for name in ("machine-a", "machine-b", "machine-c")}
        wait_until(lambda: len(list(run.client.nodes())) == 3, description="three nodes", timeout_s=60)
        launcher = run.launcher(0)
        wait_until(lambda: (run.job()["step"] or 0) >= 30, description="30 steps", timeout_s=240)
        assert {node["pool"] for node in run.client.nodes()} == {JOB}

        launcher.terminate()  # evicted: the job trains on
        assert launcher.wait(30) == 143
        launcher = run.launcher(1)

        gone = next(iter(run.job()["nodes"]))
        nodes[gone].terminate()  # its machine is drained
        assert nodes[gone].wait(60) == SUSPENDED  # not 0: an Indexed Job would count the node as done
        assert gone not in run.job()["nodes"]
        run.node("machine-d")  # the Job controller's replacement
        assert launcher.wait(300) == COMPLETED
        said = (tmp_path / "launcher-1.log").read_text()
        assert f"attached to {JOB}" in said
        assert [incident["kind"] for incident in run.client.incidents(JOB)] == ["maintenance"]
    assert run.steps == list(range(1, 301))  # none twice, none left out
    assert any((tmp_path / "store").iterdir())


def test_a_job_that_loses_all_pods_goes_on_with_others(tmp_path: Path, memory_dir: Path) -> None:
    with cluster(tmp_path, memory_dir, steps=200) as run:
        nodes = [run.node(name) for name in ("machine-a", "machine-b")]
        launcher = run.launcher(0)
        wait_until(lambda: (run.job()["step"] or 0) >= 30, description="30 steps", timeout_s=240)
        for node in nodes:  # the machines of the job are drained, or Kueue takes its quota back
            node.terminate()
        assert [node.wait(240) for node in nodes] == [SUSPENDED, SUSPENDED]
        assert launcher.wait(240) == SUSPENDED
        for name in ("machine-x", "machine-y"):  # nothing of what the others had is there
            run.node(name)
        assert run.launcher(1).wait(300) == COMPLETED
    assert run.steps == list(range(1, 201))


def test_probes_of_the_chart_hold_for_a_real_control_plane(tmp_path: Path) -> None:
    """Without a token and a certificate, as the kubelet asks."""
    found: dict[str, set[str]] = {}
    for manifest in yaml.safe_load_all((charts.RENDERED / "defaults.yaml").read_text()):
        for pod in pods(manifest):
            for container in containers(pod):
                probes = [value for key, value in container.items() if key.endswith("Probe")]
                found[container["name"]] = {each["httpGet"]["path"] for each in probes if "httpGet" in each}
                assert len(probes) >= 2
    assert found == {"supervisor": {"/livez", "/readyz"}, "diagnostics": set(), "redis": set()}
    options = StackOptions(directory=tmp_path, environment={"HOLDFAST_API_TOKEN": "0123456789abcdef"})
    with LocalStack(options) as stack, Client(stack.api_url, token="0123456789abcdef") as client:
        assert client.version()["leader"]
        for path in found["supervisor"]:
            assert probe(stack.api_url + path) == ""
        assert probe(f"{stack.api_url}/v1/jobs").startswith("HTTP 401")
        ready = json.loads((tmp_path / "diagnostics" / "ready.json").read_text())
        assert probe(f"grpc://{ready['endpoint']}") == ""


def test_a_launcher_whose_name_is_taken_is_refused_and_one_whose_script_is_wrong_is_not_tried_again(
    tmp_path: Path, memory_dir: Path
) -> None:
    with cluster(tmp_path, memory_dir, steps=100000) as run:
        for name in ("machine-a", "machine-b"):
            run.node(name)
        launcher = run.launcher(0)
        wait_until(lambda: (run.job()["step"] or 0) >= 1, description="a step", timeout_s=240)
        label = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
        stranger = run.kubelet.start(run.by_component["launcher"], "stranger", {label: "another"})
        assert stranger.wait(60) == 2
        assert "another launcher submitted it" in (tmp_path / "stranger.log").read_text()
        run.client.stop(JOB, "by a test")
        assert launcher.wait(60) == 93
