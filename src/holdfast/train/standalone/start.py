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
from holdfast.domain.mesh import Mesh
from holdfast.shards import Reader, peek
from holdfast.train.standalone import checksum, election
from holdfast.train.standalone.directory import Directory, Identity, Lock, entries
from holdfast.train.standalone.election import Election, Holding, Seat
from holdfast.train.standalone.exchange import Exchange
from holdfast.train.standalone.transfer import fetch

log = logging.getLogger("holdfast.train")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first report of a rank."""

    launch: str
    node: str
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class Start:
    """The result of the start, common to all ranks, with this rank's paths."""

    launch: str
    run: str
    attempt: int
    nodes: tuple[str, ...]
    volumes: tuple[int, ...]  # by rank: the rank that represents its directory; equal numbers share a directory
    lists: bool  # this rank represents its node
    election: Election
    paths: tuple[Path, ...]  # verified local files of this rank's parts; empty = from scratch
    lock: Lock


@dataclass(slots=True)
class _Outcome:
    """A result or an error, in the form that is sent to other ranks."""

    value: Any = None
    error: str = ""


@dataclass(slots=True)
class Starter:
    """`memory_of(run)` is the directory of this node's images of a run."""

    exchange: Exchange
    directory: Directory
    node: str
    mesh: Mesh
    memory_of: Callable[[str], Path]
    bad: set[tuple[int, str]] = field(default_factory=set)  # (holder, path) of holdings that failed verification

    def begin(self) -> Start:
        """Run the start. Raises Conflict on every rank if the directory is in use or contains checkpoints of different
        runs."""
        hellos = self._together(self._hello)
        nodes = tuple(hello.node for hello in hellos)
        launch = hellos[0].launch
        run = _run_of(hellos)
        lists = nodes.index(self.node) == self.exchange.rank
        locks: list[Lock] = []

        def claim() -> None:
            locks.append(Lock(self.directory.root, launch))
            if lists:
                self.directory.mark(launch, self.exchange.rank).touch()

        try:
            self._together(claim)
            volumes = self._volumes(nodes, launch, lists)
            represents = volumes[self.exchange.rank] == self.exchange.rank  # for its directory
            seats = tuple(Seat(node, _name(volume)) for node, volume in zip(nodes, volumes, strict=True))
            found = self._together(lambda: self._listed(run, launch, seats, lists=lists, represents=represents))
            holdings = [holding for those in found for holding in those]
            known = max((hello.identity.attempt for hello in hellos if hello.identity), default=0)
            attempt = max(known, election.attempts(holdings)) + 1
            self._together(lambda: self.directory.begin(Identity(run, attempt)) if represents else None)
            elected, paths = self._agree(holdings, seats, run)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        if self.exchange.rank == 0:
            log.info("attempt %d: %s", attempt, elected.reason)
        if self.exchange.rank == 0 and elected.at is None and holdings:
            log.warning("attempt %d starts from step 0 although there are checkpoints: %s", attempt, elected.reason)
        if lists:
            self.directory.mark(launch, self.exchange.rank).unlink(missing_ok=True)
        return Start(launch, run, attempt, nodes, volumes, lists, elected, paths, locks[0])

    def _hello(self) -> Hello:
        self.directory.create()
        return Hello(uuid.uuid4().hex, self.node, self.directory.identity())

    def _volumes(self, nodes: Sequence[str], launch: str, lists: bool) -> tuple[int, ...]:
        """Return, by rank, the rank that represents its directory: the lowest of those that represent a node with that
        directory."""
        marked = self._together(lambda: self.directory.marked(launch) if lists else -1)
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}

        def representative(rank: int) -> int:
            while marked[rank] != rank:  # a shared directory may show new files late, so ranks may see different ones
                rank = marked[rank]
            return rank

        return tuple(representative(first[node]) for node in nodes)

    # ------------------------------------------------------------ what is saved

    def _listed(self, run: str, launch: str, seats: Sequence[Seat], *, lists: bool, represents: bool) -> list[Holding]:
        """Return this rank's holdings: the committed shards of the directory and the images of the node that it represents.

        Each holding is reported once, even if several nodes share the directory, because all ranks read all reports.
        """
        rank = self.exchange.rank
        found: list[Holding] = []
        if represents:
            self.directory.sweep(launch)
            place = seats[rank].directory
            for it, path in self.directory.manifests(run):
                found.append(
                    Holding(it.key, it.domain_mesh(), it.parent, it.digest, "disk", str(path), place, holder=rank)
                )
        for path in sorted(self._images(run)) if lists else ():
            try:
                header = peek(path)
            except (FileNotFoundError, HoldfastError):
                continue  # not restorable; the next save overwrites it
            if header is not None:
                stamp = header.stamp
                manifest = self.directory.manifest(stamp.key, run)
                digest = manifest.digest if manifest is not None else ""
                found.append(
                    Holding(stamp.key, stamp.mesh, stamp.parent, digest, "memory", str(path), self.node, holder=rank)
                )
        return found

    def _images(self, run: str) -> list[Path]:
        """Return the images of this run in the memory of this node."""
        return [path for rank in entries(self.memory_of(run), "rank-*") for path in entries(rank, "[!.]*.image")]

    # ------------------------------------------------------------ what to restore

    def _agree(
        self, holdings: Sequence[Holding], seats: tuple[Seat, ...], run: str
    ) -> tuple[Election, tuple[Path, ...]]:
        """Select a checkpoint, verify and fetch its shards. If a shard fails verification, exclude it and select again.
        This terminates, because every failed round excludes at least one holding."""
        seat = seats[self.exchange.rank]
        while True:
            elected = election.elect(holdings, self.mesh, seats, self.bad)
            if not elected.parts:
                return elected, ()
            mine = elected.parts[self.exchange.rank]
            self._exclude([it.copy for it in mine if seat.reads(it) and not self._verifies(it, run)])
            if elected.uses(self.bad):
                continue
            fetched, lost = fetch(self.exchange, self.directory, elected.parts, seats, run)
            self._exclude(lost)
            if not elected.uses(self.bad):
                return elected, tuple(fetched.get(it) or self._path(it) for it in mine)

    def _path(self, holding: Holding) -> Path:
        """Return the local path of a holding that this rank can read. Nodes may mount a shared directory at different
        paths."""
        return self.directory.path(holding.key) if holding.tier == "disk" else Path(holding.path)

    def _exclude(self, mine: list[tuple[int, str]]) -> None:
        for found in self.exchange.gather(mine):
            self.bad.update(found)

    def _verifies(self, holding: Holding, run: str) -> bool:
        """Verify the checksums if there is a manifest. An image that was never written to disk has none; its header and index
        show that it was completed, and memory does not survive the loss of its node."""
        try:
            with Reader(self._path(holding), holding.key) as reader:
                manifest = self.directory.manifest(holding.key, run)
                if manifest is not None:
                    checksum.verify(manifest, reader.data)
                elif holding.tier == "disk":
                    raise IntegrityError("its manifest has been deleted")
        except (HoldfastError, OSError) as error:
            log.error("cannot restore from %s: %s", holding.path, error)
            return False
        return True

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Return the results of all ranks. If a rank has failed, all ranks raise its error."""
        try:
            outcome = _Outcome(work())
        except (HoldfastError, OSError) as error:
            outcome = _Outcome(error=f"rank {self.exchange.rank} on {self.node}: {error}")
        outcomes = self.exchange.gather(outcome)
        for each in outcomes:
            if each.error:
                raise Conflict(each.error)
        return [each.value for each in outcomes]


def _name(volume: int) -> str:
    """Return a value that no node name equals, because it contains a space."""
    return f"directory of rank {volume}"


def _run_of(hellos: Sequence[Hello]) -> str:
    """Return the run of the directories; a new one if all of them are empty."""
    runs = {hello.identity.run: hello.node for hello in hellos if hello.identity}
    if len(runs) > 1:
        where = ", ".join(f"{run} on {node}" for run, node in sorted(runs.items()))
        raise Conflict(
            f"the checkpoint directories belong to different runs ({where}): remove those that do not belong"
        )
    return next(iter(runs), hellos[0].launch[:16])
