"""The faults of the demo, their expected results, and, in the long form, three more jobs: one with a slow rank, one that loses
all nodes that hold a shard, and one with a bug in its script.

Faults are injected on a condition ("the job runs, has a checkpoint, and the last incident is closed"), never at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from holdfast.cli.client import Client
from holdfast.cli.demo.course import (
    BEREFT_JOB,
    CHECKPOINT_STEPS,
    FAULTY_JOB,
    JOB,
    PACE,
    UNEVEN_JOB,
    Course,
    Expectation,
    Outcome,
    View,
    examples,
    read_losses,
    training_arguments,
)
from holdfast.cli.follow import describe
from holdfast.cli.inject import Injector
from holdfast.cli.live import JobDisplay
from holdfast.domain.errors import HoldfastError, Unavailable

FIRST_FAULT_STEP = 25
STEPS_BETWEEN_FAULTS = 20
POLL_S = 0.1
PROGRESS_TIMEOUT_S = 120.0  # the demo fails after this time without a new step or incident
LAST_STEPS_TIMEOUT_S = 5.0
ENDED = ("failed", "stopped", "completed")
RESET_RANK = 3
XID_RANK = 5
SLOW_RANK = 1
SWAP_REWORK_MAX = CHECKPOINT_STEPS
SLOW_STEPS = 1_000_000  # a long job, so that a swap pays; the demo stops it
BEREFT_RANK = 0
BEREFT_STEPS_AFTER = 20
STORE_INTERVAL_S = 1.0
# By default an action on a slow rank follows after ten minutes, and ten minutes after another planned change. The demo is
# shorter.
WARNINGS = {"settles_s": 2.0, "gap_s": 0.0}


CHECKPOINT = {"interval_steps": CHECKPOINT_STEPS, "keep": 2}


class Scenario:
    def __init__(self, *, client: Client, console: Console, out: Path, course: Course, steps: int) -> None:
        self._client = client
        self._injector = Injector(client)
        self._console = console
        self._out = out
        self._course = course
        self._steps = steps
        self._seen: set[tuple[str, str]] = set()
        self._failures: list[str] = []
        self._lost = ""  # the powered-off node
        self._display: JobDisplay = JobDisplay(console)

    def run(self) -> Outcome:
        """Run the jobs with all faults. A fault with an unexpected result is listed in the outcome, not raised."""
        with JobDisplay(self._console, target_step=self._steps) as self._display:
            self._client.submit(self._main_job())
            course = self._course
            self._display.say(
                f"training starts: data parallel {course.dp} × pipeline parallel {course.pp} on {course.active} nodes, "
                "one spare"
            )
            self._break_processes_and_nodes()
            if not course.is_short:
                self._break_gpus()
            self._until("the job to complete", lambda job: job["phase"] == "completed")
            job = self._last_steps_counted()
        goodput = self._client.goodput(JOB)
        incidents = self._incidents(JOB)
        others = {}
        if not self._course.is_short:
            others = {
                UNEVEN_JOB: self._slow_rank(),
                BEREFT_JOB: self._both_copies_lost(),
                FAULTY_JOB: self._user_bug(),
            }
        return Outcome(
            target=self._steps,
            job=job,
            goodput=goodput,
            incidents=incidents,
            losses=read_losses(self._out / "train"),
            others=others,
            failures=self._failures,
        )

    def _last_steps_counted(self) -> View:
        """Wait for the reports of the workers' last steps, which can arrive after the workers' exits."""
        deadline = time.monotonic() + LAST_STEPS_TIMEOUT_S
        while ((job := self._client.job(JOB))["step"] or 0) < self._steps and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if (job["step"] or 0) < self._steps:
            self._failures.append(f"only {job['step']} of {self._steps} steps were counted")
        return job

    def _break_processes_and_nodes(self) -> None:
        course = self._course
        self._settle(FIRST_FAULT_STEP)
        self._fault(
            Expectation("worker crash", "worker_crash", "restart", rank=course.crash_rank, source="memory"),
            lambda: self._injector.crash(JOB, course.crash_rank),
        )
        self._settle()
        self._lost = lost = self._node_of(course.lost_rank)
        self._fault(
            Expectation("node loss", "node_lost", "hot_swap", node=lost, source="peer"),
            lambda: self._injector.node_loss(lost),
        )
        self._settle()
        self._fault(
            Expectation("hang", "hang", "restart", rank=course.hung_rank),
            lambda: self._injector.hang(JOB, course.hung_rank),
        )

    def _break_gpus(self) -> None:
        self._settle()
        faulty = self._node_of(RESET_RANK)
        self._fault(
            Expectation("GPU that must be reset", "gpu_error", "gpu_reset", node=faulty, source="memory"),
            lambda: f"{self._injector.xid(faulty, 95)}; a stand-in takes nvidia-smi's place for the reset",
        )
        self._settle()
        broken = self._node_of(XID_RANK)
        self._fault(
            Expectation(
                "uncorrectable GPU error",
                "gpu_error",
                "scale_down",
                node=broken,
                outcome="re-sharded from dp 3 to dp 2",
            ),
            lambda: self._injector.xid(broken, 79),
        )
        self._settle()
        self._fault(
            Expectation("repair", "repair", "scale_up", outcome="re-sharded from dp 2 to dp 3"),
            lambda: self._repair(self._lost, broken),
        )
        self._settle()
        self._check_resizes()
        if (dp := self._client.job(JOB)["mesh"].get("dp")) != 3:
            self._failures.append(f"repair: the job runs with dp {dp}, not 3")

    def _check_resizes(self) -> None:
        """Show the arguments of the training script's `on_resize`, and check that it was called once per resize."""
        path = self._out / "train" / "resizes.log"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            self._display.say(f"[dim]train.py, on_resize:[/] {escape(line)}")
        if [line.partition(" replicas")[0] for line in lines] != ["3 → 2", "2 → 3"]:
            self._failures.append(f"on_resize was called for {lines}, not once for 3 → 2 and once for 2 → 3 replicas")

    def _repair(self, lost: str, broken: str) -> str:
        self._injector.node_return(lost)
        self._client.repaired(broken)
        return f"{lost} is started again, {broken} is marked as repaired"

    def _fault(self, expected: Expectation, make: Callable[[], str]) -> None:
        """Inject one fault and wait until its incident is closed."""
        known = {incident["id"] for incident in self._client.incidents(JOB)}
        self._display.say(f"[bold]{expected.fault}[/]: {escape(make())}")
        closed: list[View] = []

        def resolved(_: View) -> bool:
            new = [incident for incident in self._client.incidents(JOB) if incident["id"] not in known]
            closed[:] = [incident for incident in new if incident["state"] in ("resolved", "failed")]
            return bool(closed) and len(closed) == len(new)

        try:
            self._until(f"the incident after the {expected.fault} to be resolved", resolved)
        finally:
            if failure := expected.check(next(iter(sorted(closed, key=lambda i: i["detected_at"])), None)):
                self._failures.append(failure)
                self._display.say(f"[red]{escape(failure)}[/]")

    def _settle(self, step: int = 0) -> None:
        """Wait until the job has made some steps from now on, and has a checkpoint to restore."""
        target = step or (self._client.job(JOB)["step"] or 0) + STEPS_BETWEEN_FAULTS
        self._until(f"step {target}", lambda job: job["phase"] == "running" and (job["step"] or 0) >= target)

    def _until(self, what: str, condition: Callable[[View], bool]) -> View:
        """Poll the job until `condition`. Raises if there is no new step or incident for a while."""
        last: tuple[object, ...] = ()
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while True:
            job = self._client.job(JOB)
            self._display.update(job, list(self._client.nodes()))
            self._show_incidents()
            if condition(job):
                return job
            if job["phase"] == "completed":
                raise HoldfastError(
                    f"the demo's job finished its {self._steps} steps before {what}; use more steps, for example "
                    f"--steps {2 * self._steps}"
                )
            if job["phase"] in ENDED:
                raise HoldfastError(f"the demo's job is {job['phase']} while waiting for {what}: {job['reason']}")
            if (now := (job["step"], job["phase"], job["generation"], len(self._seen))) != last:
                last, deadline = now, time.monotonic() + PROGRESS_TIMEOUT_S
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"no progress for {PROGRESS_TIMEOUT_S:.0f} s while waiting for {what}; the job is {job['phase']} "
                    f"at step {job['step']}: {job['reason']}; logs are in {self._out / 'stack'}"
                )
            time.sleep(POLL_S)

    def _show_incidents(self) -> None:
        for incident in self._client.incidents(JOB):
            if (key := (incident["id"], incident["state"])) not in self._seen:
                self._seen.add(key)
                self._display.say(describe(incident))

    def _node_of(self, rank: int, job: str = JOB) -> str:
        return next(str(worker["node"]) for worker in self._client.job(job)["ranks"] if worker["rank"] == rank)

    # ------------------------------------------------------------------ the jobs

    def _main_job(self) -> View:
        (self._out / "train").mkdir(parents=True, exist_ok=True)
        for old in [*(self._out / "train").glob("*.jsonl"), self._out / "train" / "resizes.log"]:
            old.unlink(missing_ok=True)
        return {
            "name": JOB,
            "script": str(examples() / "gpt" / "train.py"),
            "args": [*training_arguments(self._out / "train", self._steps, self._course.layers), *PACE],
            "nodes": self._course.active,
            "nproc_per_node": 1,
            "mesh": {"dp": self._course.dp, "pp": self._course.pp},
            "elastic": {"min_dp": self._course.dp_min, "max_dp": self._course.dp},
            "checkpoint": CHECKPOINT,
        }

    def _submit_gpt(
        self, name: str, mesh: Mapping[str, int], steps: int, /, *, pace: Sequence[str] = (), **more: object
    ) -> None:
        """Submit a further training of the GPT, on three nodes. `pace`: further arguments of the script; `more`: keys of the
        job file."""
        out = self._out / name
        out.mkdir(parents=True, exist_ok=True)
        job = {
            "name": name,
            "script": str(examples() / "gpt" / "train.py"),
            "args": [*training_arguments(out, steps), *pace],
            "nodes": 3,
            "nproc_per_node": 1,
            "mesh": mesh,
            "checkpoint": CHECKPOINT,
        }
        self._client.submit(job | more)

    def _incidents(self, job: str) -> list[View]:
        return sorted(self._client.incidents(job), key=lambda incident: incident["fault_at"])

    def _slow_rank(self) -> tuple[View, list[View]]:
        """Throttle one rank. Expected: a finding that names the rank, and a hot swap of its node at a checkpoint, without a
        failure or a repeated step."""
        self._console.print("[dim]starting a second job, in which one rank becomes slow …[/]")
        self._submit_gpt(UNEVEN_JOB, {"dp": 3}, SLOW_STEPS, steps=SLOW_STEPS, warnings=WARNINGS)
        self._wait_for(UNEVEN_JOB, f"step {FIRST_FAULT_STEP}", lambda job: (job["step"] or 0) >= FIRST_FAULT_STEP)
        node = self._node_of(SLOW_RANK, UNEVEN_JOB)
        self._console.print(f"[bold]slow rank[/]: {escape(self._injector.slow(UNEVEN_JOB, SLOW_RANK))}")

        job = self._wait_for(UNEVEN_JOB, "the swap of the slow node", _has_recovered)
        self._client.stop(UNEVEN_JOB, "the demo has seen the swap")
        incidents = self._incidents(UNEVEN_JOB)
        expected = Expectation("slow rank", "straggler", "hot_swap", node=node, rank=SLOW_RANK)
        if failure := expected.check(incidents[-1] if incidents else None):
            self._failures.append(failure)
        else:
            self._console.print(f"[bold]{UNEVEN_JOB}[/]: {escape(incidents[-1]['action']['reason'])}")
        if incidents and incidents[-1].get("rework_steps", 0) > SWAP_REWORK_MAX:
            self._failures.append(f"slow rank: {incidents[-1]['rework_steps']} steps were repeated for a planned swap")
        return job, incidents

    def _both_copies_lost(self) -> tuple[View, list[View]]:
        """Power off both nodes that hold copies of a rank's shards, so that only the object store has them."""
        self._console.print("[dim]starting a third job, which loses two nodes at once …[/]")
        store = {"store": f"file://{(self._out / 'store').resolve()}", "store_interval_s": STORE_INTERVAL_S}
        self._submit_gpt(BEREFT_JOB, {"dp": 1, "pp": 3}, self._steps, pace=PACE, checkpoint={**CHECKPOINT, **store})
        self._wait_for(BEREFT_JOB, "a checkpoint in the object store", lambda _: self._stored(BEREFT_JOB))
        pair: list[str] = []

        def copied(_: View) -> bool:
            pair[:] = self._holders(BEREFT_JOB, BEREFT_RANK)
            return len(pair) > 1

        self._wait_for(BEREFT_JOB, "its peer's copy", copied)
        what = f"{self._injector.nodes_loss(*pair)}; no node has a copy of rank {BEREFT_RANK}'s shards now"
        self._console.print(f"[bold]loss of both copies[/]: {escape(what)}")

        job = self._wait_for(BEREFT_JOB, "it to run again", _has_recovered)
        target = (job["step"] or 0) + BEREFT_STEPS_AFTER
        job = self._wait_for(BEREFT_JOB, f"step {target}", lambda job: (job["step"] or 0) >= target)
        self._client.stop(BEREFT_JOB, "the demo is complete")
        incidents = self._incidents(BEREFT_JOB)
        expected = Expectation("loss of both copies", "node_lost", "hot_swap", source="object store")
        if failure := expected.check(incidents[0] if incidents else None):
            self._failures.append(failure)
        else:
            self._console.print(
                f"[bold]{BEREFT_JOB}[/] continues from the object store: {escape(incidents[0]['outcome'])}"
            )
        return job, incidents

    def _wait_for(self, name: str, what: str, condition: Callable[[View], bool]) -> View:
        """Wait for a condition. Raises after the timeout, or if the job ends first."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT_S
        while not condition(job := self._client.job(name)):
            if time.monotonic() > deadline or job["phase"] in ENDED:
                raise Unavailable(f"{name} is {job['phase']} while waiting for {what}: {job['reason']}")
            time.sleep(POLL_S)
        return job

    def _stored(self, name: str) -> bool:
        return any(each["tiers"]["store"] for each in self._client.checkpoints(name))

    def _holders(self, name: str, rank: int) -> list[str]:
        """Return every node that holds a shard of `rank`."""
        steps = [(each["attempt"], each["step"]) for each in self._client.checkpoints(name)]
        held = (self._client.checkpoint_holders(name, *step).get(rank, []) for step in steps)
        return sorted({node for nodes in held for node in nodes})

    def _user_bug(self) -> tuple[View, list[View]]:
        """Run a script that raises the same exception at the same step. It must be stopped at the second attempt, or at the
        third if only one node has reported the exception by then: a spare tries it first."""
        self._console.print("[dim]starting a fourth job, with a bug in its script …[/]")
        self._client.submit(
            {
                "name": FAULTY_JOB,
                "script": str(examples() / "faulty" / "train.py"),
                "nodes": 2,
                "nproc_per_node": 1,
                "mesh": {"dp": 2},
                "checkpoint": {"interval_steps": 5, "keep": 2},
            }
        )
        job = self._wait_for(FAULTY_JOB, "its end", lambda job: job["phase"] in ENDED)
        incidents = self._incidents(FAULTY_JOB)
        self._console.print(f"[bold]{FAULTY_JOB}[/] {job['phase']}: {escape(job['reason'])}")
        expected = Expectation("user bug", "repeated_exception", "stop")
        if failure := expected.check(incidents[-1] if incidents else None):
            self._failures.append(failure)
        if job["generation"] not in (2, 3):
            self._failures.append(f"user bug: stopped after {job['generation']} generations, not 2 or 3")
        return job, incidents


def _has_recovered(job: View) -> bool:
    return job["incident"] is None and job["generation"] > 1 and job["phase"] == "running"
