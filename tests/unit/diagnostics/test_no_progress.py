"""A script that reports no steps and stops: a warning, once, and only about what was really seen to stop."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast.diagnostics.detectors.no_progress import NoProgress
from holdfast.diagnostics.detectors.protocol import TelemetryGap
from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import ClockTick, GenerationStarted, GenerationStopped, Phase, RankProgress, Signal

JOB = "plain"
T0 = 1_700_000_000.0


@dataclass
class Script:
    """Two nodes of one rank each, which report at every tick. Their clocks are an hour off."""

    detector: NoProgress = field(default_factory=NoProgress)
    roster: Roster = field(default_factory=Roster)
    now: float = T0
    generation: int = 1
    counts: dict[str, int] = field(default_factory=lambda: {"n0": 0, "n1": 0})
    silent: set[str] = field(default_factory=set)
    found: list[Finding] = field(default_factory=list)
    own_step: int = 0  # that the script reports itself

    def __post_init__(self) -> None:
        self.state = self.detector.initial()
        self.begin(1)

    def begin(self, generation: int) -> None:
        self.generation = generation
        self.counts = dict.fromkeys(self.counts, 0)
        for rank, node in enumerate(self.counts):
            mesh = Mesh.of({"dp": 2})
            self.fold(GenerationStarted(node, self.now - 3600.0, JOB, generation, mesh, (rank,), HangSpec()))

    def end(self) -> None:
        """The agents stop the generation, and say so some seconds before they start the next one."""
        for node in self.counts:
            self.fold(GenerationStopped(node, self.now, JOB, self.generation))
        for _ in range(5):
            self.now += 1.0
            self.fold(ClockTick(self.now))

    def fold(self, item: Signal | TelemetryGap | RunStarted) -> None:
        self.roster.observe(item)
        self.state, found = self.detector.observe(self.state, item, self.now, self.roster)
        self.found += found

    def run(self, seconds: float, *, stepping: bool = True) -> list[Finding]:
        """Return what was found meanwhile."""
        before = len(self.found)
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank, node in enumerate(self.counts):
                self.counts[node] += stepping
                if node not in self.silent:
                    self.report(rank, node)
            self.fold(ClockTick(self.now))
        return self.found[before:]

    def report(self, rank: int, node: str) -> None:
        observed = (self.counts[node],) if self.counts[node] else ()
        at = self.now - 3600.0
        self.fold(
            RankProgress(
                node,
                at,
                JOB,
                self.generation,
                (rank,),
                (self.own_step,),
                (Phase.INIT,),
                (at,),
                ("S",),
                (1.0,),
                (-1,),
                observed,
            )
        )


@pytest.fixture
def script() -> Script:
    return Script()


def test_a_script_that_stops_is_warned_of_and_withdrawn_when_it_goes_on(script: Script) -> None:
    assert script.run(1000) == []
    [found] = script.run(400, stepping=False)
    assert (found.kind, found.severity, found.job, found.generation) == (
        FindingKind.NO_PROGRESS,
        Severity.WARNING,
        JOB,
        1,
    )
    assert found.since == T0 + 1000.0
    assert "No rank of plain has begun an optimizer step for 301 s, after 1000 steps" in found.summary
    assert found.evidence["process_states"] == "S 2"
    [over] = script.run(1)
    assert (over.severity, over.contradicts) == (Severity.INFO, found.id)


def test_it_is_repeated_with_its_id_while_it_lasts(script: Script) -> None:
    script.run(10)
    found = script.run(1600, stepping=False)
    assert [each.repeat for each in found] == [0, 1, 2]
    assert len({each.id for each in found}) == 1


def test_a_pause_that_ended_by_itself_is_learned(script: Script) -> None:
    """An evaluation of four minutes, and one of eleven, as long as three times that allows."""
    script.run(100)
    assert script.run(240, stepping=False) == []
    script.run(100)
    assert script.run(700, stepping=False) == []
    [found] = script.run(30, stepping=False)
    assert "the longest pause before took 241 s" in found.summary


def test_what_was_learned_survives_a_restart(script: Script) -> None:
    script.run(100)
    script.run(240, stepping=False)
    script.run(10)
    script.end()
    script.begin(2)
    script.run(10)
    assert script.run(700, stepping=False) == []


def test_one_rank_that_goes_on_is_enough(script: Script) -> None:
    script.run(10)
    for _ in range(600):
        script.counts["n1"] += 1
        assert script.run(1, stepping=False) == []


def test_nothing_is_concluded_while_a_node_is_silent(script: Script) -> None:
    script.run(10)
    script.silent.add("n1")
    assert script.run(1000, stepping=False) == []
    script.silent.clear()
    script.counts["n1"] += 500  # it stepped all the time
    assert script.run(100, stepping=False) == []


def test_nothing_is_concluded_about_the_time_that_diagnostics_was_away(script: Script) -> None:
    script.run(10)
    script.now += 5000.0
    script.fold(TelemetryGap(script.now, 5000.0))
    assert script.run(290, stepping=False) == []


@pytest.mark.parametrize("end", ["stopped", "submitted again", "steps of its own"])
def test_what_ends_withdraws_the_warning(script: Script, end: str) -> None:
    script.run(10)
    [found] = script.run(400, stepping=False)
    match end:
        case "stopped":
            script.fold(GenerationStopped("n0", script.now, JOB, 1))
        case "submitted again":
            script.fold(RunStarted(JOB))
        case _:
            script.counts = dict.fromkeys(script.counts, 0)  # agents report no counts of a script that reports steps
    script.run(2, stepping=False)
    assert [each.contradicts for each in script.found] == ["", found.id]


def test_a_generation_without_an_observed_step_is_not_judged(script: Script) -> None:
    """Its script may have no optimizer of torch, or download a data set for hours."""
    assert script.run(5000, stepping=False) == []


def test_a_generation_that_never_begins_is_warned_of_if_an_earlier_one_stepped(script: Script) -> None:
    """A restart that waits for ever in its first collective, or in the download of its data."""
    script.run(200, stepping=False)  # its start, which is learned
    script.run(100)
    script.end()
    script.begin(2)
    assert script.run(600, stepping=False) == []
    [found] = script.run(2, stepping=False)
    assert (
        "begun an optimizer step for 601 s, since generation 2 started; the longest start before took 200"
        in found.summary
    )
    assert (found.generation, found.severity, found.evidence["observed_steps"]) == (2, Severity.WARNING, "0")
    [over] = script.run(1)
    assert over.contradicts == found.id


def test_a_long_start_does_not_excuse_a_long_pause(script: Script) -> None:
    script.run(1000, stepping=False)
    script.run(100)
    [found] = script.run(310, stepping=False)
    assert found.evidence["observed_steps"] == "100"


def test_a_script_that_reports_steps_after_a_restart_is_left_to_the_detector_of_hangs(script: Script) -> None:
    script.run(10)
    script.begin(2)
    script.own_step = 1
    assert script.run(1000, stepping=False) == []


def test_late_reports_of_an_earlier_generation_change_nothing(script: Script) -> None:
    script.run(10)
    script.begin(2)
    script.run(10)
    script.generation = 1
    script.counts = {"n0": 900, "n1": 900}
    script.report(0, "n0")
    script.generation = 2
    script.counts = {"n0": 10, "n1": 10}
    [found] = script.run(310, stepping=False)
    assert (found.generation, found.evidence["observed_steps"]) == (2, "10")
