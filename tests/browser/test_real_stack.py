"""The dashboard of a real local stack: real training, a real fault, and what the page makes of it."""

from __future__ import annotations

import re
from pathlib import Path

from pages import examine, opened, visit
from playwright.sync_api import Browser, expect
from training import STEP_TIMEOUT_S, cluster, gpt_job

from holdfast.cli.api_token import find, sign_in_link


def test_a_killed_worker_is_shown_from_fault_to_first_step(chromium: Browser, tmp_path: Path) -> None:
    patience_ms = STEP_TIMEOUT_S * 1000
    with cluster(tmp_path / "stack", nodes=3) as run, opened(chromium) as page:
        run.client.submit(gpt_job("gpt", tmp_path / "out", dp=2, pp=1, steps=100_000, min_dp=1))
        run.wait_step("gpt", 10)
        page.goto(sign_in_link(run.stack.api_url, find(run.stack.api_url)))
        expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
        visit(page, run.stack.api_url, "jobs/gpt")
        main = page.locator("main")
        expect(main).to_contain_text(": 2 alive.", timeout=patience_ms)
        run.inject.crash("gpt", 1)
        [incident] = run.wait_resolved("gpt", 1)
        expect(main.get_by_role("link", name=incident["cause"]).first).to_be_visible(timeout=patience_ms)
        expect(main).to_contain_text(": 2 alive.", timeout=patience_ms)
        examine(page, "real job")
        main.get_by_role("link", name=incident["cause"]).first.click()
        expect(page.locator(".phases")).to_contain_text("first step")
        expect(page.locator(".phases")).to_contain_text(re.compile(r"prepared\d"))
        expect(page.locator(".waterfall li").first).to_be_visible()
        examine(page, "real incident")
        visit(page, run.stack.api_url, "")
        expect(page.get_by_role("row", name=re.compile("^gpt"))).to_contain_text("%", timeout=patience_ms)
        examine(page, "real fleet")
