"""The chart of the control plane: values to render it with, and what every rendering of it must be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kube_schemas
import yaml
from kube_schemas import Manifest

from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.supervisor.settings import SupervisorSettings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "kubernetes" / "chart"
RENDERED = Path(__file__).parent / "kubernetes" / "data" / "rendered"
RELEASE, NAMESPACE = "holdfast", "ml"
SETTINGS: dict[str, type[SupervisorSettings] | type[DiagnosticsSettings]] = {
    "supervisor": SupervisorSettings,
    "diagnostics": DiagnosticsSettings,
}

EVERYTHING: dict[str, Any] = {
    "fleet": "blue",
    "image": {"repository": "registry.example.com/holdfast/services", "tag": "7", "pullSecrets": ["registry"]},
    "supervisor": {
        "replicas": 3,
        "settings": {"NODE_HOLD_S": "300", "LOG_LEVEL": "debug"},
        "storage": {"size": "5Gi", "className": "fast"},
        "extraVolumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        "extraVolumeMounts": [{"name": "shared", "mountPath": "/mnt/shared", "readOnly": True}],
        "nodeSelector": {"pool": "control"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "diagnostics": {"replicas": 1, "settings": {"SILENCE_S": "10"}, "nodeSelector": {"pool": "control"}},
    "redis": {
        "storage": {"className": "fast"},
        "nodeSelector": {"pool": "control"},
        "tolerations": [{"key": "control", "operator": "Exists"}],
    },
    "tls": {"certManager": {"issuer": "fleet-ca"}},
    "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "holdfast@project.iam.gserviceaccount.com"}},
    "networkPolicy": {
        "jobNamespaces": ["team-a", "team-b"],
        "agentsFrom": [{"ipBlock": {"cidr": "10.0.0.0/16"}}],
        "apiFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
    },
    "ingress": {"enabled": True, "className": "nginx", "host": "holdfast.example.com", "tlsSecret": "holdfast-web"},
    "telemetry": {"otlpEndpoint": "http://collector.observability:4317"},
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "external-redis": {
        "redis": {"externalUrl": "redis://redis.example.com:6379/0"},
        "tokens": {"existingSecret": "mine"},
    },
    "external-redis-secret": {"redis": {"externalUrlSecret": "redis"}, "tls": {"existingSecret": "certificates"}},
    "small": {
        "supervisor": {"replicas": 1},
        "diagnostics": {"replicas": 1},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
    },
}
KEPT = ("defaults", "everything")  # renderings that are kept in data/rendered, for tests without helm


def load(text: str) -> list[Manifest]:
    """Return the objects of a rendering, without the random contents of secrets."""
    found = [each for each in yaml.safe_load_all(text) if each]
    for each in found:
        if each["kind"] == "Secret":
            each["data"] = dict.fromkeys(each["data"], "cmFuZG9t")
    return found


def check(manifests: list[Manifest]) -> None:
    """Assert what holds whatever the values are: objects are valid, nobody has rights, what is named is there."""
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    assert len(names) == len(manifests)
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == NAMESPACE, manifest["metadata"]["name"]
        if manifest["kind"] == "Certificate":  # of cert-manager, whose schema is not here
            continue
        assert kube_schemas.problems(manifest) == [], manifest["metadata"]["name"]
        for pod in kube_schemas.pods(manifest):
            assert kube_schemas.unread(pod) == set()
            assert kube_schemas.unsafe(pod) == []
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert pod["spec"]["enableServiceLinks"] is False  # HOLDFAST_API_PORT=tcp://… is no setting
            for container in kube_schemas.containers(pod):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert {"requests", "limits"} <= container["resources"].keys()
            labels = manifest["spec"]["selector"]["matchLabels"]
            assert labels.items() <= pod["metadata"]["labels"].items()
            claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
            assert kube_schemas.dangling(pod) == claims  # a claim template is mounted, and is no volume of the pod
            assert ("Service", manifest["spec"]["serviceName"]) in names
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & {kind for kind, _ in names}
    _selectors_meet_pods(manifests)
    _hosts_exist(manifests)


def _selectors_meet_pods(manifests: list[Manifest]) -> None:
    pods = [pod["metadata"]["labels"] for manifest in manifests for pod in kube_schemas.pods(manifest)]
    for manifest in manifests:
        match manifest["kind"]:
            case "Service":
                wanted = manifest["spec"]["selector"]
            case "PodDisruptionBudget":
                wanted = manifest["spec"]["selector"]["matchLabels"]
            case "NetworkPolicy":
                wanted = manifest["spec"]["podSelector"]["matchLabels"]
            case _:
                continue
        assert any(wanted.items() <= labels.items() for labels in pods), manifest["metadata"]["name"]


def _hosts_exist(manifests: list[Manifest]) -> None:
    """Every host in a setting is a Service, or a pod of a StatefulSet behind one, with that port."""
    ports = {
        each["metadata"]["name"]: {port["port"] for port in each["spec"]["ports"]}
        for each in manifests
        if each["kind"] == "Service"
    }
    pods = {
        f"{each['metadata']['name']}-{index}.{each['spec']['serviceName']}"
        for each in manifests
        if each["kind"] == "StatefulSet"
        for index in range(each["spec"]["replicas"])
    }
    for manifest in manifests:
        for pod in kube_schemas.pods(manifest):
            for container in kube_schemas.containers(pod):
                for value in kube_schemas.environment(container).values():
                    value = value.replace("$(HOLDFAST_SUPERVISOR_NAME)", f"{RELEASE}-supervisor-0")
                    for host, port in re.findall(rf"([\w.-]+)\.{NAMESPACE}\.svc:(\d+)", value):
                        assert "." not in host or host in pods, host
                        assert int(port) in ports[host.rpartition(".")[2]], (host, port)
