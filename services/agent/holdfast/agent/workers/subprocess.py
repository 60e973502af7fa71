"""Runs one of Holdfast's scripts in a fork of the worker template, which has already imported torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from holdfast.agent.workers.entry import Entry
from holdfast.agent.workers.logs import last_words
from holdfast.agent.workers.template import Template
from holdfast.agent.workers.worker import Worker, WorkerIdentity
from holdfast.domain.errors import Unavailable
from holdfast.domain.template import SCRIPT
from holdfast.runtime import freeze

OUTPUT_BYTES_MAX = 1 << 20
NAME = "self-test"


async def run_subprocess(
    template: Template, script: Path, args: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> str:
    """Return the output of the script. Raises `Unavailable` if the script fails or does not end in time.

    The process has exited when this returns or raises, also if the caller is cancelled.
    """
    output = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        worker = await Worker.launch(
            template,
            WorkerIdentity(NAME, 0, 0, 0, log_path=Path(os.devnull), error_path=Path(os.devnull)),
            entry=Entry(SCRIPT, str(script), tuple(args), str(script.parent)),
            env=environment,
            log_fd=output,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, worker)
            try:
                with freeze.patience(timeout_s):
                    await worker.wait_ready()
                    worker.tell("start", env={})
                    await worker.gone.wait()
            finally:
                worker.kill()
        printed = os.pread(output, OUTPUT_BYTES_MAX, 0).decode(errors="replace")
    finally:
        os.close(output)
    how = worker.exit
    if how is None or how.exit_code != 0:
        ended = "was killed" if how is None or how.exit_code is None else f"ended with code {how.exit_code}"
        last = last_words(printed.strip().splitlines()) or "no output"
        raise Unavailable(f"{script.name} {ended} (time limit {timeout_s:g} s): {last}")
    return printed


async def _watch(worker: Worker) -> None:
    with anyio.CancelScope(shield=True):  # on cancellation, `run_subprocess` kills the worker, which ends this wait
        await worker.watch()
        await worker.clear()
