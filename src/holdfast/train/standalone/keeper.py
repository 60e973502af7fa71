"""The keeper: a thread that writes committed images to disk, and deletes checkpoints that are no longer needed.

It takes the newest waiting image; an image that has been overwritten is skipped. A failed write affects only its checkpoint
and is logged. A checkpoint is *complete* when all ranks have counted it; only then may older ones be deleted."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.domain.checkpoints import NOTHING_SAVED, CheckpointId
from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.shards import Reader
from holdfast.train.standalone.board import Board, paced
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.election import Step
from holdfast.train.standalone.peers import Peers

log = logging.getLogger("holdfast.train")

NICE: Final = 10
PACE_MAX_S: Final = 0.25  # the longest pause after one piece
SETTLE_POLL_S: Final = 0.01
UNFINISHED_MAX: Final = 8  # this rank's shards on disk of incomplete checkpoints


class Retention:
    """Decides which shards may be deleted. Pure. Checkpoints are (attempt, step), ordered by attempt first."""

    def __init__(self, keep: int, complete: Sequence[Step], *, floor: int = 0) -> None:
        """`complete` are the checkpoints complete at the start. Attempts below `floor` could not be restored and are
        never deleted, so that a user can find out why."""
        self._keep = keep
        self._floor = floor
        self._complete = sorted(set(complete))

    def completed(self, step: Step) -> None:
        self._complete = sorted({*self._complete, step})[-self._keep :]

    @property
    def newest(self) -> Step:
        return self._complete[-1] if self._complete else NOTHING_SAVED

    def victims(self, keys: Sequence[ShardKey]) -> list[ShardKey]:
        """Return the shards that are older than the oldest complete checkpoint to retain."""
        if not self._complete:
            return []
        oldest = self._complete[-self._keep :][0]
        return [key for key in keys if self._floor <= key.attempt and key.checkpoint < oldest]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's shards are stored. `staging` holds images when memory is full. These are never restored, since they are
    not fsynced.

    One rank of each node deletes the old shards of all ranks on that node. The rank that represents a directory lists it, and
    also deletes the shards that no other rank deletes: those of removed ranks, and copies for ranks of other nodes.
    """

    directory: Directory
    run: str
    node: str
    world_size: int
    memory: Path
    staging: Path
    prunes: tuple[int, ...] = ()  # the ranks whose old shards this rank deletes
    # if this rank represents the directory: the ranks whose old shards other ranks delete from it
    others: frozenset[int] | None = None
    strangers: tuple[Path, ...] = ()  # images of ranks that no longer run on this node, which this rank deletes


class Keeper:
    def __init__(self, place: Place, board: Board, retention: Retention, peers: Peers | None = None) -> None:
        self._place = place
        self._board = board
        self._peers = peers
        self._retention = retention
        self._changed = threading.Condition()
        self._waiting: tuple[ShardKey, Path] | None = None
        self._busy = self._closing = self._hurry = False
        self._seen = 0  # complete checkpoints read from the board
        self._unfinished: list[ShardKey] = []
        self.offered: ShardKey | None = None
        self.stored: ShardKey | None = None  # the newest checkpoint on disk
        self._thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
        self._thread.start()

    def offer(self, key: ShardKey, image: Path) -> None:
        """Queue an image that has been committed in memory. Never waits."""
        with self._changed:
            self._waiting = (key, image)
            self.offered = key
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Write all waiting images without pacing. Returns False on timeout."""
        self._hurry = True
        with self._changed:
            done = self._changed.wait_for(lambda: not self._busy and self._waiting is None, timeout_s)
        self._hurry = False
        return done

    def close(self, timeout_s: float) -> bool:
        """Finish, and end the thread. Returns False if it is still writing; it is a daemon thread."""
        self._hurry = True
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a container's policy refuses it; the thread then runs at normal priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    break
                (key, image), self._waiting = self._waiting, None
                self._busy = True
            try:
                self._keep(key, image)
            except (HoldfastError, OSError) as error:
                log.warning("step %d of rank %d not written to disk: %s", key.step, key.rank, error)
            except Exception:  # a failed checkpoint must not end the training, and the next save may work
                log.exception("step %d of rank %d not written to disk", key.step, key.rank)

    def _keep(self, key: ShardKey, image: Path) -> None:
        began = time.monotonic()

        def pace(nbytes: int) -> None:
            nonlocal began
            if not self._hurry:
                time.sleep(min(time.monotonic() - began, PACE_MAX_S))  # leaves half of the time to the training
            began = time.monotonic()

        with Reader(image, key) as reader:
            self._place.directory.store(reader, run=self._place.run, node=self._place.node, pace=pace)
        self.stored = key
        self._unfinished.append(key)
        if self._board.count(_counter(key), 1) == self._place.world_size:
            self._board.put(f"complete/{self._board.count('completes', 1)}", f"{key.attempt} {key.step}")
        self.tidy()
        if self._peers is not None:
            self._peers.send(key, pace)

    def tidy(self) -> None:
        """Read from the board which checkpoints have become complete, and delete those that may be deleted."""
        while (entry := self._board.get(f"complete/{self._seen + 1}")) is not None:
            attempt, step = entry.split()
            self._retention.completed(CheckpointId(int(attempt), int(step)))
            self._seen += 1
        if self._seen:
            directory, others = self._place.directory, self._place.others
            if others is not None:
                present = [key for key in directory.present() if key.rank not in others]
            else:
                present = [ShardKey(*at, rank) for at in directory.steps() for rank in self._place.prunes]
            for key in self._retention.victims(present):
                directory.delete(key)
            for stranger in self._place.strangers:
                shutil.rmtree(stranger, ignore_errors=True)
        self._forget_unfinished()

    def _forget_unfinished(self) -> None:
        """Delete old checkpoints that a rank never wrote to disk. This rank's count is withdrawn first; a checkpoint
        that turns out to be complete is retained."""
        newest = self._retention.newest
        self._unfinished = [key for key in self._unfinished if key.checkpoint > newest]
        while len(self._unfinished) > UNFINISHED_MAX:
            key = self._unfinished.pop(0)
            if self._board.count(_counter(key), -1) + 1 >= self._place.world_size:
                self._board.count(_counter(key), 1)
            else:
                self._place.directory.delete(key)

    def release_memory(self) -> None:
        """Delete the images of a completed run if the newest checkpoint is on disk."""
        if self.offered is not None and self.offered == self.stored:
            for images in (self._place.memory, self._place.staging):
                shutil.rmtree(images, ignore_errors=True)
            if not any(self._place.memory.parent.glob("rank-*")):
                shutil.rmtree(self._place.memory.parent, ignore_errors=True)


def _counter(key: ShardKey) -> str:
    return f"stored/{key.attempt}/{key.step}"


def settle(board: Board, keeper: Keeper, rank: int, world_size: int, timeout_s: float) -> None:
    """Read the board once more after all ranks have written. Rank 0, which may serve the store, leaves last."""
    deadline = time.monotonic() + timeout_s
    try:
        board.count("closed", 1)
        _await(board, "closed", world_size, deadline)
        keeper.tidy()
        board.count("left", 1)
        if rank == 0:
            _await(board, "left", world_size, deadline)
    except Unavailable as error:
        log.warning("the other ranks did not report their end: %s", error)


def _await(board: Board, counter: str, count: int, deadline: float) -> None:
    while board.count(counter) < count and time.monotonic() < deadline:
        time.sleep(paced(SETTLE_POLL_S, count))
