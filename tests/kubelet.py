"""What a kubelet does, as far as agents and launchers can tell: containers are processes of this machine.

`Kubelet` runs one pod. `Kubelets` are those of a real control plane: they run the pods that its scheduler has bound to the
machines of a test, and delete them as kubelets do: SIGTERM, the end of the process, then the object.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import kube_schemas
from control_plane import NAMESPACE, Cluster
from kube_schemas import Manifest, containers

from holdfast.cli.processes import kill_tree

SYNC_S = 0.2


@dataclass
class Kubelet:
    """Runs containers as processes. `places`: paths and names of the cluster → those of this machine, the longer ones first;
    `{pod}` in one of the latter is the pod's name."""

    root: Path
    places: dict[str, str]
    environment: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, pod: Manifest, name: str, fields: dict[str, str]) -> subprocess.Popen[bytes]:
        (container,) = containers(pod)
        fields = {"status.podIP": "127.0.0.1", "metadata.name": name, **fields}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                environment[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                environment[each["name"]] = self.environment[each["name"]]
            else:
                environment[each["name"]] = self._here(each["value"], name)
        command = kube_schemas.command(container)[1:]
        arguments = [self._here(self._expanded(text, environment), name) for text in command]
        environment["HOME"] = str(self.root)
        environment["HOLDFAST_PREFLIGHT_EVERY_S"] = "0"  # tests of a whole machine take longer than this test
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.cli.main", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.root,
            )
        self.running.append(process)
        return process

    def stop(self) -> None:
        """Kill what is still running."""
        for process in self.running:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()

    def _here(self, text: str, pod: str) -> str:
        for there, here in self.places.items():
            text = text.replace(there, here.replace("{pod}", pod))
        return text

    @staticmethod
    def _expanded(text: str, environment: dict[str, str]) -> str:
        for name, value in environment.items():
            text = text.replace(f"$({name})", value)
        return text


class Kubelets:
    """Of all machines but those that are switched off. `exit_codes`: by pod, of those that have ended."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet) -> None:
        self._cluster, self._kubelet = cluster, kubelet
        self._processes: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}  # by uid: machine, process
        self._terminated: set[str] = set()  # uids
        self._off: set[str] = set()
        self._lock = threading.Lock()
        self.exit_codes: dict[str, int] = {}
        self.errors: list[str] = []

    def power_off(self, machine: str) -> None:
        """The machine's pods are killed, and nobody says so: no heartbeat, no status."""
        with self._lock:
            self._off.add(machine)
            self._cluster.machines[machine].stop()
            for place, process in self._processes.values():
                if place == machine and process.poll() is None:
                    kill_tree(process.pid)
                    process.wait()

    def run(self, stopped: threading.Event) -> None:
        while not stopped.wait(SYNC_S):
            try:
                for pod in self._cluster.pods():
                    with self._lock:
                        self._sync(pod)
            except httpx.HTTPError:
                continue  # the API server is away: pods run on
            except AssertionError as error:  # refused, because the object has changed meanwhile
                self.errors.append(str(error))

    def _sync(self, pod: Manifest) -> None:
        about, machine = pod["metadata"], pod["spec"].get("nodeName")
        name, uid = about["name"], about["uid"]
        if not machine or machine in self._off or machine not in self._cluster.machines:
            return
        if uid not in self._processes:
            if "deletionTimestamp" in about or pod["status"]["phase"] != "Pending":
                return
            process = self._kubelet.start(pod, name, {"spec.nodeName": machine})
            self._processes[uid] = machine, process
            self._report(name, {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1"})
            return
        _, process = self._processes[uid]
        ended = process.poll() is not None
        if "deletionTimestamp" in about:
            if ended:
                self.exit_codes[name] = process.returncode
                self._cluster.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", grace_s=0)
            elif uid not in self._terminated:
                self._terminated.add(uid)
                process.terminate()
        elif ended and name not in self.exit_codes:
            self.exit_codes[name] = process.returncode
            self._report(name, {"phase": "Failed" if process.returncode else "Succeeded"})

    def _report(self, pod: str, status: dict[str, Any]) -> None:
        self._cluster.patch(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status", {"status": status})


@contextmanager
def kubelets(cluster: Cluster, kubelet: Kubelet) -> Iterator[Kubelets]:
    running, stopped = Kubelets(cluster, kubelet), threading.Event()
    thread = threading.Thread(target=running.run, args=(stopped,))
    thread.start()
    try:
        yield running
    finally:
        stopped.set()
        thread.join()
        kubelet.stop()
