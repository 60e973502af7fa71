"""Sends shards at the start to the ranks that lack them, from a rank whose node has them, span by span, verified.

Every rank computes the same list of transfers and takes part in its own, in that order, so that no circular wait is possible.
A transfer always runs to its end, even if the sender's disk fails. The received bytes then do not match the manifest, and
verification fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.domain.errors import HoldfastError, IntegrityError
from holdfast.domain.generations import ShardKey
from holdfast.shards import Manifest, Reader, spans_of
from holdfast.train.standalone import checksum
from holdfast.train.standalone.directory import Directory
from holdfast.train.standalone.election import Holding, Seat
from holdfast.train.standalone.exchange import Exchange

log = logging.getLogger("holdfast.train")

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Transfer:
    holding: Holding
    to: int  # the rank that receives the shard for its directory


def plan(parts: Sequence[Sequence[Holding]], seats: Sequence[Seat]) -> list[Transfer]:
    """Return the transfers: each shard once to each directory that needs it. Pure; every rank computes the same list."""
    wanted: dict[tuple[str, Holding], Transfer] = {}
    for rank, (those, seat) in enumerate(zip(parts, seats, strict=True)):
        for holding in those:
            if not seat.reads(holding):
                wanted.setdefault((seat.directory, holding), Transfer(holding, rank))
    return list(wanted.values())


def fetch(
    exchange: Exchange, directory: Directory, parts: Sequence[Sequence[Holding]], seats: Sequence[Seat], run: str
) -> tuple[dict[Holding, Path], list[tuple[int, str]]]:
    """Carry out this rank's transfers. Returns the paths of its fetched shards, and (holder, path) of failed transfers."""
    fetched: dict[Holding, Path] = {}
    lost: list[tuple[int, str]] = []
    rank = exchange.rank
    for transfer in plan(parts, seats):
        holding = transfer.holding
        if holding.holder == rank:
            _send(exchange, directory, transfer, run)
        if transfer.to == rank:
            try:
                receive_shard(exchange, directory, holding.holder, run, holding)
            except (HoldfastError, OSError) as error:
                log.error("transfer of step %d of rank %d failed: %s", holding.key.step, holding.key.rank, error)
                lost.append(holding.copy)
        if seats[transfer.to].directory == seats[rank].directory and not seats[rank].reads(holding):
            fetched[holding] = directory.path(holding.key)
    return fetched, lost


def _send(exchange: Exchange, directory: Directory, transfer: Transfer, run: str) -> None:
    """Send a holding; an empty manifest if it cannot be read."""
    holding = transfer.holding
    try:
        with Reader(Path(holding.path), holding.key) as reader:
            manifest = directory.manifest(holding.key, run) or _describe(reader, run, holding.place)
            send_shard(exchange, manifest, reader, transfer.to, lambda _: None)
    except (HoldfastError, OSError) as error:
        log.error("cannot send %s: %s", holding.path, error)
        _send_short(exchange, b"", transfer.to)


def send_shard(exchange: Exchange, manifest: Manifest, reader: Reader, to: int, pace: Callable[[int], None]) -> None:
    """Send the manifest, then every span. `pace(nbytes)` is called after each span."""
    _send_short(exchange, manifest.encode(), to)
    for span in manifest.spans:
        exchange.send(reader.data[span.offset : span.offset + span.size], to)
        pace(span.size)


def _describe(reader: Reader, run: str, node: str) -> Manifest:
    """Return the manifest of an image that was never written to disk."""
    algorithm, header = checksum.best(), reader.header
    spans = spans_of(header.size, header.tensors_end)
    sums = tuple(algorithm.of(reader.data[span.offset : span.offset + span.size]) for span in spans)
    digest, whole = algorithm.summarise(spans, sums, header.tensors_end)
    made = Manifest.of(header, job=run, node=node, digest=digest, crc32c=whole, spans=sums)
    return replace(made, checksum=algorithm.name)


def receive_shard(
    exchange: Exchange, directory: Directory, sender: int, run: str, expected: Holding | None = None
) -> ShardKey:
    """Receive a shard from `send_shard` into the directory. Raises IntegrityError if it is damaged or not the expected shard,
    after the transfer has been read to its end."""
    manifest = Manifest.decode(bytes(_receive_short(exchange, sender)))  # raises for an empty manifest

    def pieces() -> Iterator[memoryview]:
        for span in manifest.spans:
            yield exchange.receive(span.size, sender)

    arriving = pieces()
    try:
        if manifest.job != run:
            raise IntegrityError(f"rank {sender} sends a shard of run {manifest.job}")
        if expected is not None and (manifest.key != expected.key or expected.digest not in ("", manifest.digest)):
            raise IntegrityError(f"rank {sender} sends {manifest.key} instead of {expected.key}")
        directory.receive(manifest, arriving)
    finally:
        for _ in arriving:
            pass
    return manifest.key


def _send_short(exchange: Exchange, data: bytes, to: int) -> None:
    exchange.send(memoryview(len(data).to_bytes(_LENGTH_BYTES, "little")), to)
    exchange.send(memoryview(data), to)


def _receive_short(exchange: Exchange, sender: int) -> memoryview:
    length = int.from_bytes(exchange.receive(_LENGTH_BYTES, sender), "little")
    return exchange.receive(length, sender)
