"""The stack of docker-compose.yml under a project name of its own, and what the tests do to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeVar

from containers.images import ROOT, run
from losses import parse
from waiting import wait_until

from holdfast.cli.client import Client
from holdfast.domain.errors import HoldfastError

T = TypeVar("T")

JOB = "demo"
ENDING = ("passwords", "job")  # when they are written; when the job ends, or when nobody answers any more
LOSS_RANK = 1  # the last pipeline stage of the first replica writes the losses
TIMEOUT_S = 180.0
POLL_S = 0.25


def command() -> tuple[str, ...]:
    """Compose v2 where the docker command has it, else docker-compose 1.29."""
    v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    assert v2 or shutil.which("docker-compose"), "neither `docker compose` nor `docker-compose` is here"
    return ("docker", "compose") if v2 else ("docker-compose",)


class Compose:
    """One project. Published ports are the test's own."""

    def __init__(self, project: str, environment: dict[str, str], ports: tuple[int, int]) -> None:
        self.project = project
        self._command = (*command(), "--project-name", project, "--file", str(ROOT / "docker-compose.yml"))
        self._environment = {
            "COMPOSE_PROFILES": "",
            "OTLP_ENDPOINT": "",
            **environment,
            "API_PORT": str(ports[0]),
            "STANDBY_API_PORT": str(ports[1]),
        }
        self.apis = [f"http://127.0.0.1:{port}" for port in ports]

    # ------------------------------------------------------------------ the stack

    def __call__(self, *arguments: str, **environment: str) -> str:
        settings = {**self._environment, **environment}
        return run(*self._command, "--project-directory", str(ROOT), *arguments, **settings)

    @cached_property
    def token(self) -> str:
        """That of the API, as deploy/README.md has it read."""
        said = self("run", "--rm", "--no-deps", "-T", "passwords", "cat", "/var/lib/passwords/api/password")
        return said.split()[-1]  # after what compose itself says

    def container(self, service: str) -> str:
        return self("ps", "--all", "-q", service).strip().splitlines()[-1]

    def kill(self, service: str) -> None:
        run("docker", "kill", self.container(service))

    def start(self, service: str) -> None:
        run("docker", "start", self.container(service))

    def pause(self, service: str) -> None:
        container = self.container(service)

        def frozen() -> bool:
            """The engine gives up if processes of the container are born while it freezes them."""
            try:
                run("docker", "pause", container)
            except AssertionError as error:
                if "unable to freeze" in str(error):
                    return False
                raise
            return True

        wait_until(frozen, description=f"{service} to be paused", timeout_s=TIMEOUT_S, poll_s=POLL_S)

    def unpause(self, service: str) -> None:
        run("docker", "unpause", self.container(service))

    def restore(self) -> None:
        """Undo what a test did to its containers: what was killed is started, paused woken, cut off connected."""
        for container in self("ps", "--all", "-q").split():
            seen = json.loads(run("docker", "inspect", container))[0]
            service = seen["Config"]["Labels"]["com.docker.compose.service"]
            if service in ENDING:
                continue
            if seen["State"]["Paused"]:
                run("docker", "unpause", container)
            if not seen["NetworkSettings"]["Networks"]:
                run("docker", "network", "connect", "--alias", service, self._network, container)
            if not seen["State"]["Running"]:
                run("docker", "start", container)

    def disconnect(self, service: str) -> None:
        run("docker", "network", "disconnect", self._network, self.container(service))

    def connect(self, service: str) -> None:
        run("docker", "network", "connect", "--alias", service, self._network, self.container(service))

    def inside(self, service: str, *arguments: str) -> str:
        return run("docker", "exec", self.container(service), *arguments)

    def containers(self) -> dict[str, str]:
        """Return the containers that run, by service."""
        found = {}
        for container in self("ps", "-q").split():
            seen = json.loads(run("docker", "inspect", container))[0]
            if seen["State"]["Running"]:
                found[seen["Config"]["Labels"]["com.docker.compose.service"]] = container
        return found

    def keep_logs(self, directory: Path) -> None:
        """Each container's log in a file of its own, in place of those of the last time."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for container in self("ps", "--all", "-q").split():
            name = run("docker", "inspect", "--format", "{{.Name}}", container).strip().removeprefix(f"/{self.project}")
            (directory / f"{name.strip('_-')}.log").write_text(run("docker", "logs", container))

    @property
    def _network(self) -> str:
        return f"{self.project}_fleet"

    # ------------------------------------------------------------------ what it says

    def ask(self, question: Callable[[Client], Any]) -> Any:
        """The answer of the leader, or of whoever answers when none leads."""
        problem: Exception | None = None
        for url in sorted(self.apis, key=lambda url: not self._leads(url)):
            try:
                with Client(url, token=self.token) as client:
                    return question(client)
            except HoldfastError as error:
                problem = error
        raise problem or AssertionError("no API")

    def leader(self) -> str:
        """The service that leads, waited for."""

        def leads() -> str:
            services = zip(("supervisor-a", "supervisor-b"), self.apis, strict=True)
            return next((name for name, url in services if self._leads(url)), "")

        return self._until(leads, "a leader")

    def _leads(self, url: str) -> bool:
        with suppress(HoldfastError), Client(url, token=self.token) as client:
            return bool(client.version()["leader"])
        return False

    def job(self) -> dict[str, Any]:
        view: dict[str, Any] = self.ask(lambda client: client.job(JOB))
        return view

    def incidents(self) -> list[dict[str, Any]]:
        """Oldest first."""
        listed = self.ask(lambda client: list(client.incidents(JOB)))
        return sorted(listed, key=lambda incident: incident["fault_at"])

    def wait(self, description: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the job's view fulfils `condition`. An API that does not answer for a moment is waited for."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            with suppress(HoldfastError):
                seen.update(self.job())
                assert seen["phase"] not in ("failed", "completed"), seen["reason"]
                return condition(seen)
            return False

        self._until(holds, description)
        return seen

    def wait_steps(self, more: int = 5) -> dict[str, Any]:
        """Wait until the job runs on all four ranks and has come `more` steps farther."""
        first = (
            self.wait("four ranks", lambda view: view["phase"] == "running" and len(view["ranks"]) == 4)["step"] or 0
        )
        return self.wait(
            f"{more} steps more",
            lambda view: view["phase"] == "running" and len(view["ranks"]) == 4 and (view["step"] or 0) >= first + more,
        )

    def wait_nodes(self, count: int) -> None:
        """Wait until so many nodes are there, with ranks or as spares."""

        def there() -> bool:
            with suppress(HoldfastError):
                states = [node["state"] for node in self.ask(lambda client: list(client.nodes()))]
                return sum(state in ("active", "spare") for state in states) >= count
            return False

        self._until(there, f"{count} nodes")

    def wait_incident(self, known: int) -> dict[str, Any]:
        """The first incident after the `known` oldest ones, once it is closed."""

        def closed() -> bool:
            with suppress(HoldfastError):
                return any(one["state"] in ("resolved", "failed") for one in self.incidents()[known:])
            return False

        self._until(closed, "a closed incident")
        return next(one for one in self.incidents()[known:] if one["state"] in ("resolved", "failed"))

    def _until(self, condition: Callable[[], T], description: str) -> T:
        """`wait_until`, whose error says what the stack looks like."""
        try:
            return wait_until(condition, description=description, timeout_s=TIMEOUT_S, poll_s=POLL_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.state()}") from error

    def state(self) -> str:
        """The stack in one line, for whoever reads why a test failed."""
        try:
            job, incidents = self.job(), self.incidents()
            nodes = self.ask(lambda client: list(client.nodes()))
        except HoldfastError as error:
            return f"the API does not say more: {error}"
        parts = [f"job {job['phase']} ({job['reason']}) at step {job['step']}, generation {job['generation']}"]
        parts.append(f"ranks on {[worker['node'] for worker in job['ranks']]}")
        parts += [f"{node['node']} {node['state']} {node['reason']}".strip() for node in nodes]
        parts += [f"{one['id']} {one['kind']} of {one['node']} {one['state']}" for one in incidents[-3:]]
        return "; ".join(parts)

    def losses(self) -> dict[int, float]:
        """Steps that the trainer itself has written down, since it last came to the node that it writes on."""
        return self.losses_in(self.container_of_rank(LOSS_RANK))

    def losses_in(self, container: str) -> dict[int, float]:
        text = run("docker", "exec", container, "cat", "/tmp/gpt/loss.jsonl")
        return parse(text)

    def container_of_rank(self, rank: int) -> str:
        node = next(worker["node"] for worker in self.job()["ranks"] if worker["rank"] == rank)
        for container in self("ps", "--all", "-q").split():
            if run("docker", "inspect", "--format", "{{.Config.Hostname}}", container).strip() == node.removeprefix(
                "spare-"
            ):
                return container
        raise AssertionError(f"no container has the hostname {node}")

    def workers(self, service: str) -> int:
        """Worker processes that really run on a node: forks of its template."""
        # The brackets: the shell that asks has this text in its own command line, which must not be counted.
        script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[h]oldfast.train.warm.template' | wc -l"
        return int(self.inside(service, "sh", "-c", script)) - 1


def gateway() -> str:
    """Where containers reach this machine. An engine's first bridge names no gateway: it is the first address then."""
    described = run("docker", "network", "inspect", "--format", "{{json (index .IPAM.Config 0)}}", "bridge")
    config: dict[str, str] = json.loads(described)
    return config.get("Gateway") or str(next(ip_network(config["Subnet"]).hosts()))


def project_name() -> str:
    return f"holdfast-test-{os.getpid()}"
