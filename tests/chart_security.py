"""Who may reach and read what in a rendered chart: users of Redis, network policies, certificates."""

from __future__ import annotations

from typing import Any

import kube_schemas
from kube_schemas import COMPONENT, Manifest

from holdfast.runtime.trust.identities import Role, parse_uri

SERVICES = ("supervisor", "diagnostics")
# By component: which components of Holdfast reach which of its ports.
REACHED_BY = {
    "redis": {"redis": {"supervisor", "diagnostics"}},
    "supervisor": {"control": {"agent"}, "api": {"supervisor", "launcher"}},
    "diagnostics": {"telemetry": {"agent"}},
}


def check(manifests: list[Manifest], release: str, namespace: str) -> None:
    _ports_are_reached_by_those_that_need_them(manifests)
    _each_service_is_a_user_of_redis(manifests, release)
    _certificates_are_their_roles(manifests, release, namespace)


def _containers(manifests: list[Manifest]) -> list[Manifest]:
    return [
        each for manifest in manifests for pod in kube_schemas.pods(manifest) for each in kube_schemas.containers(pod)
    ]


def _volumes(manifests: list[Manifest], name: str) -> dict[str, dict[str, Any]]:
    """Return the pods' volumes of this name, by component."""
    return {
        kube_schemas.component(pod): volume
        for manifest in manifests
        for pod in kube_schemas.pods(manifest)
        for volume in pod["spec"].get("volumes", [])
        if volume["name"] == name
    }


def _ports_are_reached_by_those_that_need_them(manifests: list[Manifest]) -> None:
    for policy in manifests:
        if policy["kind"] == "NetworkPolicy":
            component = policy["spec"]["podSelector"]["matchLabels"][COMPONENT]
            assert admitted(policy) == REACHED_BY[component]
            assert policy["spec"].get("egress", []) == []
            assert ("Egress" in policy["spec"]["policyTypes"]) is (component == "redis"), "Redis connects to nobody"


def admitted(policy: Manifest) -> dict[str, set[str]]:
    """Return which components reach which port. Peers that the values add have no labels of Holdfast."""
    found: dict[str, set[str]] = {}
    for rule in policy["spec"]["ingress"]:
        assert rule["from"], "an empty list admits everybody"
        assert rule["ports"], "no list of ports admits to all of them"
        for port in rule["ports"]:
            for labels in (peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer):
                assert labels["app.kubernetes.io/name"] == "holdfast"
                found.setdefault(port["port"], set()).add(labels[COMPONENT])
    return found


def _each_service_is_a_user_of_redis(manifests: list[Manifest], release: str) -> None:
    """It has the file of the password of its own user, and no other pod has it but that of Redis; none is in a variable."""
    if "redis" not in (names := {each["name"] for each in _containers(manifests)}):
        return
    assert names == {"redis", *SERVICES}
    for container in _containers(manifests):
        name = container["name"]
        assert not [each for each in container["env"] if "secretKeyRef" in str(each) and "redis" in str(each)]
        if name in SERVICES:
            url = kube_schemas.environment(container)["HOLDFAST_REDIS_URL"]
            assert url.startswith(f"redis://{name}@{release}-redis.")
            [mount] = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "redis"]
            assert url.endswith(f"?password_file={mount}/password")
    own = _volumes(manifests, "redis")
    assert {name: volume["secret"]["items"] for name, volume in own.items()} == {
        name: [{"key": f"redis-{name}-password", "path": "password"}] for name in SERVICES
    }
    [files] = [volume["secret"]["items"] for volume in _volumes(manifests, "passwords").values()]
    assert files == [{"key": f"redis-{name}-password", "path": name} for name in SERVICES]


def _certificates_are_their_roles(manifests: list[Manifest], release: str, namespace: str) -> None:
    """Each stands for one role, under the names by which agents reach it, in the Secret that its pods mount."""
    variables = [kube_schemas.environment(each) for each in _containers(manifests)]
    fleets = {each["HOLDFAST_FLEET"] for each in variables if "HOLDFAST_FLEET" in each}
    mounted = {component: volume["secret"]["secretName"] for component, volume in _volumes(manifests, "tls").items()}
    for certificate in (each for each in manifests if each["kind"] == "Certificate"):
        spec = certificate["spec"]
        assert certificate["metadata"]["name"] == spec["secretName"]
        [uri] = spec["uris"]
        identity = parse_uri(uri)
        assert fleets == {identity.fleet}
        if identity.role is Role.AGENT:
            assert identity.name == "*"
            assert not {"dnsNames", "ipAddresses"} & spec.keys(), "it is nobody's server"
        else:
            assert mounted[identity.role] == spec["secretName"]
            assert f"*.{release}-{identity.role}.{namespace}.svc" in spec["dnsNames"]
