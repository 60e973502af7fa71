"""Stages the pages of the documentation site, for its generator: `python tools/documentation_site.py DIRECTORY`.

In the repository, links lead to other pages, to files and to directories. README.md becomes the start page; a file or directory
outside `docs/` that a page links to becomes a page of its own below `files/`; `adr/index.md` lists the ADRs.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = "README.md"
FILES = "files"
FILE_BYTES_MAX = 1 << 20
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sbatch": "bash", ".json": "json"}


def stage(into: Path) -> None:
    """Write all pages and pictures to the directory `into`, which is replaced."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(ROOT / "docs", into, ignore=shutil.ignore_patterns("*.md"))
    wanted = [START, *(str(each.relative_to(ROOT)) for each in sorted((ROOT / "docs").rglob("*.md")))]
    seen = set(wanted)
    while wanted:
        path = wanted.pop()
        text = _text(path)
        if path.endswith(".md"):
            linked = {_target(path, found[1]) for found in LINK.finditer(text)} - seen
            outside = {each for each in linked if not each.startswith("docs/")}
            wanted += sorted(outside)
            seen |= outside
            text = _moved(text, path)
        place = into / place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    (into / "adr" / "index.md").write_text(_records(into / "adr"), encoding="utf-8")


def place_of(path: str) -> str:
    """Where a file or directory of the repository is in the site's sources."""
    if path == START:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{FILES}/{path}/index.md"
    # hidden files are left out of a site
    shown = path.replace("/.", "/dot-") if "/" in path else re.sub(r"^\.", "dot-", path)
    return f"{FILES}/{shown}" if path.endswith(".md") else f"{FILES}/{shown}.md"


def _moved(text: str, path: str) -> str:
    """The page `path` with links that lead to where their targets are in the site."""
    here = posixpath.dirname(place_of(path))

    def moved(found: re.Match[str]) -> str:
        return posixpath.relpath(place_of(_target(path, found[1])), here or ".") + (found[2] or "")

    return LINK.sub(moved, text)


def _records(directory: Path) -> str:
    """The list of the ADRs, by number, with their titles."""
    titles = {
        each.name: each.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for each in sorted(directory.glob("0*.md"))
    }
    return "# Design decisions\n\n" + "".join(f"- [{title}]({name})\n" for name, title in titles.items())


def _target(path: str, link: str) -> str:
    """The path in the repository to which a link on the page `path` leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _text(path: str) -> str:
    """The Markdown of a page, of a file that is shown as code, or of all files of a directory."""
    source = ROOT / path
    if path.endswith(".md"):
        return source.read_text(encoding="utf-8")
    if source.is_dir():
        shown = sorted(each for each in source.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
        parts = (
            f"## {each.relative_to(source)}\n\n{_code(each)}" for each in shown if each.stat().st_size <= FILE_BYTES_MAX
        )
        return f"# {path}\n\n" + "\n\n".join(parts)
    return f"# {path}\n\n{_code(source)}"


def _code(source: Path) -> str:
    fence = "`" * 6  # longer than any in the file
    language = LANGUAGES.get(source.suffix, "text")
    return f"{fence}{language}\n{source.read_text(encoding='utf-8')}\n{fence}"


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
