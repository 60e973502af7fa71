"""Pages under test: opened, waited for, and searched for what no page may have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
AXE = ROOT / "services/supervisor/dashboard/node_modules/axe-core/axe.min.js"
PICTURES = ROOT / "out" / "browser"
Scheme = Literal["light", "dark"]
HEIGHT_PX = 900
# Of axe: what its makers call an accessibility defect by WCAG 2.1 A and AA, and their own good practices.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


@contextmanager
def opened(browser: Browser, *, width: int = 1440, scheme: Scheme = "light") -> Iterator[Page]:
    """An empty page. At the end nothing was logged as an error, refused by the content policy, or shown as a dialog."""
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT_PX}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"a dialog: {dialog.message}"))
    yield page
    context.close()
    # Answers of 401 and 404 are what some tests ask for; the browser logs every one.
    wrong = [text for text in said if "status of 40" not in text]
    assert not wrong, "\n".join(wrong)


def visit(page: Page, url: str, place: str) -> None:
    """Go there, and wait until nothing is being read any more."""
    page.goto(f"{url}/#/{place}")
    page.wait_for_function(
        "() => document.querySelector('main h1') && !document.querySelector('[aria-busy=true]') && document.fonts.ready"
    )
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def examine(page: Page, name: str) -> None:
    """The page fits its width, axe finds nothing, and there is a picture of it."""
    picture(page, name)
    wide = page.evaluate(
        "() => [...document.querySelectorAll('main *')].filter((each) => !each.closest('.scroll, pre, .u-wrap, .hidden') && "
        "each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 120)).slice(0, 3)"
    )
    assert wide == [], f"{name}: beyond the right edge"
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), f"{name}: scrolls sideways"
    found: list[dict[str, Any]] = page.evaluate(
        f"async (source) => {{ if (!window.axe) (0, eval)(source); return (await axe.run(document, {{runOnly: {RULES!r}}}))"
        ".violations.map((each) => ({id: each.id, help: each.help, nodes: each.nodes.slice(0, 3).map((n) => n.html + ' ' + "
        "n.failureSummary)})) }",
        AXE.read_text(),
    )
    assert not found, f"{name}: {json.dumps(found, indent=1)}"


def picture(page: Page, name: str) -> None:
    path = PICTURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path), full_page=True)
