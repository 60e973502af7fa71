"""Manifests of a job, its submission by kubectl, and what runs in its pods: what can be decided without a cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kube_schemas
import pod_security
import pytest
import typer
import yaml
from kube_schemas import Manifest, component, containers, pods
from rich.console import Console
from typer.main import get_command
from waiting import wait_until

from holdfast.agent.settings import AgentSettings
from holdfast.cli import last_upload
from holdfast.cli import main as cli
from holdfast.cli.client import Client
from holdfast.cli.endings import DO_NOT_RESTART, SUSPENDED, UNAVAILABLE, USAGE_ERROR
from holdfast.cli.kubernetes import job_source, kubectl, launch, node
from holdfast.cli.kubernetes.manifests import DIGEST, EXIT_MARGIN_S, render
from holdfast.cli.kubernetes.quantities import bytes_of, cpu
from holdfast.cli.kubernetes.submission import Asked
from holdfast.cli.launcher import start_options
from holdfast.domain.errors import Conflict, InvalidSpec, InvalidSpecs, NotFound, Unavailable
from holdfast.runtime.settings import read_settings
from holdfast.wire.jobfile import load_job

JOB = {
    "name": "llm",
    "script": "/workspace/train.py",
    "nodes": 4,
    "nproc_per_node": 8,
    "mesh": {"dp": 4, "pp": 8},
    "spares": 1,
    "checkpoint": {"store": "gs://bucket/llm"},
}
ASKED = Asked(
    image="registry/train:7",
    namespace="ml",
    fleet="main",
    fleet_service="holdfast",
    supervisors=2,
    spares=1,
    gpus=8,
    gpu_resource="nvidia.com/gpu",
    processors="64",
    memory="512Gi",
    memory_tier="128Gi",
    disk_tier="500Gi",
    disk_class="",
    queue="",
    secret="",
    tls_secret="",
    service_account="",
    claims=[],
    selector=[],
    grace_s=120,
    attempts=6,
    user=10001,
    share_hosts=False,
    host_network=False,
)
CHANGES: list[dict[str, Any]] = [
    {},
    {"queue": "research"},
    {"tls_secret": "holdfast-tls", "secret": "my-tokens", "service_account": "trainer"},
    {"disk_class": "local-ssd", "claims": [("data", "/data"), ("code", "/workspace")]},
    {"gpus": 0, "memory": "", "processors": "", "disk_tier": ""},
    {"share_hosts": True, "host_network": True, "selector": [("cloud.google.com/gke-nodepool", "a3")]},
    {"fleet_service": "hf.control", "supervisors": 3, "start": "resume", "spares": 0, "grace_s": 3600},
]


def written(directory: Path, body: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump({**(JOB if body is None else body), **changes}))
    return path


def rendered(directory: Path, asked: Asked = ASKED, **changes: Any) -> list[Manifest]:
    return render(asked, job_source.load(written(directory, **changes)))


def pod_specs(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {component(pod): pod["spec"] for manifest in manifests for pod in pods(manifest)}


def jobs(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {job["name"]: job["template"]["spec"] for job in manifests[-1]["spec"]["replicatedJobs"]}


# ---------------------------------------------------------------- what is rendered


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: ",".join(changes) or "plain")
def test_every_variation_is_valid_safe_and_read_by_those_who_run_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    manifests = rendered(tmp_path, replace(ASKED, **changes))
    assert [manifest["kind"] for manifest in manifests] == ["ConfigMap", "JobSet"]
    for manifest in manifests:
        assert kube_schemas.problems(manifest) == []
        for pod in pods(manifest):
            assert kube_schemas.unread(pod) == set()
            assert kube_schemas.dangling(pod) == set()
            host_network = changes.get("host_network") and component(pod) == "agent"
            assert pod_security.violations(pod) == (["spec.hostNetwork"] if host_network else [])
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert not any("livenessProbe" in each for each in containers(pod))


def test_the_schemas_catch_what_is_wrong(tmp_path: Path) -> None:
    _, jobset = rendered(tmp_path)
    nodes, launcher = (job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"])
    jobset["spec"]["successPolicy"]["operator"] = "Every"
    nodes["podReplacementPolicy"] = "Terminating"
    nodes["template"]["spec"]["toleration"] = []
    launcher["podFailurePolicy"]["rules"][0]["action"] = "Fail"
    launcher["backoffLimit"] = "6"
    assert len(kube_schemas.problems(jobset)) == 5


def test_a_node_is_replaced_whatever_becomes_of_its_pod(tmp_path: Path) -> None:
    manifests = rendered(tmp_path)
    nodes, spec = jobs(manifests)["node"], pod_specs(manifests)["agent"]
    assert nodes["completions"] == nodes["parallelism"] == 5
    assert (nodes["completionMode"], nodes["backoffLimit"]) == ("Indexed", 2**31 - 1)
    assert nodes["podReplacementPolicy"] == "TerminatingOrFailed"
    assert "podFailurePolicy" not in nodes  # it would forbid that
    assert {each["key"]: each.get("tolerationSeconds") for each in spec["tolerations"]} == {
        "node.kubernetes.io/unreachable": 10,
        "node.kubernetes.io/not-ready": 10,
        "nvidia.com/gpu": None,
    }
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = jobs(manifests)["node"]["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()


def test_an_agent_has_its_whole_grace_before_it_is_killed(tmp_path: Path) -> None:
    spec = pod_specs(rendered(tmp_path, replace(ASKED, grace_s=300)))["agent"]
    (agent,) = spec["containers"]
    grace_s = int(kube_schemas.environment(agent)["HOLDFAST_TERMINATION_GRACE_S"])
    assert grace_s == 300
    assert spec["terminationGracePeriodSeconds"] == grace_s + EXIT_MARGIN_S
    assert "lifecycle" not in agent  # a preStop hook would use up the same time


def test_the_memory_tier_is_memory_of_the_container(tmp_path: Path) -> None:
    spec = pod_specs(rendered(tmp_path))["agent"]
    (agent,) = spec["containers"]
    volume = next(each for each in spec["volumes"] if each["name"] == "memory")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "128Gi"}
    assert agent["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8"}
    assert agent["resources"]["requests"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    where = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    command = kube_schemas.command(agent)
    assert command[command.index("--memory") + 1].startswith(where["memory"])
    assert command[command.index("--dir") + 1] == where["disk"]


def test_the_launcher_is_started_again_as_its_exit_code_says(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, replace(ASKED, attempts=3))
    launcher, spec = jobs(manifests)["launcher"], pod_specs(manifests)["launcher"]
    rules = launcher["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {USAGE_ERROR: "FailJob", DO_NOT_RESTART: "FailJob", UNAVAILABLE: "Ignore", SUSPENDED: "Ignore"}
    assert rules[-1]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert (launcher["backoffLimit"], spec["restartPolicy"]) == (3, "Never")  # 1 counts
    assert launcher.get("podReplacementPolicy", "Failed") == "Failed"  # the only value beside a podFailurePolicy
    jobset = manifests[-1]["spec"]
    assert jobset["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["launcher"]}
    assert jobset["failurePolicy"]["maxRestarts"] == 0
    (token,) = [each for each in spec["containers"][0]["env"] if each["name"] == "HOLDFAST_LAUNCHER_TOKEN"]
    assert token["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"


def test_tokens_are_references_to_a_secret(tmp_path: Path) -> None:
    specs = pod_specs(rendered(tmp_path, replace(ASKED, fleet_service="hf.control")))
    (fleet,) = [each for each in specs["agent"]["volumes"] if each["name"] == "fleet"]
    assert fleet["secret"]["secretName"] == "hf-tokens"
    assert [item["key"] for item in fleet["secret"]["items"]] == ["join-token"]  # agents do not get the API's
    (api,) = [each for each in specs["launcher"]["containers"][0]["env"] if each["name"] == "HOLDFAST_API_TOKEN"]
    assert api["valueFrom"]["secretKeyRef"] == {"name": "hf-tokens", "key": "api-token", "optional": True}


def test_queue_label_and_digest(tmp_path: Path) -> None:
    plain, queued = rendered(tmp_path)[-1], rendered(tmp_path, replace(ASKED, queue="research"))[-1]
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in plain["metadata"]["labels"]
    digests = [manifest["metadata"]["annotations"][DIGEST] for manifest in (plain, queued, rendered(tmp_path)[-1])]
    assert digests[0] == digests[2] != digests[1]
    assert rendered(tmp_path, args=["--lr", "1"])[-1]["metadata"]["annotations"][DIGEST] not in digests


# ---------------------------------------------------------------- what the pods run


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: ",".join(changes) or "plain")
def test_the_command_line_of_a_node_is_one_of_the_agent(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the real commands, up to the settings with which the agent would start."""
    asked = replace(ASKED, **changes)
    (agent,) = pod_specs(rendered(tmp_path, asked))["agent"]["containers"]
    given = {"NODE_NAME": "gke-a3-7", "POD_IP": "10.4.0.9"}
    arguments = [
        text.replace("$(NODE_NAME)", given["NODE_NAME"]).replace("$(POD_IP)", given["POD_IP"])
        for text in kube_schemas.command(agent)
    ]
    assert arguments[:3] == ["holdfast", "kubernetes", "node"]
    started: dict[str, str] = {}

    def execve(program: str, argv: list[str], environ: Mapping[str, str]) -> None:
        started.update({name: value for name, value in environ.items() if name.startswith("HOLDFAST_")})

    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    for name, value in kube_schemas.environment(agent).items():
        monkeypatch.setenv(name, value or given[name])
    monkeypatch.setattr(os, "execve", execve)
    parsed: list[list[str]] = []
    monkeypatch.setattr(node.NodePod, "__init__", lambda self, command: parsed.append(list(command)))
    monkeypatch.setattr(node.NodePod, "run", lambda self: SUSPENDED)
    assert invoke(arguments[1:]) == SUSPENDED
    assert parsed[0][:3] == [sys.executable, "-m", "holdfast.cli.main"]
    assert invoke(parsed[0][3:]) == 0
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    settings = read_settings(AgentSettings)
    assert settings.node == "gke-a3-7"
    assert settings.address == "10.4.0.9"
    assert (settings.capacity, settings.pool, settings.fleet) == (8, "llm", "main")
    assert len(settings.endpoints) == asked.supervisors
    assert settings.memory_dir == Path("/dev/shm/holdfast/gke-a3-7")
    assert not settings.resets.possible
    if asked.tls_secret:
        assert (settings.tls_cert, settings.tls_ca) == (
            Path("/etc/holdfast/tls/tls.crt"),
            Path("/etc/holdfast/tls/ca.crt"),
        )


@pytest.mark.parametrize("start", ["", "resume", "fresh"])
def test_the_command_line_of_the_launcher_is_one_of_run(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = pod_specs(rendered(tmp_path, replace(ASKED, start=start)))["launcher"]["containers"]
    script = tmp_path / "train.py"
    script.write_text("")
    job_file = written(tmp_path, script=str(script))
    arguments = [str(job_file) if text.endswith("job.yaml") else text for text in kube_schemas.command(container)]
    asked: list[str] = []

    def run(self: launch.LauncherPod, client: Client, token: str, start: str) -> int:
        asked.extend([client.url, token, start])
        return 0

    monkeypatch.setattr(launch.LauncherPod, "run", run)
    for name, value in kube_schemas.environment(container).items():
        monkeypatch.setenv(name, value or "uid-1")
    assert invoke(arguments[1:]) == 0
    assert asked == ["http://holdfast-api.ml.svc:8470", "uid-1", start]


def test_a_launcher_that_the_next_pod_could_not_follow_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LAUNCHER_TOKEN", "")
    with pytest.raises(InvalidSpec, match="jobset-uid: update JobSet"):
        invoke(["kubernetes", "launcher", str(written(tmp_path))])


def invoke(arguments: list[str]) -> int:
    command = get_command(cli.application(arguments[0]))
    try:
        return int(command.main(args=arguments, prog_name="holdfast", standalone_mode=False) or 0)
    except typer.Exit as end:
        return end.exit_code


AGENT = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
def received(number, frame):
    (here / "received").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, received)
runs = here / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
if len(runs.read_text()) == 1:
    sys.exit(1)  # it crashes once
(here / "ready").touch()
while True:
    time.sleep(0.01)
"""
POD = """
import sys
from holdfast.cli.kubernetes.node import NodePod
sys.exit(NodePod([sys.executable, sys.argv[1] + "/agent.py", sys.argv[1]]).run())
"""


def test_an_agent_that_crashes_is_started_again_and_one_that_has_left_does_not_count_as_done(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    with subprocess.Popen([sys.executable, "-c", POD, str(tmp_path)]) as pod:
        try:
            wait_until((tmp_path / "ready").exists, description="a second agent")
            pod.terminate()
            assert pod.wait(30) == SUSPENDED
        finally:
            pod.kill()
    assert (tmp_path / "received").read_text() == str(int(signal.SIGTERM))
    assert (tmp_path / "runs").read_text() == "xx"


def test_an_agent_that_is_set_up_wrongly_ends_its_pod(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import sys; sys.exit(2)")
    assert subprocess.run([sys.executable, "-c", POD, str(tmp_path)], timeout=60, check=False).returncode == USAGE_ERROR


FOUND = {"phase": "failed", "permanent_failure": False, "checkpoint_step": 20, "goes_on_from": None}


@pytest.mark.parametrize(
    ("found", "start", "saved", "options"),
    [
        (None, "", False, []),
        (None, "resume", False, ["--resume"]),
        (None, "fresh", False, ["--fresh"]),
        ({**FOUND, "phase": "running"}, "resume", True, []),  # a launcher that was started again: the start is over
        ({**FOUND, "phase": "suspended"}, "", True, []),
        ({**FOUND, "phase": "completed"}, "fresh", True, []),
        (FOUND, "", True, ["--resume"]),
        (FOUND, "fresh", True, ["--resume"]),  # only its first attempt starts at step 0
        (
            {**FOUND, "checkpoint_step": 0},
            "",
            False,
            ["--fresh"],
        ),  # nothing was saved: it would be refused as not there
        ({**FOUND, "checkpoint_step": 0}, "", True, ["--resume"]),
        ({**FOUND, "checkpoint_step": 0, "goes_on_from": 100}, "", False, ["--resume"]),
        ({**FOUND, "permanent_failure": True}, "", True, []),
    ],
)
def test_how_a_launcher_starts(found: dict[str, Any] | None, start: str, saved: bool, options: list[str]) -> None:
    assert start_options(found, start, lambda: saved) == options


class Uploading:
    """An API whose job has its last checkpoint on its way for some questions, and then answers no more."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def job(self, name: str) -> dict[str, Any]:
        self.left -= 1
        if self.left < -1:
            raise Unavailable("no supervisor answers")
        return {"leaving": self.left >= 0}


@pytest.mark.parametrize(("questions", "waited_s"), [(0, 0.0), (3, 3.0), (10**6, last_upload.WAIT_S)])
def test_the_nodes_stay_for_the_last_upload_but_not_for_ever(questions: int, waited_s: float) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    last_upload.wait_for_upload(
        Uploading(questions),  # type: ignore[arg-type]
        "llm",
        Console(quiet=True),
        clock=lambda: clock[0],
        sleep=sleep,
    )
    assert clock[0] == waited_s


# ---------------------------------------------------------------- the job file


def test_the_policy_travels_with_the_job_and_the_job_has_nodes_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "swap.py").write_text("def decide(incident, job): ...\n")
    config, jobset = rendered(tmp_path, policy={"file": "swap.py", "params": {"swaps": 3}})
    assert config["data"]["policy.py"] == "def decide(incident, job): ...\n"
    (agent,) = pod_specs([config, jobset])["agent"]["containers"]
    command = kube_schemas.command(agent)
    assert command[command.index("--pool") + 1] == "llm"
    for name, text in config["data"].items():  # as the launcher finds them
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / name).write_text(text)
    script = tmp_path / "train.py"
    script.write_text("")
    path = tmp_path / "etc" / "job.yaml"
    path.write_text(path.read_text().replace("/workspace/train.py", str(script)))
    spec = load_job(path)
    assert (spec.pool, spec.policy_spec.source) == ("llm", "def decide(incident, job): ...\n")
    assert dict(spec.policy_spec.params) == {"swaps": 3}
    assert spec.checkpoint.store == "gs://bucket/llm"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"script": "train.py"}, r"job\.yaml:\d+: script: 'train.py'.*an absolute path in the container image"),
        ({"policy": "missing.py"}, r"job\.yaml:\d+: policy: 'missing.py'.*an existing file of this machine"),
        ({"nodez": 4}, r"job\.yaml:\d+: nodez.*did you mean 'nodes'"),
        ({"nodes": "four"}, r"job\.yaml:\d+: nodes"),
        ({"mesh": {"dp": 3, "pp": 8}}, "mesh"),
    ],
)
def test_a_wrong_job_file_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        rendered(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": "my image"}, "--image: 'my image'"),
        ({"namespace": "ML"}, "--namespace: 'ML'"),
        ({"fleet_service": "a.b.c"}, "--fleet-service"),
        ({"memory": "64Gi"}, "--memory: '64Gi'.*more than the memory tier"),
        ({"memory_tier": "lots"}, "--memory-tier: 'lots'.*64Gi"),
        ({"memory_tier": "0Gi"}, "--memory-tier"),
        ({"disk_tier": "500GB"}, "--disk-tier"),
        ({"disk_class": "ssd", "disk_tier": ""}, "--disk-class.*--disk-tier"),
        ({"gpus": 4}, "--gpus: 4.*at least 8"),
        ({"gpu_resource": "gpu"}, "--gpu-resource"),
        ({"processors": "many"}, "--cpu: 'many'"),
        ({"queue": "a/b"}, "--queue"),
        ({"secret": "My_Secret"}, "--secret"),
        ({"claims": [("data", "data")]}, "--claim"),
        ({"claims": [("data", "/dev/shm/holdfast")]}, "--claim.*not in"),
        ({"claims": [("data", "/var/lib")]}, "--claim.*not in"),
        ({"claims": [("a", "/x"), ("b", "/x")]}, "each path once"),
        ({"selector": [("a b", "c")]}, "--node-selector"),
    ],
)
def test_wrong_options_are_named_with_what_would_be_right(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSpec) as found:
        rendered(tmp_path, replace(ASKED, **changes))
    assert re.search(reason, str(found.value))


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecs) as found:
        rendered(tmp_path, replace(ASKED, image="", namespace="", gpus=3))
    assert [problem.field for problem in found.value.problems] == ["--image", "--namespace", "--gpus"]


@pytest.mark.parametrize(("name", "good"), [("a" * 44, True), ("a" * 45, False), ("7b", False)])
def test_names_of_pods_fit(tmp_path: Path, name: str, good: bool) -> None:
    if good:
        rendered(tmp_path, name=name)
    else:
        with pytest.raises(InvalidSpec, match=r"^name: "):
            rendered(tmp_path, name=name)


def test_quantities() -> None:
    assert (bytes_of("--memory", "1.5Gi"), bytes_of("--memory", "2k")) == (3 * 2**29, 2000)
    assert cpu("--cpu", "500m") == "500m"
    for text in ("", "-1Gi", "1e3", "Gi", "1 Gi"):
        with pytest.raises(InvalidSpec):
            bytes_of("--memory", text)
    for text in ("0", "0m", "1.5m", "x"):
        with pytest.raises(InvalidSpec):
            cpu("--cpu", text)


# ---------------------------------------------------------------- submission

KUBECTL = """#!/bin/sh
# Answers as kubectl does, for a cluster that is a directory: the JobSet in there, and what was applied to it.
printf '%s\\n' "$*" >> "$CLUSTER/calls"
case "$*" in
  *get*) cat "$CLUSTER/jobset.json" 2>/dev/null; exit 0 ;;
  *apply*) cat > "$CLUSTER/applied.yaml" ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER", str(tmp_path))
    return tmp_path


def submit(cluster: Path, *options: str) -> int:
    arguments = [str(written(cluster)), "--image", "registry/train:7", "--namespace", "ml", *options]
    return invoke(["kubernetes", "submit", *arguments])


def test_a_submission_applies_what_render_prints(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(cluster, "--context", "prod") == 0
    said = capsys.readouterr().out
    assert "5 nodes with spares" in said
    assert "kubectl logs -n ml -f job/llm-launcher-0" in said
    calls = (cluster / "calls").read_text().splitlines()
    assert calls[0].startswith("--context=prod get jobset.jobset.x-k8s.io llm --namespace=ml")
    assert calls[1] == "--context=prod apply --filename=-"
    invoke(["kubernetes", "render", str(written(cluster)), "--image", "registry/train:7", "--namespace", "ml"])
    assert capsys.readouterr().out == (cluster / "applied.yaml").read_text()
    assert [each["kind"] for each in yaml.safe_load_all((cluster / "applied.yaml").read_text())] == [
        "ConfigMap",
        "JobSet",
    ]


def test_the_same_submission_again_changes_nothing_and_another_is_refused(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(cluster)
    *_, jobset = yaml.safe_load_all((cluster / "applied.yaml").read_text())
    (cluster / "jobset.json").write_text(json.dumps(jobset))
    capsys.readouterr()
    assert submit(cluster) == 0
    assert "was submitted already" in capsys.readouterr().out
    (cluster / "applied.yaml").unlink()
    for changed, reason in (
        (["--spares", "3"], "other contents"),
        (["--memory-tier", "9Gi"], "other contents"),
    ):
        with pytest.raises(Conflict, match=reason):
            submit(cluster, *changed)
    (cluster / "jobset.json").write_text(json.dumps({**jobset, "status": {"terminalState": "Failed"}}))
    with pytest.raises(Conflict, match=r"has ended \(Failed\): delete it"):
        submit(cluster)
    assert not (cluster / "applied.yaml").exists()


def test_without_kubectl_and_with_one_that_fails(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cluster / "bin" / "kubectl"
    program.write_text("#!/bin/sh\necho 'error: no matches for kind \"JobSet\"' >&2; exit 1\n")
    with pytest.raises(Unavailable, match=r"exit code 1.*JobSet is not installed"):
        submit(cluster)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(Unavailable, match="has not answered within"):
        kubectl.run("get", timeout_s=0.1)
    program.write_text("#!/bin/sh\necho no json\n")
    with pytest.raises(Unavailable, match="output that is not JSON"):
        submit(cluster)
    monkeypatch.setenv("PATH", str(cluster))
    with pytest.raises(NotFound, match="kubectl, which submits to the cluster, is not installed"):
        submit(cluster)


def test_options_that_contradict_each_other(cluster: Path) -> None:
    with pytest.raises(InvalidSpec, match="either --fresh or --resume"):
        submit(cluster, "--fresh", "--resume")
    with pytest.raises(InvalidSpec, match="NAME:PATH"):
        submit(cluster, "--claim", "data")
