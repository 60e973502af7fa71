"""The protocol's shape as JSON: every field's number and type, every enum's values, every method; kept in `contract/data`.

`python tests/proto_shape.py` records the present shape after an addition. What was recorded once stays readable: fields are
never removed, renumbered or retyped, so that agents and supervisors of different releases understand each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor, FileDescriptor

from holdfast.v1 import control_pb2, enrolment_pb2, events_pb2, replicator_pb2, telemetry_pb2, types_pb2

BASELINE = Path(__file__).parent / "contract" / "data" / "v1.json"
FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (types_pb2, control_pb2, telemetry_pb2, events_pb2, replicator_pb2, enrolment_pb2)
)

Shape = dict[str, dict[str, Any]]


def shape() -> Shape:
    """`{"holdfast.v1.Tick": {"seq": "3 uint64", …}, …}`: one entry per message, enum and service."""
    found: Shape = {}
    for file in FILES:
        for message in file.message_types_by_name.values():
            found[message.full_name] = {field.name: _field(field) for field in message.fields}
        for enum in file.enum_types_by_name.values():
            found[enum.full_name] = _enum(enum)
        for service in file.services_by_name.values():
            found[service.full_name] = {
                method.name: f"{_stream(method.client_streaming)}{method.input_type.full_name} → "
                f"{_stream(method.server_streaming)}{method.output_type.full_name}"
                for method in service.methods
            }
    return found


def lost(old: Shape, new: Shape) -> list[str]:
    """What a peer that was built from `old` would miss or misread in `new`."""
    problems = []
    for name, parts in old.items():
        for part, meaning in parts.items():
            now = new.get(name, {}).get(part, "gone")
            if now != meaning:
                problems.append(f"{name}.{part} was {meaning}, is {now}")
    return problems


def _field(field: FieldDescriptor) -> str:
    kinds = {
        number: name.removeprefix("TYPE_").lower()
        for name, number in vars(FieldDescriptor).items()
        if name.startswith("TYPE_")
    }
    kind = kinds[field.type]
    if field.message_type:
        kind = field.message_type.full_name
    if field.enum_type:
        kind = field.enum_type.full_name
    inside = f" in {field.containing_oneof.name}" if field.containing_oneof else ""
    return f"{field.number} {'repeated ' if field.is_repeated else ''}{kind}{inside}"


def _enum(enum: EnumDescriptor) -> dict[str, Any]:
    return {value.name: value.number for value in enum.values}


def _stream(streaming: bool) -> str:
    return "stream " if streaming else ""


if __name__ == "__main__":
    problems = lost(json.loads(BASELINE.read_text()), shape()) if BASELINE.exists() else []
    if problems:
        raise SystemExit("not recorded, this would break peers of older releases:\n" + "\n".join(problems))
    BASELINE.write_text(json.dumps(shape(), indent=1, ensure_ascii=False) + "\n")
