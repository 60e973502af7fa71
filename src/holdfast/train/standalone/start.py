"""The start of a launch: checks the directory, collects the shards of all ranks, selects a checkpoint, and distributes it.

All ranks go through the same gathers in the same order. An error of one rank is sent to all, and all raise it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Reader, peek
from holdfast.train.standalone import checksum, election
from holdfast.train.standalone.directory import Directory, Identity, Lock
from holdfast.train.standalone.election import Election, Holding
from holdfast.train.standalone.exchange import Exchange
from holdfast.train.standalone.transfer import fetch

log = logging.getLogger("holdfast.train")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says first."""

    launch: str
    node: str
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class Start:
    """What all ranks have agreed on, and this rank's part of it."""

    launch: str
    run: str
    attempt: int
    nodes: tuple[str, ...]
    volumes: tuple[int, ...]  # by rank: equal numbers share a directory
    lists: bool  # this rank speaks for its node
    election: Election
    paths: tuple[Path, ...]  # of this rank's parts, verified, readable here; empty = from scratch
    lock: Lock


@dataclass(slots=True)
class _Told:
    """An answer that may be an error, as it travels."""

    value: Any = None
    error: str = ""


@dataclass(slots=True)
class Starter:
    """`memory_of(run)` is where this node's images of a run are."""

    exchange: Exchange
    directory: Directory
    node: str
    mesh: Mesh
    memory_of: Callable[[str], Path]
    bad: set[tuple[int, str]] = field(default_factory=set)  # (holder, path) of holdings that did not verify

    def begin(self) -> Start:
        """Raises Conflict when the directory is in use or belongs to different runs, on every rank alike."""
        hellos = self._together(self._hello)
        nodes = tuple(hello.node for hello in hellos)
        launch = hellos[0].launch
        run = _run_of(hellos)
        lists = nodes.index(self.node) == self.exchange.rank
        locks: list[Lock] = []

        def claim() -> list[Holding]:
            locks.append(Lock(self.directory.root, launch))
            if lists:
                self.directory.sweep(launch)
            self.directory.mark(launch, self.exchange.rank).touch()
            return self._holdings(run) if lists else []

        try:
            holdings = [holding for found in self._together(claim) for holding in found]
            known = max((hello.identity.attempt for hello in hellos if hello.identity), default=0)
            attempt = max(known, election.attempts(holdings)) + 1
            volumes = tuple(self._together(lambda: self._record(Identity(run, attempt), launch, lists)))
            elected, paths = self._agree(holdings, nodes, run)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        if self.exchange.rank == 0:
            log.info("attempt %d: %s", attempt, elected.reason)
        if self.exchange.rank == 0 and elected.at is None and holdings:
            log.warning("attempt %d starts from step 0 although there are checkpoints: %s", attempt, elected.reason)
        self.directory.mark(launch, self.exchange.rank).unlink(missing_ok=True)
        return Start(launch, run, attempt, nodes, volumes, lists, elected, paths, locks[0])

    def _hello(self) -> Hello:
        self.directory.create()
        return Hello(uuid.uuid4().hex, self.node, self.directory.identity())

    def _record(self, identity: Identity, launch: str, lists: bool) -> int:
        """Make the attempt known to later starts; returns which directory this is."""
        if lists:
            self.directory.begin(identity)
        return self.directory.marked(launch)

    # ------------------------------------------------------------ what is there

    def _holdings(self, run: str) -> list[Holding]:
        """Everything of the run that this node can read: committed shards, and images that were left in memory."""
        found: list[Holding] = []
        known: dict[ShardKey, str] = {}
        for manifest, path in self.directory.manifests(run):
            known[manifest.key] = manifest.digest
            found.append(self._holding(manifest.key, manifest.domain_mesh(), manifest.parent, "disk", path, known))
        for path in sorted(self.memory_of(run).glob("rank-*/[!.]*.image")):
            try:
                header = peek(path)
            except (FileNotFoundError, HoldfastError):
                continue  # of no use: the next save goes over it
            if header is not None:
                stamp = header.stamp
                found.append(self._holding(stamp.key, stamp.mesh, stamp.parent, "memory", path, known))
        return found

    def _holding(
        self,
        key: ShardKey,
        mesh: Mesh,
        parent: tuple[int, int] | None,
        tier: str,
        path: Path,
        known: dict[ShardKey, str],
    ) -> Holding:
        return Holding(key, mesh, parent, known.get(key, ""), tier, str(path), self.node, self.exchange.rank)

    # ------------------------------------------------------------ what to restore

    def _agree(
        self, holdings: Sequence[Holding], nodes: tuple[str, ...], run: str
    ) -> tuple[Election, tuple[Path, ...]]:
        """Elect, verify, fetch; whatever does not verify is out, and the next best is elected. Ends: every round that
        fails takes away at least one of finitely many holdings."""
        while True:
            left = [holding for holding in holdings if (holding.holder, holding.path) not in self.bad]
            elected = election.elect(left, self.mesh, nodes)
            if not elected.parts:
                return elected if left or not holdings else Election(None, "no copy of any shard verifies"), ()
            mine = elected.parts[self.exchange.rank]
            here = [holding for holding in mine if holding.node == self.node]
            self._cross_out([(it.holder, it.path) for it in here if not self._verifies(it, run)])
            if any((it.holder, it.path) in self.bad for parts in elected.parts for it in parts):
                continue
            fetched, lost = fetch(self.exchange, self.directory, elected.parts, nodes, run)
            self._cross_out(lost)
            if not any((it.holder, it.path) in self.bad for parts in elected.parts for it in parts):
                return elected, tuple(fetched.get(it) or Path(it.path) for it in mine)

    def _cross_out(self, mine: list[tuple[int, str]]) -> None:
        for found in self.exchange.gather(mine):
            self.bad.update(found)

    def _verifies(self, holding: Holding, run: str) -> bool:
        """Checksums where there is a manifest. An image that was never brought to disk has none: its header and index say
        that it was completed, and memory that was lost with its node is not there at all."""
        try:
            with Reader(Path(holding.path), holding.key) as reader:
                manifest = self.directory.manifest(holding.key, run)
                if manifest is not None:
                    checksum.verify(manifest, reader.data)
                elif holding.tier == "disk":
                    raise IntegrityError("its manifest is gone")
        except (HoldfastError, OSError) as error:
            log.error("cannot restore from %s: %s", holding.path, error)
            return False
        return True

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result; if one of them has failed, all raise its error."""
        try:
            told = _Told(work())
        except (HoldfastError, OSError) as error:
            told = _Told(error=f"rank {self.exchange.rank} on {self.node}: {error}")
        answers = self.exchange.gather(told)
        for answer in answers:
            if answer.error:
                raise Conflict(answer.error)
        return [answer.value for answer in answers]


def _run_of(hellos: Sequence[Hello]) -> str:
    """The run that the directories belong to: a new one when they are all empty."""
    runs = {hello.identity.run: hello.node for hello in hellos if hello.identity}
    if len(runs) > 1:
        where = ", ".join(f"{run} on {node}" for run, node in sorted(runs.items()))
        raise Conflict(
            f"the checkpoint directories belong to different runs ({where}): remove those that do not belong"
        )
    return next(iter(runs), hellos[0].launch[:16])
