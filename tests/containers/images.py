"""The images of the stack, made without an image registry: a base from Debian's packages under the names that the
Dockerfile and the compose file use, wheels fetched by the host's pip. A user with a registry needs nothing of this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim-bookworm"
WHEELHOUSE = ROOT / "deploy" / "wheelhouse"
MIRROR = "http://deb.debian.org/debian"
VERSION = "compose-test"
SERVICES = f"holdfast/services:{VERSION}"
TORCH = next(line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
TIMEOUT_S = 900.0


def run(*command: str, **options: str) -> str:
    """Output of a command that must succeed; its whole output is in the error when it does not."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "0", **options}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=TIMEOUT_S,
        env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


def settings() -> dict[str, str]:
    """What .env sets: image names, ports, sizes."""
    lines = (ROOT / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def exists(image: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0


def make_base(directory: Path, redis_image: str) -> None:
    """Debian with Python 3.11 and Redis 7.0, as the base of the Dockerfile and as the Redis of the compose file."""
    if exists(BASE) and exists(redis_image):
        return
    tree = directory / "rootfs"
    run(
        "debootstrap", "--variant=minbase", "--include=python3,python3-venv,redis-server", "bookworm", str(tree), MIRROR
    )
    archive = directory / "rootfs.tar"
    run("tar", "-C", str(tree), "--exclude=./var/cache/apt", "--exclude=./dev", "-cf", str(archive), ".")
    for name in (BASE, redis_image):
        run("docker", "import", str(archive), name)
    archive.unlink()
    shutil.rmtree(tree)


def fetch_wheels() -> None:
    """Everything that the two images install, for builds that reach no index."""
    WHEELHOUSE.mkdir(exist_ok=True)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WHEELHOUSE), "--prefer-binary")
    if not any(WHEELHOUSE.glob("torch-*.whl")):
        run(*pip, TORCH)
    # Debian's Python is 3.11.2; what only older ones than the host's need, pip here does not think of.
    older = ("async-timeout>=4.0.3",)
    run(
        *pip, "-c", "constraints.txt", "--find-links", str(WHEELHOUSE),
        ".[gcs,otel,alerts,nvml,train]", "hatchling>=1.27", *older,
    )  # fmt: skip


def build(version: str = VERSION) -> None:
    """Both images, from the wheelhouse alone."""
    for target in ("services", "trainer"):
        run(
            "docker", "build", "--file", "deploy/Dockerfile", "--target", target, "--tag", f"holdfast/{target}:{version}",
            "--build-arg", "PIP_ARGS=--no-index", "--build-arg", f"TORCH={TORCH}", ".",
        )  # fmt: skip
