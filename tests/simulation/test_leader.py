"""The simulated leader folds, commits and reads as production: bugs that are planted in those parts are found."""

from __future__ import annotations

import pytest
from worlds import require_found

from holdfast.domain.evolve import evolve
from holdfast.log.protocol import Commit
from holdfast.sim.scenario import simulate
from holdfast.supervisor.core import Batch, State, Written
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.fold import Folded, Folder

SEEDS = 150


def _campaign(said: str, *, first: int = 0) -> None:
    """`first`: a seed near which it is found."""

    require_found(said, range(first, first + SEEDS), simulate)


def test_a_commit_that_leaves_out_a_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = snapshot.changes

    def without_nodes(before: State | None, after: State, written: Written | None = None) -> dict[str, bytes | None]:
        parts = changes(before, after, written)
        return {part: value for part, value in parts.items() if not part.startswith("nodes/")}

    monkeypatch.setattr(snapshot, "changes", without_nodes)
    _campaign("are not the state|decides differently|not looked at|but the job is|does not train")


def test_a_batch_that_does_not_list_what_it_has_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = vars(Batch)["written"].fget

    def without_jobs(self: Batch) -> Written:
        return {table: rows for table, rows in read(self).items() if table != "jobs"}

    monkeypatch.setattr(Batch, "written", property(without_jobs))
    _campaign("are not the state|two different generations|but the job is|does not train")


def test_a_commit_that_acknowledges_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Folder.commit

    def unacknowledged(self: Folder, folded: Folded, acknowledge: dict[str, list[str]]) -> Commit:
        return evolve(commit(self, folded, acknowledge), acknowledge={})

    monkeypatch.setattr(Folder, "commit", unacknowledged)
    _campaign("goes round in circles|does not train|but the job is|no fault needs it|left no trace", first=168)
