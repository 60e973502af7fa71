"""`holdfast kubernetes render` and `submit`, and the commands that the pods run."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape

from holdfast.cli.client import Client
from holdfast.cli.connection import default_url
from holdfast.cli.kubernetes import job_source, kubectl
from holdfast.cli.kubernetes.launch import LauncherPod
from holdfast.cli.kubernetes.manifests import DIGEST, JOBSET_UID, Manifest, config_name, render
from holdfast.cli.kubernetes.node import NodePod
from holdfast.cli.kubernetes.submission import Asked
from holdfast.cli.launcher import ENV_LAUNCHER, Fresh, Launcher, Resume, chosen_start
from holdfast.cli.terminal import Terminal
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.words import plural
from holdfast.wire.jobfile import load_job

GRACE_S, GRACE_S_MAX = 120, 3600
ATTEMPTS = 6
SUPERVISORS_MAX = 9
USER = 10001  # the user of the container images of deploy/Dockerfile
IMAGE = "holdfast/trainer:0.1.0"

app = typer.Typer(
    help="Run jobs on a Kubernetes cluster that has JobSet: render the manifests, or submit them.", no_args_is_help=True
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)]
Image = Annotated[str, typer.Option(help="Container image with Holdfast, torch and the job's script.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the job.")]
Fleet = Annotated[str, typer.Option(help="Name of the fleet, as set in the chart (fleet).")]
FleetService = Annotated[
    str, typer.Option(help="The chart's release: NAME, or NAME.NAMESPACE if it is in another namespace.")
]
Supervisors = Annotated[int, typer.Option(help="Number of supervisors of the release.", min=1, max=SUPERVISORS_MAX)]
Spares = Annotated[
    int | None,
    typer.Option(help="Additional nodes, which replace failed nodes. Default: the job's.", min=0, show_default=False),
]
Gpus = Annotated[
    int | None,
    typer.Option(help="GPUs per node; 0 = none. Default: nproc_per_node of the job.", min=0, show_default=False),
]
GpuResource = Annotated[str, typer.Option(help="The cluster's resource name for GPUs.")]
Processors = Annotated[str, typer.Option("--cpu", help="Reserved processors per node, such as 64.")]
Memory = Annotated[str, typer.Option(help="Memory per node: request and limit; includes the memory tier.")]
MemoryTier = Annotated[
    str, typer.Option(help="Size of /dev/shm per node: twice the state of its ranks, plus the needs of data loaders.")
]
DiskTier = Annotated[str, typer.Option(help="Size of the disk tier per node. Default: not limited.")]
DiskClass = Annotated[
    str,
    typer.Option(
        help="Storage class of a volume per pod for the disk tier. Default: the machine's own disk (emptyDir)."
    ),
]
Queue = Annotated[str, typer.Option(help="Kueue's local queue that admits the job.")]
Secret = Annotated[
    str, typer.Option(help="Secret with join-token and api-token. Default: RELEASE-tokens, the chart's.")
]
TlsSecret = Annotated[str, typer.Option(help="Secret with tls.crt, tls.key and ca.crt, for mutual TLS.")]
ApiUrl = Annotated[
    str,
    typer.Option(
        help="URL of the API for the launcher's pod. Default: the chart's service, with https if there is a --tls-secret."
    ),
]
ServiceAccount = Annotated[str, typer.Option(help="Service account of the pods, for access to an object store.")]
Claims = Annotated[
    list[str] | None,
    typer.Option("--claim", help="A volume claim in every pod, as NAME:PATH. Repeatable.", show_default=False),
]
Selector = Annotated[
    list[str] | None,
    typer.Option("--node-selector", help="Only machines with this label, KEY=VALUE. Repeatable.", show_default=False),
]
Grace = Annotated[
    int,
    typer.Option(help="Seconds from SIGTERM in which a node saves and moves its ranks.", min=10, max=GRACE_S_MAX),
]
Attempts = Annotated[int, typer.Option(help="Number of retries of a failed job (exit code 1).", min=0, max=100)]
User = Annotated[int, typer.Option(help="User and group id of the pods' processes; 0 = root.", min=0, max=2**31 - 1)]
ShareHosts = Annotated[
    bool, typer.Option("--share-hosts", help="Allow several nodes per machine: for tests on small clusters.")
]
HostNetwork = Annotated[
    bool, typer.Option("--host-network", help="Use the machines' own network, for their fast NICs.")
]


def _manifests(
    *,
    job_file: JobFile,
    image: Image = IMAGE,
    namespace: Namespace = "default",
    fleet: Fleet = "main",
    fleet_service: FleetService = "holdfast",
    supervisors: Supervisors = 2,
    spares: Spares = None,
    gpus: Gpus = None,
    gpu_resource: GpuResource = "nvidia.com/gpu",
    processors: Processors = "",
    memory: Memory = "",
    memory_tier: MemoryTier = "8Gi",
    disk_tier: DiskTier = "",
    disk_class: DiskClass = "",
    queue: Queue = "",
    secret: Secret = "",
    tls_secret: TlsSecret = "",
    api_url: ApiUrl = "",
    service_account: ServiceAccount = "",
    claims: Claims = None,
    selector: Selector = None,
    grace: Grace = GRACE_S,
    attempts: Attempts = ATTEMPTS,
    user: User = USER,
    share_hosts: ShareHosts = False,
    host_network: HostNetwork = False,
    resume: Resume = False,
    fresh: Fresh = False,
) -> list[Manifest]:
    """Return the manifests for the options of `render` and `submit`. Raises `InvalidSpec`."""
    start = chosen_start(resume=resume, fresh=fresh)
    job = job_source.load(job_file)
    asked = Asked(
        image=image,
        namespace=namespace,
        fleet=fleet,
        fleet_service=fleet_service,
        supervisors=supervisors,
        spares=job.spec.spares if spares is None else spares,
        gpus=job.spec.nproc_per_node if gpus is None else gpus,
        gpu_resource=gpu_resource,
        processors=processors,
        memory=memory,
        memory_tier=memory_tier,
        disk_tier=disk_tier,
        disk_class=disk_class,
        queue=queue,
        secret=secret,
        tls_secret=tls_secret,
        api_url=api_url,
        service_account=service_account,
        claims=[_pair("--claim", claim, ":", "NAME:PATH") for claim in claims or []],
        selector=[_pair("--node-selector", each, "=", "KEY=VALUE") for each in selector or []],
        grace_s=grace,
        attempts=attempts,
        user=user,
        share_hosts=share_hosts,
        host_network=host_network,
        start=start,
    )
    return render(asked, job)


def _pair(option: str, text: str, separator: str, expected: str) -> tuple[str, str]:
    left, found, right = text.partition(separator)
    if not found or not left:
        raise InvalidSpec(option, text, expected)
    return left, right


def _with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `_manifests`, which the command receives as `given`, before the command's own options."""
    shared, own = (inspect.signature(each, eval_str=True).parameters.values() for each in (_manifests, command))
    parameters = [*shared, *(each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command(
    "render",
    epilog="Example: [bold]holdfast kubernetes render job.yaml --spares 1 --memory-tier 64Gi | kubectl apply -f -[/]",
)
@_with_job_options
def render_command(**given: Any) -> None:
    """Print the manifests of a job: a ConfigMap with the job file, and a JobSet with its nodes and its launcher.

    They do not contain the control plane, which is installed once, by the chart in deploy/kubernetes/chart. Two calls with the
    same arguments print the same manifests.
    """
    sys.stdout.write(documents(_manifests(**given)))


@app.command(
    epilog="Example: [bold]holdfast kubernetes submit job.yaml --image REGISTRY/train:7 --spares 1 --memory-tier 64Gi[/]"
)
@_with_job_options
def submit(
    *,
    context: Annotated[str, typer.Option(help="kubectl's context. Default: the current one.", show_default=False)] = "",
    **given: Any,
) -> None:
    """Submit a job to a cluster: apply the output of `render` by `kubectl apply`.

    Repeating the same submission changes nothing. Another submission of the same name is refused.
    """
    manifests = _manifests(**given)
    console = Terminal(highlight=False, emoji=False)
    metadata = manifests[-1]["metadata"]
    name, namespace, digest = metadata["name"], metadata["namespace"], metadata["annotations"][DIGEST]
    there = kubectl.jobset(name, namespace, context)
    if there is not None:
        _require_same(there, name, namespace, digest)
    kubectl.apply(documents(manifests), context)
    node, _ = manifests[-1]["spec"]["replicatedJobs"]
    pods = plural(node["template"]["spec"]["parallelism"], "node")
    done = (
        "was submitted already" if there is not None else f"submitted to Kubernetes: {pods} with spares, and a launcher"
    )
    console.print(f"[bold]{escape(name)}[/] {done}", soft_wrap=True)
    console.print(f"follow: kubectl logs -n {namespace} -f job/{name}-launcher-0", soft_wrap=True)
    console.print(
        f"end:    kubectl delete -n {namespace} jobset/{name} configmap/{config_name(name)}    [dim]after `holdfast jobs stop "
        f"{escape(name)}`, which saves[/]",
        soft_wrap=True,
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as a job file, as blocks, and repeats equal values instead of using aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def documents(manifests: list[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=160)


def _require_same(there: Manifest, name: str, namespace: str, digest: str) -> None:
    """Raises `Conflict` if the existing JobSet has ended or has other contents. (A JobSet cannot be changed.)"""
    end = f"`kubectl delete -n {namespace} jobset/{name}`"
    if ended := there.get("status", {}).get("terminalState"):
        raise Conflict(
            f"JobSet {name} in namespace {namespace} has ended ({ended}): delete it by {end} and submit again; --resume "
            "continues from its checkpoints"
        )
    if there["metadata"].get("annotations", {}).get(DIGEST) != digest:
        raise Conflict(
            f"namespace {namespace} has a JobSet {name} with other contents, and a JobSet cannot be changed: end it by {end}, "
            "or set another name in the job file"
        )


# ---------------------------------------------------------------- commands that run in the pods


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def node(context: typer.Context) -> None:
    """Run an agent in a node's pod, and start it again if it crashes. Accepts the options of the agent."""
    raise typer.Exit(NodePod(_holdfast("agent", *context.args)).run())


@app.command(hidden=True)
def launcher(
    job_file: Annotated[Path, typer.Argument()],
    resume: Resume = False,
    fresh: Fresh = False,
) -> None:
    """Submit or follow the job in the launcher's pod. The exit code is that of `holdfast run`."""
    if not os.environ.get(ENV_LAUNCHER):  # the launcher's next pod needs the same token
        raise InvalidSpec(
            ENV_LAUNCHER,
            "",
            f"the uid of the JobSet; this one does not give its pods the label {JOBSET_UID}: update JobSet",
        )
    spec, url = load_job(job_file), default_url()
    pod = LauncherPod(_holdfast("run", "--attach"), str(job_file), spec.name, Terminal(highlight=False, emoji=False))
    with Client(url) as client:
        start = chosen_start(resume=resume, fresh=fresh)
        raise typer.Exit(pod.run(client, Launcher.of(spec.name, url).token, start))


def _holdfast(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.main", *arguments]
