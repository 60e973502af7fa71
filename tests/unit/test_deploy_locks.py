"""What the images are made of: packages by hash, and other projects' images, named in three files where they can be pinned."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from containers.images import ROOT

DIGEST = f"sha256:{'a' * 64}"


def program(name: str) -> ModuleType:
    """Return a program of deploy/ as a module."""
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


requirements, pin = program("requirements"), program("pin")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that the programs read."""
    for file in ("pyproject.toml", "constraints.txt", *pin.PLACES):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "deploy" / "requirements", tmp_path / "deploy" / "requirements")
    return tmp_path


# ---------------------------------------------------------------- packages


@pytest.mark.parametrize("lock", requirements.CONTENTS)
def test_locks_are_up_to_date(lock: str) -> None:
    assert list(requirements.problems(lock)) == []


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("pyproject.toml", '"anyio>=4.10,<5"', '"anyio>=4.11,<5"', "services.txt is stale"),
        ("pyproject.toml", '"anyio>=4.10,<5",', '"anyio>=4.10,<5", "left-pad>=1",', "does not contain left-pad>=1"),
        ("constraints.txt", "anyio==", "anyio==0.", "but constraints.txt has 0."),
        ("deploy/requirements/services.txt", "anyio==", "anyio==9", "services.txt: anyio==9"),
        ("deploy/requirements/torch.txt", "torch==", "#torch==", "torch.txt does not contain torch>=2.6"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_lock_that_does_not_fit_is_named(copy: Path, file: str, old: str, new: str, problem: str) -> None:
    if new == "#torch==":
        lines = (copy / file).read_text()
        (copy / file).write_text(re.sub(r"^torch==.*?(?=^\S)", "", lines, flags=re.MULTILINE | re.DOTALL))
    else:
        replace(copy / file, old, new)
    found = [text for lock in requirements.CONTENTS for text in requirements.problems(lock, copy)]
    assert [text for text in found if problem in text]
    assert all("requirements.py lock" in text for text in found), "each says what to do"


def test_a_version_without_a_hash_and_a_missing_lock_are_named(copy: Path) -> None:
    path = copy / "deploy" / "requirements" / "nvml.txt"
    path.write_text(re.sub(r"(?: \\)?\n +--hash\S+", "", path.read_text()))
    assert [text for text in requirements.problems("nvml", copy) if "has no hash" in text]
    path.unlink()
    assert [text for text in requirements.problems("nvml", copy) if "is missing" in text]


@pytest.mark.parametrize("line", ["anyio>=4", "--index-url elsewhere", "-e .", "anyio @ file:///tmp/anyio.whl"])
def test_a_lock_has_versions_and_hashes_and_nothing_else(line: str) -> None:
    with pytest.raises(ValueError, match="neither NAME==VERSION nor a hash"):
        requirements.entries([line])


def test_pins_are_the_versions_without_torch(copy: Path) -> None:
    lines = (copy / "deploy" / "requirements" / "torch.txt").read_text().splitlines()
    pins = list(requirements.pins(lines))
    assert not [each for each in pins if each.startswith("torch==") or "--hash" in each]
    assert {"sympy", "filelock"} <= {each.partition("==")[0] for each in pins}
    assert len(pins) == len(requirements.entries(lines)) - 1


def test_the_images_install_by_hash_what_is_not_torch_of_ones_own() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    installed = re.findall(r"pip install [^;&]*", text)
    assert len(installed) == 6
    allowed = ("--require-hashes -r ", "--no-index --no-deps --compile /dist/*.whl", '-c pins.txt "${TORCH}"')
    assert all(any(form in command for form in allowed) for command in installed), installed
    assert sum("--require-hashes" in command for command in installed) == 4
    assert re.search(r"^ARG TORCH=\"\"$", text, re.MULTILINE), "by default, torch is locked, too"
    [built] = re.findall(r"pip wheel [^&]*", text)
    assert built.split() == [
        "pip",
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        "/dist",
        ".",
    ]


# ---------------------------------------------------------------- images


def test_images_of_others_are_named_where_they_can_be_pinned_and_nowhere_else() -> None:
    """So a tag without a digest is possible in these three files only, and `pin.py --check` sees all of them."""
    found = {(image.file, image.reference.partition("@")[0]) for image in pin.images()}
    assert {file for file, _ in found} == set(pin.PLACES)
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    ours = re.compile(r"holdfast/(services|trainer):\$\{HOLDFAST_VERSION:.*\}")
    variables = {line.partition("=")[0] for line in (ROOT / ".env").read_text().splitlines() if "_IMAGE=" in line}
    for name, service in compose["services"].items():
        assert ours.fullmatch(service["image"]) or service["image"].strip("${}") in variables, name
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    stages = set(re.findall(r" AS (\S+)$", dockerfile, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) <= stages | {"${BASE}"}
    assert set(re.findall(r"--from=(\S+)", dockerfile)) <= stages
    for template in (ROOT / "deploy" / "kubernetes" / "chart" / "templates").glob("*.yaml"):
        for image in re.findall(r"^ *image: (.*)$", template.read_text(), re.MULTILINE):
            assert image.startswith("{{ "), f"{template.name}: {image}"
    shown = [reference for _, reference in found if reference.startswith("redis:")]
    assert len(shown) == 2
    assert len(set(shown)) == 1, "the chart and the compose stack have the same Redis"


def test_pinning_writes_the_digest_of_every_image_and_keeps_what_is_pinned(copy: Path) -> None:
    asked: list[str] = []

    def digest_of(image: str) -> str:
        asked.append(image)
        return DIGEST

    before = {file: (copy / file).read_text() for file in pin.PLACES}
    assert not [image for image in pin.images(copy) if image.pinned]
    now = pin.pin(copy, digest_of)
    assert all(image.pinned and image.reference.endswith(f"@{DIGEST}") for image in now)
    assert sorted(asked) == sorted(image.reference for image in pin.images(ROOT))
    for file, text in before.items():
        assert (copy / file).read_text().replace(f"@{DIGEST}", "") == text
    pin.pin(copy, lambda image: pytest.fail(f"{image} was pinned already"))


@pytest.mark.parametrize("wrong", ["redis", "redis:latest", "redis:7@sha256:123", f"redis@{DIGEST}"])
def test_a_reference_that_says_too_little_is_refused(copy: Path, wrong: str) -> None:
    """Without a tag nobody sees which version it is."""
    replace(copy / ".env", "REDIS_IMAGE=redis:7.4-bookworm", f"REDIS_IMAGE={wrong}")
    with pytest.raises(ValueError, match=r"\.env: redis"):
        pin.images(copy)


def test_the_digest_is_the_one_under_which_the_registry_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program in place of docker that answers as docker does."""
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\ncase "$1" in pull) [ "$3" = redis:7 ];; *) echo "redis@{DIGEST}";; esac\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert pin.pulled_digest("redis:7") == DIGEST
    with pytest.raises(ValueError, match="redis:8: `docker pull --quiet` failed"):
        pin.pulled_digest("redis:8")
    docker.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="knows 0 digests"):
        pin.pulled_digest("redis:7")
