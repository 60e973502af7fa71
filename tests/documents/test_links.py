"""Links lead to files and sections that exist; files, tests and settings that the text names exist."""

from __future__ import annotations

import re

import pytest
from documented_commands import Wrong, check_variable
from markdown_pages import DOCUMENTS, ROOT, Page

TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
FILE = re.compile(r"(?:src|services|tools|tests|benchmarks|examples|deploy)/[\w/.-]+\.\w+")


@pytest.mark.parametrize("page", [*DOCUMENTS.pages, *DOCUMENTS.records], ids=lambda page: page.name)
def test_a_link_leads_somewhere(page: Page) -> None:
    for link in page.links():
        target, _, anchor = link.partition("#")
        linked = (page.path.parent / target).resolve() if target else page.path
        assert linked.exists(), link
        assert not anchor or anchor in Page(linked).anchors(), link


@pytest.mark.parametrize("page", DOCUMENTS.pages, ids=lambda page: page.name)
def test_named_files_tests_and_settings_exist(page: Page) -> None:
    for span in page.spans():
        if FILE.fullmatch(span):
            assert (ROOT / span).exists(), span
        if found := TEST.fullmatch(span):
            text = (ROOT / found[1]).read_text()
            assert not found[2] or re.search(rf"def {found[2]}\(", text), span
        if variable := re.match(r"(HOLDFAST_[A-Z0-9_]*[A-Z0-9])(=|$)", span):
            check_variable(variable[1])


def test_a_setting_that_nothing_reads_is_reported() -> None:
    with pytest.raises(Wrong, match="HOLDFAST_NO_SUCH_SETTING"):
        check_variable("HOLDFAST_NO_SUCH_SETTING")
