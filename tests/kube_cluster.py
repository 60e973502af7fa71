"""An API server of nodes and pods for tests of the bridge: lists in pages, watches, and every way to fail that is asked for.

As a real one: a watch from a version that is not kept any more gets 410; a token may be refused, a right may be missing, and
connections may break within a watch. `tests/kubernetes` runs the same bridge on a real API server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import json_server

Object = dict[str, Any]
AGENT = {"app.kubernetes.io/name": "holdfast", "app.kubernetes.io/component": "agent"}


def node(
    name: str, *, unschedulable: bool = False, taints: tuple[str, ...] = (), labels: Mapping[str, str] | None = None
) -> Object:
    spec: Object = {"unschedulable": True} if unschedulable else {}
    if taints:
        spec["taints"] = [{"key": key, "effect": "NoSchedule"} for key in taints]
    return {"kind": "Node", "metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec}


def pod(name: str, machine: str, namespace: str = "ml") -> Object:
    about = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": AGENT}
    return {"kind": "Pod", "metadata": about, "spec": {"nodeName": machine}, "status": {"phase": "Running"}}


class ClusterApi:
    """`refuse`: code by plural. `token`: that requests must carry; empty = any. `old`: versions up to it are not kept."""

    def __init__(self, *objects: Object) -> None:
        self.refuse: dict[str, int] = {}
        self.token = ""
        self.old = 0
        self.page = 1000
        self.down = False
        self.requests: list[str] = []
        self.watching = 0
        self._changed = threading.Condition()
        self._version = 0
        self._events: list[tuple[int, str, str, Object]] = []
        self._objects: dict[tuple[str, str], Object] = {}
        self._epoch = 0  # of connections: watches of an earlier one break
        for each in objects:
            self.put(each)

    def put(self, found: Object) -> None:
        plural = f"{found['kind'].lower()}s"
        key = (plural, found["metadata"]["name"])
        with self._changed:
            self._version += 1
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
            kind = "MODIFIED" if key in self._objects else "ADDED"
            self._objects[key] = found
            self._events.append((self._version, plural, kind, found))
            self._changed.notify_all()

    def delete(self, plural: str, name: str) -> None:
        with self._changed:
            found = self._objects.pop((plural, name))
            self._version += 1
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
            self._events.append((self._version, plural, "DELETED", found))
            self._changed.notify_all()

    def find(self, plural: str, name: str) -> Object:
        return self._objects[plural, name]

    def forget(self) -> None:
        """Versions up to now are not kept, and watches break."""
        with self._changed:
            self.old = self._version
            self._epoch += 1
            self._changed.notify_all()

    def drop(self) -> None:
        """Watches break."""
        with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    # ------------------------------------------------------------ requests

    def answer(self, method: str, path: str, query: dict[str, str], body: Object) -> tuple[int, Object]:
        """Of everything but a watch."""
        plural, name = _place(path)
        self.requests.append(f"{method} {plural}{f'/{name}' if name else ''}")
        if plural in self.refuse:
            return _status(self.refuse[plural], f"{plural} is forbidden")
        if not name:
            return self._list(plural, _namespace(path), query)
        if (plural, name) not in self._objects:
            return _status(404, f'{plural} "{name}" not found')
        found = self._objects[plural, name]
        if method == "DELETE":
            if body.get("preconditions", {}).get("uid") != found["metadata"]["uid"]:
                return _status(409, "the UID in the precondition is another")
            self.delete(plural, name)
        if method == "PATCH":
            self.put(_merged(found, body))
        return 200, self._objects.get((plural, name), found)

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> tuple[int, Object]:
        begin = int(query.get("continue", 0))
        with self._changed:
            found = [each for (kind, _), each in sorted(self._objects.items()) if kind == plural]
            found = [each for each in found if each["metadata"].get("namespace", "") == namespace]
            about = {"resourceVersion": str(self._version)}
        page = [
            {key: value for key, value in each.items() if key != "kind"} for each in found[begin : begin + self.page]
        ]
        if begin + self.page < len(found):
            about["continue"] = str(begin + self.page)
        return 200, {"metadata": about, "items": page}

    def watch(self, plural: str, version: int) -> Iterator[Object]:
        """Events, until the watch breaks."""
        with self._changed:
            epoch, self.watching = self._epoch, self.watching + 1
        try:
            while True:
                with self._changed:
                    if version < self.old:
                        yield {"type": "ERROR", "object": _status(410, "too old resource version")[1]}
                        return
                    more = [each for each in self._events if each[0] > version and each[1] == plural]
                    if not more:
                        self._changed.wait(30)
                        if self._epoch != epoch or self.down:
                            return
                        continue
                for number, _, kind, found in more:
                    version = max(version, number)
                    yield {"type": kind, "object": found}
        finally:
            with self._changed:
                self.watching -= 1
                self._changed.notify_all()


def _place(path: str) -> tuple[str, str]:
    parts = path.removeprefix("/api/v1/").split("/")
    if parts[0] == "namespaces":
        parts = parts[2:]
    return parts[0], parts[1] if len(parts) > 1 else ""


def _namespace(path: str) -> str:
    parts = path.removeprefix("/api/v1/").split("/")
    return parts[1] if parts[0] == "namespaces" else ""


def _merged(found: Object, patch: Object) -> Object:
    merged = {**found}
    for key, value in patch.items():
        merged[key] = _merged(found.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


def _status(code: int, message: str) -> tuple[int, Object]:
    return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


@contextmanager
def serving(api: ClusterApi) -> Iterator[str]:
    """Serve on a free port of this machine; yields the URL."""

    class Handler(json_server.JsonHandler):
        def _serve(self) -> None:
            body, parts = self.read(), urlsplit(self.path)
            query = dict(parse_qsl(parts.query))
            if api.down:
                self.close_connection = True
                return None
            if api.token and self.headers.get("Authorization") != f"Bearer {api.token}":
                return self.send(*_status(401, "Unauthorized"))
            plural, _ = _place(parts.path)
            if "watch" in query and plural not in api.refuse:
                return self._watch(plural, int(query["resourceVersion"]))
            return self.send(*api.answer(self.command, parts.path, query, body))

        def _watch(self, plural: str, version: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in api.watch(plural, version):
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                pass  # the other end is gone
            self.close_connection = True

        do_GET = do_PATCH = do_DELETE = _serve  # noqa: N815

    with json_server.serving(Handler) as url:
        try:
            yield url
        finally:
            api.drop()
