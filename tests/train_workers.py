"""Real training processes without an agent: this plays the agent's part of `holdfast.domain.worker`, nothing more.

They are forks of one process that has imported torch, as an agent's workers are.

    with Workers(tmp_path, mesh={"dp": 2}, args=["--steps", "20"]) as workers:
        workers.wait_for("saved", step=10)
        workers.kill(1)
        workers.end()
    with Workers(tmp_path, mesh={"dp": 2}, args=["--steps", "20"], restore=elect(tmp_path, {"dp": 2})) as workers:
        workers.finish()

Every process started here is ended on the way out, by its pid.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ports import port_of, reserve_port
from waiting import TIMEOUT_S, wait_until
from warm_processes import SCRIPTS, WarmProcess, warm

from holdfast.domain import worker
from holdfast.domain.mesh import Mesh
from holdfast.shards import peek

EXAMPLES = Path(__file__).parents[1] / "examples"
START_TIMEOUT_S = 120.0


class Workers:
    """One generation of `script` on `mesh`, one process per rank, their images below `directory`."""

    def __init__(
        self,
        directory: Path,
        *,
        mesh: Mapping[str, int],
        args: Sequence[str] = (),
        script: Path = EXAMPLES / "gpt" / "train.py",
        generation: int = 1,
        interval_steps: int = 5,
        restore: Mapping[int, Mapping[str, Any]] | None = None,
        previous_mesh: Mapping[str, int] | None = None,
    ) -> None:
        self.mesh = Mesh.of(mesh)
        self.notes: list[dict[str, Any]] = []
        self.logs = directory / f"logs-{generation}"
        self.logs.mkdir()
        self._listener = _Listener(directory / f"notes-{generation}", self.notes)
        self._port = reserve_port()
        self._controls: list[socket.socket] = []
        self._processes: list[WarmProcess] = []
        for rank in range(self.mesh.world_size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environ = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.mesh.world_size),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port_of(self._port)),
                "OMP_NUM_THREADS": "1",
                worker.ENV_JOB: "test",
                worker.ENV_GENERATION: str(generation),
                worker.ENV_ATTEMPT: str(generation),
                worker.ENV_MESH: json.dumps(mesh),
                worker.ENV_IMAGES: str(directory / f"images-{rank}"),
                worker.ENV_INTERVAL_STEPS: str(interval_steps),
                worker.ENV_NOTES: str(self._listener.path),
            }
            if restore is not None:
                environ[worker.ENV_RESTORE] = json.dumps(restore[rank])
                environ[worker.ENV_PREVIOUS_MESH] = json.dumps(previous_mesh or mesh)
            with (self.logs / f"{rank}.log").open("wb") as log:
                started = warm(SCRIPTS).start(
                    [str(script), *args],
                    Path.cwd(),
                    environ,
                    log.fileno(),
                    log.fileno(),
                    **{worker.ENV_CONTROL_FD: theirs.fileno()},
                )
                self._processes.append(started)
            theirs.close()
            self._controls.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for control in (*self._controls, self._port):
            control.close()
        self._listener.close()

    def wait_for(self, kind: str, *, rank: int | None = None, step: int) -> None:
        """Until `rank` (None = every rank) has sent a note of `kind` for `step` or a later one."""
        ranks = range(self.mesh.world_size) if rank is None else (rank,)

        def seen() -> bool:
            self._assert_none_failed()
            reached = {
                note["rank"] for note in list(self.notes) if note["type"] == kind and note.get("step", 0) >= step
            }
            return reached >= set(ranks)

        wait_until(seen, description=f"{kind} of step {step} from ranks {list(ranks)}", timeout_s=START_TIMEOUT_S)

    def order(self, kind: str, **fields: object) -> None:
        for control in self._controls:
            control.send(worker.encode(kind, **fields))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile no rank runs. Of their notes, a few may not have been read yet."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGCONT)

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].wait(TIMEOUT_S)

    def end(self) -> None:
        """SIGKILL whoever is left, as an agent does before the next generation."""
        for process in self._processes:
            process.kill()
            process.wait(TIMEOUT_S)

    def finish(self) -> list[int]:
        """Wait for every rank; their exit codes."""
        return [process.wait(START_TIMEOUT_S) for process in self._processes]

    def log(self, rank: int) -> str:
        return (self.logs / f"{rank}.log").read_text()

    def _assert_none_failed(self) -> None:
        failed = [rank for rank, process in enumerate(self._processes) if process.poll() not in (None, 0)]
        assert not failed, f"ranks {failed} failed:\n" + "\n".join(map(self.log, failed))


class _Listener:
    """Collects the notes; always reading, as the agent is."""

    def __init__(self, path: Path, into: list[dict[str, Any]]) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._into = into
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while raw := self._socket.recv(worker.MESSAGE_BYTES_MAX):
            self._into.append(dict(worker.decode(raw)))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._thread.join(TIMEOUT_S)
        self._socket.close()


def elect(
    directory: Path, mesh: Mapping[str, int], *, target: Mapping[str, int] | None = None
) -> dict[int, dict[str, Any]]:
    """What the supervisor and the replicators do together: the newest step that every rank of `mesh` has saved, for each
    rank of `target` (default the same mesh) from the first rank at the same position."""
    saved, wanted = Mesh.of(mesh), Mesh.of(target or mesh)
    held: list[dict[int, dict[str, Any]]] = []
    for rank in range(saved.world_size):
        steps = {}
        for path in (directory / f"images-{rank}").glob("*.image"):
            if (header := peek(path)) is not None:
                key = header.stamp.key
                steps[key.step] = {"step": key.step, "attempt": key.attempt, "path": str(path)}
        held.append(steps)
    newest = max(set.intersection(*(set(steps) for steps in held)))
    sources = {rank: rank if rank < saved.world_size else wanted.position_of(rank) for rank in range(wanted.world_size)}
    return {rank: held[source][newest] for rank, source in sources.items()}


def elect_parts(
    directory: Path, mesh: Mapping[str, int], *, target: Mapping[str, int] | None = None
) -> dict[int, dict[str, Any]]:
    """`elect` for a state that is sharded over dp: every rank gets what all replicas have saved at its position."""
    saved = Mesh.of(mesh)
    own, elected = elect(directory, mesh), elect(directory, mesh, target=target)
    for rank, restore in elected.items():
        position = Mesh.of(target or mesh).position_of(rank)
        restore["paths"] = [own[each]["path"] for each in own if saved.position_of(each) == position]
    return elected
