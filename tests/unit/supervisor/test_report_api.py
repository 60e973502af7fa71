"""Reports by REST and from a history file: one job, the fleet, a range of time, and what is stated where."""

from __future__ import annotations

import shutil
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import browsed
import pytest
from anyio import to_thread

from holdfast.cli.report import offline
from holdfast.domain.errors import InvalidSpec, NotFound
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.history.sqlite_file import LAYOUT
from holdfast.supervisor.report.fleet import fleet_report
from holdfast.supervisor.report.making import make_fleet_report
from holdfast.supervisor.report.numbers import Terms, joined
from holdfast.supervisor.report.sources import Range, report_of_run

pytestmark = pytest.mark.anyio
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def world() -> browsed.World:
    return browsed.under_fire()


async def fill(history: SqliteHistory, world: browsed.World) -> None:
    await history.add_events([EventEntry(f"{n}-0", record) for n, record in enumerate(world.records, 1)], "0")
    await history.add_steps(world.steps, "0")


async def get(api: Any, path: str) -> Any:
    answer = await api.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_report_of_a_job_needs_nothing_but_its_job_file(api: Any, world: browsed.World) -> None:
    await fill(api.history, world)
    reported = await get(api, "/v1/jobs/llm-70b/report")
    assert (reported["ranks"], reported["currency"], reported["all_faults"]["count"]) == (512, "€", 4)
    assert sum(each["seconds"] for each in reported["shares"]) == pytest.approx(reported["wall_s"])
    assert reported["cost"] == pytest.approx(reported["wall_s"] / HOUR_S * 512 * 2.5)
    ledger = await get(api, "/v1/jobs/llm-70b/goodput")
    assert reported["goodput"] == pytest.approx(reported["scheduling"] * reported["runtime"])
    assert reported["goodput"] == pytest.approx(ledger["goodput_job"], rel=1e-3)  # a moment later
    assert reported["mfu"] == pytest.approx(ledger["fault_free_tokens_per_s"] * 4.2e11 / (512 * 989e12))
    assert (reported["comparison"]["faults"], reported["comparison"]["left_out"]) == (3, 1)
    assert "restart of 4.2 min" in reported["comparison"]["text"]
    assert reported["summary"].startswith("5.7 h on 512 ranks, €")


async def test_what_the_request_gives_comes_before_the_job_file(api: Any, world: browsed.World) -> None:
    await fill(api.history, world)
    reported = await get(
        api, "/v1/jobs/llm-70b/report?price_per_gpu_hour=5&currency=CHF&restart_s=1&checkpoint_every_s=2"
    )
    assert (reported["currency"], reported["comparison"]["restart_s"]) == ("CHF", 1.0)
    assert reported["cost"] == pytest.approx(reported["wall_s"] / HOUR_S * 512 * 5)
    unstated = await get(api, "/v1/jobs/old-run/report")
    assert (unstated["cost"], unstated["comparison"], unstated["mfu"]) == (None, None, None)
    for wrong in ("restart_s=9", "flops_per_token=1e9", "price_per_gpu_hour=-1", "peak_flops=0", "currency="):
        assert (await api.http.get(f"/v1/jobs/old-run/report?{wrong}")).status_code == 422, wrong
    assert (await api.http.get("/v1/jobs/nobody/report")).status_code == 404


def test_of_a_pair_one_may_be_stated_and_the_other_given() -> None:
    both = joined(Terms(restart_s=5.0), Terms(restart_s=9.0, checkpoint_every_s=600.0))
    assert (both.restart_s, both.checkpoint_every_s) == (5.0, 600.0)
    assert joined(Terms(flops_per_token=1.0), Terms(peak_flops=2.0)).peak_flops == 2.0
    with pytest.raises(InvalidSpec, match="peak_flops as well, here or in the job file"):
        joined(Terms(flops_per_token=1.0), Terms())


async def test_the_fleet_is_the_sum_of_its_jobs(api: Any, world: browsed.World) -> None:
    await fill(api.history, world)
    reported = await get(api, "/v1/report")
    jobs = {each["job"]: each for each in reported["jobs"]}
    assert set(jobs) == {"llm-70b", "old-run", "waits"}
    assert reported["gpu_hours"] == pytest.approx(
        sum(each["wall_s"] * each["ranks"] for each in jobs.values()) / HOUR_S
    )
    assert reported["cost"] == jobs["llm-70b"]["cost"]
    assert reported["all_faults"]["count"] == sum(each["all_faults"]["count"] for each in jobs.values()) == 4
    assert sum(each["count"] for each in reported["by_kind"]) == sum(each["count"] for each in reported["by_node"]) == 4
    assert sum(each["share"] for each in reported["shares"]) == pytest.approx(1.0)
    assert reported["saved"] == jobs["llm-70b"]["comparison"]["saved"]
    assert any("2 of 3 jobs have no price" in note for note in reported["notes"])


async def test_a_range_has_only_what_happened_in_it(api: Any, world: browsed.World) -> None:
    await fill(api.history, world)
    now = time.time()
    begun = (await get(api, "/v1/jobs/llm-70b/report"))["started_at"]
    cut = begun + 2.5 * HOUR_S
    early = await get(api, f"/v1/report?since=0&until={cut}")
    late = await get(api, f"/v1/report?since={cut}&until={now}")
    whole = await get(api, f"/v1/report?since=0&until={now}")
    assert {each["job"] for each in early["jobs"]} == {"llm-70b", "old-run"}, "the third one was not submitted yet"
    assert "old-run" not in {each["job"] for each in late["jobs"]}, "it was over"
    assert [part["all_faults"]["count"] for part in (early, late, whole)] == [1, 3, 4]
    parts_h = early["gpu_hours"] + late["gpu_hours"]
    assert parts_h == pytest.approx(whole["gpu_hours"], abs=512 * 15 / HOUR_S), "but for the step at the cut"
    assert (await get(api, f"/v1/report?since={now + 9}&until={now + 99}"))["jobs"] == []
    assert (await api.http.get("/v1/report?since=9&until=9")).status_code == 422


async def test_amounts_in_different_currencies_are_not_added_up(api: Any, world: browsed.World) -> None:
    await fill(api.history, world)
    run = await api.history.run("llm-70b")
    euros = report_of_run(run, Terms(), time.time())
    dollars = report_of_run(run, Terms(currency="$"), time.time())
    reported = fleet_report([euros, replace(dollars, job="other")], 0.0, 1.0)
    assert (reported.cost, reported.saved, reported.all_faults.cost) == (None, None, None)
    assert any("Prices are in $, €" in note for note in reported.notes)
    assert reported.all_faults.count == 8
    assert reported.all_faults.mttr_s == pytest.approx(euros.all_faults.mttr_s)


async def test_more_jobs_than_a_report_has_are_counted(api: Any, world: browsed.World) -> None:
    await fill(api.history, world)
    reported = await make_fleet_report(api.history, Terms(), Range(0.0, time.time()), time.time(), jobs_max=1)
    assert ([each.job for each in reported.jobs], reported.jobs_left_out) == (["waits"], 2), "the newest one stays"


# ---------------------------------------------------------------- without a supervisor


@pytest.fixture
async def file(tmp_path: Path, world: browsed.World) -> Path:
    history = await SqliteHistory.open(tmp_path / "kept.sqlite3")
    await fill(history, world)
    await history.aclose()
    return tmp_path / "kept.sqlite3"


def listed(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def test_a_file_says_what_the_supervisor_said_and_is_not_changed(file: Path) -> None:
    before = listed(file.parent)
    made, incidents, timeline = await to_thread.run_sync(offline.of_job, file, "llm-70b", Terms())
    assert (made.ranks, made.all_faults.count, made.currency) == (512, 4, "€")
    assert sum(each.seconds for each in made.shares) == pytest.approx(made.wall_s)
    assert len(incidents) == 4
    assert len(timeline["at"]) == len(timeline["step"]) > 10
    fleet = await to_thread.run_sync(offline.of_fleet, file, Terms(), Range(0.0, time.time()))
    assert {each["job"] for each in fleet["jobs"]} == {"llm-70b", "old-run", "waits"}
    assert listed(file.parent) == before, "nothing is left beside it"


async def test_what_a_crashed_supervisor_had_not_merged_into_its_file_counts(
    tmp_path: Path, world: browsed.World
) -> None:
    history = await SqliteHistory.open(tmp_path / "live.sqlite3")
    await fill(history, world)
    live, _, _ = await to_thread.run_sync(offline.of_job, tmp_path / "live.sqlite3", "llm-70b", Terms())
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for end in ("", "-wal"):
        shutil.copy(tmp_path / f"live.sqlite3{end}", crashed / f"history.sqlite3{end}")
    await history.aclose()
    before = listed(crashed)
    found, _, _ = await to_thread.run_sync(offline.of_job, crashed / "history.sqlite3", "llm-70b", Terms())
    assert found == live
    assert listed(crashed) == before


async def test_what_is_no_history_is_refused_and_stays_where_it_is(file: Path) -> None:
    with pytest.raises(NotFound, match="it has waits, llm-70b, old-run"):
        await to_thread.run_sync(offline.of_job, file, "nobody", Terms())
    newer = Path(shutil.copy(file, file.parent / "newer.sqlite3"))
    database = sqlite3.connect(newer)
    database.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    database.close()
    (file.parent / "text.sqlite3").write_text("not a database, and long enough to be looked at" * 50)
    for wrong in ("newer.sqlite3", "text.sqlite3", "none.sqlite3", "."):
        with pytest.raises(InvalidSpec, match=r"--history"):
            await to_thread.run_sync(offline.of_job, file.parent / wrong, "llm-70b", Terms())
    assert (file.parent / "text.sqlite3").read_text().startswith("not a database")
