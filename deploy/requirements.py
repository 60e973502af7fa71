"""Locks of what the images install: every version with the hashes of its files. `lock` needs uv, the rest the standard library.

    python deploy/requirements.py lock        writes the locks from pyproject.toml and constraints.txt (`make lock`)
    python deploy/requirements.py check       reports a lock that does not fit to them; needs no network (`make check`)
    python deploy/requirements.py pins FILE   prints a lock's versions without hashes, as constraints for pip

A lock (deploy/requirements/NAME.txt) is resolved for all systems and each supported Python at once, and from the package index
alone. A build of torch from elsewhere has other files, so other hashes: deploy/README.md.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "requirements"
CONSTRAINTS = "constraints.txt"
# By name of the file: what it locks. `""` = the dependencies of the package itself, `build` = those of its build.
CONTENTS: dict[str, tuple[str, ...]] = {
    "services": ("", "gcs", "otel", "alerts"),
    "build": ("build",),
    "nvml": ("nvml",),
    "torch": ("train",),
}
INPUTS = "# inputs: "
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)( ; [^\\]+?)?(?: \\)?$")
COMMAND = "python deploy/requirements.py lock"


def wanted(lock: str, root: Path = ROOT) -> list[str]:
    """Return the requirements that a lock resolves, as pyproject.toml has them."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    groups = {
        "": project["project"]["dependencies"],
        "build": project["build-system"]["requires"],
        **project["project"]["optional-dependencies"],
    }
    return sorted(requirement for name in CONTENTS[lock] for requirement in groups[name])


def digest(lock: str, root: Path = ROOT) -> str:
    """Return the digest of what a lock is asked for. (Versions of constraints.txt are compared one by one.)"""
    return hashlib.sha256("\n".join(wanted(lock, root)).encode()).hexdigest()


def problems(lock: str, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with a lock: stale, without hashes, or of another version than constraints.txt."""
    path = root / "deploy" / "requirements" / f"{lock}.txt"
    if not path.exists():
        yield f"{path.name} is missing: {COMMAND}"
        return
    lines = path.read_text().splitlines()
    if f"{INPUTS}{digest(lock, root)}" not in lines:
        yield f"{path.name} is stale, since pyproject.toml has changed: {COMMAND}"
    held = {_name(pin): pin.split("==")[1] for pin in _pins((root / CONSTRAINTS).read_text().splitlines())}
    locked: set[str] = set()
    for name, version, hashes in entries(lines):
        locked.add(name)
        if not hashes:
            yield f"{path.name}: {name}=={version} has no hash: {COMMAND}"
        if version != held.get(name, version):
            yield f"{path.name}: {name}=={version}, but constraints.txt has {held[name]}: {COMMAND}"
    for requirement in wanted(lock, root):
        if _name(requirement) not in locked:
            yield f"{path.name} does not contain {requirement}: {COMMAND}"


def entries(lines: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Return name, version and hashes of each entry of a lock. Raises `ValueError` for a line of another kind."""
    found: list[tuple[str, str, list[str]]] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if pin := PIN.match(line):
            found.append((_name(pin[1]), pin[2], []))
        elif found and (hashed := re.fullmatch(r"--hash=(sha256:[0-9a-f]{64})(?: \\)?", text)):
            found[-1][2].append(hashed[1])
        else:
            raise ValueError(f"a line that is neither NAME==VERSION nor a hash: {line!r}")
    return found


def pins(lines: Sequence[str]) -> Iterator[str]:
    """Yield NAME==VERSION with its markers, without torch itself, which a build of one's own stands in for."""
    for line in lines:
        if (pin := PIN.match(line)) and _name(pin[1]) != "torch":
            yield f"{pin[1]}=={pin[2]}{pin[3] or ''}"


def lock(name: str) -> None:
    """Write a lock anew. Raises `CalledProcessError` if it cannot be resolved, with uv's reason on stderr."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--universal", "--python-version", "3.11"),
            *("--generate-hashes", "--no-annotate", "--no-header", "--only-binary", ":all:"),
            *("--constraint", CONSTRAINTS),
        ],
        input="\n".join(wanted(name)), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    header = f"# Written by `{COMMAND}`; not to be edited.\n{INPUTS}{digest(name)}\n"
    LOCKS.mkdir(exist_ok=True)
    (LOCKS / f"{name}.txt").write_text(header + done.stdout)


def _pins(lines: Sequence[str]) -> list[str]:
    return [line.strip() for line in lines if "==" in line and not line.startswith("#")]


def _name(requirement: str) -> str:
    """As the package index normalises it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["lock"]:
            for name in CONTENTS:
                lock(name)
        case ["check"]:
            found = [problem for name in CONTENTS for problem in problems(name)]
            sys.stderr.writelines(f"{problem}\n" for problem in found)
            return min(1, len(found))
        case ["pins", file]:
            sys.stdout.writelines(f"{pin}\n" for pin in pins(Path(file).read_text().splitlines()))
        case _:
            sys.stderr.write("usage: requirements.py lock | check | pins FILE\n")
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
