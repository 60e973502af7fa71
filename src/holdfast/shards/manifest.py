"""The manifest of a shard. A shard without a manifest is not committed.

The manifest identifies the shard and contains the checksums (CRC-32C) with which every copy is verified, and cryptographic
digests (BLAKE3) with which a copy is verified when it arrives from another machine. A checksum detects accidental damage only:
an attacker can choose changed bytes so that it still matches. The digests are combined into one, the *root*, which the order to
restore contains, so that neither the bytes nor the manifest can be replaced in transfer.

There is one checksum per *span*: the header page, then index and tensors, then the extra, in steps of 8 MiB. The spans are
computed from two numbers, so both ends of a transfer use the same spans, and a corrupt span can be found and fetched alone. The
checksums of the tensors (equal for replicas of one state) and of the complete file result from the same single pass.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IncompatibleVersion, IntegrityError
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards.layout import LAYOUT_VERSION, PAGE, Header, require_nameable
from holdfast.shards.opening import move_aside, open_stored, open_temporary
from holdfast.shards.sealed import UNDECODABLE, lineage_fields, seal, unseal_attached

SCHEMA_VERSION = 1
CHUNK_BYTES = 8 << 20
MANIFEST_BYTES_MAX = 8 << 20  # about 1.2 TB of shard
SUM_BYTES_MAX = 12  # of one checksum in the manifest
DIGEST_BYTES = 32
DIGEST_CHARS_MAX = 44  # of one digest in the manifest, in base64
ROOT_CHARS = 32  # 128 bits: no one can find other bytes for a given root
_DIGESTS = "blake3"  # name of the attached text
_FIELD_BYTES_MAX = 8 << 10  # of all other fields: names, mesh, producer


@dataclass(frozen=True, slots=True)
class Span:
    """A range of the file with its own checksum."""

    offset: int
    size: int


def spans_of(size: int, tensors_end: int) -> tuple[Span, ...]:
    """Return the spans of header page, index and tensors, and extra. No span is longer than `CHUNK_BYTES` or covers two
    sections."""
    return (Span(0, PAGE), *_pieces(PAGE, tensors_end), *_pieces(tensors_end, size))


def _pieces(start: int, end: int) -> tuple[Span, ...]:
    return tuple(Span(offset, min(CHUNK_BYTES, end - offset)) for offset in range(start, end, CHUNK_BYTES))


_mesh_of = lru_cache(maxsize=64)(Mesh)  # of dims; all shards of a job have one of a few meshes


@dataclass(frozen=True, slots=True)
class Manifest:
    """`digest` covers index and tensors, `crc32c` the complete file. `span_crc32c` and `span_blake3` are parallel to `spans`;
    `span_blake3` has `DIGEST_BYTES` for each, and is empty if an earlier release, or a trainer without services, committed
    the shard."""

    job: str
    node: str  # node of the worker that saved the shard
    attempt: int
    step: int
    rank: int
    mesh: tuple[tuple[str, int], ...]
    parent: CheckpointId | None  # (attempt, step) from which the attempt started
    size: int
    tensors_end: int
    digest: str
    crc32c: int
    span_crc32c: tuple[int, ...]
    created_at: float
    producer: str
    layout: int = LAYOUT_VERSION
    schema: int = SCHEMA_VERSION
    checksum: str = "crc32c"  # the algorithm of all checksums; "crc32" if a trainer without services had only zlib
    span_blake3: bytes = field(default=b"", repr=False)
    _root: str | None = field(default=None, init=False, repr=False, compare=False)  # derived on first use

    @classmethod
    def of(
        cls,
        header: Header,
        *,
        job: str,
        node: str,
        digest: str,
        crc32c: int,
        spans: tuple[int, ...],
        blake3: bytes = b"",
    ) -> Manifest:
        """Return the manifest of a complete shard. `spans`: the CRC-32C of each span, and `blake3`: the concatenated digests of
        all spans, both in the order of `spans_of`. `digest`, `crc32c`: as of the class."""
        stamp = header.stamp
        return cls(
            job=job,
            node=node,
            attempt=stamp.key.attempt,
            step=stamp.key.step,
            rank=stamp.key.rank,
            mesh=stamp.mesh.dims,
            parent=stamp.parent,
            size=header.size,
            tensors_end=header.tensors_end,
            digest=digest,
            crc32c=crc32c,
            span_crc32c=spans,
            created_at=stamp.created_at,
            producer=stamp.producer,
            span_blake3=blake3,
        )

    @property
    def key(self) -> ShardKey:
        """Attempt, step and rank of the save."""
        return ShardKey(self.attempt, self.step, self.rank)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The ranges that `span_crc32c` and `span_blake3` are about, in the order of the file."""
        return spans_of(self.size, self.tensors_end)

    @property
    def root(self) -> str:
        """Digest of all bytes of the shard and of the manifest's fields, as hexadecimal; "" if the manifest has no
        digests of the spans. Equal for all copies of a shard, and different for replicas of one state."""
        if self._root is None:
            object.__setattr__(self, "_root", self._derived_root() if self.span_blake3 else "")
            assert self._root is not None
        return self._root

    def _derived_root(self) -> str:
        said = {name: value for name, value in self._fields().items() if name != "span_crc32c"}
        found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
        found.update(self.span_blake3)
        return found.hexdigest()[:ROOT_CHARS]

    def blake3_of(self, number: int) -> bytes:
        """Return the BLAKE3 digest of a span; empty if the manifest has none."""
        return self.span_blake3[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def without_digests(self) -> Manifest:
        """Return the manifest in the form that earlier releases wrote, without BLAKE3 digests."""
        return replace(self, span_blake3=b"")

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def domain_mesh(self) -> Mesh:
        """The mesh of the generation that saved the shard."""
        return _mesh_of(self.mesh)

    def describes(self, header: Header) -> bool:
        """Whether the manifest is of exactly this save. A step may be saved twice."""
        stamp = header.stamp
        return (self.key, self.created_at, self.size) == (stamp.key, stamp.created_at, header.size)

    # ------------------------------------------------------------ bytes

    def encode(self) -> bytes:
        """Return the content of the manifest file: JSON with its own checksum (`sealed`)."""
        attached = {_DIGESTS: base64.b64encode(self.span_blake3).decode()} if self.span_blake3 else None
        return seal("manifest", self._fields(), attached)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises IntegrityError for anything that `encode` did not write, IncompatibleVersion for a newer schema."""
        fields, digests = unseal_attached("manifest", raw, schema=SCHEMA_VERSION, what="manifest", name=_DIGESTS)
        try:
            if fields["layout"] != LAYOUT_VERSION:
                raise IncompatibleVersion(
                    f"manifest of a shard of layout {fields['layout']}; this release reads layout {LAYOUT_VERSION}"
                )
            sums = tuple(map(int, fields["span_crc32c"]))
            found = base64.b64decode(digests, validate=True)
            manifest = cls(**(fields | lineage_fields(fields) | {"span_crc32c": sums, "span_blake3": found}))
            manifest.domain_mesh()
        except UNDECODABLE as error:
            raise IntegrityError(f"not a manifest: {error!r}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Validate the values before use, because numbers become paths and memory sizes."""
        numbers = (self.attempt, self.step, self.rank, self.size, self.tensors_end, self.crc32c)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise IntegrityError("the manifest has a field that is not an integer")
        require_nameable(self.key)
        texts = (self.job, self.node, self.digest, self.producer, self.checksum)
        if not all(type(text) is str for text in texts) or type(self.created_at) not in (int, float):
            raise IntegrityError("the manifest has a field of another type")
        if not all(text.isprintable() or _is_encodable(text) for text in texts):
            raise IntegrityError("the manifest has a text that is not Unicode")
        if not math.isfinite(self.created_at):
            raise IntegrityError("the manifest has no date")
        if not PAGE <= self.tensors_end <= self.size <= len(self.span_crc32c) * CHUNK_BYTES:
            raise IntegrityError(
                f"the manifest's sizes are impossible: tensors end at {self.tensors_end} of {self.size}"
            )
        if len(self.span_crc32c) != (counted := len(self.spans)):
            raise IntegrityError(f"the manifest has {len(self.span_crc32c)} checksums for {counted} spans")
        if len(self.span_blake3) not in (0, DIGEST_BYTES * counted):
            raise IntegrityError(f"the manifest has {len(self.span_blake3)} bytes of digests for {counted} spans")

    def verify(self, shard: memoryview, crc32c: Callable[[memoryview], int]) -> None:
        """Compare the bytes of a shard with every checksum. Raises IntegrityError that names the first damaged span."""
        if len(shard) != self.size:
            raise IntegrityError(f"{self.key} has {len(shard)} bytes, but its manifest states {self.size}")
        for span, expected in zip(self.spans, self.span_crc32c, strict=True):
            if crc32c(shard[span.offset : span.offset + span.size]) != expected:
                raise IntegrityError(f"{self.key}: bytes {span.offset} to {span.offset + span.size} are damaged")

    @staticmethod
    def reserve(path: Path, shard_bytes: int) -> None:
        """Allocate the space of the manifest `path` for a shard of at most `shard_bytes`, so that `write` needs no more space.

        Raises OSError.
        """
        temporary = temporary_of(path)
        if temporary.is_dir():
            move_aside(temporary)
        fd = open_temporary(temporary)
        try:
            os.posix_fallocate(
                fd, 0, _FIELD_BYTES_MAX + (SUM_BYTES_MAX + DIGEST_CHARS_MAX) * (shard_bytes // CHUNK_BYTES + 3)
            )
        finally:
            os.close(fd)

    def write(self, path: Path) -> None:
        """Write the manifest atomically and durably: temporary name → fsync → rename → fsync of the directory. Uses the
        reserved space and fills the rest of it with blanks."""
        temporary = temporary_of(path)
        for place in (temporary, path):
            if place.is_dir():  # a rename cannot replace a directory
                move_aside(place)
        with open(open_temporary(temporary), "wb") as file:
            file.write(self.encode().ljust(os.fstat(file.fileno()).st_size))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_directory(path.parent)

    @classmethod
    def read(cls, path: Path, *, owners: Collection[int] | None = None) -> Manifest:
        """`owners`: as of `open_stored`. Raises FileNotFoundError, IntegrityError, IncompatibleVersion, OSError."""
        with open(open_stored(path, owners=owners), "rb") as file:
            raw = file.read(MANIFEST_BYTES_MAX + 1)
        if len(raw) > MANIFEST_BYTES_MAX:
            raise IntegrityError(f"{path} is larger than any manifest ({MANIFEST_BYTES_MAX} bytes)")
        return cls.decode(raw)


_FIELDS = tuple(each.name for each in fields(Manifest) if each.name not in ("span_blake3", "_root"))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can contain
        return False
    return True


def temporary_of(path: Path) -> Path:
    """Return the temporary name of the manifest `path`."""
    return path.with_name(f".{path.name}.tmp")


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
