"""Checkpoints without services for one launch: built here, used by `hf.launch` and `hf.Run`."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.domain.generations import ShardKey
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, RestoreTarget, World
from holdfast.train.standalone.agreement import Agreement, Gate, Proposal
from holdfast.train.standalone.board import Board
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.exchange import Alone, Group
from holdfast.train.standalone.keeper import UNFINISHED_MAX, Keeper, Place, Retention, settle
from holdfast.train.standalone.options import Checkpoints
from holdfast.train.standalone.peers import TRANSFER_TIMEOUT_S, Peers, targets
from holdfast.train.standalone.start import Start, Starter
from holdfast.train.standalone.watcher import Watcher

log = logging.getLogger("holdfast.train")

FINISH_TIMEOUT_S: Final = 600.0  # for writing the last save to disk after the script has ended
SETTLE_TIMEOUT_S: Final = 60.0
PEERS_TIMEOUT_S: Final = 10.0  # part of the grace period, for copies on other nodes
STANDBY_TIMEOUT_S: Final = 5.0  # before an emergency save, until an image is free


class Journal(Notes):
    """Messages of a run without an agent: only the saves have a receiver, the keeper."""

    def __init__(self, keeper: Keeper, rank: int) -> None:
        super().__init__(agent="", replicator="", job="", generation=0, rank=rank)
        self._keeper = keeper
        self._rank = rank

    def saved(self, *, step: int, attempt: int, image: str, stall_s: float) -> None:
        self._keeper.offer(ShardKey(attempt, step, self._rank), Path(image))


@dataclass(slots=True)
class Session:
    """`environment` is for `Run` and the checkpointer: directory of the images, checkpoint to restore, interval."""

    environment: Environment
    notes: Journal
    start: Start
    place: Place
    keeper: Keeper
    peers: Peers | None
    gate: Gate
    watcher: Watcher
    board: Board

    def due(self, step: int) -> Proposal | None:
        """Whether all ranks have agreed to save this step. Waits until an image is free."""
        proposal = self.gate.due(step)
        if proposal is not None:
            self.keeper.drain(STANDBY_TIMEOUT_S)
        return proposal

    @property
    def grace_left_s(self) -> float | None:
        """Seconds until the end of the grace period of a SIGTERM of this rank; None if there is none."""
        deadline = self.watcher.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def finish(self) -> None:
        """End after a normal end of the script: write everything to disk, then delete the images."""
        if not self.keeper.close(FINISH_TIMEOUT_S):
            log.warning("the last checkpoint was not on disk within %g s after the end", FINISH_TIMEOUT_S)
        if self.peers is not None and not self.peers.close(FINISH_TIMEOUT_S):
            log.warning("copies of other ranks were incomplete %g s after the end", FINISH_TIMEOUT_S)
        world = self.environment.world
        settle(self.board, self.keeper, world.rank, world.world_size, SETTLE_TIMEOUT_S)
        self.keeper.release_memory()
        self._close()

    def interrupt(self) -> None:
        """End after a stop request: write the last save to disk within the grace period."""
        grace_left_s = self.grace_left_s
        left_s = FINISH_TIMEOUT_S if grace_left_s is None else grace_left_s
        if not self.keeper.close(left_s):
            log.error("the emergency save is in memory, but not on disk: grace_s was too short")
        elif self.peers is not None:
            self.peers.close(min(PEERS_TIMEOUT_S, left_s))
        self._close()

    def abandon(self) -> None:
        """End after a failure of the script, without waiting. The images stay in memory."""
        self._close()

    def _close(self) -> None:
        self.watcher.close()
        self.start.lock.close()


def open_session(options: Checkpoints, environment: Environment) -> Session:
    """Select the checkpoint to restore together with all ranks, and prepare saving. Collective; requires the process group.

    Raises Conflict if the directory is in use or contains checkpoints of different runs.
    """
    world = environment.world
    exchange = Alone() if world.world_size == 1 else Group()
    directory = Directory(Path(options.directory))
    start = Starter(exchange, directory, environment.node, world.mesh, options.memory_of).begin()
    elected = start.election
    memory = options.memory_of(start.run)
    if start.lists:
        _sweep_memory(options, directory, start.run)
    here = [rank for rank, node in enumerate(start.nodes) if node == environment.node]
    strangers = set(memory.glob("rank-*")) - {memory / f"rank-{rank}" for rank in here}
    place = Place(
        directory=directory,
        run=start.run,
        node=environment.node,
        world_size=world.world_size,
        memory=memory / f"rank-{world.rank}",
        staging=directory.root / "images" / f"rank-{world.rank}",
        prunes=tuple(here) if start.lists else (),
        others=_others(start, world.rank, here),
        strangers=tuple(sorted(strangers)) if start.lists else (),
    )
    board = Board.alone() if world.world_size == 1 else Board.shared(start.launch)
    retention = Retention(options.keep, elected.complete, floor=0 if elected.at else start.attempt)
    peers = _peers(options, start, board, directory)
    keeper = Keeper(place, board, retention, peers)
    gate = Gate()
    agreement = Agreement(board, gate, rank=world.rank, world_size=world.world_size)
    ready = replace(
        environment,
        attempt=start.attempt,
        images=str(place.memory),
        image_fallback_dir=str(place.staging),
        interval_steps=options.interval_steps,
        restore=_target(start, world),
        previous_mesh=elected.mesh,
    )
    journal = Journal(keeper, world.rank)
    return Session(ready, journal, start, place, keeper, peers, gate, Watcher(agreement, options.grace_s), board)


def _peers(options: Checkpoints, start: Start, board: Board, directory: Directory) -> Peers | None:
    """Start copying to peers. Collective if there are several directories; all ranks know whether there are."""
    chosen = targets(start.volumes)
    if not options.peers or all(to is None for to in chosen):
        return None
    group = Group(timeout_s=TRANSFER_TIMEOUT_S)
    return Peers(group, board, directory, start.run, chosen, options.keep + UNFINISHED_MAX)


def _others(start: Start, rank: int, here: Iterable[int]) -> frozenset[int] | None:
    """Return the ranks of other nodes that share the directory if `rank` represents it, otherwise None."""
    if start.volumes[rank] != rank:
        return None
    return frozenset(other for other, volume in enumerate(start.volumes) if volume == rank) - frozenset(here)


def _target(start: Start, world: World) -> RestoreTarget | None:
    if start.election.at is None or start.election.mesh is None:
        return None
    attempt, step = start.election.at
    paths = tuple(map(str, start.paths))
    if len(paths) == 1:
        return RestoreTarget(step=step, attempt=attempt, path=paths[0])
    parts, saved_by = start.election.parts[world.rank], world.mesh.counterpart(world.rank, start.election.mesh)
    own = (path for part, path in zip(parts, paths, strict=True) if part.key.rank == saved_by)
    leads = next(own, paths[0])
    return RestoreTarget(step=step, attempt=attempt, path=leads, paths=paths)


def _sweep_memory(options: Checkpoints, directory: Directory, run: str) -> None:
    """Delete the images of runs whose directory no longer exists, because such runs cannot continue."""
    mine = options.memory_of(run)
    mine.mkdir(parents=True, exist_ok=True)
    (mine / "directory").write_text(str(directory.root))
    for other in mine.parent.iterdir():
        try:
            home = Directory(Path((other / "directory").read_text()))
            identity = home.identity()
        except (OSError, ValueError):
            continue  # incomplete, or written by another version
        if identity is None or identity.run != other.name:
            log.info("removed the images of run %s: %s no longer contains the run", other.name, home.root)
            shutil.rmtree(other, ignore_errors=True)
