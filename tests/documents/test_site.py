"""The documentation builds as a site: no broken link, every page in the navigation, nothing fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from markdown_pages import ROOT

CONFIGURATION = ROOT / "mkdocs.yml"
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?https?:[^>]*|<link(?![^>]*rel=\"?canonical)[^>]*\shref=\"?https?:[^>]*"
)


class _Loader(yaml.SafeLoader):
    """Reads the tags that the generator's format has besides YAML's own."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("documentation")
    text = CONFIGURATION.read_text()
    for kind in ("docs_dir: out/site-source", "site_dir: out/site"):
        assert kind in text
        text = text.replace(kind, kind.replace("out/", ""))
    (directory / "mkdocs.yml").write_text(text)
    stage = [sys.executable, str(ROOT / "tools" / "documentation_site.py"), str(directory / "site-source")]
    subprocess.run(stage, check=True, cwd=directory)
    build = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    done = subprocess.run(build, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "site"


def test_every_page_is_built_and_none_fetches_from_elsewhere(site: Path) -> None:
    wanted = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} | {"index.html", "adr/index.html"}
    assert {name for name in wanted if not (site / name).is_file()} == set()
    for path in site.rglob("*.html"):
        assert FETCHED.findall(path.read_text()) == [], path


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = yaml.load(CONFIGURATION.read_text(), _Loader)  # a subclass of the safe one

    def places(part: object) -> list[str]:
        match part:
            case str():
                return [part]
            case list():
                return [place for each in part for place in places(each)]
            case dict():
                return places(list(part.values()))
        raise TypeError(part)

    found = [place for place in places(configuration["nav"]) if "/" not in place]
    assert sorted(found) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])


def test_links_lead_to_where_files_are_in_the_site(site: Path) -> None:
    page = (site / "policies.html").read_text()
    assert 'href="files/examples/policies/spares_are_cheap.py.html"' in page
    assert "def decide" in re.sub(
        r"<[^>]*>", "", (site / "files/examples/policies/spares_are_cheap.py.html").read_text()
    )
    assert 'href="checkpoints.html' in (site / "index.html").read_text()
