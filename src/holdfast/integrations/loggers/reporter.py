"""Writes what rank 0 knows to the loggers, in a thread of its own.

The training thread only adds numbers to a record (`_Measured`). The thread reads the record every `every_s` seconds and the API
every `api_every_s` seconds, and writes. An error of a logger or of the API is logged once until it works again; it never
reaches the script. Texts that could not be written are tried again."""

from __future__ import annotations

import atexit
import http.client
import logging
import os
import threading
import time
from collections.abc import Mapping

import holdfast.train as hf
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.words import plural
from holdfast.integrations.loggers.sink import PREFIX, Entry, Sink
from holdfast.integrations.loggers.supervisor import Supervisor
from holdfast.train.step_events import FinishedStep

log = logging.getLogger("holdfast.integrations")

CLOSE_S_MAX = 10.0  # how long the end of the script waits for the last report
PENDING_MAX = 100  # texts that wait for a logger that does not work; the oldest are dropped


def attach(
    run: hf.Run, *sinks: Sink, every_s: float = 10.0, api_every_s: float = 30.0, supervisor: Supervisor | None = None
) -> Reporter | None:
    """Log this run to `sinks` on rank 0; on other ranks do nothing and return None.

    `every_s`, `api_every_s`: seconds between two reports, and between two readings of the API. `supervisor`: the API; by
    default the one that the script's environment names (`HOLDFAST_API`, `HOLDFAST_API_TOKEN`), if any.
    Raises `InvalidSpec` for an argument that cannot be used, `ModuleNotFoundError` if a logger's package is missing. Errors of
    loggers after that are logged, not raised. The last report is written when the script ends, or by `close`."""
    for name, value in (("every_s", every_s), ("api_every_s", api_every_s)):
        if not value > 0:
            raise InvalidSpec(name, value, "more than 0 seconds")
    if run.rank != 0 or not sinks:
        return None
    for sink in sinks:
        sink.check()
    if supervisor is None:
        supervisor = Supervisor.of_environment(os.environ, job=run.job, generation=run.generation)
    return Reporter(run, sinks, every_s=every_s, api_every_s=api_every_s, supervisor=supervisor)


class _Measured:
    """Steps of rank 0 since the last report."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.began = self.ended = self.data_s = self.stall_s = 0.0
        self.comm_wait_s: float | None = None

    def add(self, step: FinishedStep) -> None:
        if not self.steps:
            self.began = step.started_at
        self.ended = step.ended_at
        self.steps += 1
        self.tokens += step.tokens
        self.data_s += step.data_s
        self.stall_s += step.stall_s
        if step.comm_wait_s is not None:
            self.comm_wait_s = (self.comm_wait_s or 0.0) + step.comm_wait_s

    def values(self) -> dict[str, float]:
        """Means over the steps. Saves between two steps are part of their time."""
        duration_s = self.ended - self.began
        if not self.steps or duration_s <= 0:
            return {}  # no step, or the clock was set back
        named = {
            "step_s": duration_s / self.steps,
            "data_wait_s": self.data_s / self.steps,
            "checkpoint_stall_s": self.stall_s / self.steps,
        }
        if self.tokens:
            named["tokens_per_s"] = self.tokens / duration_s
        if self.comm_wait_s is not None:
            named["comm_wait_s"] = self.comm_wait_s / self.steps
        return {f"{PREFIX}rank0/{name}": value for name, value in named.items()}


class _Output:
    """One logger, whose errors end here."""

    def __init__(self, sink: Sink, restored_step: int) -> None:
        self._sink = sink
        self._restored_step = restored_step
        self._opened = False
        self._failing = False
        self._pending: list[Entry] = []

    def write(self, step: int, values: Mapping[str, float], entries: list[Entry]) -> None:
        self._pending = [*self._pending, *entries][-PENDING_MAX:]
        try:
            if not self._opened:
                self._sink.open(self._restored_step)
                self._opened = True
            while self._pending:
                self._sink.entry(self._pending[0])
                del self._pending[0]
            if values:
                self._sink.scalars(step, values)
            self._sink.flush()
            self._failing = False
        except Exception as error:  # no logger may end the training
            if not self._failing:
                log.warning("%s cannot be written: %r. Training continues", type(self._sink).__name__, error)
            self._failing = True

    def close(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            log.warning("%s cannot be closed: %r", type(self._sink).__name__, error)


class Reporter:
    """What `attach` returns on rank 0. A context manager, but it need not be closed: the end of the script does that."""

    def __init__(
        self, run: hf.Run, sinks: tuple[Sink, ...], *, every_s: float, api_every_s: float, supervisor: Supervisor | None
    ) -> None:
        self._run = run
        self._every_s = every_s
        self._api_every_s = api_every_s
        self._supervisor = supervisor
        self._outputs = [_Output(sink, run.restore_step) for sink in sinks]
        self._process = os.getpid()  # a forked child runs the same handlers
        self._lock = threading.Lock()  # of the two below
        self._measured, self._step = _Measured(), run.restore_step
        self._entries: list[Entry] = []
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._api_due = time.monotonic()
        self._api_failing = False
        self._logged: set[str] = set()  # ids of incidents
        run.on_step(self._stepped)
        run.on_leaving(self._leaving)
        atexit.register(self.close)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the last report and close what was opened here. Waits for at most 10 s. A second call does nothing."""
        if self._ending.is_set() or os.getpid() != self._process:
            return
        self._ending.set()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
            if self._thread.is_alive():
                log.warning("the last report to the loggers took longer than %.0f s and is given up", CLOSE_S_MAX)

    def _stepped(self, finished: FinishedStep) -> None:
        if self._ending.is_set():
            return
        with self._lock:
            self._measured.add(finished)
            self._step = finished.step
            if self._thread is None:
                self._entries.append(_started(self._run))
        if self._thread is None:
            self._thread = threading.Thread(target=self._report, name="holdfast-loggers", daemon=True)
            self._thread.start()

    def _leaving(self, leaving: hf.Leaving) -> None:
        """Called before a planned change ends this process; its own limit of time is `run.on_leaving`'s."""
        with self._lock:
            self._entries.append(
                Entry(
                    id=f"generation-{self._run.generation}-leaving-{leaving.step}",
                    step=leaving.step,
                    title=f"Planned stop after step {leaving.step}",
                    text=leaving.reason,
                )
            )
        self._write({})

    def _report(self) -> None:
        """The thread. Its first report follows the first step."""
        ending = False
        while not ending:
            self._write(self._ask())
            ending = self._ending.wait(self._every_s)
        self._write({})  # the API is not asked: it might delay the end of the script
        for output in self._outputs:
            output.close()

    def _ask(self) -> Mapping[str, float]:
        """Read the API, if it is due: keep new incidents for the next report, and return the job's values."""
        now = time.monotonic()
        if self._supervisor is None or now < self._api_due:
            return {}
        self._api_due = now + self._api_every_s
        try:
            facts = self._supervisor.read(self._step)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._api_failing:
                log.warning("goodput and incidents are not logged while the Holdfast API cannot be read: %s", error)
            self._api_failing = True
            return {}
        self._api_failing = False
        with self._lock:
            self._entries += [each for each in facts.incidents if each.id not in self._logged]
        self._logged |= {each.id for each in facts.incidents}
        return facts.values

    def _write(self, of_job: Mapping[str, float]) -> None:
        with self._writing:
            with self._lock:
                measured, self._measured = self._measured, _Measured()
                entries, self._entries = self._entries, []
                step = self._step
            values = {**measured.values(), **of_job}
            if values:
                values[f"{PREFIX}world_size"] = float(self._run.world_size)
                values[f"{PREFIX}generation"] = float(self._run.generation)
            for output in self._outputs:
                output.write(step, values, entries)


def _started(run: hf.Run) -> Entry:
    """What rank 0 knows of the start of its own process."""
    step, mesh, before = run.restore_step, run.world.mesh, run.previous_mesh
    origin = f"continued from the checkpoint of step {step}" if step else "started without a checkpoint"
    resized = f" That checkpoint was saved by mesh {before}." if before is not None and before != mesh else ""
    return Entry(
        id=f"generation-{run.generation}",
        step=step,
        title=f"Generation {run.generation} {origin}",
        text=f"Mesh {mesh}, {plural(run.world_size, 'rank')}.{resized}",
    )
