"""The options of a submission to Kubernetes, and their checks before the API server sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.cli.connection import DEFAULT_API_PORT
from holdfast.cli.kubernetes.job_source import JobSource
from holdfast.cli.kubernetes.quantities import bytes_of, cpu
from holdfast.domain.errors import InvalidSpec, InvalidSpecs

CONTROL_PORT = 8471
NODE_JOB, LAUNCHER_JOB = "node", "launcher"
JOB_DIRECTORY, TOKEN_DIRECTORY, TLS_DIRECTORY = "/etc/holdfast/job", "/etc/holdfast/fleet", "/etc/holdfast/tls"
STATE, SHARED_MEMORY = "/var/lib/holdfast", "/dev/shm"
POD_LABEL_CHARS_MAX = 63
POD_SUFFIX_CHARS = 6  # end of a pod's name: a hyphen and five characters
OWN_DIRECTORIES = (JOB_DIRECTORY, TOKEN_DIRECTORY, TLS_DIRECTORY, STATE, SHARED_MEMORY)  # in the containers
CONFIG_BYTES_MAX = 1_000_000  # Kubernetes limits the complete object to 1 MiB
_LABEL_EXPECTED = "1 to 63 lower-case letters, digits and hyphens, a letter or digit first and last"
_NAME_EXPECTED = "a valid name in Kubernetes: lower-case letters, digits, hyphens and dots"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(rf"((?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_FLEET = re.compile(rf"{_LABEL}(\.{_LABEL})?")
_IMAGE = re.compile(r"[^\s]{1,1024}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of a submission. Names and quantities are in Kubernetes' notation; empty = none.

    `fleet_service`: NAME or NAME.NAMESPACE of the chart's release. `claims`, `selector`: NAME and PATH, KEY and VALUE.
    `start`: how the first launcher uses checkpoints of the job's name, "resume", "fresh" or "". `user`: user id of the pods'
    processes.
    """

    image: str
    namespace: str
    fleet: str
    fleet_service: str
    supervisors: int
    spares: int
    gpus: int
    gpu_resource: str
    processors: str
    memory: str
    memory_tier: str
    disk_tier: str
    disk_class: str
    queue: str
    secret: str
    tls_secret: str
    service_account: str
    claims: Sequence[tuple[str, str]]
    selector: Sequence[tuple[str, str]]
    grace_s: int
    attempts: int
    user: int
    share_hosts: bool
    host_network: bool
    api_url: str = ""
    start: str = ""

    @property
    def service(self) -> str:
        return self.fleet_service.partition(".")[0]

    @property
    def service_namespace(self) -> str:
        return self.fleet_service.partition(".")[2] or self.namespace

    @property
    def token_secret(self) -> str:
        return self.secret or f"{self.service}-tokens"

    @property
    def endpoints(self) -> str:
        """Each supervisor by its own name, because an agent tries them one after the other until it finds the leader."""
        host = f"{self.service}-supervisor"
        return ",".join(
            f"{host}-{index}.{host}.{self.service_namespace}.svc:{CONTROL_PORT}" for index in range(self.supervisors)
        )

    @property
    def api(self) -> str:
        """The chart serves it with TLS if it has a certificate."""
        scheme = "https" if self.tls_secret else "http"
        return self.api_url or f"{scheme}://{self.service}-api.{self.service_namespace}.svc:{DEFAULT_API_PORT}"


# ---------------------------------------------------------------- checks


def check(asked: Asked, job: JobSource) -> None:
    """Raises `InvalidSpec` with all mistakes. The API server would report one at a time, and some only in a pod's log."""
    problems: list[InvalidSpec] = []

    def require(good: bool, option: str, value: object, expected: str) -> None:
        if not good:
            problems.append(InvalidSpec(option, value, expected))

    def size(option: str, text: str) -> int:
        try:
            return bytes_of(option, text) if text else 0
        except InvalidSpec as problem:
            problems.append(problem)
            return 0

    name = job.spec.name
    longest = f"-{NODE_JOB}-0-{job.spec.nodes + asked.spares - 1}"
    room = POD_LABEL_CHARS_MAX - POD_SUFFIX_CHARS - max(len(longest), len(f"-{LAUNCHER_JOB}-0-0"))
    require(
        len(name) <= room, "name", name, f"at most {room} characters: the names of pods contain it, and have at most 63"
    )
    require(name[0].isalpha(), "name", name, "a name that begins with a letter, as Kubernetes requires for a JobSet")
    require(_IMAGE.fullmatch(asked.image) is not None, "--image", asked.image, "an image, such as REGISTRY/trainer:TAG")
    require(re.fullmatch(_LABEL, asked.namespace) is not None, "--namespace", asked.namespace, _LABEL_EXPECTED)
    require(
        _FLEET.fullmatch(asked.fleet_service) is not None,
        "--fleet-service",
        asked.fleet_service,
        "the release of the chart, NAME, or NAME.NAMESPACE if it is in another namespace",
    )
    for option, text in (
        ("--secret", asked.secret),
        ("--tls-secret", asked.tls_secret),
        ("--service-account", asked.service_account),
        ("--disk-class", asked.disk_class),
        *(("--claim", claim) for claim, _ in asked.claims),
    ):
        require(not text or _SUBDOMAIN.fullmatch(text) is not None, option, text, _NAME_EXPECTED)
    require(not asked.queue or re.fullmatch(_LABEL, asked.queue) is not None, "--queue", asked.queue, _LABEL_EXPECTED)
    paths = [path for _, path in asked.claims]
    for path in paths:
        require(
            path.startswith("/") and ":" not in path and not _is_ours(path),
            "--claim",
            path,
            f"NAME:PATH with an absolute path that is not in {', '.join(OWN_DIRECTORIES)}",
        )
        require(paths.count(path) == 1, "--claim", path, "each path once")
    for key, value in asked.selector:
        good = _LABEL_KEY.fullmatch(key) is not None and _LABEL_VALUE.fullmatch(value) is not None
        require(good, "--node-selector", f"{key}={value}", "KEY=VALUE, a label of the machines")
    require(
        _LABEL_KEY.fullmatch(asked.gpu_resource) is not None and "/" in asked.gpu_resource,
        "--gpu-resource",
        asked.gpu_resource,
        "a resource of the cluster, such as nvidia.com/gpu",
    )
    require(
        asked.gpus in (0, job.spec.nproc_per_node) or asked.gpus > job.spec.nproc_per_node,
        "--gpus",
        asked.gpus,
        f"at least {job.spec.nproc_per_node}, the nproc_per_node of the job file, or 0 for none",
    )
    tier, memory = size("--memory-tier", asked.memory_tier), size("--memory", asked.memory)
    size("--disk-tier", asked.disk_tier)
    require(
        not memory or memory > tier,
        "--memory",
        asked.memory,
        f"more than the memory tier ({asked.memory_tier}, --memory-tier), which counts against the container's memory",
    )
    require(
        bool(asked.disk_tier) or not asked.disk_class,
        "--disk-class",
        asked.disk_class,
        "together with the size of the volumes, for example --disk-tier 500Gi",
    )
    if asked.processors:
        try:
            cpu("--cpu", asked.processors)
        except InvalidSpec as problem:
            problems.append(problem)
    total = sum(len(text.encode()) for text in job.files.values())
    require(
        total <= CONFIG_BYTES_MAX,
        "job file",
        f"{total} bytes with its policy",
        f"at most {CONFIG_BYTES_MAX}, the limit of a ConfigMap",
    )
    if problems:
        raise InvalidSpecs(problems)


def _is_ours(path: str) -> bool:
    return any(f"{path}/".startswith(f"{own}/") or own.startswith(f"{path.rstrip('/')}/") for own in OWN_DIRECTORIES)
