"""Codecs of values that several protocols share: enums, mesh, shards and their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Generic, TypeVar

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError, Message

from holdfast.domain.errors import IncompatibleVersion, InvalidSpec, MalformedMessage
from holdfast.domain.generations import (
    RankRestore,
    RestoreRun,
    ShardKey,
    ShardPlace,
    ShardRecord,
    ShardSource,
    StoredStep,
)
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.signals import Phase
from holdfast.domain.tiers import NEARNESS
from holdfast.v1 import types_pb2 as pb
from holdfast.wire.derived import Codec, Through, register

E = TypeVar("E", bound=StrEnum)
M = TypeVar("M", bound=Message)


class EnumCodec(Generic[E]):
    """One domain enum ↔ one proto enum `PREFIX_MEMBER`. Raises TypeError at import if the two differ."""

    def __init__(self, domain: type[E], wire: EnumTypeWrapper, prefix: str) -> None:
        numbers = {name.removeprefix(prefix): number for name, number in wire.items() if number != 0}
        if numbers.keys() != (names := {member.name for member in domain}):
            raise TypeError(f"{domain.__name__} and its proto enum differ in {sorted(numbers.keys() ^ names)}")
        self._domain = domain.__name__
        self._wire_name = {member: prefix + member.name for member in domain}
        self._member = {numbers[member.name]: member for member in domain}
        register(domain, self.encode, self.decode)

    def encode(self, member: E) -> str:
        """Return the proto name, which message constructors accept."""
        return self._wire_name[member]

    def decode(self, number: int, field: str) -> E:
        """Return the member. Raises `MalformedMessage` for 0 (unspecified), and for unknown numbers of a newer peer."""
        try:
            return self._member[number]
        except KeyError:
            known = ", ".join(f"{n} {member}" for n, member in self._member.items())
            raise MalformedMessage(field, f"{number} is not a {self._domain} known here ({known})") from None

    def encode_all(self, members: Iterable[E]) -> list[str]:
        return [self._wire_name[member] for member in members]

    def decode_all(self, numbers: Iterable[int], field: str) -> tuple[E, ...]:
        """Decode a column. Raises as `decode` does."""
        try:
            return tuple(map(self._member.__getitem__, numbers))
        except KeyError:
            return tuple(self.decode(number, field) for number in numbers)


PHASE = EnumCodec(Phase, pb.Phase, "PHASE_")

TIER_WIRE: Mapping[str, Any] = {  # of `pb.Tier`, whose stub calls them numbers
    name.removeprefix("TIER_").lower(): number for name, number in pb.Tier.items() if number != 0
}
if drifted := TIER_WIRE.keys() ^ NEARNESS.keys():
    raise TypeError(f"the tiers and their proto enum differ in {sorted(drifted)}")
TIER_NAME: Mapping[int, str] = {number: name for name, number in TIER_WIRE.items()}


def parse(message: type[M], raw: bytes) -> M:
    """Parse protobuf bytes. Raises `MalformedMessage` if they are invalid."""
    try:
        return message.FromString(raw)
    except DecodeError as error:
        raise MalformedMessage(message.DESCRIPTOR.name, f"{len(raw)} bytes that are not one ({error})") from error


def check_protocol(theirs: int, peer: str) -> None:
    """Raises `IncompatibleVersion` that names both versions, unless `peer` uses the protocol version of this release."""
    if theirs != PROTOCOL_VERSION:
        raise IncompatibleVersion(
            f"{peer} speaks protocol version {theirs}, this side speaks {PROTOCOL_VERSION}; "
            "install the same Holdfast release on both"
        )


def check_columns(field: str, **columns: Sized) -> None:
    """Raises `MalformedMessage` unless all columns have the same length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise MalformedMessage(field, f"columns of unequal length: {listed}")


_MESHES_MAX = 1024  # cached meshes; nearly all of thousands of shards have the same mesh


@lru_cache(_MESHES_MAX)
def encode_mesh(mesh: Mesh) -> pb.Mesh:
    """Return a shared message. Use it only as a part of other messages, which copy it."""
    return pb.Mesh(dims=[pb.MeshDim(name=name, size=size) for name, size in mesh.dims])


@lru_cache(_MESHES_MAX)
def _mesh(raw: bytes) -> Mesh:
    return Mesh(tuple([(dim.name, dim.size) for dim in pb.Mesh.FromString(raw).dims]))


def decode_mesh(message: pb.Mesh, field: str) -> Mesh:
    try:
        return _mesh(message.SerializeToString())
    except InvalidSpec as error:
        raise MalformedMessage(field, str(error)) from error


register(Mesh, encode_mesh, decode_mesh)


def _decode_tier(number: int, field: str) -> str:
    if number not in TIER_NAME:
        raise MalformedMessage(field, f"{number} is not a tier known here ({', '.join(TIER_WIRE)})")
    return TIER_NAME[number]


def _tier(field: str) -> Through:
    return Through(TIER_WIRE.__getitem__, partial(_decode_tier, field=field))


HANG_SPEC = Codec(HangSpec, pb.HangSpec, "hang")
SHARD_KEY = Codec(ShardKey, pb.ShardKey, "shard.key")
SHARD_RECORD = Codec(
    ShardRecord, pb.ShardRecord, "shard", renamed={"size": "size_bytes"}, through={"tier": _tier("shard.tier")}
)
SHARD_PLACE = Codec(ShardPlace, pb.ShardPlace, "gone", through={"tier": _tier("inventory.gone")})
STORED_STEP = Codec(StoredStep, pb.StoredStep, "stored")
SHARD_SOURCE = Codec(ShardSource, pb.ShardSource, "source")
RANK_RESTORE = Codec(RankRestore, pb.RankRestore, "restore")
RESTORE_RUN = Codec(RestoreRun, pb.RestoreRun, "restore")


def decode_runs(messages: Iterable[pb.RestoreRun]) -> tuple[RankRestore, ...]:
    """Raises `MalformedMessage`."""
    runs = [RESTORE_RUN.decode(message) for message in messages]
    for run in runs:
        if run.roots and len(run.roots) != len(run.digests):
            raise MalformedMessage("restore.roots", f"{len(run.roots)} entries for {len(run.digests)} ranks")
    return tuple(chain.from_iterable(runs))
