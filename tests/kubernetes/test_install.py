"""The chart on a real API server: installed, upgraded and removed by helm and by kubectl, and what its account may do."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import charts
import pytest
import yaml
from charts import NAMESPACE, RELEASE
from control_plane import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900), charts.NEEDS_HELM]

TEAM = "team-a"
ACCOUNT = f"{RELEASE}-supervisor"
TOKENS = f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}-tokens"
ASKS_API = (f"--set=kubernetes.namespaces={{{TEAM}}}", "--set=kubernetes.watch=true")
KINDS = (
    "serviceaccount,service,statefulset,networkpolicy,poddisruptionbudget,ingress,"
    "role,rolebinding,clusterrole,clusterrolebinding,configmap"
)

Rights = dict[str, set[str]]  # resource → verbs


@pytest.fixture
def chart(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """For 1.20. What tests leave of it is deleted."""
    cluster.kubectl("create", "namespace", TEAM)
    yield str(charts.for_old_servers(tmp_path))
    cluster.tool("helm", "uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "secret", f"{RELEASE}-tokens", "--namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "namespace", TEAM)


def helm(cluster: Cluster, command: str, chart: str, *options: str) -> str:
    return cluster.tool("helm", command, RELEASE, chart, "--namespace", NAMESPACE, *options).stdout


def installed(cluster: Cluster) -> set[str]:
    """Return KIND/NAME of the release's objects, in all namespaces, without tokens."""
    selector = f"app.kubernetes.io/name=holdfast,app.kubernetes.io/instance={RELEASE}"
    command = ["get", KINDS, "--all-namespaces", "--selector", selector, "--output", "json"]
    found = json.loads(cluster.kubectl(*command).stdout)["items"]
    return {_words(each) for each in found}


def expected(manifest: str) -> set[str]:
    return {_words(each) for each in yaml.safe_load_all(manifest) if each and each["kind"] != "Secret"}


def _words(manifest: dict[str, Any]) -> str:
    about = manifest["metadata"]
    return f"{about.get('namespace', '')} {manifest['kind']}/{about['name']}"


def tokens(cluster: Cluster) -> dict[str, str]:
    secret = cluster.find(TOKENS)
    assert secret is not None
    return dict(secret["data"])


def test_helm_installs_upgrades_and_removes_it_and_tokens_are_kept(cluster: Cluster, chart: str) -> None:
    notes = helm(cluster, "install", chart)
    assert "holdfast kubernetes submit job.yaml" in notes
    manifest = cluster.tool("helm", "get", "manifest", RELEASE, "--namespace", NAMESPACE).stdout
    assert installed(cluster) == expected(manifest)
    assert not any("Role" in each for each in installed(cluster)), "nobody has rights"
    first = tokens(cluster)
    assert {len(base64.b64decode(each)) for each in first.values()} == {48}

    helm(cluster, "upgrade", chart, "--reuse-values", *ASKS_API, "--set=kubernetes.replacePods=true")
    manifest = cluster.tool("helm", "get", "manifest", RELEASE, "--namespace", NAMESPACE).stdout
    assert installed(cluster) == expected(manifest)
    assert f"{TEAM} Role/{ACCOUNT}-{NAMESPACE}" in installed(cluster)
    assert tokens(cluster) == first

    helm(cluster, "upgrade", chart, "--reset-values")
    assert not any("Role" in each for each in installed(cluster)), "the rights went with the bridge"
    cluster.tool("helm", "rollback", RELEASE, "2", "--namespace", NAMESPACE)
    assert f" ClusterRole/{ACCOUNT}-{NAMESPACE}" in installed(cluster)
    assert tokens(cluster) == first

    cluster.tool("helm", "uninstall", RELEASE, "--namespace", NAMESPACE)
    assert installed(cluster) == set()
    assert tokens(cluster) == first, "agents and jobs of other tools go on"
    helm(cluster, "install", chart)
    assert tokens(cluster) == first, "the next installation takes them"


def test_kubectl_applies_what_is_rendered_and_a_second_time_changes_nothing(cluster: Cluster, chart: str) -> None:
    """As GitOps tools do, which render and apply; tokens and certificates are then Secrets of one's own. (This API server ends
    when a custom resource is created, such as cert-manager's: its JSON library is older than the Go that built it.)"""
    values = Path(chart).parent / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {**charts.EVERYTHING, "tls": charts.VALUES["secrets"]["tls"], "tokens": {"existingSecret": "mine"}}
        )
    )
    command = ["helm", "template", RELEASE, chart, "--namespace", NAMESPACE, "--values", str(values)]
    text = cluster.tool(*command).stdout.replace("team-b", TEAM)
    text = "---\n".join(dict.fromkeys(text.split("---\n")))  # two namespaces have become one
    try:
        cluster.kubectl("apply", "-f", "-", stdin=text)
        assert installed(cluster) == expected(text)
        again = cluster.kubectl("apply", "-f", "-", stdin=text).stdout.splitlines()
        changed = [line for line in again if not line.endswith("unchanged")]
        # The server fills in defaults of a StatefulSet's claim templates, which kubectl takes for a change.
        assert all(line.startswith("statefulset.apps/") for line in changed), changed
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)
    assert installed(cluster) == set()


@pytest.mark.parametrize(
    ("options", "nodes", "pods"),
    [
        (["watch=true"], {"list", "watch"}, {"list", "watch"}),
        (["watch=true", "replacePods=true"], {"list", "watch", "get", "patch"}, {"list", "watch", "delete"}),
        (["replacePods=true", "mark=none"], {"list", "watch"}, {"list", "watch", "delete"}),
    ],
)
def test_supervisors_may_do_what_the_bridge_does_and_nothing_else(
    cluster: Cluster, chart: str, options: list[str], nodes: set[str], pods: set[str]
) -> None:
    values = [f"--set=kubernetes.{each}" for each in options]
    helm(cluster, "install", chart, f"--set=kubernetes.namespaces={{{TEAM}}}", *values)
    for namespace in (NAMESPACE, TEAM):
        assert rights(cluster, ACCOUNT, namespace) == {"nodes": nodes, "pods": pods}
    assert rights(cluster, ACCOUNT, "kube-system") == {"nodes": nodes}
    assert rights(cluster, RELEASE, NAMESPACE) == {}, "diagnostics and supervisors without the bridge"
    for verb, what in (("get", "secrets"), ("create", "pods/exec"), ("update", "nodes/status"), ("list", "pods -A")):
        asked = ["auth", "can-i", verb, *what.split(), f"--as=system:serviceaccount:{NAMESPACE}:{ACCOUNT}"]
        assert cluster.kubectl(*asked, "--namespace", NAMESPACE, check=False).stdout.strip() == "no", (verb, what)


def rights(cluster: Cluster, account: str, namespace: str) -> Rights:
    """Return what an account may do in a namespace, by its own token, without what everybody may."""
    found: Rights = {}
    for rule in _rules(cluster, account, namespace):
        for resource in rule["resources"]:
            assert not rule.get("resourceNames"), rule
            found.setdefault(resource, set()).update(rule["verbs"])
    everybody = {"selfsubjectaccessreviews", "selfsubjectrulesreviews"}
    return {resource: verbs for resource, verbs in found.items() if resource not in everybody}


def _rules(cluster: Cluster, account: str, namespace: str) -> list[dict[str, Any]]:
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    headers = {"Authorization": f"Bearer {cluster.token(account)}"}
    answer = cluster.client.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", json=body, headers=headers)
    assert answer.is_success, answer.text
    status = answer.json()["status"]
    assert not status["incomplete"]
    return list(status["resourceRules"])
