"""A Docker engine: the one that runs, or one that is installed from Debian's packages and started for these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_until

PACKAGES = ("docker.io", "docker-compose", "debootstrap", "debian-archive-keyring", "iptables")
PROGRAMS = ("dockerd", "docker", "docker-compose", "debootstrap", "iptables")
ANSWER_TIMEOUT_S = 20.0
START_TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 600.0


class NoEngine(Exception):
    """There is none and none can be had here; the text says why."""


def answers() -> bool:
    """Whether an engine answers where the `docker` command looks for it."""
    if shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


@contextmanager
def engine(directory: Path) -> Iterator[str]:
    """An engine for the block; says which. One that we started is stopped, its containers with it. Raises `NoEngine`."""
    if answers():
        yield "the engine of this machine"
        return
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine answers, and only root can start one")
    _install()
    with (directory / "dockerd.log").open("wb") as log:
        # Whatever becomes of us, it does not stay behind.
        command = ["setpriv", "--pdeathsig", "TERM", "dockerd", f"--data-root={_data_root()}"]
        daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: daemon.poll() is not None or answers(),
                description="the engine's first answer",
                timeout_s=START_TIMEOUT_S,
                poll_s=0.2,
            )
            if daemon.poll() is not None:
                raise NoEngine(f"dockerd ended at once: {(directory / 'dockerd.log').read_text()[-600:]}")
            yield "an engine of our own"
        finally:
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _install() -> None:
    if all(shutil.which(program) for program in PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        raise NoEngine("no Docker engine answers, and without apt-get none can be installed")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES],
    ):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
        )
        if done.returncode:
            raise NoEngine(f"{' '.join(command)} failed: {done.stderr[-600:]}")


def _data_root() -> Path:
    """Kept between runs, so that the base image and build layers are made once."""
    root = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "holdfast-containers" / "docker"
    root.mkdir(parents=True, exist_ok=True)
    return root
