"""What the distribution claims about itself, and that every source root is in it."""

from __future__ import annotations

import configparser
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

import holdfast
from holdfast.domain.distribution import DISTRIBUTION, install_command

REPOSITORY = Path(__file__).parents[2]
TOLD: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = TOLD["tool"]
ROOTS = sorted(path.parent for top in ("src", "tools", "services") for path in (REPOSITORY / top).glob("**/holdfast"))


def packages(root: Path) -> list[str]:
    return sorted(f"holdfast.{path.parent.name}" for path in root.glob("holdfast/*/__init__.py"))


def test_every_package_of_the_namespace_says_that_it_is_typed() -> None:
    """PEP 561: a marker per package, because `holdfast` itself is a namespace and belongs to nobody."""
    directories = [
        path for root in holdfast.__path__ for path in Path(root).iterdir() if (path / "__init__.py").exists()
    ]
    assert len(directories) > 10
    assert [path.name for path in directories if not (path / "py.typed").exists()] == []


def test_the_distribution_that_error_messages_name_is_this_one() -> None:
    """The package index gives the name `holdfast` to another project."""
    assert TOLD["project"]["name"] == DISTRIBUTION
    extras = TOLD["project"]["optional-dependencies"]
    files = [
        *REPOSITORY.glob("*.md"),
        *(path for top in ("docs", "deploy", "examples") for path in (REPOSITORY / top).rglob("*.md")),
    ]
    files += [path for root in ROOTS for path in root.glob("holdfast/**/*.py")]
    texts = {path: path.read_text() for path in files if path.name != "CHANGELOG.md"}
    assert len(texts) > 400
    wrong = re.compile(r"""pip install ['"]?holdfast\b(?!-training)|\bholdfast\[[a-z]""")
    assert [str(path) for path, text in texts.items() if wrong.search(text)] == []
    asked = {name for text in texts.values() for name in re.findall(r"install_command\(['\"](\w+)['\"]\)", text)}
    assert asked <= extras.keys()
    assert "demo" in asked
    assert install_command("demo") == "pip install 'holdfast-training[demo]'"


def test_every_source_root_is_installed_checked_and_copied_into_the_images() -> None:
    names = {str(root.relative_to(REPOSITORY)) for root in ROOTS}
    assert set(PROJECT["hatch"]["build"]["dev-mode-dirs"]) == names
    assert {*PROJECT["mypy"]["mypy_path"].split(":")} - {"tests"} == names
    assert {*PROJECT["mypy"]["files"]} - {"tests", "benchmarks"} == names
    tops = {name.split("/")[0] for name in names}
    dockerfile = (REPOSITORY / "deploy" / "Dockerfile").read_text().splitlines()
    assert tops <= {line.split()[1] for line in dockerfile if line.startswith("COPY ")}
    assert tops <= {
        line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }


def test_the_wheel_has_every_module_of_every_source_root(tmp_path: Path) -> None:
    """An editable install finds the modules of a root that `packages` does not name."""
    (wheel,) = WheelBuilder(str(REPOSITORY)).build(directory=str(tmp_path), versions=["standard"])
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert {str(path.relative_to(root)) for root in ROOTS for path in root.glob("holdfast/**/*.py")} - packed == set()


def test_the_layers_name_every_package_and_go_by_source_root() -> None:
    """tools/ may import services/, services/ may import src/, and never the other way."""
    contracts = configparser.ConfigParser()
    contracts.read(REPOSITORY / ".importlinter")
    layers = [line.split(" | ") for line in contracts["importlinter:contract:layers"]["layers"].split("\n") if line]
    of_root = {root.relative_to(REPOSITORY).parts[0]: set[str]() for root in ROOTS}
    for root in ROOTS:
        of_root[root.relative_to(REPOSITORY).parts[0]] |= {*packages(root)}
    tops = [next(top for top, names in of_root.items() if name in names) for layer in layers for name in layer]
    assert tops == sorted(tops, key=["tools", "services", "src"].index)
    assert sorted(name for layer in layers for name in layer) == sorted(
        name for names in of_root.values() for name in names
    )


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: str(root.relative_to(REPOSITORY)))
def test_no_root_has_a_package_named_holdfast_itself(root: Path) -> None:
    """A `holdfast/__init__.py` would hide the packages of every other root (docs/adr/0001)."""
    assert not (root / "holdfast" / "__init__.py").exists()
