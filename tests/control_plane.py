"""A real control plane of Kubernetes 1.20 on this machine: etcd, API server, controllers and scheduler, without a kubelet.

    with control_plane(directory) as cluster:
        cluster.add_machine("m1")
        cluster.post("/api/v1/namespaces/default/pods", {...})

Machines are objects with a heartbeat (`Machine`). `tests/kubernetes/build_control_plane.py` builds the programs.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from ports import free_ports
from waiting import wait_until

from holdfast.runtime.processes.children import tied

VERSION = "1.20.2"
DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast-test" / f"kubernetes-{VERSION}"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
MISSING = f"no control plane of Kubernetes in {DIRECTORY}: python tests/kubernetes/build_control_plane.py builds it"
NAMESPACE = "ml"
ADMIN = "admin-of-the-test"  # bearer token
HEARTBEAT_S = 1.0
GRACE_S = 15  # a machine without a heartbeat is NotReady after this long
START_S = 300.0  # seconds are enough on an idle machine
TOOL_S = 120.0
Object = dict[str, Any]


def is_built() -> bool:
    return all((DIRECTORY / name).exists() for name in PROGRAMS)


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.etcd_port, peer, self.port = free_ports(3)
        self._peer = peer
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.machines: dict[str, Machine] = {}
        self._client: httpx.Client | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca_file(self) -> Path:
        """Of the certificate that the API server makes for itself."""
        return self.directory / "certificates" / "apiserver.crt"

    # ------------------------------------------------------------ programs

    def start(self) -> None:
        directory = self.directory
        key = directory / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (directory / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        etcd = f"http://127.0.0.1:{self.etcd_port}"
        peers = f"http://127.0.0.1:{self._peer}"
        self._start(
            "etcd", "--data-dir", str(directory / "etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
        )  # fmt: skip
        self.start_api_server()
        config = directory / "kubeconfig"
        config.write_text(json.dumps(self._kubeconfig()))
        common = ("--kubeconfig", str(config), "--leader-elect=false", "--port=0", "--secure-port=0")
        self._start(
            "kube-controller-manager", *common, "--controllers=job,nodelifecycle,podgc,namespace,serviceaccount",
            "--node-monitor-period=1s", f"--node-monitor-grace-period={GRACE_S}s", "--node-startup-grace-period=60s",
            "--service-account-private-key-file", str(key),
        )  # fmt: skip
        self._start("kube-scheduler", *common)
        self.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        wait_until(lambda: self.find(path), description="the controllers to work", timeout_s=START_S, poll_s=0.2)

    def start_api_server(self) -> None:
        """Also again, after `kill`."""
        key = str(self.directory / "accounts.key")
        self._start(
            "kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{self.etcd_port}", "--bind-address=127.0.0.1",
            "--secure-port", str(self.port), "--cert-dir", str(self.directory / "certificates"),
            "--token-auth-file", str(self.directory / "tokens.csv"), "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file", key, "--service-account-signing-key-file", key,
            "--disable-admission-plugins=ServiceAccount", "--allow-privileged=false",
        )  # fmt: skip

        self.wait_ready()

    def wait_ready(self) -> None:
        """Until the API server serves; starts it if it was killed."""
        if "kube-apiserver" not in self._running:
            self.start_api_server()
            return

        def ready() -> bool:
            self._alive()
            if not self.ca_file.exists():
                return False
            try:
                return self.client.get("/readyz").status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

        wait_until(ready, description="the API server", timeout_s=START_S, poll_s=0.2)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def compact(self) -> None:
        """etcd forgets every version but the newest."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self.etcd_port}", timeout=30) as etcd:
            revision = etcd.post("/v3/kv/range", json={"key": "AA=="}).json()["header"]["revision"]
            etcd.post("/v3/kv/compaction", json={"revision": revision}).raise_for_status()

    def stop(self) -> None:
        for machine in self.machines.values():
            machine.stop()
        for process in reversed(self._running.values()):
            process.kill()
            process.wait()
        if self._client is not None:
            self._client.close()

    def _start(self, program: str, *arguments: str) -> None:
        with (self.directory / f"{program}.log").open("ab") as log:
            command = tied([str(DIRECTORY / program), *arguments])  # they end with this process, however it ends
            self._running[program] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _alive(self) -> None:
        for name, process in self._running.items():
            if process.poll() is not None:
                tail = (self.directory / f"{name}.log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{name} ended with {process.returncode}:\n{tail}")

    def _kubeconfig(self) -> Object:
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": ADMIN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }

    # ------------------------------------------------------------ objects

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            verify = ssl.create_default_context(cafile=str(self.ca_file))
            headers = {"Authorization": f"Bearer {ADMIN}"}
            self._client = httpx.Client(base_url=self.url, verify=verify, headers=headers, timeout=60, trust_env=False)
        return self._client

    def find(self, path: str, **query: str) -> Object | None:
        answer = self.client.get(path, params=query)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return _checked(answer)

    def items(self, path: str, **query: str) -> list[Object]:
        found = self.find(path, **query)
        assert found is not None, path
        return list(found["items"])

    def post(self, path: str, body: Object) -> Object:
        return _checked(self.client.post(path, json=body))

    def patch(self, path: str, body: Object) -> Object:
        content = json.dumps(body)
        headers = {"Content-Type": "application/merge-patch+json"}
        return _checked(self.client.patch(path, content=content, headers=headers))

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        query = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        answer = self.client.delete(path, params=query)
        if answer.status_code != httpx.codes.NOT_FOUND:
            _checked(answer)

    # ------------------------------------------------------------ machines

    def add_machine(self, name: str, **labels: str) -> Machine:
        machine = self.machines[name] = Machine(self, name, labels)
        machine.start()
        return machine

    def cordon(self, name: str, *, cordoned: bool = True) -> None:
        self.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": cordoned or None}})

    def taint(self, name: str, *keys: str) -> None:
        """Replaces the machine's taints."""
        taints = [{"key": key, "effect": "NoSchedule"} for key in keys]
        self.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints}})

    def wait_untainted(self) -> None:
        """Until the controllers have taken their taint off every new machine."""

        def untainted() -> bool:
            return not any(each["spec"].get("taints") for each in self.items("/api/v1/nodes"))

        wait_until(untainted, description="machines without taints", timeout_s=START_S, poll_s=0.2)

    def pods(self) -> list[Object]:
        return self.items(f"/api/v1/namespaces/{NAMESPACE}/pods")

    def kubectl(self, *arguments: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.tool("kubectl", *arguments, stdin=stdin, check=check)

    def tool(self, *command: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl or helm as the administrator. Their caches and settings are kept in the cluster's directory."""
        environment = {**os.environ, "KUBECONFIG": str(self.directory / "kubeconfig"), "HOME": str(self.directory)}
        done = subprocess.run(
            command, input=stdin, env=environment, check=False, capture_output=True, text=True, timeout=TOOL_S
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done

    def clear(self) -> None:
        """Delete what a test has left: machines, jobs and pods."""
        self.wait_ready()
        for machine in self.machines.values():
            machine.stop()
        self.machines.clear()
        for path in (
            f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            "/api/v1/nodes",
        ):
            _checked(self.client.delete(path, params={"gracePeriodSeconds": "0", "propagationPolicy": "Background"}))

    def token(self, account: str, *, bound_to: str = "") -> str:
        """A token of a service account; `bound_to`: a Secret, with which it ends."""
        spec: Object = {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": 3600}
        if bound_to:
            spec["boundObjectRef"] = {"kind": "Secret", "apiVersion": "v1", "name": bound_to}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        return str(self.post(path, body)["status"]["token"])


class Machine:
    """A Node object and its heartbeat, as a kubelet keeps it."""

    def __init__(self, cluster: Cluster, name: str, labels: dict[str, str]) -> None:
        self._cluster, self.name = cluster, name
        self._labels = {"kubernetes.io/hostname": name, **labels}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._cluster.post("/api/v1/nodes", {"metadata": {"name": self.name, "labels": self._labels}})
        self._beat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stopped,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Its heartbeat ends; the object stays."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def delete(self) -> None:
        self.stop()
        self._cluster.delete(f"/api/v1/nodes/{self.name}")

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(HEARTBEAT_S):
            try:
                self._beat()
            except (httpx.HTTPError, AssertionError):
                continue  # the API server was killed, or the object deleted

    def _beat(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": "True",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
            "reason": "test",
        }
        room = {"cpu": "8", "memory": "16Gi", "pods": "20"}
        status = {"conditions": [ready], "capacity": room, "allocatable": room}
        self._cluster.patch(f"/api/v1/nodes/{self.name}/status", {"status": status})


def _checked(answer: httpx.Response) -> Object:
    assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:500]}"
    found: Object = answer.json()
    return found


@contextmanager
def control_plane(directory: Path) -> Iterator[Cluster]:
    assert shutil.which("openssl"), "openssl is not installed"
    directory.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
