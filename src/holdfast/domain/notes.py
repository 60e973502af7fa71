"""Notes: the messages that a worker sends to its agent. Standard library only, because this module runs in the user's process.

`encode` creates a datagram (`domain.worker` describes the channel), `parse` reads it. A worker can write anything to the
socket. `parse` rejects malformed messages, so that no NaN time or negative step reaches a detector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from holdfast.domain import worker
from holdfast.domain.collectives import check_members
from holdfast.domain.signals import Phase

INTEGER_MAX = 2**63 - 1
PHASES_MAX = 16
DIGEST_CHARS_MAX = 64
NAME_CHARS_MAX = 256
PATH_CHARS_MAX = 4096
GROUPS_MAX = 256  # process groups of one rank
OBSERVED_STEPS_MAX = 1 << 20  # of one block


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a note, as the note itself states it."""

    job: str
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class StepNote:
    """A finished step."""

    sender: Sender
    step: int
    started_at: float
    ended_at: float
    data_s: float
    stall_s: float
    tokens: int
    loss: float  # NaN = not reported, +inf = reported as NaN
    grad_norm: float
    comm_wait_s: float = math.nan  # NaN = not measured
    local_grad_norm: float = math.nan  # as grad_norm
    ended_uptime_s: float = 0.0  # `ended_at` by the monotonic clock; 0.0 = not known
    flops: float = 0.0  # of this rank; 0.0 = not reported


@dataclass(frozen=True, slots=True)
class ObservedStepsNote:
    """A block of optimizer steps of a script that reports no steps."""

    sender: Sender
    step: int  # optimizer steps begun by this process up to the end of the block
    steps: int  # number of steps in the block
    started_at: float
    ended_at: float
    comm_wait_s: float  # in the whole block; NaN = not measured


@dataclass(frozen=True, slots=True)
class ReplicaCheckNote:
    """A checksum of the parameters that other replicas have as well; empty if there are none."""

    sender: Sender
    step: int
    digest: str
    duration_s: float
    restored: bool


@dataclass(frozen=True, slots=True)
class PhaseNote:
    """The phase that the worker has entered."""

    sender: Sender
    phase: Phase
    at: float
    step: int


@dataclass(frozen=True, slots=True)
class StartedNote:
    """Duration of each part of the start: process group, build, restore, first step. Sent when the first step is finished."""

    sender: Sender
    phases_s: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class SavedNote:
    """A save is complete in this node's memory. Also sent to the replicator."""

    sender: Sender
    step: int
    attempt: int = 0
    image: str = ""  # path
    stall_s: float = 0.0  # how long the save blocked training


@dataclass(frozen=True, slots=True)
class MissedNote:
    """A save that was due did not happen. Also sent to the replicator."""

    sender: Sender
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsNote:
    """The ranks of each process group."""

    sender: Sender
    members: tuple[tuple[str, str], ...]  # (name of the group, its ranks as in `domain.collectives.compact`)


Note = StepNote | PhaseNote | StartedNote | SavedNote | MissedNote | GroupsNote | ReplicaCheckNote | ObservedStepsNote

_KINDS: Mapping[type, str] = {
    StepNote: "step",
    PhaseNote: "phase",
    StartedNote: "started",
    SavedNote: "saved",
    MissedNote: "missed",
    GroupsNote: "groups",
    ReplicaCheckNote: "replica_check",
    ObservedStepsNote: "observed_steps",
}
_FIELDS = {kind: [each.name for each in fields(kind) if each.name != "sender"] for kind in _KINDS}
_ON_WIRE = {"duration_s": "took_s"}  # fields with another name in datagrams, which other versions send and read
_MAPPINGS = {kind: {"phases_s", "members"} & {*names} for kind, names in _FIELDS.items()}
_NUMBERS = {"loss", "grad_norm", "local_grad_norm", "comm_wait_s"}  # NaN = None
_OPTIONAL = {kind: _NUMBERS & {*names} for kind, names in _FIELDS.items()}


def reported(value: float | None) -> float:
    """Return an optional number in the form that notes use: NaN if it is absent, +inf if it is itself NaN."""
    return math.nan if value is None else math.inf if math.isnan(value) else float(value)


def encode(note: Note) -> bytes:
    """Encode the note as one datagram. Raises ValueError if it does not fit into a datagram."""
    kind = type(note)
    values = {_ON_WIRE.get(name, name): getattr(note, name) for name in _FIELDS[kind]}
    for name in _MAPPINGS[kind]:
        values[name] = dict(values[name])
    for name in _OPTIONAL[kind]:
        if math.isnan(values[name]):
            values[name] = None
    sender = note.sender
    return worker.encode(_KINDS[kind], job=sender.job, generation=sender.generation, rank=sender.rank, **values)


def parse(raw: bytes) -> Note | None:
    """Return the note; None if the datagram is malformed, incomplete or of an unknown kind."""
    message = worker.decode(raw)
    try:
        sender = Sender(str(message["job"]), _integer(message, "generation"), _integer(message, "rank"))
        match message["type"]:
            case "step":
                return StepNote(
                    sender=sender,
                    step=_integer(message, "step"),
                    started_at=_finite(message, "started_at"),
                    ended_at=_finite(message, "ended_at"),
                    data_s=_finite(message, "data_s"),
                    stall_s=_finite(message, "stall_s"),
                    tokens=_integer(message, "tokens"),
                    loss=_reported(message, "loss"),
                    grad_norm=_reported(message, "grad_norm"),
                    comm_wait_s=math.nan if message.get("comm_wait_s") is None else _finite(message, "comm_wait_s"),
                    local_grad_norm=_reported(message, "local_grad_norm"),
                    ended_uptime_s=_number(message.get("ended_uptime_s", 0.0)),
                    flops=_number(message.get("flops", 0.0)),
                )
            case "replica_check":
                return ReplicaCheckNote(
                    sender=sender,
                    step=_integer(message, "step"),
                    digest=_text(message["digest"], DIGEST_CHARS_MAX),
                    duration_s=_finite(message, "took_s"),
                    restored=message["restored"] is True,
                )
            case "observed_steps":
                started_at, ended_at = _finite(message, "started_at"), _finite(message, "ended_at")
                steps = _integer(message, "steps")
                if not (0 < steps <= OBSERVED_STEPS_MAX and started_at <= ended_at):
                    return None
                waited_s = math.nan if message.get("comm_wait_s") is None else _finite(message, "comm_wait_s")
                return ObservedStepsNote(sender, _integer(message, "step"), steps, started_at, ended_at, waited_s)
            case "phase":
                return PhaseNote(sender, Phase(message["phase"]), _finite(message, "at"), _integer(message, "step"))
            case "started":
                phases = list(message["phases_s"].items())[:PHASES_MAX]
                return StartedNote(sender, tuple((_text(name), _number(seconds)) for name, seconds in phases))
            case "saved":
                attempt = _integer({"attempt": 0, **message}, "attempt")
                image = _text(message.get("image", ""), PATH_CHARS_MAX)
                return SavedNote(
                    sender, _integer(message, "step"), attempt, image, _number(message.get("stall_s", 0.0))
                )
            case "missed":
                return MissedNote(sender, _integer(message, "step"), _text(message["reason"]))
            case "groups":
                return GroupsNote(sender, _groups(message["members"]))
            case _:
                return None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _text(value: object, chars_max: int = NAME_CHARS_MAX) -> str:
    """Return the value as text that can be sent. JSON may contain half of a surrogate pair, a message must not."""
    return str(value)[:chars_max].encode(errors="replace").decode()


def _groups(members: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Check the members here, so that no detector expands a text that is malformed or stands for too many ranks."""
    groups = list(members.items())[:GROUPS_MAX]
    for _, text in groups:
        if not isinstance(text, str):
            raise TypeError(f"members as text, not {text!r}")
    check_members(text for _, text in groups)
    return tuple((_text(name), text) for name, text in groups)


def _integer(message: Mapping[str, Any], name: str) -> int:
    value = message[name]
    if type(value) is not int or not 0 <= value <= INTEGER_MAX:
        raise ValueError(name)
    return value


def _finite(message: Mapping[str, Any], name: str) -> float:
    return _number(message[name])


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ValueError(value)
    return float(value)  # type: ignore[arg-type]


def _reported(message: Mapping[str, Any], name: str) -> float:
    """Return NaN for an absent value, and +inf for a NaN that the worker has reported, to distinguish the two."""
    value = message.get(name)
    if value is not None and type(value) not in (int, float):
        raise ValueError(name)
    return reported(value)
