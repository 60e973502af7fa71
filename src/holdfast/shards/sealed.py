"""Self-verifying JSON: canonical, with its own checksum, a name and a schema number.

A flipped digit in a manifest must not name another step, so a document is accepted only with the checksum of exactly its
fields."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IncompatibleVersion, IntegrityError, InvalidSpec

# What reading JSON of an unknown writer into values can raise: a number of 5,000 digits, a list where a name should be.
UNDECODABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, InvalidSpec)


def seal(member: str, fields: Mapping[str, Any]) -> bytes:
    """One line: `{"<member>": fields, "self": checksum}`. Equal fields make equal bytes."""
    raw = _canonical(fields)
    return b'{"' + member.encode() + b'":' + raw + b',"self":' + str(zlib.crc32(raw)).encode() + b"}\n"


def unseal(member: str, raw: bytes, *, schema: int, what: str) -> dict[str, Any]:
    """The fields, as plain JSON values.

    Raises IntegrityError for anything that `seal` did not write, IncompatibleVersion for another schema. `what` is how the
    errors call it.
    """
    try:
        envelope: Any = json.loads(raw)
        fields: dict[str, Any] = envelope[member]
        if zlib.crc32(_canonical(fields)) != envelope["self"]:
            raise IntegrityError(f"the {what} is damaged: its own checksum does not match")
        found = fields["schema"]
    except UNDECODABLE as error:
        raise IntegrityError(f"not a {what}: {error!r}") from error
    if found != schema:
        raise IncompatibleVersion(f"{what} of schema {found}; this release reads {schema}")
    return fields


def lineage_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`mesh` and `parent` as the values that manifests hold. Raises one of `UNDECODABLE`."""
    parent = fields["parent"]
    return {
        "mesh": tuple((str(name), int(size)) for name, size in fields["mesh"]),
        "parent": None if parent is None else CheckpointId(int(parent[0]), int(parent[1])),
    }


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
