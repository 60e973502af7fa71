"""PyTorch's flight recorder (`torch/csrc/distributed/c10d/FlightRecorder.hpp`, versions 2.x) → rows of `domain.collectives`.

A dump comes from a user's process, as JSON from its worker server or as a pickle that NCCL's watchdog has written to disk.
Neither is trusted: pickles are read by an unpickler that rejects all classes, so that no pickle can run code, and input without
the structure of a dump raises `MalformedMessage`.

Contents of a dump (torch 2.13):

* `pg_status` identifies groups by a number that is local to the process; entries contain the name for a number. If no entry is
  left, the groups of `pg_config`, sorted by name, are matched with the sorted numbers, if both have the same count.
* gloo leaves `pg_config` empty, so the members come from the trainer library. It marks operations `retired`, never `completed`,
  and records no point-to-point operations.
* NCCL names both ends of a point-to-point operation, as ranks within the group: `nccl:recv 3<-0`.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from holdfast.domain.collectives import RANKS_MAX, CollectiveRows, compact, expand
from holdfast.domain.errors import MalformedMessage
from holdfast.wire.pickle_cost import HashCost

DUMP_BYTES_MAX = 64 << 20
OPCODES_MAX = 4_000_000  # of a pickle; 2,000 entries of a recorder have about 200,000
HASH_COST_MAX = 10 * OPCODES_MAX  # half a second
GROUPS_MAX = 256  # of one rank
TENSORS_MAX = 8  # of one operation, and dimensions of one tensor
COUNT_MAX = 2**62
PEERS_MAX = 64  # point-to-point rows of one rank and group
NAME_CHARS_MAX = 100
SIZES_CHARS_MAX = 120

_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_VERSION = re.compile(r"2\.\d+")


@dataclass(slots=True)
class _Group:
    """One process group in one rank's dump."""

    entered: int = -1
    pending: int = -1
    kind: str = ""
    sizes: str = ""
    peers: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)  # (direction, rank in group) → oldest


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and text. Rejects every class and function, and every instruction that would call one."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it needs {module}.{name}; a dump holds plain values only")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


def parse_pickle(raw: bytes) -> Mapping[str, Any]:
    """Return the dump in a pickle. Raises `MalformedMessage` for invalid bytes, and for a pickle that tries to run code."""
    _check_length(raw)
    try:
        _check_opcodes(raw)
        return _check_dump(_Plain(io.BytesIO(raw)).load())
    except MalformedMessage:
        raise
    except Exception as error:  # invalid bytes can cause any exception in the unpickler
        raise MalformedMessage("flight recorder", f"not a plain pickle: {error}") from error


def parse_json(raw: bytes) -> Mapping[str, Any]:
    """Return the dump in a JSON text. Raises `MalformedMessage` for invalid text."""
    _check_length(raw)
    try:
        return _check_dump(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise MalformedMessage("flight recorder", f"not JSON: {error}") from error


def rows_of(dumps: Iterable[tuple[int, Mapping[str, Any]]], known: Mapping[str, str] | None = None) -> CollectiveRows:
    """Return the rows of some ranks' dumps, given as (rank, dump). `known` has the members by group name, in the form of
    `compact`, for groups without members in the dump. Raises `MalformedMessage` that names the rank of an invalid dump."""
    table = _Table()
    for rank, dump in dumps:
        try:
            _add(table, rank, dump, known or {})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise MalformedMessage(f"flight recorder of rank {rank}", f"{type(error).__name__}: {error}") from error
    return CollectiveRows(**{name: tuple(column) for name, column in table.columns.items()})


def entered_total(dump: Mapping[str, Any]) -> int:
    """Return the number of operations that all groups of one rank have entered together. Only its changes are meaningful: they
    show that the rank makes progress. Raises `MalformedMessage`."""
    try:
        return sum(max(0, _number(counters["last_enqueued_collective"])) for counters in dump["pg_status"].values())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage("flight recorder", f"pg_status: {type(error).__name__}: {error}") from error


def records_messages(dump: Mapping[str, Any]) -> bool:
    """Whether the dump contains point-to-point operations: gloo, which has no version of its own, does not record them."""
    return bool(dump.get("nccl_version") or dump.get("comm_lib_version"))


class _Table:
    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {each.name: [] for each in fields(CollectiveRows)}

    def add(self, **row: Any) -> None:
        for name, value in row.items():
            self.columns[name].append(value)


def _check_length(raw: bytes) -> None:
    if len(raw) > DUMP_BYTES_MAX:
        raise MalformedMessage("flight recorder", f"{len(raw)} bytes; at most {DUMP_BYTES_MAX}")


def _check_opcodes(raw: bytes) -> None:
    """Reject pickles with too many operations, with values that take too long to hash, or with gaps in the memo's numbers. The
    unpickler allocates its memo up to the largest number, which nine bytes can set to two billion; picklers number from 0 on
    without gaps."""
    cost = HashCost(HASH_COST_MAX)
    for number, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
        if number > OPCODES_MAX:
            raise MalformedMessage("flight recorder", f"a pickle of more than {OPCODES_MAX} operations")
        if opcode.name in _MEMO and not (isinstance(argument, int) and 0 <= argument <= number):
            raise MalformedMessage("flight recorder", f"{opcode.name} {argument} as operation {number} of a pickle")
        cost.follow(opcode, argument)


def _check_dump(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not {"version", "pg_config", "pg_status"} <= value.keys():
        raise MalformedMessage("flight recorder", "not a dump: no version, pg_config and pg_status")
    if not _VERSION.fullmatch(str(value["version"])):
        raise MalformedMessage("flight recorder", f"version {str(value['version'])[:20]!r}; only 2.x is supported")
    return value


def _add(table: _Table, rank: int, dump: Mapping[str, Any], known: Mapping[str, str]) -> None:
    groups, names = _entries(dump.get("entries", ()))
    complete = _count(groups, names, dump)
    config = {_text(name): _members(each["ranks"]) for name, each in dump["pg_config"].items()}
    members = {**known, **{name: ranks for name, ranks in config.items() if ranks}}
    for name in sorted(groups.keys() | members.keys())[:GROUPS_MAX]:
        # The recorder counts for a group from its first operation on. If every count has a group, other groups have none yet.
        group = groups.get(name) or _Group(entered=0 if complete else -1)
        text = members.get(name, "")
        row = {"rank": rank, "group": name[:NAME_CHARS_MAX], "members": text}
        table.add(**row, kind=group.kind, sizes=group.sizes, peer=-1, entered=group.entered, pending=group.pending)
        ranks = expand(text) if group.peers else ()
        for (direction, within), (seq, sizes) in sorted(group.peers.items())[:PEERS_MAX]:
            if within < len(ranks):
                table.add(**row, kind=direction, sizes=sizes, peer=ranks[within], entered=-1, pending=seq)


def _entries(entries: Iterable[Mapping[str, Any]]) -> tuple[dict[str, _Group], dict[str, str]]:
    """Return groups by name from the recorded operations, and names by the process's own numbers."""
    groups: dict[str, _Group] = {}
    names: dict[str, str] = {}
    for entry in entries:
        name, operation = _text(entry["process_group"][0]), _text(entry["profiling_name"])
        operation = operation.partition(":")[2] or operation
        names[str(_number(entry["pg_id"]))] = name
        group = groups.setdefault(name, _Group())
        finished = entry["retired"] is True or entry["state"] == "completed"
        if entry["is_p2p"] is True:
            if not finished and (found := _P2P.fullmatch(operation)) is not None:
                seq = _number(entry["p2p_seq_id"])
                group.peers.setdefault((found[1], int(found[3])), (seq, _sizes(entry)))
            continue
        seq = _number(entry["collective_seq_id"])
        group.entered = max(group.entered, seq)
        if not finished and (group.pending < 0 or seq < group.pending):
            group.pending, group.kind, group.sizes = seq, operation[:NAME_CHARS_MAX], _sizes(entry)
    return groups, names


def _count(groups: dict[str, _Group], names: dict[str, str], dump: Mapping[str, Any]) -> bool:
    """Add the groups of which no operation is left in the recorder, from the counters.

    NCCL counts point-to-point operations in the same counters, so the counters of a group with recorded entries are not used.
    Returns False if a counter belongs to no known group.
    """
    status, config = dump["pg_status"], dump["pg_config"].keys() - {""}  # gloo's has one group without name and ranks
    if len(status) == len(config):
        in_order = dict(zip(sorted(status, key=int), sorted(config, key=_by_number), strict=True))
        if all(in_order.get(number) == name for number, name in names.items()):
            names = in_order
    for number, counters in status.items():
        name = names.get(str(number))
        if name is not None and name not in groups:
            groups[name] = _Group(entered=_number(counters["last_enqueued_collective"]))
    return all(str(number) in names for number in status)


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), name) if name.isdecimal() else (COUNT_MAX, name)


def _members(ranks: object) -> str:
    listed = json.loads(ranks) if isinstance(ranks, str) else ranks
    if not isinstance(listed, list) or len(listed) > RANKS_MAX:
        raise ValueError(f"{reprlib.repr(ranks)} is not a list of ranks")
    return compact([_number(rank) for rank in listed])


# A pickle can nest one list in another a thousand times, so no part of it is printed before its size is checked.


def _sizes(entry: Mapping[str, Any]) -> str:
    """Return the types and shapes of the inputs as one text."""
    types, shapes = entry["input_dtypes"], entry["input_sizes"]
    if not isinstance(types, list) or not isinstance(shapes, list) or len(types) != len(shapes):
        raise TypeError("input_dtypes and input_sizes are not lists of the same length")
    parts = []
    for kind, shape in zip(types[:TENSORS_MAX], shapes[:TENSORS_MAX], strict=True):
        parts.append(f"{_text(kind)}[{','.join(str(_number(size)) for size in shape[:TENSORS_MAX])}]")
    return " ".join(parts)[:SIZES_CHARS_MAX]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text was expected")
    return value


def _number(value: object) -> int:
    """Return a count of the dump. In JSON, the counters of groups are text."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{type(value).__name__} where a number was expected")
    number = int(value)
    if not -1 <= number <= COUNT_MAX:
        raise ValueError(f"{number} is not a count")
    return number
