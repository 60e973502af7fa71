"""Every page in a real browser: what it shows, at every width, in both schemes, with 512 and 100,000 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browsed
import pytest
from browsed import Site
from pages import Scheme, examine, opened, visit
from playwright.sync_api import Browser, Page, expect

from holdfast.cli.api_token import sign_in_link
from holdfast.runtime.trust.api_tokens import ApiRole, TokensFile, added, text_of
from holdfast.supervisor.alerts.targets import Webhook
from holdfast.supervisor.protocol import JobChanged, JobPhase, JobStopRequested, ResizeRequested

core = pytest.mark.core
Sites = Callable[[str], Site]
JOB = "jobs/llm-70b"
TABS = ("logs", "checkpoints", "findings", "report", "policy", "configuration", "attempts")

VARIATIONS = [
    pytest.param(width, scheme, marks=[core] if (width, scheme) == (1440, "light") else [])
    for width in (1440, 768, 390)
    for scheme in ("light", "dark")
]


def places(world: browsed.World) -> dict[str, str]:
    """What to call a page's picture → its address."""
    opened_now = next(iter(world.state.incidents))
    shown = {
        "fleet": "",
        "incidents": "incidents",
        "incident open": f"incidents/{opened_now}",
        "incident resolved": f"incidents/{world.state.closed[0].id}",
        "nodes": "nodes",
        "node": "nodes/node-020",
        "node with GPUs": "nodes/node-021",
        "checkpoints": "checkpoints",
        "report": "report",
        "settings": "settings",
        "job": JOB,
        "no such job": "jobs/none",
        "no such page": "nothing",
    }
    return shown | {f"job {tab}": f"{JOB}/{tab}" for tab in TABS}


@pytest.mark.parametrize(("width", "scheme"), VARIATIONS)
def test_every_page_fits_and_is_accessible(chromium: Browser, sites: Sites, width: int, scheme: Scheme) -> None:
    site = sites("under fire")
    for name, place in places(site.world).items():
        with opened(chromium, width=width, scheme=scheme) as page:
            if name == "no such page":
                page.goto(f"{site.url}/#/{place}")
                expect(page.get_by_text("There is no page nothing here")).to_be_visible()
                continue
            visit(page, site.url, place)
            examine(page, f"{width} {scheme}/{name}")


@pytest.mark.parametrize(("width", "scheme"), VARIATIONS)
def test_an_empty_fleet_says_what_to_do(chromium: Browser, sites: Sites, width: int, scheme: Scheme) -> None:
    site = sites("empty")
    for name, place, text in (
        ("fleet", "", "holdfast run job.yaml"),
        ("incidents", "incidents", "No incident."),
        ("nodes", "nodes", "holdfast agent"),
    ):
        with opened(chromium, width=width, scheme=scheme) as page:
            visit(page, site.url, place)
            expect(page.locator("main")).to_contain_text(text)
            examine(page, f"{width} {scheme}/empty {name}")


@pytest.mark.parametrize(("width", "scheme"), VARIATIONS)
def test_100_000_ranks_are_a_density_map(chromium: Browser, sites: Sites, width: int, scheme: Scheme) -> None:
    site = sites("large")
    with opened(chromium, width=width, scheme=scheme) as page:
        visit(page, site.url, "jobs/llm")
        canvas = page.get_by_role("img", name="100,000 ranks")
        expect(canvas).to_be_visible()
        expect(page.locator("main")).to_contain_text("99,992 alive, 8 lost")
        expect(page.locator("main")).to_contain_text("Each cell stands for several ranks")
        assert 0 < warm_pixels(page) < 4000, "the lost node, and no other, is seen among 12,500"
        examine(page, f"{width} {scheme}/100,000 ranks")
        visit(page, site.url, "nodes")
        expect(page.locator("main")).to_contain_text("12,499")
        examine(page, f"{width} {scheme}/12,500 nodes")


def warm_pixels(page: Page) -> int:
    """Of the mesh: those that are more red than green. What runs or starts is green or blue in both schemes."""
    found: int = page.evaluate(
        """() => {
            const canvas = document.querySelector('.mesh canvas');
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let n = 0; n < data.length; n += 4) if (data[n + 3] && data[n] > 1.2 * data[n + 1]) found += 1;
            return found;
        }"""
    )
    return found


# ---------------------------------------------------------------- the fleet


@core
def test_the_fleet_is_one_request_however_many_jobs_there_are(chromium: Browser, sites: Sites) -> None:
    site = sites("under fire")
    with opened(chromium) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.removeprefix(site.url)))
        visit(page, site.url, "")
        expect(page.get_by_role("link", name="llm-70b", exact=True)).to_be_visible()
        api = {path for path in asked if path.startswith("/v1/")}
        assert api == {"/v1/session", "/v1/fleet", "/v1/events"}
        assert all(path.startswith("/") or path.startswith("data:") for path in asked), "nothing from elsewhere"


@core
def test_jobs_are_filtered_and_searched(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("under fire").url, "")
        rows = page.get_by_role("table").locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("dp 16 × pp 8 × tp 4")
        page.get_by_label("Which jobs").select_option("finished")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("old-run")
        page.get_by_label("Which jobs").select_option("all")
        expect(rows).to_have_count(3)
        page.get_by_label("Search jobs").fill("OLD")
        expect(rows).to_have_count(1)
        page.get_by_label("Search jobs").fill("nobody")
        expect(page.locator("main")).to_contain_text("No job")


@core
def test_an_event_makes_a_page_ask_again(chromium: Browser, sites: Sites) -> None:
    """By its timer alone this part would ask again after a minute, which is longer than Playwright waits."""
    site = sites("under fire")
    with opened(chromium) as page:
        with page.expect_response("**/v1/events"):
            visit(page, site.url, f"incidents/{site.world.state.closed[0].id}")
        with page.expect_response("**/trace"):
            site.publish(JobChanged(time.time(), "llm-70b", JobPhase.STARTING, "ordered to start"))


# ---------------------------------------------------------------- a job


@core
def test_a_job_is_stopped_by_keyboard_after_a_look_at_what_will_happen(chromium: Browser, sites: Sites) -> None:
    site = sites("under fire")
    with opened(chromium) as page:
        visit(page, site.url, JOB)
        stop = page.get_by_role("button", name="Stop", exact=True)
        stop.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("saves a last checkpoint if it can, then its 512 ranks end")
        expect(dialog).to_contain_text("holdfast jobs stop llm-70b")
        before = site.requests()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert site.requests() == before, "nothing happens before it is confirmed"
        stop.press("Enter")
        examine(page, "1440 light/confirm stop")
        dialog.get_by_role("button", name="Stop the job").press("Enter")
        expect(dialog).to_contain_text("accepted", timeout=15_000)
        asked = site.requests()[len(before) :]
        assert [type(event) for event in asked] == [JobStopRequested]


@core
def test_a_resize_says_how_many_replicas_and_the_command_for_it(chromium: Browser, sites: Sites) -> None:
    site = sites("under fire")
    with opened(chromium) as page:
        visit(page, site.url, JOB)
        page.get_by_role("button", name="Resize", exact=True).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Replicas (12 to 16)").fill("13")
        expect(dialog).to_contain_text("goes on with 13 replicas instead of 16")
        expect(dialog).to_contain_text("holdfast jobs resize llm-70b 13")
        dialog.get_by_role("button", name="Resize the job").click()
        expect(dialog).to_contain_text("accepted", timeout=15_000)
        last = site.requests()[-1]
        assert isinstance(last, ResizeRequested)
        assert last.dp == 13


@core
def test_a_rank_is_found_in_the_mesh_along_any_two_axes(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("under fire").url, JOB)
        page.get_by_label("Rank", exact=True).fill("90")
        expect(page.locator(".mesh")).to_contain_text("Rank 90 (dp 2, pp 6, tp 2) on node-011: suspect")
        for down, across in (("tp", "dp"), ("pp", "tp"), ("dp", "")):
            page.get_by_label("Across").select_option("")
            page.get_by_label("Down").select_option(down)
            page.get_by_label("Across").select_option(across)
            assert warm_pixels(page) > 0, "the suspect is drawn"
        page.get_by_label("Colour").select_option("age of the process")
        expect(page.locator(".mesh")).to_contain_text("Grey: not known, of any rank")
        page.get_by_label("Colour").select_option("faults a day of the node")
        expect(page.locator(".mesh")).to_contain_text("Pale: the least")
        page.locator(".mesh canvas").hover(position={"x": 3, "y": 3})
        expect(page.locator(".mesh")).to_contain_text("Rank 0 (dp 0, pp 0, tp 0)")


@core
def test_the_mesh_by_step_time_and_temperature_asks_agents_only_while_it_is_shown(
    chromium: Browser, sites: Sites
) -> None:
    site = sites("under fire")
    with opened(chromium) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        visit(page, site.url, JOB)
        mesh = page.locator(".mesh")
        expect(mesh).to_contain_text("suspect")
        assert not [url for url in asked if url.endswith("/measurements")], "nobody looks at them yet"
        mesh.get_by_label("Colour").select_option("step time without waiting")
        expect(mesh).to_contain_text(f"Slowest: rank {browsed.SLOW_RANK} on node-025 (9.9 s)")
        expect(mesh).to_contain_text("Grey: not known, of 8 ranks")
        expect(mesh).to_contain_text("63 of 64 nodes have answered")
        page.get_by_label("Rank", exact=True).fill(str(browsed.SLOW_RANK))
        expect(mesh).to_contain_text("step time 10 s of which it waits 0.10 s for others, 61 °C")
        examine(page, "1440 light/mesh by own step time")
        mesh.get_by_label("Colour").select_option("temperature")
        expect(mesh).to_contain_text("Hottest: rank 127 on node-015 (89 °C)")
        examine(page, "1440 light/mesh by temperature")
        mesh.get_by_label("Colour").select_option("step time")
        expect(mesh).to_contain_text("The largest, 10 s, differs so little that it is drawn pale")


@core
def test_100_000_ranks_by_step_time_stay_quick(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("large").url, "jobs/llm")
        mesh = page.locator(".mesh")
        expect(page.locator("main")).to_contain_text("99,992 alive")
        mesh.get_by_label("Colour").select_option("step time without waiting")
        expect(mesh).to_contain_text("1,024 of 12,500 nodes have answered")
        expect(mesh).to_contain_text("Each cell stands for several ranks and shows the largest number among them")
        examine(page, "1440 light/100,000 ranks by own step time")
        mesh.get_by_label("Colour").select_option("state")
        taken_ms = page.evaluate(
            """() => new Promise((done) => {
                const choice = [...document.querySelectorAll('.mesh select')].at(-1);
                const began = performance.now();
                choice.value = 'step time without waiting';
                choice.dispatchEvent(new Event('change', { bubbles: true }));
                requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
            })"""
        )
        assert taken_ms < 1_000, "from the choice to the picture"


@core
def test_the_report_of_a_job_and_of_the_fleet(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("under fire").url, f"{JOB}/report")
        tab = page.get_by_role("tabpanel")
        expect(tab).to_contain_text("4 faults, one in")
        expect(tab).to_contain_text("each of 3 repaired faults takes a restart of 4.2 min")
        expect(page.get_by_role("group", name="Faults by kind")).to_contain_text("worker crash")
        expect(page.get_by_role("group", name="Time by class")).to_contain_text("€")
        page.get_by_role("link", name="Report", exact=True).click()
        jobs = page.get_by_role("group", name="Jobs")
        expect(jobs).to_contain_text("llm-70b")
        expect(jobs).to_contain_text("old-run")
        expect(page.locator("main")).to_contain_text("2 of 3 jobs have no price")
        examine(page, "1440 light/report of the fleet")
        page.locator("main form select").select_option("the last 24 hours")
        expect(jobs).to_contain_text("llm-70b")
        jobs.get_by_role("link", name="llm-70b").click()
        expect(page.get_by_role("tab", name="Report")).to_have_attribute("aria-selected", "true")


@core
def test_tabs_are_walked_by_the_arrow_keys_and_are_part_of_the_address(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("under fire").url, JOB)
        page.get_by_role("tab", name="Ranks").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("tab", name="Attempts")).to_be_focused()
        expect(page.get_by_role("tabpanel")).to_contain_text("Every change of nodes or processes is a generation")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Logs")).to_have_attribute("aria-selected", "true")
        assert page.url.endswith("/jobs/llm-70b/logs")


@core
def test_the_log_of_a_rank_is_shown_followed_and_searched(chromium: Browser, tmp_path: Path) -> None:
    world = browsed.under_fire()
    with browsed.served(world, tmp_path) as site, opened(chromium) as page:
        visit(page, site.url, f"{JOB}/logs")
        expect(page.get_by_role("alert")).to_contain_text("an agent keeps the logs of a job's newest 5 generations")
        site.write_log("llm-70b", 0, "step 1\r step 2\r\n\x1b[31mloss is nan 💥\x1b[0m\n<b>no markup</b>\n")
        log = page.get_by_role("log")
        expect(log).to_have_text(" step 2\nloss is nan 💥\n<b>no markup</b>\n")
        examine(page, "1440 light/job logs of a rank")
        site.write_log("llm-70b", 0, "".join(f"line {n}\n" for n in range(40_000)))
        expect(log).to_contain_text("line 39999", timeout=30_000)  # in seven parts
        page.wait_for_function(  # it stays at the end
            "() => { const box = document.querySelector('pre.log');"
            " return box.scrollHeight - box.scrollTop - box.clientHeight < 40 }"
        )
        page.get_by_label("Lines with").fill("NAN")
        expect(log).to_have_text("loss is nan 💥")
        rank = page.get_by_label("Rank", exact=True).last  # the first one is that of the mesh
        page.get_by_label("Lines with").fill("")
        rank.fill("9")
        site.write_log("llm-70b", 0, "the page is drawn again\n")
        expect(log).to_contain_text("the page is drawn again")
        expect(rank).to_have_value("9")
        rank.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("rank-9.log")
        site.write_log("llm-70b", 9, "nan of rank 9\n")
        expect(log).to_have_text("nan of rank 9")
        rank.fill("100000")
        rank.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("there is no rank 100000")


# ---------------------------------------------------------------- an incident, and a node


@core
def test_an_incident_shows_its_phases_and_the_log_of_the_culprit_as_text(chromium: Browser, sites: Sites) -> None:
    site = sites("under fire")
    crash = site.world.state.closed[0]
    with opened(chromium) as page:
        visit(page, site.url, f"incidents/{crash.id}")
        main = page.locator("main")
        expect(main).to_contain_text("<script>alert('markup')</script>")
        for name in ("detected", "decided", "prepared", "first step"):
            expect(page.locator(".phases")).to_contain_text(name)
        assert crash.first_step_at is not None
        expect(page.locator(".phases")).to_contain_text(f"{crash.first_step_at - crash.fault_at:.1f} s")
        expect(page.locator(".waterfall li").first).to_contain_text("incident")
        assert crash.action is not None
        expect(main).to_contain_text(crash.action.reason)
        page.get_by_role("button", name="Cordon", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text("holdfast nodes cordon node-007")


@core
def test_what_a_node_is_not_known_to_have_is_not_invented(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("under fire").url, "nodes/node-020")
        gpus = page.get_by_role("region", name="GPUs")
        expect(gpus).to_contain_text("the agent of node-020 is not connected")
        expect(page.get_by_role("region", name="Its tests of itself")).to_contain_text("writes took 9.1 s")


@core
def test_what_happened_on_a_node_is_on_one_time_axis(chromium: Browser, sites: Sites) -> None:
    """Of one whose worker crashed, and of one that was lost and has failed a test."""
    site = sites("under fire")
    with opened(chromium) as page:
        for node in ("node-007", "node-020"):
            visit(page, site.url, f"nodes/{node}")
            axis = page.get_by_role("region", name="Timeline").get_by_role("img")
            reported = axis.get_attribute("aria-label") or ""
            marks = axis.locator("rect")
            counted = [int(part.rpartition(": ")[2]) for part in reported.partition(": ")[2].split(", ")]
            assert sum(counted) == marks.count() > 0, reported
            assert marks.first.locator("title").text_content()
        visit(page, site.url, "nodes/node-021")
        expect(page.get_by_role("region", name="Timeline")).to_contain_text("Nothing is known to have happened here.")


@core
def test_the_gpus_of_a_node_are_asked_of_its_agent(chromium: Browser, sites: Sites) -> None:
    with opened(chromium) as page:
        visit(page, sites("under fire").url, "nodes/node-021")
        rows = page.get_by_role("group", name="GPUs").get_by_role("row")
        expect(rows).to_have_count(4)
        expect(rows.nth(1)).to_contain_text("61 °C")
        expect(rows.nth(1)).to_contain_text("26 below slowdown")
        expect(rows.nth(2)).to_contain_text("reset needed")
        expect(rows.nth(2)).to_contain_text("not known")
        expect(rows.nth(3)).to_contain_text("its driver does not reach it")


# ---------------------------------------------------------------- sign-in


@core
def test_sign_in_by_token_without_a_prompt_and_out_again(chromium: Browser, tmp_path: Path) -> None:
    with browsed.served(browsed.empty(), tmp_path, token="s3cret") as site, opened(chromium) as page:
        page.goto(site.url)
        field = page.get_by_label("API token")
        expect(field).to_be_focused()
        examine(page, "1440 light/sign-in")
        field.fill("wrong")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("no such token: give HOLDFAST_API_TOKEN")
        field.fill("s3cret")
        field.press("Enter")
        expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
        assert stored(page) == {"cookie": "", "local": 0, "session": 0}, "no script can read the token or the session"
        page.reload()
        expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
        visit(page, site.url, "settings")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API token")).to_be_visible()


@core
def test_settings_show_the_owners_of_tokens_and_who_gets_alerts(chromium: Browser, tmp_path: Path) -> None:
    tokens, ada = added((), "ada", ApiRole.OPERATOR, 1_700_000_000.0)
    tokens, eve = added(tokens, "eve", ApiRole.VIEWER, 1_700_000_000.0, 4_000_000_000.0)
    file = tmp_path / "tokens.json"
    file.write_bytes(text_of(tokens))
    hook = Webhook("https://user:secret@hooks.example.org/x", secret="", source="/holdfast/main", link="")
    with browsed.served(browsed.empty(), tmp_path, tokens=TokensFile(file), alerts=[hook]) as site:
        with opened(chromium) as page:
            page.goto(sign_in_link(site.url, ada))
            expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
            visit(page, site.url, "settings")
            expect(page.get_by_role("group", name="Tokens")).to_contain_text("eve")
            expect(page.locator("main")).to_contain_text("https://hooks.example.org")
            assert "user:secret" not in page.content()
            examine(page, "1440 light/settings of an operator")
        with opened(chromium) as page:
            page.goto(sign_in_link(site.url, eve))
            expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
            visit(page, site.url, "settings")
            expect(page.locator("main")).to_contain_text("Signed in as eve, with role viewer.")
            expect(page.get_by_role("group", name="Tokens")).to_have_count(0)


@core
def test_the_link_of_a_local_stack_signs_in_and_leaves_the_address(chromium: Browser, tmp_path: Path) -> None:
    with browsed.served(browsed.empty(), tmp_path, token="s3 cr/et") as site, opened(chromium) as page:
        page.goto(sign_in_link(site.url, "s3 cr/et"))
        expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
        assert "token" not in page.url
        page.reload()
        expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
    with browsed.served(browsed.empty(), tmp_path, token="another") as site, opened(chromium) as page:
        page.goto(sign_in_link(site.url, "of an earlier start"))
        expect(page.get_by_label("API token")).to_be_focused()
        assert "token" not in page.url


def stored(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        "() => ({cookie: document.cookie, local: localStorage.length, session: sessionStorage.length})"
    )
    return found
