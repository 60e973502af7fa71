"""The bytes of a shard: its sections, its header page, and the detection of incomplete writes.

A shard is one file, the same bytes as memory image, disk file and peer copy:

    0          header page    magic, state word, checksummed body: counters, sizes, and a JSON stamp (rank, time, step)
    4096       index          JSON: for each tensor its name, dtype, shape, position in the global tensor, and slot
    aligned    tensors        a slot each: prefix, 64-byte aligned payload, suffix; the gaps are zero
    aligned    extra          the small rest of the state, pickled by the trainer; last, because it is the only part that grows

Sections start on pages, so that a file can be written with O_DIRECT and checksummed section by section. The module `slots`
defines index and tensors. With the trainer's prefixes and suffixes, every slot has the format of `torch.save` for one tensor.
So a plain `torch.distributed.checkpoint` can read the file, given (file, offset, length) for each tensor.

**Order of a write** (`Image`): state = WRITING → tensors, extra → header body → state = COMPLETE. A process that is killed in
between leaves WRITING or, if it is killed inside the header, a body with a wrong checksum. Both mean that the shard has no
content. Writes of a killed process are visible to other processes in program order, because all of them map the same page-cache
pages. Between running processes, `flock` defines the order: the writer releases it after COMPLETE, and a reader takes it before
it reads.

Code outside this package does not depend on these details.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IncompatibleVersion, IntegrityError, InvalidSpec
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards.sealed import UNDECODABLE, lineage_fields

LAYOUT_VERSION = 2  # 1: bare payloads without slots
PAGE = 4096
ALIGN = 64
INDEX_BYTES_MAX = 256 << 20

MAGIC = b"HFSHARD\0"
WRITING = b"WRITING\0"
COMPLETE = b"COMPLETE"
STATE_OFFSET = len(MAGIC)

# Largest numbers that paths and messages can contain.
ATTEMPT_MAX = 10**12 - 1
STEP_MAX = 10**15 - 1
RANK_MAX = 10**9 - 1

_PREFIX = struct.Struct("<8s8sI")  # magic, state, checksum of everything after it up to the stamp's end
# layout, stamp bytes, sequence, index bytes, index checksum, tensors end, extra bytes
_BODY = struct.Struct("<IIQQIQQ")
_STAMP_OFFSET = _PREFIX.size + _BODY.size
STAMP_BYTES_MAX = PAGE - _STAMP_OFFSET


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of a save."""

    key: ShardKey
    mesh: Mesh
    parent: CheckpointId | None = None  # (attempt, step) from which this attempt started; None = from scratch
    created_at: float = 0.0  # Unix s
    producer: str = ""  # e.g. "torch 2.13.0"

    def encode(self) -> bytes:
        """Return the stamp as JSON. Raises `InvalidSpec` if it does not fit into the header page."""
        fields = {
            "attempt": self.key.attempt,
            "step": self.key.step,
            "rank": self.key.rank,
            "mesh": [list(dim) for dim in self.mesh.dims],
            "parent": self.parent,
            "created_at": self.created_at,
            "producer": self.producer,
        }
        raw = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
        if len(raw) > STAMP_BYTES_MAX:
            raise InvalidSpec("stamp", f"{len(raw)} bytes", f"at most {STAMP_BYTES_MAX} bytes of mesh and producer")
        return raw

    @classmethod
    def decode(cls, raw: bytes) -> Stamp:
        """Raises IntegrityError for anything that `encode` did not write."""
        try:
            fields: Mapping[str, Any] = json.loads(raw)
            lineage = lineage_fields(fields)
            stamp = cls(
                key=ShardKey(int(fields["attempt"]), int(fields["step"]), int(fields["rank"])),
                mesh=Mesh(lineage["mesh"]),
                parent=lineage["parent"],
                created_at=float(fields["created_at"]),
                producer=str(fields["producer"]),
            )
            stamp.producer.encode()  # a lone surrogate, which JSON can contain, raises UnicodeEncodeError
        except UNDECODABLE as error:
            raise IntegrityError(f"the shard's stamp cannot be read: {error!r}") from error
        require_nameable(stamp.key)
        if not math.isfinite(stamp.created_at):  # NaN is not equal to itself, so no manifest could match it
            raise IntegrityError(f"the shard's stamp has no date: {stamp.created_at}")
        return stamp


def require_nameable(key: ShardKey) -> None:
    """Raises IntegrityError for numbers that cannot be part of a path or of a message."""
    limits = (ATTEMPT_MAX, STEP_MAX, RANK_MAX)
    if not all(0 <= number <= most for number, most in zip((key.attempt, key.step, key.rank), limits, strict=True)):
        raise IntegrityError("the attempt, step or rank of the shard is out of range")


@dataclass(frozen=True, slots=True)
class Header:
    """The header page of a complete shard. `sequence` grows with every save into the same image."""

    stamp: Stamp
    sequence: int
    index_size: int
    index_crc: int
    tensors_end: int
    extra_size: int

    @property
    def size(self) -> int:
        """Size of the shard in bytes. An image may be larger because of its reserve; a copy has exactly this size."""
        return self.tensors_end + self.extra_size


def pack_header(header: Header) -> bytes:
    """Return the body with its checksum, to be stored at `BODY_OFFSET` while the state word is WRITING."""
    stamp = header.stamp.encode()
    body = _BODY.pack(
        LAYOUT_VERSION,
        len(stamp),
        header.sequence,
        header.index_size,
        header.index_crc,
        header.tensors_end,
        header.extra_size,
    )
    return zlib.crc32(body + stamp).to_bytes(4, "little") + body + stamp


BODY_OFFSET = STATE_OFFSET + len(WRITING)


def state_of(page: bytes) -> bytes:
    """Return the state word. Raises IntegrityError if the file is not a shard."""
    if len(page) < PAGE or page[: len(MAGIC)] != MAGIC:
        raise IntegrityError("not a Holdfast shard: the magic number is missing")
    return page[STATE_OFFSET:BODY_OFFSET]


def parse_header(page: bytes) -> Header | None:
    """Return the header, or None if the shard is empty, being written or incomplete.

    Raises IntegrityError if the file is not a shard or its header is damaged, IncompatibleVersion for another layout.
    """
    return parse_body(page) if state_of(page) == COMPLETE else None


def parse_body(page: bytes) -> Header:
    """Return the header of the last *complete* save, also while the next one is being written. Raises as `parse_header`."""
    state_of(page)  # raises IntegrityError if the file is not a shard
    _, _, checksum = _PREFIX.unpack_from(page)
    layout, stamp_size, sequence, index_size, index_crc, tensors_end, extra_size = _BODY.unpack_from(page, _PREFIX.size)
    end = _STAMP_OFFSET + stamp_size
    if end > PAGE or zlib.crc32(page[_PREFIX.size : end]) != checksum:
        raise IntegrityError("the shard's header is damaged: its checksum does not match")
    if layout != LAYOUT_VERSION:
        raise IncompatibleVersion(f"shard of layout {layout}; this release reads layout {LAYOUT_VERSION}")
    if tensors_end < PAGE + index_size or index_size > INDEX_BYTES_MAX:
        raise IntegrityError(f"the shard's header is damaged: {index_size} bytes of index in {tensors_end} bytes")
    stamp = Stamp.decode(page[_STAMP_OFFSET:end])
    return Header(stamp, sequence, index_size, index_crc, tensors_end, extra_size)
