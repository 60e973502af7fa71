"""Values that several protocols share: enums, mesh, shards, where to find them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from enum import StrEnum
from functools import lru_cache
from itertools import repeat
from typing import Generic, TypeVar

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError, Message

from holdfast.domain.errors import IncompatibleVersion, InvalidSpec, MalformedMessage
from holdfast.domain.generations import (
    RankRestore,
    RestoreRun,
    ShardKey,
    ShardPlace,
    ShardRecord,
    Shards,
    ShardSource,
    StoredStep,
    rows_of,
)
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.signals import Phase
from holdfast.v1 import types_pb2 as pb

E = TypeVar("E", bound=StrEnum)
M = TypeVar("M", bound=Message)
T = TypeVar("T")


class EnumCodec(Generic[E]):
    """One domain enum ↔ one proto enum `PREFIX_MEMBER`. Raises TypeError at import when the two have drifted apart."""

    def __init__(self, domain: type[E], wire: EnumTypeWrapper, prefix: str) -> None:
        numbers = {name.removeprefix(prefix): number for name, number in wire.items() if number != 0}
        if numbers.keys() != (names := {member.name for member in domain}):
            raise TypeError(f"{domain.__name__} and its proto enum differ in {sorted(numbers.keys() ^ names)}")
        self._domain = domain.__name__
        self._wire_name = {member: prefix + member.name for member in domain}
        self._member = {numbers[member.name]: member for member in domain}

    def encode(self, member: E) -> str:
        """The proto name, which message constructors accept."""
        return self._wire_name[member]

    def decode(self, number: int, field: str) -> E:
        """Raises `MalformedMessage` for 0 (unspecified) and for numbers that a newer peer may have added."""
        try:
            return self._member[number]
        except KeyError:
            known = ", ".join(f"{n} {member}" for n, member in self._member.items())
            raise MalformedMessage(field, f"{number} is not a {self._domain} known here ({known})") from None

    def encode_all(self, members: Iterable[E]) -> list[str]:
        return [self._wire_name[member] for member in members]

    def decode_all(self, numbers: Iterable[int], field: str) -> tuple[E, ...]:
        """A column. Raises as `decode` does."""
        try:
            return tuple(map(self._member.__getitem__, numbers))
        except KeyError:
            return tuple(self.decode(number, field) for number in numbers)


PHASE = EnumCodec(Phase, pb.Phase, "PHASE_")

_TIER_WIRE: Mapping[str, pb.Tier] = {"memory": pb.TIER_MEMORY, "disk": pb.TIER_DISK}
_TIER_NAME: Mapping[int, str] = {number: name for name, number in _TIER_WIRE.items()}


def parse(message: type[M], raw: bytes) -> M:
    """Parse protobuf bytes. Raises `MalformedMessage` for garbage."""
    try:
        return message.FromString(raw)
    except DecodeError as error:
        raise MalformedMessage(message.DESCRIPTOR.name, f"{len(raw)} bytes that are not one ({error})") from error


def check_protocol(theirs: int, peer: str) -> None:
    """Raises `IncompatibleVersion` naming both versions unless `peer` speaks ours."""
    if theirs != PROTOCOL_VERSION:
        raise IncompatibleVersion(
            f"{peer} speaks protocol version {theirs}, this side speaks {PROTOCOL_VERSION}; "
            "install the same Holdfast release on both"
        )


def check_columns(field: str, **columns: Sized) -> None:
    """Raises `MalformedMessage` unless all columns have one length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise MalformedMessage(field, f"columns of unequal length: {listed}")


def check_time(at: float, field: str) -> float:
    """`at` itself. Raises `MalformedMessage` unless it is a finite time; order and deadlines are computed from it."""
    if not math.isfinite(at):
        raise MalformedMessage(field, f"{at} is not a time")
    return at


_MESHES_MAX = 1024  # that are remembered: of thousands of shards nearly all have the same


@lru_cache(_MESHES_MAX)
def encode_mesh(mesh: Mesh) -> pb.Mesh:
    """To be put into other messages, which copy it."""
    return pb.Mesh(dims=[pb.MeshDim(name=name, size=size) for name, size in mesh.dims])


@lru_cache(_MESHES_MAX)
def _mesh(dims: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh(dims)


def decode_mesh(message: pb.Mesh, field: str) -> Mesh:
    try:
        return _mesh(tuple([(dim.name, dim.size) for dim in message.dims]))
    except InvalidSpec as error:
        raise MalformedMessage(field, str(error)) from error


def encode_hang(hang: HangSpec) -> pb.HangSpec:
    return pb.HangSpec(floor_s=hang.floor_s, factor=hang.factor, init_s=hang.init_s)


def decode_hang(message: pb.HangSpec) -> HangSpec:
    return HangSpec(floor_s=message.floor_s, factor=message.factor, init_s=message.init_s)


def encode_shard_key(key: ShardKey) -> pb.ShardKey:
    return pb.ShardKey(attempt=key.attempt, step=key.step, rank=key.rank)


def decode_shard_key(message: pb.ShardKey) -> ShardKey:
    return ShardKey(attempt=message.attempt, step=message.step, rank=message.rank)


def encode_shard_record(record: ShardRecord) -> pb.ShardRecord:
    return pb.ShardRecord(
        key=encode_shard_key(record.key),
        mesh=encode_mesh(record.mesh),
        tier=_TIER_WIRE[record.tier],
        size_bytes=record.size,
        digest=record.digest,
        owner=record.owner,
    )


def decode_shard_record(message: pb.ShardRecord) -> ShardRecord:
    if message.tier not in _TIER_NAME:
        raise MalformedMessage("shard.tier", f"{message.tier} is not a tier known here ({', '.join(_TIER_WIRE)})")
    return ShardRecord(
        key=decode_shard_key(message.key),
        mesh=decode_mesh(message.mesh, "shard.mesh"),
        tier=_TIER_NAME[message.tier],
        size=message.size_bytes,
        digest=message.digest,
        owner=message.owner,
    )


def short(column: Sequence[T]) -> Sequence[T]:
    """A column of equal entries as one."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


def column(values: Sequence[T], count: int, field: str) -> Iterable[T]:
    """The entries of a column. Raises `MalformedMessage` unless it has one for all, or one for each."""
    if len(values) == count:
        return values
    if len(values) == 1:
        return repeat(values[0], count)
    raise MalformedMessage(field, f"{len(values)} entries for {count}")


def _of(places: Sequence[int], values: Sequence[T], count: int, field: str) -> Iterable[T]:
    if places and max(places) >= len(values):
        raise MalformedMessage(field, f"{max(places)} is not a place among {len(values)}")
    return column([values[place] for place in places], count, field)


def encode_shards(records: Sequence[ShardRecord]) -> pb.ShardColumns:
    """In columns; there is at least one."""
    attempts, steps, ranks, mesh_of, tiers, sizes, digests, owner_of = zip(*rows_of(records), strict=True)
    meshes = {mesh: place for place, mesh in enumerate(dict.fromkeys(mesh_of))}
    owners = {owner: place for place, owner in enumerate(dict.fromkeys(owner_of))}
    return pb.ShardColumns(
        ranks=ranks,
        attempts=short(attempts),
        steps=short(steps),
        meshes=[encode_mesh(mesh) for mesh in meshes],
        mesh_of=short([meshes[mesh] for mesh in mesh_of]),
        tiers=short([_TIER_WIRE[tier] for tier in tiers]),
        sizes=short(sizes),
        digests=short(digests),
        owners=list(owners),
        owner_of=short([owners[owner] for owner in owner_of]),
    )


def decode_shards(message: pb.ShardColumns) -> Shards:
    count, field = len(message.ranks), "shards"
    if unknown := set(message.tiers) - _TIER_NAME.keys():
        raise MalformedMessage("shards.tiers", f"{min(unknown)} is not a tier known here ({', '.join(_TIER_WIRE)})")
    rows = zip(
        column(message.attempts, count, field),
        column(message.steps, count, field),
        message.ranks,
        _of(message.mesh_of, [decode_mesh(mesh, "shards.meshes") for mesh in message.meshes], count, field),
        column([_TIER_NAME[tier] for tier in message.tiers], count, field),
        column(message.sizes, count, field),
        column(message.digests, count, field),
        _of(message.owner_of, message.owners, count, field),
        strict=False,  # columns of one entry go on for ever
    )
    return Shards(rows)


def encode_saved_steps(steps: Iterable[tuple[int, int]]) -> list[pb.SavedStep]:
    return [pb.SavedStep(attempt=attempt, step=step) for attempt, step in steps]


def decode_saved_steps(messages: Iterable[pb.SavedStep]) -> tuple[tuple[int, int], ...]:
    return tuple((message.attempt, message.step) for message in messages)


def encode_places(places: Iterable[ShardPlace]) -> list[pb.ShardPlace]:
    return [pb.ShardPlace(key=encode_shard_key(place.key), tier=_TIER_WIRE[place.tier]) for place in places]


def decode_places(messages: Iterable[pb.ShardPlace]) -> tuple[ShardPlace, ...]:
    places = []
    for message in messages:
        if message.tier not in _TIER_NAME:
            raise MalformedMessage(
                "inventory.gone", f"{message.tier} is not a tier known here ({', '.join(_TIER_WIRE)})"
            )
        places.append(ShardPlace(decode_shard_key(message.key), _TIER_NAME[message.tier]))
    return tuple(places)


def encode_stored(steps: Iterable[StoredStep]) -> list[pb.StoredStep]:
    return [
        pb.StoredStep(
            attempt=stored.attempt,
            step=stored.step,
            mesh=encode_mesh(stored.mesh),
            sharded=stored.sharded,
            damage=stored.damage,
        )
        for stored in steps
    ]


def decode_stored(messages: Iterable[pb.StoredStep]) -> tuple[StoredStep, ...]:
    return tuple(
        StoredStep(
            attempt=message.attempt,
            step=message.step,
            mesh=decode_mesh(message.mesh, "stored.mesh"),
            sharded=message.sharded,
            damage=message.damage,
        )
        for message in messages
    )


def encode_sources(sources: Iterable[ShardSource]) -> list[pb.ShardSource]:
    return [pb.ShardSource(node=source.node, endpoint=source.endpoint, job=source.job) for source in sources]


def decode_sources(messages: Iterable[pb.ShardSource]) -> tuple[ShardSource, ...]:
    return tuple(ShardSource(node=message.node, endpoint=message.endpoint, job=message.job) for message in messages)


def encode_restores(restores: Iterable[RankRestore]) -> list[pb.RankRestore]:
    return [
        pb.RankRestore(
            rank=restore.rank,
            shard=encode_shard_key(restore.shard),
            digest=restore.digest,
            sources=encode_sources(restore.sources),
            sharing=encode_sources(restore.sharing),
        )
        for restore in restores
    ]


def encode_runs(restores: Iterable[RestoreRun]) -> list[pb.RestoreRun]:
    return [
        pb.RestoreRun(
            rank=run.rank,
            shard=encode_shard_key(run.shard),
            digests=run.digests,
            sources=encode_sources(run.sources),
            sharing=encode_sources(run.sharing),
        )
        for run in restores
    ]


def decode_runs(messages: Iterable[pb.RestoreRun]) -> tuple[RestoreRun, ...]:
    return tuple(
        RestoreRun(
            rank=message.rank,
            shard=decode_shard_key(message.shard),
            digests=tuple(message.digests),
            sources=decode_sources(message.sources),
            sharing=decode_sources(message.sharing),
        )
        for message in messages
    )


def decode_restores(messages: Iterable[pb.RankRestore]) -> tuple[RankRestore, ...]:
    return tuple(
        RankRestore(
            rank=message.rank,
            shard=decode_shard_key(message.shard),
            digest=message.digest,
            sources=decode_sources(message.sources),
            sharing=decode_sources(message.sharing),
        )
        for message in messages
    )
