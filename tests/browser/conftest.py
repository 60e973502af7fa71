"""A real browser: Debian's Chromium, driven by Playwright, or a skip that says what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import browsed
import pytest
from pages import AXE
from playwright.sync_api import Browser, sync_playwright

WORLDS: dict[str, Callable[[], browsed.World]] = {
    "empty": browsed.empty,
    "under fire": browsed.under_fire,
    "large": browsed.large,
}
# A container has no room in /dev/shm, and root has no sandbox: only pages of these tests are opened.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--font-render-hinting=none"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium, or name a program in CHROMIUM")
    if not AXE.exists():
        pytest.skip("axe-core is not installed: `make browser-test` gets it where there is a registry of npm")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], browsed.Site]]:
    """The API over a world by its name; each is made once."""
    opened: dict[str, browsed.Site] = {}
    with ExitStack() as stack:

        def site(world: str) -> browsed.Site:
            if world not in opened:
                served = browsed.served(WORLDS[world](), tmp_path_factory.mktemp("site"))
                opened[world] = stack.enter_context(served)
            return opened[world]

        yield site
