"""The chart of the control plane: values to render it with, and what every rendering of it must be."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chart_security
import kube_schemas
import pod_security
import pytest
import yaml
from kube_schemas import Manifest
from waiting import TIMEOUT_S

from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.supervisor.settings import SupervisorSettings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "kubernetes" / "chart"
RENDERED = Path(__file__).parent / "kubernetes" / "data" / "rendered"
RELEASE, NAMESPACE = "holdfast", "ml"
NEEDS_HELM = pytest.mark.skipif(shutil.which("helm") is None, reason="not installed: helm (make kubernetes-test)")
SETTINGS: dict[str, type[SupervisorSettings] | type[DiagnosticsSettings]] = {
    "supervisor": SupervisorSettings,
    "diagnostics": DiagnosticsSettings,
}

EVERYTHING: dict[str, Any] = {
    "fleet": "blue",
    "image": {
        "repository": "registry.example.com/holdfast/services",
        "tag": "7",
        "digest": f"sha256:{'7' * 64}",
        "pullSecrets": ["registry"],
    },
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
    "tls": {
        "mode": "certManager",
        "certManager": {"issuer": "fleet-ca", "issuerKind": "ClusterIssuer", "agentNamespaces": ["team-a", NAMESPACE]},
    },
    "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "holdfast@project.iam.gserviceaccount.com"}},
    "kubernetes": {"watch": True, "namespaces": ["team-a", "team-b"], "nodeSelector": "pool=gpu", "mark": "none"},
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
    "external-redis-secret": {
        "redis": {
            "externalUrlSecret": "redis",
            "externalUrlKeys": {"diagnostics": "url-of-diagnostics"},
            "externalPasswordKeys": {"supervisor": "password-of-supervisor"},
        },
        "tls": {"mode": "secret", "existingSecret": "certificates"},
    },
    "secrets": {
        "tls": {"mode": "secret", "secrets": {"supervisor": "supervisor-tls", "diagnostics": "diagnostics-tls"}}
    },
    "small": {
        "supervisor": {"replicas": 1},
        "diagnostics": {"replicas": 1},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "kubernetes": {"replacePods": True},
    },
}
RIGHTS = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
ASKS = ("HOLDFAST_KUBERNETES_", "HOLDFAST_PROVIDER")
KEPT = ("defaults", "everything")  # renderings that are kept in data/rendered, for tests without helm


def rendered(*templates: str, chart: Path = CHART, **kubernetes: Any) -> str:
    """Return these templates, or all, with values of `kubernetes`, such as `watch=True`."""
    shown = [f"--show-only=templates/{name}" for name in templates]
    values = [f"--set=kubernetes.{name}={str(value).lower()}" for name, value in kubernetes.items()]
    command = ["helm", "template", RELEASE, str(chart), "--namespace", NAMESPACE, *shown, *values]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


NEWER: Mapping[str, str] = {  # what Kubernetes 1.20 does not have → what it has
    "apiVersion: policy/v1\n": "apiVersion: policy/v1beta1\n",  # 1.21
    "  unhealthyPodEvictionPolicy: AlwaysAllow\n": "",  # 1.26
    "grpc: {port: 8472}\n": "tcpSocket: {port: telemetry}\n",  # 1.24
}


def for_old_servers(directory: Path) -> Path:
    """Return a copy of the chart for the API server of the tests, which is older than those that the chart is for."""
    chart = directory / "chart"
    shutil.copytree(CHART, chart)
    about = chart / "Chart.yaml"
    about.write_text(re.sub("kubeVersion: .*\n", "", about.read_text()))
    for template in (chart / "templates").glob("*.yaml"):
        text = template.read_text()
        for newer, older in NEWER.items():
            text = text.replace(newer, older)
        template.write_text(text)
    return chart


def load(text: str) -> list[Manifest]:
    """Return the objects of a rendering, without the random contents of secrets and without scripts."""
    found = [each for each in yaml.safe_load_all(text) if each]
    for each in found:
        match each["kind"]:
            case "Secret":
                each["data"] = dict.fromkeys(each["data"], "cmFuZG9t")
            case "ConfigMap":
                each["data"] = dict.fromkeys(each["data"], "a file of the chart")
    return found


def _place(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("namespace", ""))


def _environment(pod: Manifest) -> dict[str, str]:
    return {
        name: value for each in kube_schemas.containers(pod) for name, value in kube_schemas.environment(each).items()
    }


def rights(manifests: list[Manifest]) -> dict[tuple[str, str], set[str]]:
    """Return what somebody may do: (namespace, resource) → verbs."""
    found: dict[tuple[str, str], set[str]] = {}
    for each in manifests:
        for rule in each.get("rules", []):
            assert rule["apiGroups"] == [""]
            for resource in rule["resources"]:
                found.setdefault((_place(each), resource), set()).update(rule["verbs"])
    return found


def _rights_are_the_bridges(manifests: list[Manifest]) -> None:
    """Nobody has rights but supervisors that ask the API server, and they have those that they need and no others."""
    settings: dict[str, str] = {}
    for manifest in manifests:
        for pod in kube_schemas.pods(manifest):
            settings |= {name: value for name, value in _environment(pod).items() if name.startswith(ASKS)}
    namespaces = settings.get("HOLDFAST_KUBERNETES_NAMESPACES", "").split(",") if settings else []
    replaces = settings.get("HOLDFAST_PROVIDER") == "kubernetes"
    marks = replaces and settings["HOLDFAST_KUBERNETES_MARK"] != "none"
    nodes = {"list", "watch"} | ({"get", "patch"} if marks else set())
    pods = {"list", "watch"} | ({"delete"} if replaces else set())
    expected = {("", "nodes"): nodes} | {(each, "pods"): pods for each in namespaces} if settings else {}
    assert rights(manifests) == expected
    bound = [each for each in manifests if each["kind"].endswith("RoleBinding")]
    assert len(bound) == len(expected)
    roles = {(each["kind"], _place(each), each["metadata"]["name"]) for each in manifests if "rules" in each}
    account = {"kind": "ServiceAccount", "name": f"{RELEASE}-supervisor", "namespace": NAMESPACE}
    for each in bound:
        assert each["subjects"] == [account]
        assert (each["roleRef"]["kind"], _place(each), each["roleRef"]["name"]) in roles


def check(manifests: list[Manifest]) -> None:
    """Assert what holds whatever the values are: objects are valid, rights are those needed, what is named is there."""
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    assert len({(each["kind"], _place(each), each["metadata"]["name"]) for each in manifests}) == len(manifests)
    for manifest in manifests:
        if manifest["kind"] not in RIGHTS and manifest["metadata"]["name"] != f"{RELEASE}-agent-tls":
            assert manifest["metadata"]["namespace"] == NAMESPACE, manifest["metadata"]["name"]
        assert kube_schemas.problems(manifest) == [], manifest["metadata"]["name"]
        for pod in kube_schemas.pods(manifest):
            assert kube_schemas.unread(pod) == set()
            assert pod_security.violations(pod) == []
            bridge = any(name.startswith("HOLDFAST_KUBERNETES_") for name in _environment(pod))
            assert pod["spec"]["automountServiceAccountToken"] is bridge
            assert (pod["spec"].get("serviceAccountName") == f"{RELEASE}-supervisor") is bridge
            assert pod["spec"]["enableServiceLinks"] is False  # HOLDFAST_API_PORT=tcp://… is no setting
            for container in kube_schemas.containers(pod):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert {"requests", "limits"} <= container["resources"].keys()
            labels = manifest["spec"]["selector"]["matchLabels"]
            assert labels.items() <= pod["metadata"]["labels"].items()
            claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
            assert kube_schemas.dangling(pod) == claims  # a claim template is mounted, and is no volume of the pod
            assert ("Service", manifest["spec"]["serviceName"]) in names
    _rights_are_the_bridges(manifests)
    chart_security.check(manifests, RELEASE, NAMESPACE)
    _selectors_meet_pods(manifests)
    _hosts_exist(manifests)
    _ports_name_their_protocol(manifests)


def _ports_name_their_protocol(manifests: list[Manifest]) -> None:
    """The protocol is part of a port's key: server-side apply (helm 4) refuses a port without it on older API servers, and
    `kubectl apply` and GitOps tools find a difference each time."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        ports = list(spec.get("ports", []))
        ports += [port for rule in spec.get("ingress", []) for port in rule.get("ports", [])]
        ports += [
            port
            for pod in kube_schemas.pods(manifest)
            for each in kube_schemas.containers(pod)
            for port in each["ports"]
        ]
        assert all(port["protocol"] == "TCP" for port in ports), manifest["metadata"]["name"]


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
