"""Reads the documentation: the blocks of code, code spans, links and headings of every page, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
SHELL = "shell"  # language of indented blocks
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code. `line`: of its first line of code, from 1."""

    page: str
    line: int
    language: str  # empty for a fence that names none
    text: str

    @property
    def name(self) -> str:
        """The page and the block's first line, which identify it when other parts of the page change."""
        return f"{self.page}: {self.text.strip().splitlines()[0].strip()}"


@dataclass(frozen=True, slots=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def blocks(self) -> Iterator[Block]:
        for token in self._tokens():
            if token.type in ("fence", "code_block") and token.content.strip():
                assert token.map is not None
                fenced = token.type == "fence"
                language = token.info.strip() if fenced else SHELL
                yield Block(self.name, token.map[0] + 1 + fenced, language, token.content)

    def spans(self) -> set[str]:
        """The code spans of the text, `like this`."""
        return {each.content for each in self._inline() if each.type == "code_inline"}

    def links(self) -> set[str]:
        """The targets of links and pictures that do not lead to another site."""
        targets = {str(each.attrs.get("href") or each.attrs.get("src") or "") for each in self._inline()}
        return {target for target in targets if target and not re.match(r"[a-z]+:", target)}

    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub makes them."""
        tokens = self._tokens()
        headings = [tokens[at + 1] for at, each in enumerate(tokens) if each.type == "heading_open"]
        texts = ("".join(part.content for part in each.children or ()) for each in headings)
        return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts}

    def _tokens(self) -> list[Token]:
        return _PARSER.parse(self.path.read_text(encoding="utf-8"))

    def _inline(self) -> Iterator[Token]:
        for token in self._tokens():
            yield from token.children or ()


@dataclass(frozen=True)
class Documents:
    """`pages`: for users and developers, true today. `records`: the ADRs and the changelog, true when they were written."""

    @cached_property
    def pages(self) -> list[Page]:
        named = ("README.md", "SECURITY.md", "deploy/README.md")
        found = (ROOT.glob(pattern) for pattern in ("docs/*.md", "services/*/README.md", "examples/**/README.md"))
        return [
            Page(path) for path in (*(ROOT / name for name in named), *sorted(each for many in found for each in many))
        ]

    @cached_property
    def records(self) -> list[Page]:
        return [Page(path) for path in (ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/adr/*.md")))]

    @cached_property
    def blocks(self) -> list[Block]:
        return [block for page in self.pages for block in page.blocks()]


DOCUMENTS = Documents()
