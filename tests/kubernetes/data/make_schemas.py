"""Makes schemas.json: strict JSON Schemas of the objects that Holdfast renders for Kubernetes.

    pip install --target WHEELS --no-deps kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    python tests/kubernetes/data/make_schemas.py WHEELS > tests/kubernetes/data/schemas.json

Core objects are Kubernetes' own OpenAPI definitions, as `kubernetes-validate` packs them (unknown fields are errors). JobSet is
the OpenAPI definition that Kubeflow's API package is generated from. Descriptions are left out, but for the values they list.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

VERSION = "v1.37.0-local-strict"
KINDS = (
    "ConfigMap v1",
    "PersistentVolumeClaim v1",
    "Secret v1",
    "Service v1",
    "ServiceAccount v1",
    "Deployment apps/v1",
    "StatefulSet apps/v1",
    "Ingress networking.k8s.io/v1",
    "NetworkPolicy networking.k8s.io/v1",
    "PodDisruptionBudget policy/v1",
    *(f"{kind} rbac.authorization.k8s.io/v1" for kind in ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")),
)
CORE = re.compile(r"#/\$defs/(IoK8s\w+)")
# Fields of JobSet whose enumeration stands in the API's documentation, and not in its OpenAPI definition.
JOBSET_VALUES = {
    ("JobsetV1alpha2SuccessPolicy", "operator"): ["All", "Any"],
    ("JobsetV1alpha2FailurePolicyRule", "action"): [
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ],
    ("JobsetV1alpha2FailurePolicy", "restartStrategy"): ["Recreate", "BlockingRecreate", "InPlaceRestart"],
}


def main(wheels: Path) -> None:
    folder = wheels / "kubernetes_validate" / "kubernetes-json-schema" / VERSION
    core = json.loads((folder / "_definitions.json").read_text())["$defs"]
    kinds = {kind: _core_kind(core, kind) for kind in KINDS}
    jobset, own = _jobset(wheels, core)
    kinds["JobSet jobset.x-k8s.io/v1alpha2"] = jobset
    wanted: dict[str, Any] = {}
    todo = [*kinds.values(), *own.values()]
    while todo:
        for name in re.findall(r'"#/\$defs/([^"]+)"', json.dumps(todo.pop())):
            if name not in wanted:
                wanted[name] = own[name] if name in own else _bare(core[name])
                todo.append(wanted[name])
    schema = {"kinds": dict(sorted(kinds.items())), "$defs": dict(sorted(wanted.items()))}
    sys.stdout.write(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


def _core_kind(core: dict[str, Any], kind: str) -> dict[str, Any]:
    name, _, api = kind.partition(" ")
    group, _, version = api.rpartition("/")
    for key, definition in core.items():
        for found in definition.get("x-kubernetes-group-version-kind", []):
            if (found["group"], found["version"], found["kind"]) == (group, version, name):
                return _object(_bare(core[key]))
    raise SystemExit(f"no definition of {kind}")


def _object(definition: dict[str, Any]) -> dict[str, Any]:
    """Of what is applied: without a status."""
    properties = {key: value for key, value in definition["properties"].items() if key != "status"}
    return {**definition, "properties": properties, "required": ["apiVersion", "kind", "metadata"]}


def _bare(value: Any) -> Any:
    """Without descriptions, and with the values that a description lists."""
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if not isinstance(value, dict):
        return value
    bare = {
        key: {name: _bare(each) for name, each in item.items()} if key == "properties" else _bare(item)
        for key, item in value.items()
        if key not in ("description", "title", "default", "example") and not key.startswith("x-kubernetes-")
    }
    said = value.get("description", "")
    if isinstance(said, str) and "string" in bare.get("type", ()) and "enum" not in bare:
        listed = re.findall(r"(?:^|\s)- `?\"?([A-Z]\w+)\"?`?(?::| means|\s)", said.partition("Possible values are:")[2])
        if listed:
            bare["enum"] = [*dict.fromkeys(listed), None]
    return bare


def _jobset(wheels: Path, core: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    sys.path.insert(0, str(wheels))
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # type: ignore[import-not-found]

    names = {_pythonic(name): name for name in core}
    text = json.dumps(JobsetV1alpha2JobSet.model_json_schema(by_alias=True))
    text = CORE.sub(lambda found: f"#/$defs/{names[found[1]]}", text)
    whole = json.loads(text)
    own = {key: _closed(value) for key, value in whole.pop("$defs").items() if key not in names}
    for (model, field), values in JOBSET_VALUES.items():
        if field in own[model]["properties"]:
            own[model]["properties"][field] = {"enum": values}
    return _object(_closed(whole)), own


def _closed(definition: dict[str, Any]) -> dict[str, Any]:
    """Unknown fields are errors. A field that may be left out is not null in what is rendered."""
    bare = {**_bare(definition), "additionalProperties": False}
    for name, field in bare["properties"].items():
        if "anyOf" in field:
            [bare["properties"][name]] = [each for each in field["anyOf"] if each != {"type": "null"}]
    return bare


def _pythonic(name: str) -> str:
    return "".join(part[0].upper() + part[1:] for part in re.split(r"[.\-]", name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
