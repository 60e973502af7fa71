"""Versions of Holdfast, and fleets of which each part runs one of them, in an environment whose package can be replaced.

    with mixed_fleet(directory, nodes=2, default=older) as fleet:
        fleet.install(current, "supervisor")     # as `pip install` does under a running process
        fleet.restart_service("supervisor")

An environment is a virtual environment without packages. Its path has the source roots of a version by way of a link, and the
packages of the environment that the tests run in. A running process imports from the version that the link names by then.
`versions.txt` lists the commits that stand for earlier versions. Tests are skipped if the checkout lacks their history.
"""

from __future__ import annotations

import subprocess
import sysconfig
import tarfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import IO

import pytest
from training import Cluster
from waiting import wait_until

from holdfast.cli.processes import STOP_TIMEOUT_S, Process
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import Conflict
from holdfast.runtime.processes.children import tied

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = (
    "src", "tools", "services/agent", "services/diagnostics", "services/supervisor", "services/checkpoint-replicator",
)  # fmt: skip
METADATA = "metadata"  # directory of the package's metadata, which names the version
COMMITS = tuple(
    line for line in Path(__file__).with_suffix(".txt").read_text().splitlines() if not line.startswith("#")
)
CURRENT = "current"
SERVICES = ("diagnostics", "supervisor")
COMMAND_S = 60.0


@dataclass(frozen=True, slots=True)
class Version:
    """`name`: as the parts report it. `directory` has the source roots and the metadata."""

    name: str
    directory: Path


def current(directory: Path) -> Version:
    """This working tree."""
    directory.mkdir(parents=True)
    for top in _tops():
        (directory / top).symlink_to(ROOT / top)
    return _named(CURRENT, directory)


def earlier(commit: str, directory: Path) -> Version:
    """The sources of a commit. Skips the test if this checkout does not have it."""
    if not has_commit(commit):
        pytest.skip(f"this checkout lacks the history with {commit[:12]}: git fetch --unshallow")
    packed = _git("archive", commit, *_tops())
    directory.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return _named(commit[:12], directory)


@cache
def has_commit(commit: str) -> bool:
    return _git("cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode == 0


def _git(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=check, capture_output=True)


def _tops() -> list[str]:
    return sorted({root.partition("/")[0] for root in SOURCE_ROOTS})


def _named(name: str, directory: Path) -> Version:
    version = f"0.1.0+{name}"
    where = directory / METADATA / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    where.mkdir(parents=True)
    (where / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: {version}\n")
    return Version(version, directory)


class Environment:
    """A virtual environment of one machine."""

    def __init__(self, directory: Path, version: Version) -> None:
        venv.create(directory, symlinks=True)
        self.python = directory / "bin" / "python"
        self._link = directory / "holdfast"
        packages = sysconfig.get_path("purelib", vars={"base": str(directory)})
        path = [*(str(self._link / root) for root in (*SOURCE_ROOTS, METADATA)), sysconfig.get_path("purelib")]
        (Path(packages) / "holdfast.pth").write_text("".join(f"{each}\n" for each in path))
        self.install(version)

    def install(self, version: Version) -> None:
        new = self._link.with_suffix(".new")
        new.symlink_to(version.directory)
        new.replace(self._link)


class _Stack(LocalStack):
    """Each part runs in its own environment."""

    environments: Mapping[str, Environment]

    def _run(self, part: str, module: str, environment: Mapping[str, str], output: IO[bytes]) -> Process:
        return subprocess.Popen(
            tied([str(self.environments[part].python), "-m", module], thread_lasts=True),
            env=environment, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MixedFleet(Cluster):
    environments: Mapping[str, Environment]

    def install(self, version: Version, *parts: str) -> None:
        for part in parts:
            self.environments[part].install(version)

    def restart_service(self, name: str) -> None:
        """Ask the service to end, and start it again with what is installed."""
        process = self.stack._services.processes.pop(name)
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        self.stack.start_service(name)

    def versions(self) -> dict[str, str]:
        """Of the connected agents, by node."""
        return {node["node"]: node["version"] for node in self.client.nodes() if node["connected"]}

    def command(self, part: str, *arguments: str) -> str:
        """Output of `holdfast` as it is installed on the machine of `part`. Raises if it fails."""
        command = [str(self.environments[part].python), "-m", "holdfast.cli.main", *arguments]
        done = subprocess.run(
            command, env=self.stack.for_commands, check=False, capture_output=True, text=True, timeout=COMMAND_S
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def replace_agent(self, node: str, version: Version) -> None:
        """What docs/upgrades.md says of a node without ranks."""
        self.install(version, node)
        wait_until(
            partial(self._is_restarting, node), description=f"{node} without workers of the generation that it left"
        )
        wait_until(
            lambda: self.versions().get(node) == version.name,
            description=f"the agent of {node} with version {version.name}",
        )

    def _is_restarting(self, node: str) -> bool:
        try:
            self.client.restart_agent(node, "upgrade")
        except Conflict as refused:
            if "has workers" not in str(refused):
                raise
            return False
        return True

    def complaints(self) -> list[str]:
        """Lines of the services' logs, not of the ranks', that are errors or belong to a traceback."""
        return [
            f"{log.name}: {line}"
            for log in sorted(self.stack.directory.rglob("*.log"))
            if "logs" not in log.relative_to(self.stack.directory).parts
            for line in log.read_text(errors="replace").splitlines()
            if "Traceback" in line or '"level": "error"' in line or '"level": "critical"' in line
        ]


@contextmanager
def mixed_fleet(directory: Path, nodes: int, default: Version, **others: Version) -> Iterator[MixedFleet]:
    """A stack of which each part has the version `default` at first; `others` names other ones, by part."""
    options = StackOptions(directory=directory / "stack", nodes=nodes)
    options.directory.mkdir(parents=True)
    stack = _Stack(options)
    parts = (*SERVICES, *stack.node_names)
    stack.environments = environments = {
        part: Environment(directory / "environments" / part, others.get(part.replace("-", "_"), default))
        for part in parts
    }
    with stack, stack.connect() as client:
        wait_for_nodes(client, stack, nodes)
        yield MixedFleet(stack, client, environments)
