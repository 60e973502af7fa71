"""MLflow: metrics, and texts as tags and artifacts, in the user's own run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import holdfast.train as hf
from holdfast.domain.errors import InvalidSpec
from holdfast.integrations.loggers.package import imported
from holdfast.integrations.loggers.sink import MARKER, Entry

TAG = "holdfast.submission"


def mlflow_run(run: hf.Run, experiment: str, *, tracking_uri: str | None = None) -> str | None:
    """Return the id of the MLflow run of this submission of the job on rank 0, None on other ranks. It is made by the first
    process, and found again by its tag in all later generations: `mlflow.start_run(run_id=…)` continues it. Without an agent,
    where no submission is known, each call makes a run.

    Raises `ModuleNotFoundError` if mlflow is missing, and mlflow's exceptions if the tracking server does not answer."""
    if run.rank != 0:
        return None
    client = _client(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    experiment_id = found.experiment_id if found is not None else client.create_experiment(experiment)
    if not run.submission:
        return str(client.create_run(experiment_id).info.run_id)
    runs = client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.submission}'", max_results=1)
    made = runs[0] if runs else client.create_run(experiment_id, tags={TAG: run.submission}, run_name=run.submission)
    return str(made.info.run_id)


class Mlflow:
    """Log to the run `run_id`, for example `mlflow.active_run().info.run_id` or that of `mlflow_run`; None on ranks other
    than 0. It stays the caller's to end."""

    def __init__(self, run_id: str | None, *, tracking_uri: str | None = None) -> None:
        self._run_id = run_id
        self._tracking_uri = tracking_uri
        self._api: Any = None

    def check(self) -> None:
        """Raise `InvalidSpec` if rank 0 was given no run, `ModuleNotFoundError` if the package is missing."""
        if self._run_id is None:
            raise InvalidSpec("run_id", None, "on rank 0 the id that loggers.mlflow_run has returned")
        imported("mlflow", "mlflow")

    def open(self, restored_step: int) -> None:
        self._api = _client(self._tracking_uri)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        metric = imported("mlflow.entities", "mlflow").Metric
        now_ms = int(time.time() * 1000)
        self._api.log_batch(self._run_id, metrics=[metric(name, value, now_ms, step) for name, value in values.items()])

    def entry(self, entry: Entry) -> None:
        text = f"# {entry.title}\n\nStep {entry.step}.\n\n{entry.text}\n"
        self._api.log_text(self._run_id, text, f"{entry.topic}/{entry.id}.md")
        if entry.is_incident:
            self.scalars(entry.step, {MARKER: 1.0})

    def flush(self) -> None:
        """Nothing to do: each call has written."""

    def close(self) -> None:
        """Nothing to do: the run is the caller's."""


def _client(tracking_uri: str | None) -> Any:
    return imported("mlflow", "mlflow").MlflowClient(tracking_uri=tracking_uri)
