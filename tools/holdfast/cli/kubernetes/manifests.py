"""Renders the objects of one job in Kubernetes: a ConfigMap with its job file, and a JobSet with nodes and launcher. Pure.

    JobSet NAME ─┬─ Job node       Indexed, a pod per node and spare: `holdfast kubernetes node` ── `holdfast agent`
                 └─ Job launcher   one pod: `holdfast kubernetes launcher` ── `holdfast run --attach`
    ConfigMap NAME-job             job.yaml, policy.py

| event | result |
|---|---|
| a machine is lost | its pod is deleted after `UNREACHABLE_S`, and replaced at once; a spare has taken over its ranks |
| a pod is deleted or evicted, a machine is drained | SIGTERM: the ranks move at a saved step; the pod fails, and is replaced |
| the job completes | the launcher ends with 0, which is the JobSet's success; the nodes' pods are deleted |
| the job fails, and another attempt may succeed (1) | the launcher is started again, at most `attempts` times, and resumes |
| the script is wrong, or an operator stopped the job (93, 2) | the launcher's Job fails at once, and the JobSet with it |
| the job is suspended, or no supervisor answers (75, 69) | the launcher is started again, without a limit |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from holdfast.cli.connection import ENV_API, ENV_TOKEN
from holdfast.cli.endings import DO_NOT_RESTART, SUSPENDED, UNAVAILABLE, USAGE_ERROR
from holdfast.cli.kubernetes.job_source import JOB_KEY, JobSource
from holdfast.cli.kubernetes.submission import (
    JOB_DIRECTORY,
    LAUNCHER_JOB,
    NODE_JOB,
    SHARED_MEMORY,
    STATE,
    TLS_DIRECTORY,
    TOKEN_DIRECTORY,
    Asked,
    check,
)
from holdfast.cli.launcher import ENV_LAUNCHER
from holdfast.runtime.trust.tls import CA as TLS_CA

Manifest = dict[str, Any]
# instead of Kubernetes' 300, because a spare has the ranks, and the old pod only delays its replacement
UNREACHABLE_S = 10
UNLIMITED = 2_147_483_647  # for backoffLimit: the number of failures of the nodes' pods is not limited
EXIT_MARGIN_S = 20  # from the end of an agent's grace period to SIGKILL; the agent's own end takes 10 s of this
PART_OF, NAME, INSTANCE, COMPONENT = (
    f"app.kubernetes.io/{key}" for key in ("part-of", "name", "instance", "component")
)
QUEUE = "kueue.x-k8s.io/queue-name"
DIGEST = "holdfast/digest"  # annotation of the JobSet: digest of the inputs that it was rendered from
JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"  # label that JobSet gives its pods
JOIN_TOKEN_KEY, API_TOKEN_KEY = "join-token", "api-token"  # of the chart's Secret
CA_KEY = "ca.crt"  # of the Secret with the certificate


def render(asked: Asked, job: JobSource) -> list[Manifest]:
    """Return the objects in the order in which they are applied. Raises `InvalidSpec`."""
    check(asked, job)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(asked, config_name(job.spec.name), job.spec.name),
        "data": dict(job.files),
    }
    jobset: Manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(asked, job.spec.name, job.spec.name, queue=asked.queue),
        "spec": {
            "network": {"enableDNSHostnames": False},  # nodes get each other's addresses from the supervisor
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER_JOB]},
            "failurePolicy": {"maxRestarts": 0},  # only the launcher's Job can fail, after its own retries
            "replicatedJobs": [_node_job(asked, job), _launcher_job(asked, job)],
        },
    }
    jobset["metadata"] |= {"annotations": {DIGEST: _digest(config, jobset)}}
    return [config, jobset]


def config_name(job: str) -> str:
    return f"{job}-job"


def _digest(*manifests: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifests, sort_keys=True).encode()).hexdigest()[:32]


def _metadata(asked: Asked, name: str, job: str, queue: str = "") -> Manifest:
    return {
        "name": name,
        "namespace": asked.namespace,
        "labels": {NAME: "holdfast", PART_OF: "holdfast", INSTANCE: job, **({QUEUE: queue} if queue else {})},
    }


# ---------------------------------------------------------------- nodes


def _node_job(asked: Asked, job: JobSource) -> Manifest:
    pods = job.spec.nodes + asked.spares
    return {
        "name": NODE_JOB,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "completionMode": "Indexed",
                "backoffLimit": UNLIMITED,
                # The pod of a lost machine stays Terminating until the machine is back, and must not delay its replacement. A
                # podFailurePolicy would forbid this value.
                "podReplacementPolicy": "TerminatingOrFailed",
                "template": {"metadata": {"labels": _labels(job, "agent")}, "spec": _node_pod(asked, job)},
            }
        },
    }


def _node_pod(asked: Asked, job: JobSource) -> Manifest:
    spec: Manifest = {
        # A crashed container is started again in its pod, which has the memory and disk tiers.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": asked.grace_s + EXIT_MARGIN_S,
        **_identity(asked),
        "tolerations": [
            *(_evicted_after(f"node.kubernetes.io/{what}", UNREACHABLE_S) for what in ("unreachable", "not-ready")),
            *([{"key": asked.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}] if asked.gpus else []),
        ],
        "containers": [_agent(asked, job)],
        "volumes": [
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": asked.memory_tier}},
            _disk(asked),
            *_secrets(asked),
            *_claims(asked),
        ],
    }
    if asked.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if asked.selector:
        spec["nodeSelector"] = dict(asked.selector)
    if not asked.share_hosts:
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_other_agents()]}}
    return spec


def _agent(asked: Asked, job: JobSource) -> Manifest:
    # The node has the name of the machine, not of the pod, so that the fault history of the machine also applies to its next
    # pod.
    name = "metadata.name" if asked.share_hosts else "spec.nodeName"
    resources = {asked.gpu_resource: str(asked.gpus)} if asked.gpus else {}
    memory = {"memory": asked.memory} if asked.memory else {}
    processors = {"cpu": asked.processors} if asked.processors else {}
    return {
        "name": "agent",
        "image": asked.image,
        "command": ["holdfast", "kubernetes", "node"],
        "args": [
            *("--supervisor", asked.endpoints),
            *("--node", "$(NODE_NAME)"),
            *("--address", "$(POD_IP)"),
            *("--capacity", str(job.spec.nproc_per_node)),
            *("--pool", job.spec.pool),
            *("--dir", STATE),
            *("--memory", f"{SHARED_MEMORY}/holdfast"),
            *("--kernel-log", "/dev/null"),  # a pod may not read the machine's kernel log; NVML reports Xids, too
        ],
        "env": [
            _from_field("NODE_NAME", name),
            _from_field("POD_IP", "status.podIP"),
            _env("HOLDFAST_FLEET", asked.fleet),
            _env("HOLDFAST_JOIN_TOKEN_FILE", f"{TOKEN_DIRECTORY}/{JOIN_TOKEN_KEY}"),
            _env("HOLDFAST_TERMINATION_GRACE_S", str(asked.grace_s)),
            _env("HOLDFAST_GPU_RESET_COMMAND", "none"),  # a reset needs root on the machine
            _env("HOLDFAST_LOG_FORMAT", "json"),
            *_tls_environment(asked),
        ],
        "resources": {
            **({"limits": {**memory, **resources}} if memory or resources else {}),
            **({"requests": {**processors, **memory, **resources}} if processors or memory or resources else {}),
        },
        "securityContext": _unprivileged(),
        "volumeMounts": [
            {"name": "memory", "mountPath": SHARED_MEMORY},
            {"name": "disk", "mountPath": STATE},
            {"name": "fleet", "mountPath": TOKEN_DIRECTORY, "readOnly": True},
            *_tls_mounts(asked),
            *_claim_mounts(asked),
        ],
    }


def _disk(asked: Asked) -> Manifest:
    if not asked.disk_class:
        return {"name": "disk", "emptyDir": {"sizeLimit": asked.disk_tier} if asked.disk_tier else {}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": asked.disk_class,
        "resources": {"requests": {"storage": asked.disk_tier}},
    }
    return {"name": "disk", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _other_agents() -> Manifest:
    """Return the label selector of agents of any job and namespace, because a machine is one node of a fleet."""
    return {
        "labelSelector": {"matchLabels": {NAME: "holdfast", COMPONENT: "agent"}},
        "namespaceSelector": {},
        "topologyKey": "kubernetes.io/hostname",
    }


# ---------------------------------------------------------------- launcher


def _launcher_job(asked: Asked, job: JobSource) -> Manifest:
    return {
        "name": LAUNCHER_JOB,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": 1,
                "completions": 1,
                "completionMode": "Indexed",
                "backoffLimit": asked.attempts,
                "podFailurePolicy": {
                    "rules": [
                        _on_exit("FailJob", [USAGE_ERROR, DO_NOT_RESTART]),
                        _on_exit("Ignore", [UNAVAILABLE, SUSPENDED]),
                        # evicted, or its machine was lost: the job continues, and the next launcher follows it
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    ]
                },
                "template": {"metadata": {"labels": _labels(job, "launcher")}, "spec": _launcher_pod(asked, job)},
            }
        },
    }


def _on_exit(action: str, codes: Iterable[int]) -> Manifest:
    values = sorted(codes)
    return {"action": action, "onExitCodes": {"containerName": "launcher", "operator": "In", "values": values}}


def _launcher_pod(asked: Asked, job: JobSource) -> Manifest:
    return {
        "restartPolicy": "Never",  # podFailurePolicy needs it
        **_identity(asked),
        "containers": [
            {
                "name": "launcher",
                "image": asked.image,
                "command": ["holdfast", "kubernetes", "launcher"],
                "args": [f"{JOB_DIRECTORY}/{JOB_KEY}", *([f"--{asked.start}"] if asked.start else [])],
                "env": [
                    _env(ENV_API, asked.api),
                    *([_env(TLS_CA, f"{TLS_DIRECTORY}/{CA_KEY}")] if asked.tls_secret else []),
                    {
                        "name": ENV_TOKEN,
                        "valueFrom": {
                            "secretKeyRef": {"name": asked.token_secret, "key": API_TOKEN_KEY, "optional": True}
                        },
                    },
                    _from_field(ENV_LAUNCHER, f"metadata.labels['{JOBSET_UID}']"),
                    _env("HOME", "/tmp"),
                ],
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
                "securityContext": {**_unprivileged(), "readOnlyRootFilesystem": True},
                "volumeMounts": [
                    {"name": "job", "mountPath": JOB_DIRECTORY, "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                    *_tls_mounts(asked),
                    *_claim_mounts(asked),
                ],
            }
        ],
        "volumes": [
            {"name": "job", "configMap": {"name": config_name(job.spec.name)}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
            *_api_ca(asked),
            *_claims(asked),
        ],
    }


# ---------------------------------------------------------------- parts of both


def _identity(asked: Asked) -> Manifest:
    context: Manifest = {
        "runAsUser": asked.user,
        "runAsGroup": asked.user,
        "fsGroup": asked.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if asked.user:
        context["runAsNonRoot"] = True
    account = {"serviceAccountName": asked.service_account} if asked.service_account else {}
    return {**account, "automountServiceAccountToken": False, "enableServiceLinks": False, "securityContext": context}


def _unprivileged() -> Manifest:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _labels(job: JobSource, component: str) -> Manifest:
    return {NAME: "holdfast", PART_OF: "holdfast", INSTANCE: job.spec.name, COMPONENT: component}


def _evicted_after(key: str, seconds: int) -> Manifest:
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}


def _env(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _secrets(asked: Asked) -> list[Manifest]:
    tokens = {"secretName": asked.token_secret, "defaultMode": 0o440, "items": [_item(JOIN_TOKEN_KEY)]}
    tls = {"secretName": asked.tls_secret, "defaultMode": 0o440}
    return [{"name": "fleet", "secret": tokens}, *([{"name": "tls", "secret": tls}] if asked.tls_secret else [])]


def _api_ca(asked: Asked) -> list[Manifest]:
    """Return the volume with the API's CA, without the key of the agents, which a launcher does not need."""
    ca = {"secretName": asked.tls_secret, "defaultMode": 0o440, "items": [_item(CA_KEY)]}
    return [{"name": "tls", "secret": ca}] if asked.tls_secret else []


def _item(key: str) -> Manifest:
    return {"key": key, "path": key}


def _tls_mounts(asked: Asked) -> list[Manifest]:
    return [{"name": "tls", "mountPath": TLS_DIRECTORY, "readOnly": True}] if asked.tls_secret else []


def _tls_environment(asked: Asked) -> list[Manifest]:
    files = {"HOLDFAST_TLS_CERT": "tls.crt", "HOLDFAST_TLS_KEY": "tls.key", TLS_CA: CA_KEY}
    return [_env(name, f"{TLS_DIRECTORY}/{file}") for name, file in files.items()] if asked.tls_secret else []


def _claims(asked: Asked) -> list[Manifest]:
    names = dict.fromkeys(name for name, _ in asked.claims)
    return [{"name": f"claim-{name}", "persistentVolumeClaim": {"claimName": name}} for name in names]


def _claim_mounts(asked: Asked) -> list[Manifest]:
    return [{"name": f"claim-{name}", "mountPath": path} for name, path in asked.claims]
