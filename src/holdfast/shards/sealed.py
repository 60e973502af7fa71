"""Self-verifying JSON: canonical, with its own checksum, a name and a schema number.

A flipped digit in a manifest must not name another step, so a document is accepted only with the checksum of exactly its
fields.

A document may have *attached* texts next to its fields. Older releases ignore them, and newer releases accept documents without
them. So a value can be added without a new schema number."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IncompatibleVersion, IntegrityError, InvalidSpec

# Exceptions of converting JSON of an unknown writer: for example, a number of 5,000 digits, or a list instead of a name.
UNDECODABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, InvalidSpec)

DIMENSIONS_MAX = 64
WORLD_SIZE_MAX = 10**9
NUMBER_MAX = 10**15 - 1  # largest attempt or step


def seal(member: str, fields: Mapping[str, Any], attached: Mapping[str, str] | None = None) -> bytes:
    """Return one line: `{"<member>": fields, "self": checksum, "<name>": [text, checksum], …}`. Equal values result in equal
    bytes."""
    raw = _canonical(fields)
    others = "".join(
        f',"{name}":{json.dumps([text, zlib.crc32(text.encode())], separators=(",", ":"))}'
        for name, text in sorted((attached or {}).items())
    )
    return (
        b'{"' + member.encode() + b'":' + raw + b',"self":' + str(zlib.crc32(raw)).encode() + others.encode() + b"}\n"
    )


def unseal(member: str, raw: bytes, *, schema: int, what: str) -> dict[str, Any]:
    """Return the fields as plain JSON values.

    Raises IntegrityError if `seal` did not write the bytes, IncompatibleVersion for another schema. `what`: name of the
    document in error messages.
    """
    return unseal_attached(member, raw, schema=schema, what=what, name="")[0]


def unseal_attached(member: str, raw: bytes, *, schema: int, what: str, name: str) -> tuple[dict[str, Any], str]:
    """As `unseal`. Also returns the attached text `name`; "" if the document has none."""
    try:
        envelope: Any = json.loads(raw)
        fields: dict[str, Any] = envelope[member]
        if zlib.crc32(_canonical(fields)) != envelope["self"]:
            raise IntegrityError(f"the {what} is damaged: its own checksum does not match")
        found = fields["schema"]
        text, own = envelope.get(name, ("", 0))
        if zlib.crc32(text.encode()) != own:
            raise IntegrityError(f"the {what} is damaged: the checksum of {name!r} does not match")
    except UNDECODABLE as error:
        raise IntegrityError(f"not a {what}: {error!r}") from error
    if found != schema:
        raise IncompatibleVersion(f"{what} of schema {found}; this release reads {schema}")
    return fields, text


def lineage_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mesh` and `parent` as the values in manifests. Raises one of `UNDECODABLE`, also for values that are too large
    for a message."""
    given = fields["parent"]
    mesh = tuple((str(name), int(size)) for name, size in fields["mesh"])
    parent = None if given is None else CheckpointId(int(given[0]), int(given[1]))
    _require_mesh(mesh)
    if parent is not None and not all(0 <= number <= NUMBER_MAX for number in parent):
        raise ValueError("the parent's attempt or step is out of range")
    return {"mesh": mesh, "parent": parent}


def _require_mesh(dims: tuple[tuple[str, int], ...]) -> None:
    if len(dims) > DIMENSIONS_MAX:
        raise ValueError(f"{len(dims)} dimensions in the mesh; at most {DIMENSIONS_MAX}")
    if not all(1 <= size <= WORLD_SIZE_MAX for _, size in dims) or math.prod(size for _, size in dims) > WORLD_SIZE_MAX:
        raise ValueError(f"the mesh does not have between 1 and {WORLD_SIZE_MAX} ranks")
    for name, _ in dims:
        name.encode()  # a lone surrogate, which JSON can contain, raises UnicodeEncodeError


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
