"""Validates rendered Kubernetes objects strictly, and finds what they would run: environments and command lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from holdfast.agent.settings import AgentSettings
from holdfast.cli.connection import ENV_API, ENV_TOKEN
from holdfast.cli.launcher import ENV_LAUNCHER
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.runtime.settings import ENV_PREFIX
from holdfast.runtime.trust.tls import CA as TLS_CA
from holdfast.supervisor.settings import SupervisorSettings

Manifest = dict[str, Any]

# By component: who reads the environment of its pods.
READERS: Mapping[str, frozenset[str]] = {
    "agent": frozenset(f"{ENV_PREFIX}{name.upper()}" for name in AgentSettings.model_fields),
    "diagnostics": frozenset(f"{ENV_PREFIX}{name.upper()}" for name in DiagnosticsSettings.model_fields),
    "supervisor": frozenset(f"{ENV_PREFIX}{name.upper()}" for name in SupervisorSettings.model_fields),
    "launcher": frozenset({ENV_API, ENV_TOKEN, ENV_LAUNCHER, TLS_CA}),
    "redis": frozenset(),
}
COMPONENT = "app.kubernetes.io/component"


DATA = Path(__file__).parent / "kubernetes" / "data"
CERTIFICATE = "Certificate cert-manager.io/v1"


@cache
def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "schemas.json").read_text())
    found["kinds"][CERTIFICATE] = json.loads((DATA / "cert_manager.json").read_text())
    return found


def problems(manifest: Manifest) -> list[str]:
    """Return what is wrong with an object; raises KeyError for a kind without a schema."""
    schemas = _schemas()
    kind = schemas["kinds"][f"{manifest['kind']} {manifest['apiVersion']}"]
    validator = jsonschema.Draft202012Validator({**kind, "$defs": schemas["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def known(manifest: Manifest) -> bool:
    return f"{manifest['kind']} {manifest['apiVersion']}" in _schemas()["kinds"]


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the pod templates of an object."""
    if manifest["kind"] == "JobSet":
        for job in manifest["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]
    elif manifest["kind"] in ("Deployment", "StatefulSet"):
        yield manifest["spec"]["template"]


def component(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][COMPONENT])


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def environment(container: Manifest) -> dict[str, str]:
    """Return the literal values; those of secrets and fields are empty."""
    return {each["name"]: each.get("value", "") for each in container.get("env", [])}


def unread(pod: Manifest) -> set[str]:
    """Return the variables of Holdfast that nobody in the pod reads."""
    names = {name for each in containers(pod) for name in environment(each) if name.startswith(ENV_PREFIX)}
    return names - READERS[component(pod)]


def command(container: Manifest) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def dangling(pod: Manifest) -> set[str]:
    """Return volumes that are mounted and not there, or there and not mounted."""
    mounted = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])}
    return mounted ^ {volume["name"] for volume in pod["spec"].get("volumes", [])}
