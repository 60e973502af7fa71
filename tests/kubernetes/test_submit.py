"""`holdfast kubernetes submit` through the real kubectl, to an API server of this process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kube_api import KubeApi, serving

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.core,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="not installed: kubectl (make kubernetes-test)"),
]


def submit(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    body = {
        "name": "llm",
        "script": "/train.py",
        "nodes": 2,
        "mesh": {"dp": 2},
        "checkpoint": {"store": "gs://bucket/llm"},
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(body))
    command = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "kubernetes",
        "submit",
        str(path),
        "--namespace",
        "ml",
        *options,
    ]
    environment = {**os.environ, "KUBECONFIG": str(directory / "config"), "HOME": str(directory), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)


def test_a_job_is_submitted_once_and_by_name(tmp_path: Path) -> None:
    api = KubeApi()
    with serving(api, tmp_path / "config"):
        done = submit(tmp_path, "--spares", "1", "--queue", "research")
        assert done.returncode == 0, done.stderr
        assert "submitted to Kubernetes: 3 nodes with spares" in done.stdout
        assert api.objects.keys() == {("configmaps", "ml", "llm-job"), ("jobsets", "ml", "llm")}
        jobset = api.objects["jobsets", "ml", "llm"]
        assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"

        again = submit(tmp_path, "--spares", "1", "--queue", "research")
        assert again.returncode == 0, again.stderr
        assert "was submitted already" in again.stdout
        assert api.requests == ["POST configmaps", "POST jobsets"]  # nothing was changed

        other = submit(tmp_path, "--spares", "2", "--queue", "research")
        assert other.returncode == 2
        assert "a JobSet llm with other contents" in other.stderr
        jobset["status"] = {"terminalState": "Completed"}
        over = submit(tmp_path, "--spares", "1", "--queue", "research")
        assert over.returncode == 2
        assert "has ended (Completed): delete it by" in over.stderr
        assert api.requests == ["POST configmaps", "POST jobsets"]


def test_a_cluster_without_jobset_and_one_that_does_not_answer(tmp_path: Path) -> None:
    with serving(KubeApi(jobset_installed=False), tmp_path / "config"):
        done = submit(tmp_path)
        assert done.returncode == 2
        assert "JobSet is not installed in this cluster" in done.stderr
    done = submit(tmp_path)  # nobody listens there any more
    assert done.returncode == 2
    assert "kubectl get" in done.stderr
