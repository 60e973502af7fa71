"""An API server of Kubernetes as far as kubectl and helm need one for what is rendered: objects in memory, schemas.

No defaults, no webhooks, no controllers: it shows what they send, and that they take the answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import json_server
import kube_schemas
import yaml

KINDS = {
    "configmaps": ("", "v1", "ConfigMap"),
    "secrets": ("", "v1", "Secret"),
    "services": ("", "v1", "Service"),
    "serviceaccounts": ("", "v1", "ServiceAccount"),
    "statefulsets": ("apps", "v1", "StatefulSet"),
    "networkpolicies": ("networking.k8s.io", "v1", "NetworkPolicy"),
    "poddisruptionbudgets": ("policy", "v1", "PodDisruptionBudget"),
    "jobsets": ("jobset.x-k8s.io", "v1alpha2", "JobSet"),
}
OBJECT = re.compile(r"/(?:api|apis/[\w.-]+)/v\w+/namespaces/([\w.-]+)/(\w+)(?:/([\w.-]+))?")


class KubeApi:
    """`objects`: by plural, namespace and name. `requests`: what changed something, in order."""

    def __init__(self, *, jobset_installed: bool = True) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.kinds = {key: kind for key, kind in KINDS.items() if key != "jobsets" or jobset_installed}

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if (found := OBJECT.fullmatch(path)) and found[2] in self.kinds:
            return self._object(method, (found[2], found[1], found[3] or ""), body)
        return self._discovery(path)

    def _object(self, method: str, key: tuple[str, str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        plural, namespace, name = key
        if method == "GET":
            return (
                (200, self.objects[key])
                if key in self.objects
                else _status(404, "NotFound", f'{plural} "{name}" not found')
            )
        self.requests.append(f"{method} {plural}")
        if method == "POST":
            name = body["metadata"]["name"]
            if problems := kube_schemas.problems(body):
                return _status(400, "BadRequest", f"strict decoding error: {problems[0]}")
            body["metadata"] |= {"uid": f"uid-{len(self.objects)}", "resourceVersion": "1"}
            self.objects[plural, namespace, name] = body
            return 201, body
        return _status(405, "MethodNotAllowed", f"{method} is not answered here")

    def _discovery(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/version":
            return 200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        groups = sorted({kind[:2] for kind in self.kinds.values()})
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            named = [(group, version) for group, version in groups if group]
            versions = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in named]
            listed = [
                {"name": group, "versions": [each], "preferredVersion": each}
                for (group, _), each in zip(named, versions, strict=True)
            ]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        if path == "/openapi/v3":
            paths = {_prefix(*each): {"serverRelativeURL": f"/openapi/v3/{_prefix(*each)}?hash=1"} for each in groups}
            return 200, {"paths": paths}
        for group, version in groups:
            kinds = {plural: kind for plural, kind in self.kinds.items() if kind[:2] == (group, version)}
            if path == f"/{_prefix(group, version)}":
                return 200, {
                    "kind": "APIResourceList",
                    "apiVersion": "v1",
                    "groupVersion": f"{group}/{version}".lstrip("/"),
                    "resources": [_resource(plural, kind[2]) for plural, kind in kinds.items()],
                }
            if path == f"/openapi/v3/{_prefix(group, version)}":
                paths = {
                    f"/{_prefix(group, version)}/namespaces/{{namespace}}/{plural}/{{name}}": _patch(*kind)
                    for plural, kind in kinds.items()
                }
                return 200, {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.37.0"}, "paths": paths}
        return _status(404, "NotFound", f"{path} is not answered here")


def _prefix(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def _resource(plural: str, kind: str) -> dict[str, Any]:
    verbs = ["create", "get", "list", "patch"]
    return {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}


def _patch(group: str, version: str, kind: str) -> dict[str, Any]:
    """Tells kubectl that the server checks fields strictly."""
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    what = {"group": group, "version": version, "kind": kind}
    return {"patch": {"parameters": [parameter], "x-kubernetes-group-version-kind": what, "responses": {}}}


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    said = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return code, {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


@contextmanager
def serving(api: KubeApi, config: Path) -> Iterator[None]:
    """Serve on a free port, and write a configuration of kubectl for it."""

    class Handler(json_server.JsonHandler):
        def _serve(self) -> None:
            self.send(*api.answer(self.command, urlsplit(self.path).path, self.read()))

        do_GET = do_POST = do_PATCH = _serve  # noqa: N815

    with json_server.serving(Handler) as url:
        cluster = {"name": "test", "cluster": {"server": url}}
        context = {"name": "test", "context": {"cluster": "test", "user": ""}}
        kubeconfig = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
        config.write_text(yaml.safe_dump({**kubeconfig, "current-context": "test"}))
        yield
