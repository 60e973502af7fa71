"""The images of the stack, made without an image registry: a base from Debian's packages under the names that the
Dockerfile and the compose file use, wheels fetched by the host's pip. A user with a registry needs nothing of this."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim-bookworm"
LOCKS = ROOT / "deploy" / "requirements"
WHEELHOUSE = ROOT / "deploy" / "wheelhouse"
MIRROR = "http://deb.debian.org/debian"
VERSION = "compose-test"
SERVICES = f"holdfast/services:{VERSION}"
TORCH = next(line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
TIMEOUT_S = 900.0
REDIS_USER = 999
LABEL, RECIPE = "holdfast.base", "2"  # of the base, whose copies on other machines may be of an earlier recipe


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


def made_here(image: str) -> bool:
    """Whether there is an image of this name of the present recipe, or one that is not from here."""
    asked = ["docker", "image", "inspect", "--format", "{{json .Config.Labels}} {{.Comment}}", image]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.returncode == 0 and (f'"{LABEL}":"{RECIPE}"' in done.stdout or "Imported from" not in done.stdout)


def make_base(directory: Path, redis_image: str) -> None:
    """Debian with Python 3.11 and Redis 7.0, as the base of the Dockerfile and as the Redis of the compose file. /data
    belongs to the user of the official Redis image."""
    if made_here(BASE) and made_here(redis_image):
        return
    tree = directory / "rootfs"
    run(
        "debootstrap", "--variant=minbase", "--include=python3,python3-venv,redis-server", "bookworm", str(tree), MIRROR
    )
    (tree / "data").mkdir()
    os.chown(tree / "data", REDIS_USER, REDIS_USER)
    archive = directory / "rootfs.tar"
    run("tar", "-C", str(tree), "--exclude=./var/cache/apt", "--exclude=./dev", "-cf", str(archive), ".")
    for name in (BASE, redis_image):
        run("docker", "import", "--change", f"LABEL {LABEL}={RECIPE}", str(archive), name)
    archive.unlink()
    shutil.rmtree(tree)


def fetch_wheels() -> None:
    """Everything that the two images install, for builds that reach no index: what is locked by its hashes, and a torch."""
    WHEELHOUSE.mkdir(exist_ok=True)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(WHEELHOUSE),
        "--find-links",
        str(WHEELHOUSE),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(run(sys.executable, str(LOCKS.parent / "requirements.py"), "pins", str(LOCKS / "torch.txt")))
        pins.flush()
        run(*pip, "--constraint", pins.name, TORCH)
    for lock in ("services", "build", "nvml"):
        run(*pip, "--only-binary", ":all:", "--require-hashes", "--requirement", str(LOCKS / f"{lock}.txt"))
    # Debian's Python is 3.11.2; what only older ones than the host's need, pip here does not think of.
    run(*pip, *_older_than_here(LOCKS / "services.txt"))


def _older_than_here(lock: Path) -> list[str]:
    """Return the entries of a lock for earlier releases of Python, without their markers."""
    return re.findall(r"^(\S+==\S+) ; python_full_version <", lock.read_text(), re.MULTILINE)


def build(version: str = VERSION) -> None:
    """Both images, from the wheelhouse alone."""
    for target in ("services", "trainer"):
        run(
            "docker", "build", "--file", "deploy/Dockerfile", "--target", target, "--tag", f"holdfast/{target}:{version}",
            "--build-arg", "PIP_ARGS=--no-index", "--build-arg", f"TORCH={TORCH}", ".",
        )  # fmt: skip
