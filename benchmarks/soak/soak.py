"""Runs one soak: injects the planned faults, waits until the run has recovered, and records errors."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak import kinds, watch
from benchmarks.soak.field import Field, NotNow, Struck, Worker
from benchmarks.soak.judge import ENDED, Progress, Sample, evicted, leaks, lost_work, repeated, restarted, untrue
from benchmarks.soak.report import Outcome, Report
from benchmarks.soak.rig import SERVICES, Rig
from benchmarks.soak.schedule import Kind, Trial, plan
from benchmarks.soak.truth import StepReader, read_wrong
from benchmarks.soak.watch import Api

START_TIMEOUT_S = 120.0
LAST_CALM_S = 6.0  # time after which connections that a failed service accepted without an answer are closed
POLL_S = 0.1
KEEPER_BACKOFF_S = 0.5  # delay before a service that ended by itself is restarted, as by a service manager
PAUSE_S_MAX = 6.0  # longest pause of a run that no fault affects, on a quiet machine
API_LATE_S = 15.0  # the API may show the state of the processes with this delay
MEASURE_EVERY_S = 3.0
SLOWNESS_MAX = 5.0  # on a slower machine a soak is not possible
CHANGES_MAX = 10  # changes before the circuit breaker is reset, which correctly opens at 30 generations in five minutes
STEPS = 100_000_000
PAUSE_PER_STEP_S = 0.03
INTERVAL_STEPS = 20
STORE_INTERVAL_S = 5.0
SCRIPT = Path(__file__).with_name("train.py")

Say = Callable[[str], None]


class BrokenOff(Exception):
    """The soak cannot continue; earlier results are kept."""


@dataclass(slots=True)
class Soak:
    """`run` stores its results in `report`. The rig must have been entered."""

    rig: Rig
    report: Report
    say: Say
    only: tuple[str, ...] = ()  # patterns of kinds; empty = all
    api: Api = field(init=False)
    job: str = field(init=False, default="")
    progress: Progress = field(init=False, default_factory=Progress)
    _reader: StepReader | None = field(init=False, default=None)
    _truth: Path = field(init=False)
    _field: Field = field(init=False)
    _began: float = field(init=False, default_factory=time.monotonic)
    _ended_at: dict[str, float] = field(init=False, default_factory=dict)
    _noticed: list[str] = field(init=False, default_factory=list)
    _measured: list[tuple[float, float]] = field(init=False, default_factory=list)
    _samples: list[Sample] = field(init=False, default_factory=list)
    _jobs: int = field(init=False, default=0)
    _truths: list[Path] = field(init=False, default_factory=list)

    # ------------------------------------------------------------------ the whole

    def run(self) -> None:
        self.api = Api(self.rig.api_urls)
        self._field = Field(self.rig, self.api, "", self._workers)
        possible = {}
        for name, kind in kinds.KINDS.items():
            if self.only and not any(fnmatch(name, each) for each in self.only):
                continue
            if kind.needs in self.rig.lacks:
                self.report.skipped[name] = f"needs {kind.needs}: {self.rig.lacks[kind.needs]}"
            else:
                possible[name] = kind
        for why in sorted(set(self.report.skipped.values())):
            skipped = sorted(name for name, reason in self.report.skipped.items() if reason == why)
            self.say(f"skipped: {', '.join(skipped)}: {why}")
        try:
            self._wait_nodes()
            self._submit()
            self._settle(time.monotonic(), START_TIMEOUT_S, 1.0, "the start")
            self._samples.append(watch.sample(self.rig, self._world_size))
            until = self._began + 60.0 * self.report.minutes
            for trial in plan(self.report.seed, possible, self.report.minutes):
                if time.monotonic() > until:
                    break
                self._try(trial, possible)
            self._settle(time.monotonic(), START_TIMEOUT_S, LAST_CALM_S, "the last trial")
            self._samples.append(watch.sample(self.rig, self._world_size))
            self._stop(self.job, "the soak is over")
        except BrokenOff as error:
            self.report.broken_off = str(error)
            self.say(f"FAIL broken off: {error}")
        finally:
            self.report.elapsed_s = time.monotonic() - self._began
            self.api.close()
            self._count_wrong()
            self.report.leaks |= leaks(self._samples)

    def look_for_leftovers(self) -> None:
        """Check that no process and no lock of the rig is left. Call this after the rig has been stopped."""
        for process in self.rig.leftovers():
            try:
                command = " ".join(process.cmdline())[:120]
            except psutil.Error:
                continue
            self.report.leaks[f"process {process.pid}"] = f"outlived everything: {command}"
        for node in self.rig.node_names:
            names = sorted(str(path.relative_to(self.rig.shm(node))) for path in self.rig.shm(node).rglob("*.lock"))
            if names:
                self.report.leaks[f"locks of {node}"] = ", ".join(names[:5])

    # ------------------------------------------------------------------ the job

    @property
    def _world_size(self) -> int:
        return self.rig.nodes - 1  # one spare

    def _mesh(self) -> dict[str, int]:
        size = self._world_size
        return {"dp": size // 2, "pp": 2} if size % 2 == 0 else {"dp": size}

    def _submit(self) -> None:
        self._jobs += 1
        self.job = f"chain-{self._jobs}"
        self._truth = self.rig.work / self.job
        self._truth.mkdir()
        self._truths.append(self._truth)
        self._reader, self.progress = StepReader(self._truth), Progress()
        self._field.job = self.job
        mesh = self._mesh()
        arguments = ["--out", str(self._truth), "--steps", str(STEPS), "--pause-s", str(PAUSE_PER_STEP_S)]
        body = {
            "name": self.job,
            "script": str(SCRIPT),
            "args": arguments,
            "nodes": self._world_size,
            "nproc_per_node": 1,
            "mesh": mesh,
            "elastic": {"min_dp": max(1, mesh["dp"] - 1), "max_dp": mesh["dp"]},
            "checkpoint": {
                "interval_steps": INTERVAL_STEPS,
                "keep": 2,
                "store": f"file://{self.rig.store}",
                "store_interval_s": STORE_INTERVAL_S,
                "store_keep": 3,
            },
            "hang": {"floor_s": 4.0, "factor": 3.0, "init_s": 60.0},
        }
        self._until(lambda: self.api.post("/v1/jobs", body), 30.0, f"{self.job} was not accepted")

    def _stop(self, job: str, reason: str) -> None:
        self.api.post(f"/v1/jobs/{job}/stop", {"reason": reason})
        self._until(lambda: (self.api.job(job) or {}).get("phase") in ENDED, 30.0, f"{job} does not stop")

    def _workers(self) -> list[Worker]:
        """Return the running ranks, from the processes themselves, because the API may be late."""
        found: list[Worker] = []
        for path in sorted(self._truth.glob("rank-*.pid")):
            try:
                pid, rank = int(path.read_text()), int(path.stem.removeprefix("rank-"))
                found.append(Worker(rank, pid, self._node_of(psutil.Process(pid))))
            except (ValueError, LookupError, psutil.Error, OSError):
                continue
        return found

    def _node_of(self, process: psutil.Process) -> str:
        if process.status() == psutil.STATUS_ZOMBIE:
            raise LookupError(f"{process.pid} has ended")
        ancestors = {parent.pid for parent in process.parents()}
        for node in self.rig.node_names:
            if self.rig.running(node) and self.rig.pid(node) in ancestors:
                return node
        raise LookupError(f"{process.pid} is not a worker")

    # ------------------------------------------------------------------ one trial

    def _try(self, trial: Trial, possible: Mapping[str, Kind]) -> None:
        self._calm_breaker()
        before = self.api.job(self.job) or {}
        known = {incident["id"] for incident in self.api.incidents(self.job)}
        self._noticed.clear()
        began = time.monotonic()
        wrong = self._count_wrong()
        struck = self._strike(trial)
        if not struck:
            return
        names = tuple(name for name, _ in struck)
        struck_kinds = [possible[name] for name in names]
        touched = {node for _, each in struck for node in each.nodes}
        what = "; ".join(each.what for _, each in struck)
        alone = all(kind.leaves_alone for kind in struck_kinds)
        recover_s = max(kind.recover_s for kind in struck_kinds)
        aftermath_s = max(kind.aftermath_s for kind in struck_kinds)
        undone = time.monotonic()
        findings = self._settle(undone, recover_s, aftermath_s, what)
        ended = time.monotonic()

        pause_s = self.progress.pause_s(began, ended)
        pause_max_s = PAUSE_S_MAX * self._slowness(began)
        generations = self.progress.generations(began, ended)
        after = self.api.job(self.job) or {}
        incidents = [incident for incident in self.api.incidents(self.job) if incident["id"] not in known]
        if not findings:
            if why := restarted(generations, leaves_alone=alone):
                findings.append(("healthy_stopped", why + self._reasons(incidents)))
            elif alone and pause_s > pause_max_s:
                findings.append(("unrecovered", f"no step for {pause_s:.1f} s, though no rank was touched"))
            rework_steps = self.progress.rework_steps(began, ended)
            if why := lost_work(rework_steps, INTERVAL_STEPS, self._slowness(began), struck_kinds):
                findings.append(("lost_work", why))
            if why := repeated(incidents, generations, [each.incidents_max for _, each in struck]):
                findings.append(("repeated", why + self._reasons(incidents)))
            findings += [("untrue", why) for incident in incidents if (why := untrue(incident))]
            for node, why in evicted(before, after, incidents, touched).items():
                findings.append(("healthy_evicted", f"{node}: {why}"))
        findings += [("wrong", words) for words in self._wrong_since(wrong)]
        for cordoned in self.api.nodes():
            if cordoned["state"] == "cordoned":
                name = str(cordoned["node"])
                if name not in touched:
                    findings.append(("healthy_evicted", f"{name} is cordoned: {cordoned['reason']}"))
                self.api.post(f"/v1/nodes/{name}/repair", {})
                self.api.post(f"/v1/nodes/{name}/uncordon", {"reason": "the soak goes on"})
        bound_s = pause_max_s if alone else (undone - began) + recover_s * self._slowness(began)
        outcome = Outcome(
            trial.number,
            names,
            what,
            pause_s,
            bound_s,
            self.progress.rework_steps(began, ended),
            len(generations) - 1,
            tuple(findings),
        )
        self.report.outcomes.append(outcome)
        self._log_outcome(outcome, generations)
        if any(kind == "unrecovered" for kind, _ in findings):
            self._replace_dead_job()
        elif not findings:
            self._samples.append(watch.sample(self.rig, self._world_size))

    def _strike(self, trial: Trial) -> list[tuple[str, Struck]]:
        """Inject and undo every fault of the trial at its times. Returns when the last fault is undone."""
        began = time.monotonic()
        struck: list[tuple[str, Struck]] = []
        to_do = sorted((strike.after_s, index) for index, strike in enumerate(trial.strikes))
        to_undo: list[tuple[float, Struck]] = []
        while to_do or to_undo:
            passed = time.monotonic() - began
            if to_do and to_do[0][0] <= passed:
                strike = trial.strikes[to_do.pop(0)[1]]
                try:
                    done = kinds.STRIKES[strike.kind](self._field, random.Random(strike.draw), strike.hold_s)
                except NotNow as error:
                    self.say(f"#{trial.number} {strike.kind}: not now, {error}")
                    continue
                self.say(f"#{trial.number} {strike.kind}: {done.what}")
                struck.append((strike.kind, done))
                to_undo.append((passed + strike.hold_s, done))
            for due, done in list(to_undo):
                if due <= passed:
                    to_undo.remove((due, done))
                    done.undo()
            self._look()
            time.sleep(POLL_S)
        return struck

    def _settle(self, since: float, recover_s: float, aftermath_s: float, what: str) -> list[tuple[str, str]]:
        """Wait until the run steps, the API shows this, every node is connected, and all this has held for `aftermath_s`."""
        well_since: float | None = None
        trouble = ""
        while True:
            self._look()
            now = time.monotonic()
            trouble, hopeless = self._trouble(since)
            if hopeless:
                return [("healthy_stopped", trouble)]
            well_since = None if trouble else (well_since or now)
            if well_since is not None and now - well_since >= aftermath_s:
                return []
            late_s = API_LATE_S if self.progress.recovered_at(since) is not None else 0.0
            if well_since is None and now > since + (recover_s + late_s) * self._slowness(since):
                return [("unrecovered", f"{now - since:.0f} s after {what}: {trouble}")]
            time.sleep(POLL_S)

    def _trouble(self, since: float) -> tuple[str, bool]:
        """Return (deviation from the expected state, whether it is final); "" if the state is as expected."""
        view = self.api.job(self.job)
        if view is not None and view["phase"] in ENDED:
            return f"{self.job} {view['phase']}: {view['reason']}", True
        last = self.progress.last
        if self.progress.recovered_at(since) is None:
            return f"no rank steps; API: {watch.words(view)}", False
        assert last is not None
        if view is None or view["phase"] != "running" or view["incident"] or view["generation"] != last.generation:
            return f"generation {last.generation} steps; API: {watch.words(view)}", False
        if len(view["ranks"]) != self._world_size:
            return f"{len(view['ranks'])} of {self._world_size} ranks run", False
        away = sorted(node["node"] for node in self.api.nodes() if node["state"] == "lost")
        return (f"{', '.join(away)} not back" if away else ""), False

    # ------------------------------------------------------------------ all the time

    def _look(self) -> None:
        """Read new steps of the ranks, and restart services that ended by themselves."""
        if self._reader is not None:
            self.progress.add(self._reader.new())
        now = time.monotonic()
        if not self._measured or now - self._measured[-1][0] > MEASURE_EVERY_S:
            self._measured.append((now, watch.slowness()))
            self.report.slowest = max(self.report.slowest, self._measured[-1][1])
        for name in (*SERVICES, *self.rig.node_names):
            if self.rig.running(name) or name in self._field.down:
                self._ended_at.pop(name, None)
            elif name not in self._ended_at:
                self._ended_at[name] = now
                self._noticed.append(f"{name} ended by itself")
            elif now - self._ended_at[name] > KEEPER_BACKOFF_S:
                self._ended_at.pop(name)
                self.rig.start(name)
        if self.rig.network is not None and not self.rig.network.alive:
            raise BrokenOff("the switch between the nodes has ended")

    def _slowness(self, since: float) -> float:
        """Return the highest slowness of the machine since `since`, by which limits are multiplied."""
        slowest = max((slow for at, slow in self._measured if at >= since - MEASURE_EVERY_S), default=1.0)
        return min(slowest, SLOWNESS_MAX)

    def _wait_nodes(self) -> None:
        def connected() -> bool:
            self._look()
            return [node["state"] for node in self.api.nodes()].count("spare") == self.rig.nodes

        self._until(connected, START_TIMEOUT_S, "the nodes do not connect")

    def _until(self, holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        deadline = time.monotonic() + timeout_s * self._slowness(time.monotonic())
        while not holds():
            if time.monotonic() > deadline:
                raise BrokenOff(otherwise)
            time.sleep(POLL_S)

    def _calm_breaker(self) -> None:
        breaker = self.api.get("/v1/breaker")
        if breaker is not None and (breaker["changes"] > CHANGES_MAX or breaker["state"] == "open"):
            self.api.post("/v1/breaker/reset", {"reason": "a soak of faults made on purpose"})

    # ------------------------------------------------------------------ findings

    def _count_wrong(self) -> int:
        self.report.wrong_values = sum(len(read_wrong(truth)) for truth in self._truths)
        return self.report.wrong_values

    def _wrong_since(self, before: int) -> list[str]:
        self._count_wrong()
        found = [wrong for truth in self._truths for wrong in read_wrong(truth)]
        return [str(wrong) for wrong in found[before:]]

    def _replace_dead_job(self) -> None:
        """Start another job if the run does not recover, because a dead run would hide all further errors."""
        since = time.monotonic()
        if not self._settle(since, START_TIMEOUT_S / 4, 1.0, "another wait"):
            return
        self.say(f"     {self.job} does not recover; starting another job")
        self._dump()
        for worker in self._workers():
            _resume(worker.pid)
        self._stop(self.job, "dead")
        self._submit()
        if found := self._settle(time.monotonic(), START_TIMEOUT_S, 1.0, "the start of another job"):
            raise BrokenOff(found[0][1])

    def _dump(self) -> None:
        """Log the state of nodes, ranks and incidents, for the analysis of a dead run."""
        for node in self.api.nodes():
            self.say(f"     {node['node']}: {node['state']} {node['reason']}")
        for worker in self._workers():
            self.say(f"     rank {worker.rank} is process {worker.pid} on {worker.node}")
        for incident in self.api.incidents(self.job)[:3]:
            action = incident["action"] or {"kind": "nothing decided", "reason": ""}
            self.say(
                f"     incident {incident['id']}: {incident['kind']} {incident['state']}, generation "
                f"{incident['generation']}: {action['kind']}: {action['reason']}"
            )

    @staticmethod
    def _reasons(incidents: list[dict[str, Any]]) -> str:
        return "".join(
            f"; incident {incident['id']}: {incident['kind']} of {incident['node'] or '?'}: {incident['cause']}"
            for incident in incidents[:3]
        )

    def _log_outcome(self, outcome: Outcome, generations: list[int]) -> None:
        last = self.progress.last
        verdict = "FAIL" if outcome.findings else "ok  "
        self.say(
            f"     {verdict} paused {outcome.pause_s:.1f} s (at most {outcome.bound_s:.0f}), "
            f"{outcome.rework_steps} steps again, "
            f"generations {'→'.join(map(str, generations))}; processes: generation {last.generation if last else '?'}, step "
            f"{last.step if last else '?'}; API: {watch.words(self.api.job(self.job))}"
        )
        for notice in self._noticed:
            self.say(f"          {notice}")
        for kind, words in outcome.findings:
            self.say(f"     FAIL {kind}: {words}")
        if outcome.findings:
            self.say(f"          logs: {self.rig.logs} and {self.rig.work}")


def _resume(pid: int) -> None:
    try:
        psutil.Process(pid).send_signal(signal.SIGCONT)
    except psutil.Error:
        return
