"""A job whose nodes are pods of a real control plane: machines are cordoned, drained, tainted, deleted, and lost.

Real: etcd, the API server with the rights that the chart gives, scheduler, Job and node controllers, kubectl, all services,
agents, training. Not real: kubelets (`kubelet.py`), JobSet (a plain Job has its place), the network of pods.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import charts
import pytest
import scaling_train
import yaml
from control_plane import GRACE_S, NAMESPACE, Cluster
from kube_schemas import Manifest, component, environment, pods
from kubelet import Kubelet, Kubelets, kubelets
from scaling_losses import records, undisturbed_losses
from waiting import wait_until

from holdfast.cli import stack_services
from holdfast.cli.client import Client
from holdfast.cli.endings import COMPLETED, DO_NOT_RESTART, SUSPENDED
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.domain.errors import NotFound

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900), charts.NEEDS_HELM]

JOB = "llm"
ACCOUNT = f"{charts.RELEASE}-supervisor"
API_TOKEN = "0123456789abcdef"
IMPENDING = "cloud.google.com/impending-node-termination"
MACHINES = ("gpu-a", "gpu-b", "gpu-c", "gpu-d")
WAIT_S = 180.0
STEPS = 900  # of 0.1 s: a drain takes the grace of its pod, and the job must outlast it


@dataclass
class Run:
    root: Path
    cluster: Cluster
    machines: Kubelets
    launcher: subprocess.Popen[bytes]
    client: Client

    @property
    def records(self) -> list[dict[str, Any]]:
        return records(self.root / "out")

    @property
    def steps(self) -> list[int]:
        return [int(record["step"]) for record in self.records]

    def wait_step(self, step: int) -> None:
        self.wait(f"step {step}", lambda: self.steps and self.steps[-1] >= step)

    def wait_steps(self, more: int) -> None:
        self.wait_step(self.steps[-1] + more)

    def ranks_on(self) -> set[str]:
        return {str(rank["node"]) for rank in self.client.job(JOB)["ranks"]}

    def node(self, name: str) -> dict[str, Any]:
        """Empty when the fleet does not know it."""
        try:
            return self.client.node(name)
        except NotFound:
            return {}

    def problem_of_nodes(self) -> str:
        """Why the supervisor does not see the machines; empty = it does."""
        (nodes,) = [each for each in self.client.kubernetes()["watched"] if each["what"] == "nodes"]
        return str(nodes["problem"])

    def pods_on(self) -> dict[str, str]:
        """Machine → pod, of those that run."""
        return {
            each["spec"]["nodeName"]: each["metadata"]["name"]
            for each in self.cluster.pods()
            if each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]
        }

    def wait(self, what: str, condition: Any) -> Any:
        try:
            return wait_until(condition, description=what, timeout_s=WAIT_S, poll_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.state_text()}") from error

    def wait_moved(self, machine: str) -> None:
        """Until a generation without ranks on the machine is stepping."""
        self.wait(
            f"{machine} to have no ranks",
            lambda: self.client.job(JOB)["phase"] == "running" and machine not in self.ranks_on(),
        )

    def state_text(self) -> str:
        incidents = [(each["kind"], each["state"], each["cause"]) for each in self.client.incidents(JOB)]
        logs = [*self.root.glob("*.log"), *self.root.glob("stack/supervisor/*.log")]
        tails = [f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs]
        return f"incidents: {incidents}\nkubelets: {self.machines.errors[-5:]}\n" + "\n".join(tails)

    def finish(self, code: int = COMPLETED) -> None:
        """Wait for the end, and compare with a run that nothing happened to."""
        assert self.launcher.wait(WAIT_S * 2) == code, self.state_text()
        assert self.steps == list(range(1, self.steps[-1] + 1)), "no step is done twice, and none left out"
        assert [record["loss"] for record in self.records] == undisturbed_losses(len(self.steps), 2)
        assert {each["kind"] for each in self.client.incidents(JOB)} == {"maintenance"}


def job_objects(root: Path, *, steps: int) -> dict[str, Manifest]:
    """Pod templates by component, as `holdfast kubernetes render` makes them: two nodes and a spare."""
    body = {
        "name": JOB,
        "script": scaling_train.__file__,
        "args": ["--steps", str(steps), "--out", str(root / "out"), "--step-s", "0.1"],
        "nodes": 2,
        "mesh": {"dp": 2},
        "spares": 1,
        "checkpoint": {"interval_steps": 20, "store": f"file://{root}/store"},
    }
    (root / "job.yaml").write_text(yaml.safe_dump(body))
    command = [sys.executable, "-m", "holdfast.cli.main", "kubernetes", "render", str(root / "job.yaml")]
    options = ["--namespace", NAMESPACE, "--gpus", "0", "--spares", "1", "--supervisors", "1", "--grace", "30"]
    done = subprocess.run(
        [*command, *options, "--image", "any", "--memory-tier", "64Mi"], check=True, capture_output=True, text=True
    )
    config, jobset = yaml.safe_load_all(done.stdout)
    (root / "etc").mkdir()
    for name, text in config["data"].items():
        (root / "etc" / name).write_text(text)
    return {component(pod): pod for pod in pods(jobset)}


def job_of_agents(template: Manifest) -> Manifest:
    """A plain Job in the place of the JobSet's, without what Kubernetes 1.20 does not have."""
    spec = {"parallelism": 3, "completions": 3, "backoffLimit": 2147483647, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{JOB}-node-0"}, "spec": spec}


def supervisor_settings(cluster: Cluster, root: Path) -> dict[str, str]:
    """Those of the chart, with the place of this API server and a token of the chart's service account."""
    (statefulset,) = [
        each
        for each in yaml.safe_load_all(charts.rendered("supervisor.yaml", watch=True))
        if each["kind"] == "StatefulSet"
    ]
    (pod,) = pods(statefulset)
    settings = environment(pod["spec"]["containers"][0])
    (root / "account-token").write_text(cluster.token(ACCOUNT))
    return {
        **{name: value for name, value in settings.items() if name.startswith("HOLDFAST_KUBERNETES_")},
        "HOLDFAST_KUBERNETES_API": cluster.url,
        "HOLDFAST_KUBERNETES_TOKEN_FILE": str(root / "account-token"),
        "HOLDFAST_KUBERNETES_CA_FILE": str(cluster.ca_file),
        "HOLDFAST_API_TOKEN": API_TOKEN,
    }


@contextmanager
def running(
    root: Path, cluster: Cluster, memory: Path, *, steps: int, machines: Sequence[str] = MACHINES
) -> Iterator[Run]:
    templates = job_objects(root, steps=steps)
    for name in machines:
        cluster.add_machine(name)
    cluster.wait_untainted()
    options = StackOptions(directory=root / "stack", environment=supervisor_settings(cluster, root))
    with LocalStack(options) as stack, Client(stack.api_url, token=API_TOKEN) as client:
        service = f"{charts.RELEASE}-supervisor"
        places = {
            f"{service}-0.{service}.{NAMESPACE}.svc:8471": stack.control_endpoint,
            f"http://{charts.RELEASE}-api.{NAMESPACE}.svc:8470": stack.api_url,
            "/etc/holdfast/fleet/join-token": stack.joining["HOLDFAST_JOIN_TOKEN_FILE"],
            "/etc/holdfast/job": str(root / "etc"),
            "/var/lib/holdfast": f"{root}/disk/{{pod}}",
            "/dev/shm/holdfast": f"{memory}/{{pod}}",
        }
        kubelet = Kubelet(root, places, {"HOLDFAST_API_TOKEN": API_TOKEN})
        with kubelets(cluster, kubelet) as real:
            cluster.post(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", job_of_agents(templates["agent"]))
            wait_until(lambda: len(list(client.nodes())) == 3, description="three nodes", timeout_s=WAIT_S)
            label = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
            launcher = kubelet.start(templates["launcher"], "launcher", {label: "uid"})
            yield Run(root, cluster, real, launcher, client)
            cluster.delete(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{JOB}-node-0")


@pytest.fixture(autouse=True)
def rights(cluster: Cluster) -> Iterator[None]:
    """The chart's account and what it may do."""
    manifests = charts.rendered("bridge.yaml", "serviceaccount.yaml", watch=True)
    cluster.kubectl("apply", "-f", "-", stdin=manifests)
    yield
    cluster.wait_ready()
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=manifests)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services share the machine with a control plane."""
    monkeypatch.setattr(stack_services, "SERVICE_START_TIMEOUT_S", WAIT_S)


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """On a tmpfs, as the volume of a pod is."""
    with tempfile.TemporaryDirectory(prefix="holdfast-drain-", dir="/dev/shm") as path:
        yield Path(path)


def test_a_drained_machine_is_left_before_its_pod_and_no_step_is_done_twice(
    tmp_path: Path, memory_dir: Path, cluster: Cluster
) -> None:
    """`kubectl drain`: cordon, eviction, SIGTERM. The Job makes another pod, which comes to the fourth machine."""
    with running(tmp_path, cluster, memory_dir, steps=STEPS) as run:
        run.wait_step(30)
        before = run.pods_on()
        (free,) = set(MACHINES) - before.keys()
        drained = min(run.ranks_on())
        cluster.kubectl("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
        assert run.machines.exit_codes == {before[drained]: SUSPENDED}, "its pod left in good order"
        run.wait_moved(drained)
        run.wait(f"a pod on {free}", lambda: free in run.pods_on())
        run.wait(f"{free} to be the next spare", lambda: run.node(free).get("state") == "spare")
        assert run.node(drained)["state"] in ("cordoned", "left"), run.node(drained)
        cluster.kubectl("uncordon", drained)
        run.finish()
        assert len(list(run.client.incidents(JOB))) == 1


def test_cordons_and_taints_move_ranks_while_the_pods_stay(tmp_path: Path, memory_dir: Path, cluster: Cluster) -> None:
    """Nothing but the bridge tells the supervisor of these: no pod is touched."""
    with running(tmp_path, cluster, memory_dir, steps=100_000, machines=MACHINES[:3]) as run:
        run.wait_step(30)
        before = run.pods_on()

        cordoned = min(run.ranks_on())
        cluster.kubectl("cordon", cordoned)
        run.wait_moved(cordoned)
        assert "Kubernetes: cordoned" in run.node(cordoned)["reason"]
        cluster.kubectl("uncordon", cordoned)
        run.wait(f"{cordoned} to be a spare again", lambda: run.node(cordoned)["state"] == "spare")

        tainted = min(run.ranks_on())
        cluster.kubectl("taint", "node", tainted, f"{IMPENDING}=:NoSchedule")
        run.wait_moved(tainted)
        assert cordoned in run.ranks_on()

        cluster.kubectl("taint", "node", "--all", "--overwrite", f"{IMPENDING}=:NoSchedule")  # nowhere to go
        run.wait("notices of all", lambda: all(run.node(name)["notices"] for name in MACHINES[:3]))
        run.wait_steps(20)
        cluster.kubectl("taint", "node", "--all", f"{IMPENDING}-")
        run.wait("no notice", lambda: not any(run.node(name)["notices"] for name in MACHINES[:3]))

        cluster.kill("kube-apiserver")
        run.wait("the problem", lambda: "does not answer" in run.problem_of_nodes())
        run.wait_steps(20)
        cluster.start_api_server()
        last = min(run.ranks_on())
        cluster.kubectl("cordon", last)
        run.wait_moved(last)
        assert run.pods_on() == before
        run.client.stop(JOB, "by a test")
        run.finish(DO_NOT_RESTART)


def test_a_lost_machine_is_replaced_and_forgotten_with_its_object(
    tmp_path: Path, memory_dir: Path, cluster: Cluster
) -> None:
    with running(tmp_path, cluster, memory_dir, steps=STEPS) as run:
        run.wait_step(30)
        (free,) = set(MACHINES) - run.pods_on().keys()
        lost = min(run.ranks_on())
        run.machines.power_off(lost)
        run.wait_moved(lost)
        run.wait_steps(10)
        assert GRACE_S > 5, "ranks have moved before the cluster has noticed anything"
        run.wait(f"the Job's replacement on {free}", lambda: free in run.pods_on())
        assert run.node(lost)["state"] == "lost"
        assert not run.node(lost)["notices"], "NotReady is no finding"

        cluster.machines[lost].delete()
        run.wait(f"{lost} to be forgotten", lambda: not run.node(lost))
        assert run.launcher.wait(WAIT_S * 2) == COMPLETED, run.state_text()
        losses = {record["step"]: record["loss"] for record in run.records}
        assert list(losses.values()) == undisturbed_losses(len(losses), 2)
        assert [each["kind"] for each in run.client.incidents(JOB)] == ["node_lost"]
