"""Builds a real control plane of Kubernetes for tests: `python build_control_plane.py [DIRECTORY]`.

Debian 12 packs Kubernetes 1.20.2 as source only; its source package has every module that it needs. Compilers and etcd are
unpacked from Debian's packages, so that nothing is installed. About five minutes of one CPU, once: programs are kept in
DIRECTORY (default: `control_plane.DIRECTORY`), outside of the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from control_plane import DIRECTORY, PROGRAMS, VERSION

MIRROR = "http://deb.debian.org/debian bookworm main"
PACKAGES = ("golang-1.19-go", "golang-1.19-src", "etcd-server")
SERVERS = tuple(name for name in PROGRAMS if name != "etcd")
NOT_OURS = ("vendor/k8s.io/code-generator", "vendor/k8s.io/sample-", "vendor/k8s.io/kube-openapi", "/testdata/")
TAG = "+k8s:openapi-gen="


def run(words: Sequence[str], where: Path, **environment: str) -> str:
    """Raises `CalledProcessError`."""
    command = ["nice", "-n", "15", *words]
    done = subprocess.run(
        command, cwd=where, env={**os.environ, **environment}, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        done.check_returncode()
    return done.stdout


def fetch(work: Path) -> None:
    """By an apt with settings, lists and a cache of its own. Raises `CalledProcessError` where there is no Debian mirror."""
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "archives" / "partial").mkdir(parents=True)
    (work / "sources.list").write_text(f"deb {MIRROR}\ndeb-src {MIRROR}\n")
    (work / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{work}/sources.list";\nDir::Etc::sourceparts "-";\n'
        f'Dir::State::lists "{work}/lists";\nDir::Cache "{work}";\nAPT::Sandbox::User "root";\n'
    )
    apt = {"APT_CONFIG": str(work / "apt.conf")}
    run(["apt-get", "update"], work, **apt)
    run(["apt-get", "source", "--download-only", "kubernetes"], work, **apt)
    run(["apt-get", "download", *PACKAGES], work, **apt)


def unpack(work: Path) -> Path:
    """Return the source tree of Kubernetes."""
    for package in work.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(work / "tools")], work)
    tree = work / "go" / "src" / "k8s.io" / "kubernetes"
    tree.mkdir(parents=True)
    (archive,) = work.glob("kubernetes_*.orig.tar.gz")
    run(["tar", "xzf", str(archive), "--strip-components=1", "-C", str(tree)], work)
    return tree


def tagged(tree: Path) -> list[str]:
    """Return the packages from which the API's description is generated. (Those of `vendor/k8s.io` are links.)"""
    found = run(["grep", "-Rl", "--include=*.go", TAG, "vendor/k8s.io", "pkg"], tree).split()
    ours = {str(Path(name).parent) for name in found if not any(part in name for part in NOT_OURS)}
    return [f"k8s.io/kubernetes/{name}" for name in sorted(ours)]


def build(work: Path, tree: Path) -> Path:
    """Return the directory of the programs."""
    root = work / "tools" / "usr" / "lib" / "go-1.19"
    go = str(root / "bin" / "go")
    settings = {
        "GOROOT": str(root), "GOPATH": str(work / "go"), "GOCACHE": str(work / "cache"), "GOFLAGS": "",
        "GO111MODULE": "off", "CGO_ENABLED": "0", "PATH": f"{root}/bin:{os.environ['PATH']}",
    }  # fmt: skip
    run(
        [go, "build", "-o", str(work / "openapi-gen"), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], tree, **settings
    )
    package = "k8s.io/kubernetes/pkg/generated/openapi"
    header = "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"
    generated = ["-p", package, "-O", "zz_generated.openapi", "-h", header, "-r", str(work / "violations")]
    run([str(work / "openapi-gen"), "--logtostderr", "-i", ",".join(tagged(tree)), *generated], tree, **settings)
    name = "k8s.io/kubernetes/vendor/k8s.io/component-base/version."
    flags = f"-s -w -X {name}gitVersion=v{VERSION} -X {name}gitMajor=1 -X {name}gitMinor=20"
    (work / "bin").mkdir()
    commands = [f"./cmd/{server}" for server in SERVERS]
    run([go, "build", "-ldflags", flags, "-o", f"{work / 'bin'}/", *commands], tree, **settings)
    shutil.copy(work / "tools" / "usr" / "bin" / "etcd", work / "bin" / "etcd")
    return work / "bin"


def main(directory: Path) -> None:
    if all((directory / name).exists() for name in PROGRAMS):
        return
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"building Kubernetes {VERSION} into {directory}: about five minutes of one CPU, once\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as name:
        work = Path(name)
        try:
            fetch(work)
            built = build(work, unpack(work))
            for program in PROGRAMS:
                (built / program).rename(directory / program)
        finally:
            run(["chmod", "-R", "u+w", str(work)], directory)  # Go makes parts of its cache read-only


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
