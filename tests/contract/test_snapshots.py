"""Snapshots that an earlier version has written: what this version makes of them, and that it carries on from there.

`snapshots.jsonl`: one snapshot a line, part → JSON, as format 2 wrote them: jobs in every phase, with every optional value that
a job can have, every timer and every order.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Blamed, Remedy
from holdfast.domain.orders import CheckpointNow, PrepareTemplate
from holdfast.supervisor.core import Job, Node, State, step
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.upgrades import timer
from holdfast.supervisor.protocol import JobPhase, LeaderStarted, TimerFired
from holdfast.supervisor.timers import (
    BreakerWindowOver,
    KeptOver,
    LinkTestsDue,
    LinkTestTimeout,
    LoanDue,
    RebootDue,
    ReplacementDue,
    ResetTimeout,
    ReturnDue,
    RungTimeout,
    SlowStart,
    Timer,
    WarningDue,
)
from holdfast.wire import records

RECORDED = [json.loads(line) for line in (Path(__file__).parent / "data" / "snapshots.jsonl").read_text().splitlines()]
# Format 4: n3 has failed, n4 is cordoned, and an operator has requested a checkpoint.
FORMAT_4 = json.loads((Path(__file__).parent / "data" / "snapshot-4.json").read_text())
# Format 6: an incident of n1 is being answered, n3 has tested itself, and n4 has an order to prepare a worker template.
FORMAT_6 = json.loads((Path(__file__).parent / "data" / "snapshot-6.json").read_text())
# Format 8: n2 has prepared a generation, n0 and n1 have not, n3 and n4 run another job, n5 one that is not in the state.
FORMAT_8 = json.loads((Path(__file__).parent / "data" / "snapshot-8.json").read_text())
SECONDS = 2000.0  # longer than any timer but that of a maintenance notice

# Where the fields of a job in format 2 stand now; the others stand where they stood.
MOVED = {
    "attempt_base": ("numbering", "attempt_base"),
    "first_attempt": ("numbering", "first_attempt"),
    "numbers_seen": ("numbering", "seen"),
    "running_at": ("membership", "running_at"),
    "absent": ("membership", "absent"),
    "finished": ("membership", "finished"),
    "step": ("progress", "step"),
    "best_step": ("progress", "best_step"),
    "step_s": ("progress", "step_s"),
    "loss": ("progress", "loss"),
    "blind": ("progress", "reports_no_steps"),
    "progressed": ("progress", "progressed"),
    "furthest": ("progress", "furthest_step"),
    "fruitless": ("progress", "restarts_without_progress"),
    "stuck": ("progress", "restarts_without_advance"),
    "outages": ("progress", "outages"),
    "seen_step": ("progress", "seen_step"),
    "seen_at": ("progress", "seen_at"),
    "lineage": ("checkpoints", "lineage"),
    "checkpoint_step": ("checkpoints", "step"),
    "saved_at": ("checkpoints", "saved_at"),
    "at_home": ("checkpoints", "at_home"),
    "ever_saved": ("checkpoints", "ever_saved"),
    "stored": ("checkpoints", "stored"),
    "saved_by_all": ("checkpoints", "saved_by_all"),
    "sharded": ("checkpoints", "sharded"),
    "passed_over": ("checkpoints", "skipped"),
    "trusted": ("checkpoints", "trusted"),
    "resumed": ("checkpoints", "resumed"),
    "measured": ("checkpoints", "measured"),
    "interval": ("checkpoints", "interval"),
    "awaited": ("checkpoints", "requests"),
}
# Format 2 had a phase and five optional values where there is one value now; their fields that have another name.
OPTIONAL = ("change", "planned", "blocked", "stopping", "leaving")
RENAMED = {"waiting": "stops", "options": "candidates", "news": "status", "over": "finished"}


def _load(recorded: dict[str, str]) -> State:
    return snapshot.load({name: text.encode() for name, text in recorded.items()})


def _old_jobs(recorded: dict[str, str]) -> dict[str, dict[str, Any]]:
    rows = {name.partition("/")[2]: json.loads(text) for name, text in recorded.items() if name.startswith("jobs/")}
    return {name: tree for name, tree in rows.items() if ":" not in name}


def test_the_recording_has_jobs_in_every_phase_that_it_knew() -> None:
    assert {JobPhase(job["phase"]) for each in RECORDED for job in _old_jobs(each).values()} == {*JobPhase} - {
        JobPhase.SUSPENDED
    }


@pytest.mark.parametrize("recorded", RECORDED)
def test_nothing_of_a_job_is_lost(recorded: dict[str, str]) -> None:
    state = _load(recorded)
    assert not snapshot.is_current({name: text.encode() for name, text in recorded.items()})
    for name, old in _old_jobs(recorded).items():
        job = state.jobs[name]
        new = json.loads(records.dumps(job, Job))
        for field, path in MOVED.items():
            found: Any = new
            for part in path:
                found = found[part]
            was = old[field]
            assert (found if not isinstance(was, dict) else {key: found[key] for key in was}) == was, field
        for node, stay in old["stays"].items():
            eviction = job.deferred_evictions[node]
            assert (list(eviction.candidates), eviction.until) == (stay["options"], stay["until"])
        _check_doing(old, new["doing"])
        assert (job.phase, job.reason, job.target_dp) == (JobPhase(old["phase"]), old["reason"], old["target_dp"])
        save, asked = job.checkpoints.on_demand, old["asked"]
        assert (save and (save.generation, save.at_step, save.to_object_store)) == (
            asked and (asked["generation"], asked["at_step"], asked["far"])
        )
        for apart in ("generation", "running"):
            raw = recorded.get(f"jobs/{name}:{apart}")
            assert new[apart] == (json.loads(raw) if raw else None)


def _check_doing(old: dict[str, Any], doing: dict[str, Any]) -> None:
    """Every field of the optional values that the old job had is somewhere in the new value, or said nothing."""
    known = dict(doing)
    for part in ("change", "awaited", "planned", "upload"):
        known |= doing.get(part) or {}
    for field, value in ((field, value) for part in OPTIONAL for field, value in (old[part] or {}).items()):
        name = RENAMED.get(field, field)
        if name in known:
            found = known[name]  # an action has more fields since
            assert ({key: found[key] for key in value} if field == "action" else found) == value, field
        else:  # what the wait for START was about is of no use after it; who waits for shards waits for no nodes
            useless = field == "master" and doing["_"] == "Starting"
            useless |= field == "fenced" and doing["_"] == "Starting"
            useless |= field in ("options", "uses") and doing["_"] == "Deferred"
            assert not value or value == "0" or useless, field


@pytest.mark.parametrize("recorded", RECORDED)
def test_timers_keep_what_they_are_about(recorded: dict[str, str]) -> None:
    timers = {str(timer): due for timer, due in _load(recorded).timers.items()}
    assert timers == {
        part.removeprefix("timers/"): float(due) for part, due in recorded.items() if part.startswith("timers/")
    }


def test_a_node_that_is_out_of_service_in_format_4_stays_out_of_service() -> None:
    state = _load(FORMAT_4)
    assert state.nodes["n3"].unschedulable_reason == "gpu_error on n3"
    assert state.nodes["n4"].unschedulable_reason == "cordoned by an operator: to the workshop"
    assert {name for name, node in state.nodes.items() if not node.usable} == {"n3", "n4"}
    assert {name for name, node in state.nodes.items() if state.live_on(node) == {"job": (2,)}} == {
        "n0",
        "n1",
        "n2",
        "n4",
    }
    assert [name for _, name in state.breaker.failed_nodes] == ["n3"]
    assert {send.order for send in state.outbox.values()} == {CheckpointNow("job", 2, 37, to_object_store=True)}


def test_times_recommended_actions_tests_and_orders_of_format_6_are_read_by_their_former_names() -> None:
    state = _load(FORMAT_6)
    [incident] = state.incidents.values()
    assert (incident.fault_at, incident.detected_at, incident.decided_at) == (1000.59, 1000.6, 1000.6)
    assert incident.recommended_actions == (Remedy.RESET_GPU, Remedy.REPLACE_NODE)
    tested = state.nodes["n3"].preflight
    assert tested is not None
    assert tested.duration_s == 0.5
    templates = {send.node: send.order for send in state.outbox.values() if isinstance(send.order, PrepareTemplate)}
    assert {node: order.job for node, order in templates.items()} == {"n4": "job"}
    assert state.nodes["n0"].inventory, "the groups of a row are parts in format 6, as they are now"


def test_a_snapshot_of_format_6_is_written_again_before_changes_are_added_to_it() -> None:
    parts = {name: text.encode() for name, text in FORMAT_6.items()}
    assert not snapshot.is_current(parts)
    state = snapshot.load(parts)
    again = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    assert snapshot.is_current(again)
    assert snapshot.load(again) == state
    assert not any(old in raw.decode() for raw in again.values() for old in ("t_fault", "ladder", "took_s", '"Warm"'))


@pytest.mark.parametrize("recorded", RECORDED)
def test_nodes_keep_the_generations_that_may_live_there(recorded: dict[str, str]) -> None:
    old = {name.partition("/")[2]: json.loads(text) for name, text in recorded.items() if name.startswith("nodes/")}
    state = _load(recorded)
    for name, node in state.nodes.items():
        assert node.unschedulable_reason == old[name]["condemned"]
        assert {job: list(numbers) for job, numbers in state.live_on(node).items()} == old[name]["holds"]


@pytest.mark.parametrize("recorded", [FORMAT_6, FORMAT_8])
def test_nodes_keep_the_generations_that_were_parts_of_their_own(recorded: dict[str, str]) -> None:
    """Also those of a job that the state does not contain (`lost`, in format 8)."""
    state = _load(recorded)
    old = {name: json.loads(recorded.get(f"nodes/{name}:generations", "{}")) for name in state.nodes}
    assert any(old.values())
    assert {
        name: {job: list(numbers) for job, numbers in state.live_on(node).items()} for name, node in state.nodes.items()
    } == old
    assert sorted(node.number for node in state.nodes.values()) == [*range(len(state.nodes))]


@pytest.mark.parametrize("recorded", RECORDED)
def test_nodes_keep_the_number_of_their_newest_report(recorded: dict[str, str]) -> None:
    """Format 2 had it in the row of the node. A repeated report must not count again."""
    old = {name.partition("/")[2]: json.loads(text) for name, text in recorded.items() if name.startswith("nodes/")}
    numbers = {name: tree["last_seq"] for name, tree in old.items() if "last_seq" in tree}
    state = _load(recorded)
    assert {name: state.last_seq(state.nodes[name]) for name in numbers} == numbers


def test_the_attribution_of_an_open_incident_is_read_from_its_evidence() -> None:
    incidents = [incident for each in RECORDED for incident in _load(each).incidents.values()]
    assert {Blamed.UNKNOWN, Blamed.HARDWARE, Blamed.USER} & {incident.attribution.blame for incident in incidents}
    for incident in incidents:
        said = (incident.evidence.get("blame", ""), incident.evidence.get("error_class", ""))
        assert (incident.attribution.blame, incident.attribution.error_class) == said


def test_the_recording_has_every_timer_that_it_knew_but_the_breakers() -> None:
    words = {
        part.partition("/")[2].partition(":")[0] for each in RECORDED for part in each if part.startswith("timers/")
    }
    assert words == {kind.word for kind in get_args(Timer)} - {
        BreakerWindowOver.word,
        WarningDue.word,
        ResetTimeout.word,
        RebootDue.word,
        ReplacementDue.word,
        LoanDue.word,
        KeptOver.word,
        LinkTestsDue.word,
        LinkTestTimeout.word,
        ReturnDue.word,
        RungTimeout.word,
        SlowStart.word,
    }
    assert timer("breaker", 5.0) == [{"_": "BreakerWindowOver"}, 5.0]


@pytest.mark.parametrize("recorded", RECORDED)
def test_rows_keep_the_order_of_their_fields(recorded: dict[str, str]) -> None:
    """What is written of a row follows from its place in the row, after any change."""
    state = _load(recorded)
    rows: list[Job | Node] = [*state.jobs.values(), *state.nodes.values()]
    for row in rows:
        names = [each.name for each in dataclasses.fields(row) if each.init]
        assert [*vars(row)] == names
        assert [*vars(evolve(row, **{names[-1]: getattr(row, names[-1]), names[0]: getattr(row, names[0])}))] == names


@pytest.mark.parametrize("recorded", [*RECORDED, FORMAT_4, FORMAT_6, FORMAT_8])
def test_a_leader_carries_on_from_it(recorded: dict[str, str]) -> None:
    """Nobody answers, so every timer of the state fires: each of them must find what it is about."""
    state = _load(recorded)
    parts = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    assert snapshot.is_current(parts)
    assert snapshot.load(parts) == state
    now = max([state.folded_at, *state.timers.values()])
    state, _ = step(state, LeaderStarted(state.folded_at, state.epoch + 1))
    end = now + SECONDS
    while due := sorted((when, name) for name, when in state.timers.items() if when <= end):
        now = max(state.folded_at, due[0][0])
        state, _ = step(state, TimerFired(now, due[0][1]))
