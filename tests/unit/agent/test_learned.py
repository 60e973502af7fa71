"""Doubts about a start with learned modules: when a script is started with them again, and when not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.agent.workers import learned as module
from holdfast.agent.workers.environment import Site
from holdfast.agent.workers.generation import LocalGeneration
from holdfast.agent.workers.learned import FILES_MAX, MORE_MIN, Imports, Learned
from holdfast.agent.workers.templates import Templates
from holdfast.domain.job import HangSpec, LaunchSpec

LAUNCH = LaunchSpec("/train.py", preload=("auto",))
NAMES = tuple(f"pkg.m{number}" for number in range(MORE_MIN))


class Scripts:
    """What the scripts of a node have recorded, and what its agent, which is started again for each question, makes of it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "learned").mkdir()
        self.record()

    @property
    def learned(self) -> Learned:
        return Learned(self._root / "learned", self._root / "doubts")

    def record(self, *more: str, files: str = "1 1", variables: dict[str, str] | None = None) -> None:
        content = {"modules": [*NAMES, *more], "files": {"pkg": files}, "variables": variables or {}}
        path = self.learned.path(LAUNCH)
        path.write_text(json.dumps(content))
        os.utime(path, ns=(0, len(list(self._root.iterdir())) + hash(path.read_text()) % 10**9))

    def judge(
        self,
        run: str,
        *,
        has_learned: bool,
        at: float = 5.0,
        failure: str = "",
        steps: bool = False,
        cascades: int = 0,
        stopped: bool = False,
    ) -> None:
        """A generation starts, the communication of so many of its ranks fails, then one fails or steps, or all are stopped."""
        site = SimpleNamespace(learned=self._root / "learned", agent_dir=self._root, user=None)
        templates = Templates(cast(Site, site), {}, lambda: None)
        generation = SimpleNamespace(
            order=SimpleNamespace(launch=LAUNCH, generation=2, job="gpt", hang=HangSpec()),
            submission=run,
            judged=False,
            has_cascaded=False,
            started_at=0.0,
            has_learned=has_learned,
            has_stepped_or_lasted=lambda _: steps,
        )
        for _ in range(cascades):
            lost = "rank 0 raised DistNetworkError"
            templates.judge(cast(LocalGeneration, generation), at, lost, cascading=True)
        if failure or steps or stopped or not cascades:
            templates.judge(cast(LocalGeneration, generation), at, failure)

    def refused(self, run: str) -> str:
        return self.learned.refused(LAUNCH, run)


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def test_the_file_of_a_doubt_is_read_only_when_it_has_changed(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    load = module._load

    def counted(path: Path, uid: int) -> Mapping[str, object]:
        reads.append(path)
        return load(path, uid)

    monkeypatch.setattr(module, "_load", counted)
    learned = scripts.learned
    assert learned.refused(LAUNCH, "run 1") == ""
    learned.failed(LAUNCH, "run 1", "rank 0 raised RuntimeError", of_ranks=True)
    reads.clear()
    for _ in range(3):
        assert learned.refused(LAUNCH, "run 1") == "rank 0 raised RuntimeError"
    assert [path.parent.name for path in reads] == ["doubts"]
    learned.failed(LAUNCH, "run 1", "rank 1 raised RuntimeError", of_ranks=True)
    assert learned.refused(LAUNCH, "run 1") == "rank 1 raised RuntimeError", "by this agent"
    scripts.learned.failed(LAUNCH, "run 1", "rank 2 raised RuntimeError", of_ranks=True)
    assert learned.refused(LAUNCH, "run 1") == "rank 2 raised RuntimeError", "by another object"
    scripts.learned.failed_without(LAUNCH, "run 1")
    learned.reached(LAUNCH, "run 1")
    assert learned.refused(LAUNCH, "run 1") == "", "deleted"


def test_a_failed_start_is_followed_by_one_without_and_given_up_if_that_one_steps(scripts: Scripts) -> None:
    scripts.judge("run 1", has_learned=True, failure="rank 0 raised RuntimeError")
    assert "generation 2 made no step: rank 0 raised RuntimeError" in scripts.refused("run 1")
    assert scripts.refused("run 2") == "", "perhaps the script was wrong, and is another one now"
    scripts.judge("run 1", has_learned=False, steps=True)
    assert scripts.refused("run 2"), "given up"
    scripts.record("one.more")
    assert scripts.refused("run 2"), "much the same modules"
    scripts.record(*(f"other{number}" for number in range(MORE_MIN)))
    assert scripts.refused("run 2") == "", "others"


def test_another_version_of_a_package_is_tried_again(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, failure="rank 0 was ended by signal 11")
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("run")
    scripts.record(files="2 1")
    assert scripts.refused("run") == ""


def test_a_script_that_fails_without_them_as_well_is_started_with_them_again(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, failure="rank 0 raised ValueError")
    scripts.judge("run", has_learned=False, failure="rank 0 raised ValueError")
    assert scripts.refused("run"), "not in turns: that would double the tries"
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("run") == ""


def test_a_start_that_was_stopped_early_is_no_evidence(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, at=HangSpec().init_s - 1)
    assert "it was stopped 599 s after its start" in scripts.refused("run")
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("run") == ""


def test_a_start_that_hangs_is_given_up(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, at=600.0)
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("another run")


@pytest.mark.parametrize("at", [5.0, HangSpec().init_s + 1])
def test_a_communication_that_fails_once_may_be_another_nodes_fault(scripts: Scripts, at: float) -> None:
    scripts.judge("run", has_learned=True, cascades=2, stopped=True, at=at)
    assert "rank 0 raised DistNetworkError" in scripts.refused("run"), "the next start has none, in case it is theirs"
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("run") == "", "they may be harmless"
    scripts.judge("run", has_learned=True, steps=True)
    scripts.judge("run", has_learned=True, cascades=1)
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("run") == "", "they have worked in between"


def test_a_communication_that_fails_again_with_them_and_not_without_gives_them_up(scripts: Scripts) -> None:
    for _ in range(2):
        assert scripts.refused("run") == ""
        scripts.judge("run", has_learned=True, cascades=2, stopped=True)
        scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("another run")


def test_a_rank_that_fails_by_itself_after_the_communication_of_another_gives_them_up(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, cascades=1, failure="rank 1 raised RuntimeError")
    assert "rank 1 raised RuntimeError" in scripts.refused("run")
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("another run")


def test_a_communication_that_fails_without_them_too_says_nothing_about_them(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, failure="rank 0 raised RuntimeError")
    scripts.judge("run", has_learned=False, cascades=1, stopped=True)
    scripts.judge("run", has_learned=False, steps=True)
    assert scripts.refused("another run"), "the failure was one of the modules"


def test_a_start_that_steps_leaves_no_doubt(scripts: Scripts) -> None:
    scripts.judge("run", has_learned=True, steps=True, failure="rank 0 raised ValueError")
    assert scripts.refused("run") == ""


@pytest.mark.parametrize(
    ("now", "before", "differ"),
    [
        (Imports(NAMES), Imports(NAMES[1:]), False),
        (Imports(NAMES), Imports(), True),
        (Imports(NAMES, (("pkg", "2"),)), Imports(NAMES, (("pkg", "1"),)), True),
        (Imports(NAMES, (("new", "2"),)), Imports(NAMES, (("pkg", "1"),)), False),
        (Imports(NAMES, (), (("HF_HOME", "a"),)), Imports(NAMES), True),
        (Imports(NAMES), Imports(NAMES, (), (("HF_HOME", "a"),)), False),
    ],
)
def test_what_needs_another_template(now: Imports, before: Imports, differ: bool) -> None:
    assert now.differ(before) is differ


@pytest.mark.parametrize(
    "content",
    [
        [*NAMES],
        {"modules": [*NAMES]},
        {"modules": [1], "files": {}, "variables": {}},
        {"modules": [*NAMES], "files": {"a": 1}, "variables": {}},
        {"modules": [*NAMES], "files": {}, "variables": ["A"]},
    ],
)
def test_what_is_no_list_is_ignored(scripts: Scripts, content: Any) -> None:
    """Also what an earlier version has recorded."""
    scripts.learned.path(LAUNCH).write_text(json.dumps(content))
    assert scripts.learned.imports(LAUNCH) is None


def test_a_job_that_does_not_ask_for_it_learns_nothing(scripts: Scripts) -> None:
    assert scripts.learned.imports(LAUNCH) is not None
    assert scripts.learned.imports(LaunchSpec("/train.py")) is None


def test_the_lists_of_many_scripts_are_bounded(tmp_path: Path, scripts: Scripts) -> None:
    learned = scripts.learned
    for number in range(FILES_MAX + 20):
        learned.path(LaunchSpec(f"/{number}.py", preload=("auto",))).write_text("{}")
    assert len(list((tmp_path / "learned").iterdir())) <= FILES_MAX
