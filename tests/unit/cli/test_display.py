"""The live view on a terminal and on a pipe, following a job to its end, and the event lines."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from holdfast.cli.connection import NoApi
from holdfast.cli.follow import SETTLE_MAX_S, SILENCE_MAX_S, describe, follow
from holdfast.cli.live import MESSAGES_MAX, REPLICAS_SHOWN_MAX, JobDisplay
from holdfast.domain.errors import NotFound, Unavailable

NASTY = "rank 4 raised ValueError: [/bold] list [red] at train.py:100: :warning:"


def incident(state: str = "decided", **changes: Any) -> dict[str, Any]:
    action = {"kind": "hot_swap", "reason": "a spare is there [x]"}
    base: dict[str, Any] = {"id": "i1", "state": state, "cause": NASTY, "action": action}
    base |= {"fault_at": 10.0, "detected_at": 10.1, "decided_at": None, "first_step_at": None}
    return base | changes


def job(**changes: Any) -> dict[str, Any]:
    dp, pp = changes.pop("shape", (3, 3))
    ranks = [{"rank": rank, "node": f"node-{rank}", "pid": 100 + rank} for rank in range(dp * pp)]
    base = {
        "name": "gpt",
        "phase": "running",
        "reason": "",
        "mesh": {"dp": dp, "pp": pp},
        "generation": 2,
        "step": 41,
        "loss": 2.34567,
        "tokens_per_s": 12345.6,
        "ranks": ranks,
        "incident": None,
    }
    return base | changes


def nodes(count: int, **states: str) -> list[dict[str, Any]]:
    names = [f"node-{number}" for number in range(count)]
    return [{"node": name, "state": states.get(name.replace("-", "_"), "active")} for name in names]


def console(width: int = 80, *, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    made = Console(file=out, width=width, height=40, force_terminal=terminal, color_system=None, highlight=False)
    return made, out


def rendered(
    width: int, view: dict[str, Any], fleet: list[dict[str, Any]], *events: str, target: int | None = 100
) -> str:
    screen, _ = console(width, terminal=False)
    display = JobDisplay(screen, target_step=target, clock=lambda: 0.0)
    for line in events:
        display._events.append(line)
    display._job, display._nodes = view, fleet
    with screen.capture() as capture:
        screen.print(display._render())
    return capture.get()


def test_a_running_job_with_an_incident_at_80_columns() -> None:
    text = rendered(80, job(incident=incident()), nodes(11, node_4="lost", node_9="spare", node_10="cordoned"))
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in ("gpt", "running", "generation 2", "dp 3 × pp 3", "step 41/100", "2.3457", "12,346 tokens/s"):
        assert part in " ".join(text.split()), part
    assert "replica 2    ■ rank 6 node-6    ■ rank 7 node-7" in text
    assert "node-9 spare   node-10 cordoned" in text
    assert "incident · decided" in text
    assert "hot_swap: a spare is there [x]" in text
    assert "[/bold] list [red]" in text
    assert ":100:" in text
    assert ":warning:" in text


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        (
            {"step": None, "observed_steps": 4544, "observed_step_s": 0.00718},
            "4,544 optimizer steps observed, 0.00718 s each",
        ),
        ({"step": None, "observed_steps": 1, "observed_step_s": 2.0}, "1 optimizer step observed, 2 s each"),
        ({"step": None, "observed_steps": None}, "steps are not reported by the script"),
        ({"step": 0}, "no step yet"),
        ({"step": 7}, "step 7"),
    ],
)
def test_what_is_known_of_the_steps(known: dict[str, Any], shown: str) -> None:
    view = job(loss=None, tokens_per_s=None, **known)
    assert shown in rendered(80, view, nodes(9), target=None)


def test_a_first_step_that_does_not_come_is_explained() -> None:
    screen, out = console(200, terminal=False)
    played = Played()
    display = JobDisplay(screen, clock=played.clock)
    for pause_s in (0.0, 30.0, 45.0):
        played.sleep(pause_s)
        display.update(job(phase="starting", step=0), nodes(9))
    first, second, third = out.getvalue().splitlines()
    assert first.endswith("no step yet")
    assert second.endswith("no step yet")
    assert third.endswith("no step yet after 75 s; a script that uses holdfast.train must call run.step")
    for _ in range(2):
        display.update(job(step=0), nodes(9))
        played.sleep(65.0)
    assert out.getvalue().splitlines()[-1].endswith("no step yet that all ranks have reported")


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            {"step": None, "observed_steps": 256, "observed_step_s": 0.01},
            "256 optimizer steps observed, 0.01 s each, none for 25 s",
        ),
        ({"step": 7, "loss": None, "tokens_per_s": None}, "step 7, none for 25 s"),
        ({"step": None, "observed_steps": 2, "observed_step_s": 60.0}, "2 optimizer steps observed, 60 s each\n"),
        ({"step": None, "observed_steps": None}, "steps are not reported by the script\n"),
        ({"step": 7, "phase": "starting", "loss": None, "tokens_per_s": None}, "step 7\n"),
    ],
)
def test_a_job_that_has_stopped_stepping_does_not_look_like_one_that_steps(known: dict[str, Any], said: str) -> None:
    now = [0.0]
    screen, out = console(terminal=False)
    with JobDisplay(screen, clock=lambda: now[0]) as display:
        for now[0] in (0.0, 5.0, 25.0):
            display.update(job(**known), nodes(9))
        assert said in out.getvalue()
        now[0] = 30.0
        grown = {name: value + 1 for name, value in known.items() if name in ("step", "observed_steps") and value}
        display.update(job(**known | grown), nodes(9))
    assert "none for" not in out.getvalue().splitlines()[-1]


def test_before_the_job_is_there() -> None:
    assert rendered(80, {}, []).strip() == "waiting for the job"


@pytest.mark.parametrize("changes", [{"ranks": []}, {"loss": None, "tokens_per_s": None}, {"phase": "never seen"}])
def test_a_job_that_has_little_to_show(changes: dict[str, Any]) -> None:
    assert "gpt" in rendered(80, job(**changes), [])


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_large_mesh_fits_the_screen(width: int) -> None:
    view = job(shape=(40, 16))
    text = rendered(width, view, nodes(700))
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert text.count("■") == REPLICAS_SHOWN_MAX * 16
    assert f"and {40 - REPLICAS_SHOWN_MAX} more" in text
    assert "and 48 more" in " ".join(text.split())  # of 60 other nodes


def test_a_pipe_gets_whole_lines_and_no_control_codes() -> None:
    now = [0.0]
    screen, out = console(terminal=False)
    with JobDisplay(screen, clock=lambda: now[0]) as display:
        display.update(job(), nodes(9))
        now[0] = 1.0
        display.update(job(step=42), nodes(9))  # too soon for another heartbeat
        now[0] = 6.0
        display.update(job(step=50), nodes(9))
        display.say(describe(incident("open")))
        display.print("[rank0] " + "x" * 200 + " [/red] :smile: \x1b[31mred")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert "step 41" in lines[0]
    assert "step 50" in lines[1]
    assert "detected" in lines[2]
    assert NASTY in lines[2]
    assert lines[3].startswith("[rank0] " + "x" * 200 + " [/red] :smile:")


def test_a_terminal_is_drawn_and_left_in_order() -> None:
    screen, out = console(terminal=True)
    with JobDisplay(screen, target_step=100) as display:
        display.update(job(), nodes(10, node_9="spare"))
        for number in range(MESSAGES_MAX + 3):
            display.say(f"event {number}")
        display.print("[rank0] printed")
    drawn = Text.from_ansi(out.getvalue()).plain
    assert "[rank0] printed" in drawn
    assert "events" in drawn
    last = drawn[drawn.rindex("events") :]
    assert "event 10" in last
    assert "event 2" not in last
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        (incident("open", action=None), f"detected  {NASTY}"),
        (incident("decided"), "decided   hot_swap: a spare is there [x]"),
        (incident("recovering", action=None), f"recovering : {NASTY}"),
        (incident("resolved", first_step_at=11.5), f"resolved  {NASTY}: hot_swap, 1.50 s from fault to first step"),
        (
            incident("resolved", first_step_at=25.0, phases_s={"script": 13.42, "first_step": 0.3}),
            f"resolved  {NASTY}: hot_swap, 15.00 s from fault to first step, 13.4 s of it until the script called "
            "holdfast.train: `preload: [auto]` loads its imports ahead",
        ),
        (incident("resolved"), "resolved  hot_swap: a spare is there [x]"),
        (incident("failed"), f"failed    {NASTY}: hot_swap led to no new step"),
        (
            incident("failed", action={"kind": "stop", "reason": "three times [x]"}),
            f"stopped   {NASTY}: three times [x]",
        ),
    ],
)
def test_event_lines(seen: dict[str, Any], line: str) -> None:
    assert Text.from_markup(describe(seen), emoji=False).plain == line


def test_slow_imports_of_a_job_that_learns_them_are_explained_in_its_log() -> None:
    slow = incident("resolved", first_step_at=25.0, phases_s={"script": 13.42})
    assert describe(slow, learns=True).endswith("called holdfast.train: if that recurs, the log of rank 0 says why")


@pytest.mark.parametrize(
    ("step", "end"), [(None, "all ranks running again"), (0, "all ranks running again"), (7, "first step")]
)
def test_a_recovery_of_a_script_without_steps_names_none(step: int | None, end: str) -> None:
    played = Played(job(step=step), job(step=step, phase="completed"))
    played.found = [incident("resolved", first_step_at=11.5)]
    assert f"hot_swap, 1.50 s from fault to {end}" in played.follow()[1]


class Played:
    """A supervisor that shows `views` in turn; an exception among them is raised."""

    def __init__(self, *views: dict[str, Any] | Exception) -> None:
        self._views = list(views)
        self.now = 0.0
        self.found: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def job(self, name: str) -> dict[str, Any]:
        view = self._views[0] if len(self._views) == 1 else self._views.pop(0)
        if isinstance(view, Exception):
            raise view
        return view

    def nodes(self) -> list[dict[str, Any]]:
        return nodes(9)

    def incidents(self, name: str) -> list[dict[str, Any]]:
        return list(self.found)

    def newest_findings(self, count: int, job: str | None = None) -> list[dict[str, Any]]:
        return [each for each in self.findings if job in (None, each["job"])][:count]

    def node(self, name: str) -> dict[str, str]:
        return {"hostname": "elsewhere", "directory": "/nowhere"}

    def rank_log(self, name: str, rank: int, generation: int, offset: int, limit: int) -> dict[str, Any]:
        raise NotFound("there is no such log")

    def follow(self, **options: Any) -> tuple[int, str]:
        screen, out = console(terminal=False)
        code = follow(self, "gpt", screen, clock=self.clock, sleep=self.sleep, **options)  # type: ignore[arg-type]
        return code, out.getvalue()


@pytest.mark.parametrize(
    ("phase", "permanent", "code"),
    [("completed", False, 0), ("stopped", False, 93), ("failed", False, 1), ("failed", True, 93), ("failed", None, 1)],
)
def test_the_exit_code_is_the_jobs(phase: str, permanent: bool | None, code: int) -> None:
    reported = (
        {} if permanent is None else {"permanent_failure": permanent}
    )  # a supervisor of an earlier version does not say
    ended = job(phase=phase, reason=f"because {NASTY}", ranks=[], **reported)
    given, text = Played(job(), ended).follow()
    assert given == code
    assert f"gpt {phase}: because {NASTY}" in text


def test_a_failed_job_names_the_command_that_shows_why() -> None:
    ending = job(phase="failed", reason="rank 1 raised ValueError")
    assert "holdfast logs gpt --first-error" in Played(ending).follow()[1]
    assert "--first-error" not in Played(job(phase="completed")).follow()[1]


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ({"step": None}, "its script reports no steps"),
        ({"step": 30}, "no checkpoint was saved by step 30"),
        ({"step": 0}, ""),
        ({"step": 30, "checkpoint_step": 20}, ""),
        ({"step": 30, "phase": "suspended"}, ""),
    ],
)
def test_a_job_that_ends_without_a_checkpoint_says_so(ended: dict[str, Any], said: str) -> None:
    suspended = {"step": 30, "durable": True, "nodes_left": [], "tiers": {}, "directories": {}}
    ending = job(**{"phase": "completed", **ended}, suspended=suspended if "phase" in ended else None)
    text = Played(ending).follow()[1]
    assert (said in text) if said else ("no checkpoint" not in text)


def test_a_reason_that_contains_the_cause_is_printed_without_repeating_it() -> None:
    action = {"kind": "stop", "reason": f"twice in a row: {NASTY}."}
    line = describe(incident("failed", action=action))
    assert line.count("raised ValueError") == 1


def test_each_state_of_an_incident_is_printed_once() -> None:
    played = Played(job(), job(), job(phase="completed"))
    played.found = [incident("open")]
    _, text = played.follow()
    assert text.count("detected") == 1


def test_an_incident_that_is_first_seen_while_it_is_acted_on_says_what_happened() -> None:
    played = Played(job(), job(), job(phase="completed"))
    played.found = [incident("preparing"), incident("resolved", id="i-2", first_step_at=11.5)]
    _, text = played.follow()
    assert text.count(f"detected  {NASTY}") == 1
    assert text.index("detected") < text.index("preparing hot_swap")
    assert text.count(f"resolved  {NASTY}") == 1


def test_an_incident_of_an_earlier_run_of_the_name_is_not_printed_again() -> None:
    again = {"submitted_at": 100.0}
    played = Played(job(**again), job(phase="completed", **again))
    earlier = incident("resolved", detected_at=10.0, decided_at=10.5, first_step_at=11.5)
    now = incident(
        "resolved", id="i-2", detected_at=99.0, decided_at=100.5, first_step_at=101.0
    )  # a node's clock is late
    played.found = [earlier, now]
    _, text = played.follow()
    assert text.count(f"resolved  {NASTY}") == 1


def warning(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "id": "f1",
        "kind": "checkpoint",
        "severity": "warning",
        "summary": NASTY,
        "advice": "make room [now]",
    }
    base |= {"job": "gpt", "node": "node-0", "rank": None, "gpu": None, "incident": "", "judged_at": 10.0}
    return {**base, "evidence": {"trouble": "tier_fails", "place": "disk"}, **changes}


def test_a_warning_is_printed_once_while_the_job_is_followed() -> None:
    played = Played(*[job()] * 50, job(phase="completed"))
    played.findings = [warning(), warning(id="f2")]
    _, text = played.follow()
    assert text.count("warning   ") == 1
    assert f"warning   {NASTY}. To do: make room [now]" in text


def test_a_warning_of_the_last_second_is_printed() -> None:
    played = Played(job(), job(phase="completed", ranks=[]))
    polls = 0

    def check() -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            played.findings = [warning()]

    assert "warning   " in played.follow(check=check)[1]


def test_a_copy_that_the_disk_refuses_is_not_waited_for() -> None:
    kept = {"attempt": 1, "step": 41, "on_disk": False, "directories": {"node-0": "/d/gpt"}, "unwritten": {"node-0": 9}}
    ended = job(phase="completed", checkpoint_step=41, kept=kept)
    played = Played(job(), ended)
    played.follow()
    assert played.now > SETTLE_MAX_S, "without a report it may still arrive"
    played = Played(job(), ended)
    played.findings = [warning()]
    _, text = played.follow()
    assert played.now < 5.0
    assert "the checkpoint at step 41 is not on disk" in text


def test_a_control_plane_that_is_away_is_waited_for() -> None:
    away = Unavailable("no Holdfast API answers [here]")
    code, text = Played(job(), away, away, job(), job(phase="completed")).follow()
    assert code == 0
    assert text.count("no Holdfast API answers [here]; training continues") == 1
    assert text.count("connected to the supervisor again") == 1


def test_who_waits_for_a_supervisor_is_not_told_to_start_another() -> None:
    away = NoApi("no Holdfast API answers at http://h:1; start one with `holdfast up`")
    _, text = Played(job(), away, job(phase="completed")).follow()
    assert "the supervisor does not answer; training continues" in text
    assert "holdfast up" not in text


def test_a_job_that_the_supervisor_has_lost_is_no_wrong_usage() -> None:
    """Redis came back empty: exit code 69, how the job is doing is not known, and what to do."""
    with pytest.raises(Unavailable, match="its state was lost; the job's workers may still train"):
        Played(job(), NotFound("there is no job gpt")).follow()
    with pytest.raises(NotFound):
        Played(NotFound("there is no job gpt")).follow()


def test_who_ends_everything_with_the_job_waits_for_its_last_checkpoint() -> None:
    views = [job(phase="completed", leaving=True), job(phase="completed", leaving=False, reason="step 40 is there")]
    code, text = Played(*views).follow(until_left=True)
    assert (code, "step 40 is there" in text) == (0, True)
    assert "step 40 is there" not in Played(*views).follow()[1]


def test_but_not_for_ever() -> None:
    played = Played(job(), Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        played.follow()
    assert SILENCE_MAX_S < played.now < SILENCE_MAX_S + 1


def test_a_local_stack_that_died_ends_the_waiting_at_once() -> None:
    def check() -> None:
        raise Unavailable("supervisor ended with code 1")

    with pytest.raises(Unavailable, match="supervisor ended"):
        Played(job()).follow(check=check)


AT = {
    "step": 120,
    "durable": True,
    "nodes_left": [],
    "directories": {"n0": "/disk/gpt"},
    "tiers": {"disk": 2, "memory": 0},
}


def test_a_suspended_job_ends_the_following_and_says_where_it_goes_on() -> None:
    suspended = job(phase="suspended", reason="all of its nodes were asked to end", suspended=AT, ranks=[])
    code, text = Played(job(), suspended).follow()
    assert code == 75
    assert "checkpoint at step 120 is in: disk of 2 ranks, under /disk/gpt" in text


def test_it_waits_for_the_copies_of_the_last_save_while_nodes_make_them() -> None:
    copying = job(phase="suspended", suspended={**AT, "durable": False, "nodes_left": ["n0"]}, ranks=[])
    played = Played(copying, copying, copying, job(phase="suspended", suspended=AT, ranks=[]))
    code, text = played.follow()
    assert (code, "not all copies were made" in text) == (75, False)
    played = Played(copying)
    code, text = played.follow()
    assert (code, "not all copies were made" in text) == (75, True)
    assert played.now < 60.0


def test_who_attaches_to_a_suspended_job_gives_it_time_to_go_on() -> None:
    suspended = job(phase="suspended", suspended=AT, ranks=[])
    code, _ = Played(suspended, suspended, job(), job(phase="completed")).follow(suspended_wait_s=10.0)
    assert code == 0
    played = Played(suspended)
    code, _ = played.follow(suspended_wait_s=10.0)
    assert code == 75
    assert 10.0 <= played.now < 11.0
    played = Played(suspended, job(), suspended)
    code, _ = played.follow(suspended_wait_s=10.0)
    assert (code, played.now < 1.0) == (75, True)


def test_a_long_job_writes_a_status_line_per_minute_on_a_pipe_and_one_at_each_change() -> None:
    now = [0.0]
    screen, out = console(200, terminal=False)
    display = JobDisplay(screen, clock=lambda: now[0])
    for now[0] in range(24 * 3600):
        display.update(job(step=int(now[0]), generation=2 + (now[0] >= 80_000)), nodes(1))
    times = [float(line.split(" s ")[0]) for line in out.getvalue().splitlines()]
    assert times[:4] == [0.0, 5.0, 10.0, 15.0]
    assert len(times) < 24 * 60 + 60
    assert max(after - before for before, after in itertools.pairwise(times)) == 60.0
    assert any(80_000 <= at <= 80_005 for at in times)


def test_a_pipe_shows_why_a_job_does_not_train_as_soon_as_it_is_known() -> None:
    screen, out = console(200, terminal=False)
    display, now = JobDisplay(screen, clock=lambda: 0.0), nodes(1)
    for reason in ("nobody has looked", "it needs [8] workers", "it needs [8] workers"):
        display.update(job(phase="pending", reason=reason), now)
    display.update(job(phase="running", reason="first start"), now)
    reported = [line.split("dp 3 × pp 3   ")[-1] for line in out.getvalue().splitlines()]
    assert reported == ["nobody has looked", "it needs [8] workers"]


def test_a_terminal_shows_why_a_job_does_not_train() -> None:
    assert "it needs [8] workers" in rendered(
        80, job(phase="waiting", reason="it needs [8] workers", ranks=[]), nodes(1)
    )
    assert "first start" not in rendered(80, job(phase="running", reason="first start"), nodes(1))
