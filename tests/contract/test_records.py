"""Records: what was written stays readable, what is wrong is named, and a big snapshot is cheap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.generations import Placement, ShardKey, ShardRecord
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState
from holdfast.domain.job import CheckpointSpec, HangSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts, Preflight, RunningWorker
from holdfast.domain.orders import Inventory, Order, OrderDone, Prepare, PrepareTemplate, Report, WorkersChanged
from holdfast.domain.runs import ShardRun
from holdfast.supervisor.inbox import InboxEvent
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.protocol import Event, NodeRepaired, NodeReported, Record, Send
from holdfast.supervisor.published import Published
from holdfast.wire import records
from holdfast.wire.columns import MARK, RUNS
from holdfast.wire.records import dumps, entry, loads

DATA = Path(__file__).parent / "data"


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Box:
    by_rank: Mapping[int, str]
    by_name: Mapping[str, ShardKey]
    by_colour: Mapping[Colour, int]
    tags: frozenset[str] = frozenset()
    report: Report | None = None
    limit: float | None = None
    colour: Colour = Colour.RED


FINDING = Finding("f", FindingKind.GPU_ERROR, Severity.FATAL, 1.0, 1.0, "Xid 48 on n1", "n1", "j", 1)
INCIDENT = Incident("i", "j", "gpu_error", "Xid 48 on n1", IncidentState.OPEN, 1)
BOX = Box({10: "b", 9: "a"}, {"y": ShardKey(1, 2, 3), "x": ShardKey(1, 1, 1)}, {Colour.RED: 1}, frozenset("cab"))


# ---------------------------------------------------------------- recorded by an earlier build


@pytest.mark.parametrize(("file", "union"), [("events.jsonl", Event), ("records.jsonl", Record)])
def test_recorded_lines_load_and_write_back_the_same(file: str, union: Any) -> None:
    lines = (DATA / file).read_bytes().splitlines()
    for line in lines:
        value = loads(line, union)
        known = _as_named_now(json.loads(line))
        assert _without_newer(json.loads(dumps(value, union)), known) == known
    assert {json.loads(line)["_"] for line in lines} >= {kind.__name__ for kind in get_args(union)} - NEWER


def _without_newer(again: Any, was: Any) -> Any:
    """`again` without the fields, at any depth, that were added since `was` was recorded; in rows where those were."""
    if isinstance(again, dict) and isinstance(was, list):
        again = _rows(again, again.pop(MARK))
    if isinstance(again, dict) and isinstance(was, dict):
        return {key: _without_newer(value, was[key]) for key, value in again.items() if key in was}
    if isinstance(again, list) and isinstance(was, list) and len(again) == len(was):
        return [_without_newer(one, other) for one, other in zip(again, was, strict=True)]
    return again


def _as_named_now(was: Any) -> Any:
    """The recorded tree without fields that were removed since, and with today's names of those that were renamed."""
    if isinstance(was, dict):
        return {RENAMED.get(key, key): _as_named_now(value) for key, value in was.items() if key not in GONE}
    return [_as_named_now(each) for each in was] if isinstance(was, list) else was


# Fields that nothing read, removed since the recording: old lines load without them.
GONE = {"same_error_max"}
# Fields that have another name since the recording: `records` reads both, and writes the new one.
RENAMED = {
    "ladder": "recommended_actions",
    "took_s": "duration_s",
    "t_fault": "fault_at",
    "t_detected": "detected_at",
    "t_decided": "decided_at",
    "t_prepared": "prepared_at",
    "t_first_step": "first_step_at",
}


def _rows(tree: dict[str, Any], count: int) -> list[dict[str, Any]]:
    columns = {
        name: _rows(column, count) if isinstance(column, dict) else column * (count // len(column))
        for name, column in tree.items()
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(count)]


# Kinds that came after the recording: a new line for them goes to the files, then the name leaves this list.
NEWER: set[str] = {"FindingJudged", "PolicyChangeRequested", "PolicyChanged", "PolicyAsked"}


def test_a_record_from_before_a_field_existed_takes_its_default() -> None:
    old = b'{"_":"NodeReported","at":1,"node":"n","incarnation":"i","seq":2,"report":{"_":"Inventory","job":"j"}}'
    assert loads(old, Event) == NodeReported(1.0, "n", "i", 2, Inventory("j"))


@pytest.mark.parametrize(
    ("kind", "old"),
    [
        (Preflight, {"at": 1.0, "took_s": 0.5}),
        (Finding, {**json.loads(dumps(FINDING, Finding)), "ladder": ["reset_gpu"]}),
        (
            Incident,
            {**json.loads(dumps(INCIDENT, Incident)), "t_fault": 3.0, "t_decided": 4.0, "ladder": ["reset_gpu"]},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "tree"),
)
def test_a_field_is_read_by_its_former_name_alone_in_a_union_and_in_a_container(
    kind: type, old: dict[str, Any]
) -> None:
    now = {RENAMED[name]: value for name, value in old.items() if name in RENAMED}
    raw = json.dumps({name: value for name, value in old.items() if name not in now}).encode()
    alone: Any = loads(raw, kind)
    among: Any = loads(b"[" + raw + b"]", tuple[kind, ...])  # type: ignore[valid-type]
    assert among == (alone,)
    assert {name: json.loads(dumps(alone, kind))[name] for name in now} == now


def test_an_order_is_read_by_its_former_name_and_an_unknown_one_is_refused() -> None:
    launch = {"script": "/train.py"}
    old = json.dumps({"_": "Warm", "job": "j", "launch": launch}).encode()
    order = loads(old, Order)
    assert order == PrepareTemplate("j", LaunchSpec("/train.py"))
    assert json.loads(dumps(order, Order))["_"] == "PrepareTemplate"
    with pytest.raises(MalformedMessage, match="unknown type 'Warmth'"):
        loads(old.replace(b"Warm", b"Warmth"), Order)
    with pytest.raises(MalformedMessage, match="unknown type 'Warm'"):
        loads(old, Report)  # a union without this order


def test_a_record_from_a_newer_release_loses_only_what_is_new() -> None:
    assert loads(b'{"_":"NodeRepaired","at":1,"node":"t","colour":"red"}', Event) == NodeRepaired(1.0, "t")


def test_an_enum_comes_back_as_its_member_not_as_an_equal_string() -> None:
    assert type(loads(b'"red"', Colour)) is Colour
    with pytest.raises(MalformedMessage, match="blue"):
        loads(b'"blue"', Colour)


# ---------------------------------------------------------------- canonical


def test_equal_values_have_equal_bytes() -> None:
    other = Box({9: "a", 10: "b"}, {"x": ShardKey(1, 1, 1), "y": ShardKey(1, 2, 3)}, {Colour.RED: 1}, frozenset("bca"))
    assert other == BOX
    assert dumps(other, Box) == dumps(BOX, Box)
    assert loads(dumps(BOX, Box), Box) == BOX


def test_unions_nested_in_unions_keep_their_types() -> None:
    box = Box({}, {}, {}, report=OrderDone("c-1", ok=True))
    assert loads(dumps(box, Box), Box) == box
    assert json.loads(dumps(box, Box))["report"]["_"] == "OrderDone"


def test_an_enum_comes_back_as_one_and_an_unknown_member_is_refused() -> None:
    loaded = loads(dumps(BOX, Box), Box)
    assert isinstance(loaded.colour, Colour)  # equality would not tell: a StrEnum equals its string
    assert [type(key) for key in loaded.by_colour] == [Colour]
    with pytest.raises(MalformedMessage, match="'blue' is not a valid Colour"):
        loads(b'{"by_rank":{},"by_name":{},"by_colour":{},"colour":"blue"}', Box)


def test_numbers_that_are_not_finite_survive() -> None:
    raw = dumps(NodeRepaired(float("inf"), "t"), Event)
    assert loads(raw, Event).at == float("inf")


def test_an_entry_names_its_type() -> None:
    written = entry("e-1", NodeRepaired(1.0, "t"), Event, traceparent="00-t")
    assert (written.id, written.type, written.traceparent) == ("e-1", "NodeRepaired", "00-t")
    assert loads(written.data, Event) == NodeRepaired(1.0, "t")


# ---------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "an object with a '_' that names its type"),
        (b'{"at":1}', "an object with a '_' that names its type"),
        (b'{"_":"Explode"}', "unknown type 'Explode'; known here: .*TimerFired"),
        (b'{"_":["TimerFired"]}', "unknown type"),
        (b'{"_":"NodeRepaired","at":1}', "the field 'node' is missing"),
        (b'{"_":"NodeRepaired","at":"1","node":"t"}', r"'1' is not a number @ .*\.at"),
        (b'{"_":"NodeRepaired","at":true,"node":"t"}', "True is not a number"),
        (b'{"_":"NodeRepaired","at":1,"node":null}', "None is not a str"),
        (
            b'{"_":"NodeReported","at":1,"node":"n","incarnation":"i","seq":1.5,"report":{"_":"Inventory","job":"j"}}',
            "1.5 is",
        ),
        (
            b'{"_":"NodeReported","at":1,"node":"n","incarnation":"i","seq":1,"report":{"_":"TimerFired"}}',
            "unknown type",
        ),
    ],
)
def test_garbage_is_refused_with_the_field(raw: bytes, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        loads(raw, Event)


@dataclass(frozen=True, slots=True)
class Tray:
    """Every field has a default, so that an empty container would be read as one."""

    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    label: str = ""


@pytest.mark.parametrize(
    "raw", [b'""', b"[]", b"{}x", b"null", b'"label"', b"0", b'{"checkpoint":[]}', b'{"checkpoint":""}']
)
def test_a_dataclass_without_required_fields_is_read_from_an_object_only(raw: bytes) -> None:
    with pytest.raises(MalformedMessage, match=r"is not an object|not JSON"):
        loads(raw, Tray)
    assert loads(b"{}", Tray) == Tray()


@pytest.mark.parametrize("raw", [b'""', b"[]", b"null"])
def test_a_dataclass_with_required_fields_says_the_same(raw: bytes) -> None:
    with pytest.raises(MalformedMessage, match="is not an object"):
        loads(raw, Box)


def test_a_value_that_is_not_of_the_union_is_not_written() -> None:
    with pytest.raises(TypeError, match="Inventory does not belong to"):
        dumps(Inventory("j"), Event)


def test_keys_that_json_cannot_carry_are_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Wrong:
        pairs: Mapping[tuple[str, str], int]

    with pytest.raises(TypeError, match="keys must be str, int or an enum"):
        loads(b'{"pairs":{}}', Wrong)


# ---------------------------------------------------------------- cost


@dataclass(frozen=True, slots=True)
class Picture:
    nodes: Mapping[str, NodeFacts]
    outbox: tuple[Send, ...]
    inventories: Mapping[str, Inventory]


def test_a_snapshot_of_a_thousand_nodes_survives() -> None:
    mesh = Mesh.of({"dp": 125, "pp": 8})
    prepare = Prepare(
        "job", 1, 1, mesh, Placement(0, "n", 0, 8), 1000, LaunchSpec("/train.py"), CheckpointSpec(), HangSpec(), "t", 0
    )
    names = [f"node-{number}" for number in range(1000)]
    picture = Picture(
        {
            name: NodeFacts(name, "i", name, "10.0.0.1", "z", 8, "10.0.0.1:7000", 1, "/var", "/dev/kmsg")
            for name in names
        },
        tuple(Send(name, f"c-{name}", prepare) for name in names),
        {
            name: Inventory("job", tuple(ShardRecord(ShardKey(1, 100, 0), mesh, "memory", 1, "d") for _ in range(2)))
            for name in names
        },
    )
    assert loads(dumps(picture, Picture), Picture) == picture


def test_what_is_prepared_is_not_made_again_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = records._converter(detailed=False)
    monkeypatch.setattr(records, "_FAST", converter)
    monkeypatch.setattr(records, "_prepared", {})
    snapshot.prepare()
    records.prepare(Published, InboxEvent)
    caches = [converter._unstructure_func.dispatch, converter._structure_func.dispatch]
    made = [cache.cache_info().misses for cache in caches]  # type: ignore[attr-defined]
    for kind in records._prepared:
        converter.get_unstructure_hook(kind)
        converter.get_structure_hook(kind)
    assert [cache.cache_info().misses for cache in caches] == made  # type: ignore[attr-defined]
    wait = Action(ActionKind.WAIT, "for a spare")
    dumps(replace(INCIDENT, action=replace(wait, before=(wait,), fallbacks=(wait,))), Incident)
    assert [cache.cache_info().misses for cache in caches] == made  # type: ignore[attr-defined]


# ---------------------------------------------------------------- columns


def as_object(run: list[Any]) -> dict[str, Any]:
    """A run as versions before format 8 wrote it."""
    return dict(zip(ShardRun._fields, run, strict=True))


def test_shards_travel_in_runs_and_columns_and_rows_are_still_read() -> None:
    mesh = Mesh.of({"dp": 8})
    shards = tuple(ShardRecord(ShardKey(7, 50, rank), mesh, "disk", 9, f"d{rank}") for rank in range(8))
    whole = Inventory("job", shards)
    tree = json.loads(dumps(whole, Inventory))
    [run] = map(as_object, tree["shards"][RUNS])
    assert (run["rank"], run["width"], run["sizes"]) == (0, 8, [9])
    assert run["digests"] == "d0,d1,d2,d3,d4,d5,d6,d7"
    assert loads(dumps(whole, Inventory), Inventory) == whole
    assert loads(json.dumps(tree | {"shards": {RUNS: [run]}}).encode(), Inventory) == whole  # of format 7
    columns = {
        "key": {"attempt": [7], "step": [50], "rank": list(range(8))},
        "mesh": [run["mesh"]],
        "tier": ["disk"],
        "size": [9],
        "digest": [f"d{rank}" for rank in range(8)],
    }
    for shards_as in ({MARK: 8, **columns}, _rows(columns, 8)):
        assert loads(json.dumps(tree | {"shards": shards_as}).encode(), Inventory) == whole
    few = Inventory("job", whole.shards[:3])
    assert isinstance(json.loads(dumps(few, Inventory))["shards"], list)
    assert loads(dumps(few, Inventory), Inventory) == few


@pytest.mark.parametrize(
    "change",
    [
        {"width": 7},
        {"width": 9},
        {"sizes": [9, 9]},
        {"sizes": []},
        {"sizes": ["x"]},
        {"digests": "d0"},
        {"rank": True},
        {"rank": None},
        {"digests": None},
        {"mesh": None},
    ],
)
def test_runs_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    shards = tuple(ShardRecord(ShardKey(7, 50, rank), Mesh.of({"dp": 8}), "disk", 9, f"d{rank}") for rank in range(8))
    tree = json.loads(dumps(Inventory("job", shards), Inventory))
    changed = as_object(tree["shards"][RUNS][0]) | change
    for run in (changed, list(changed.values())):
        tree["shards"][RUNS] = [run]
        with pytest.raises(MalformedMessage):
            loads(json.dumps(tree).encode(), Inventory)


def test_what_a_run_has_in_common_with_the_run_before_is_written_once() -> None:
    mesh, digests = Mesh.of({"dp": 32}), [f"d{rank}" for rank in range(8)]
    memory, disk = (
        [ShardRecord(ShardKey(7, 50, rank), mesh, tier, 9, digest) for rank, digest in enumerate(digests)]
        for tier in ("memory", "disk")
    )
    peer = [ShardRecord(ShardKey(7, 50, rank), mesh, "disk", 9, f"p{rank}", root=f"r{rank}") for rank in range(9, 17)]
    other = [ShardRecord(ShardKey(8, 60, 0), Mesh.of({"dp": 2}), "disk", 9, "d")]
    whole = Inventory("job", (*memory, *disk, *peer, *other))
    tree = json.loads(dumps(whole, Inventory))
    first, *rest = map(as_object, tree["shards"][RUNS])
    assert first["mesh"] is not None
    assert [each["mesh"] is None for each in rest] == [True, True, False]
    assert [each["digests"] is None for each in rest] == [True, False, False]
    assert loads(dumps(whole, Inventory), Inventory) == whole
    runs = tree["shards"][RUNS]
    newer = [[*run, "a value of a newer version"] for run in runs]
    assert loads(json.dumps(tree | {"shards": {RUNS: newer}}).encode(), Inventory) == whole
    for place, wrong in (
        (1, runs[1][:6]),
        (1, [*runs[1][:5], None, *runs[1][6:]]),
        (0, [None if value == first["digests"] else value for value in runs[0]]),
    ):
        spoiled = [*runs[:place], wrong, *runs[place + 1 :]]
        with pytest.raises(MalformedMessage):
            loads(json.dumps(tree | {"shards": {RUNS: spoiled}}).encode(), Inventory)


def test_a_column_that_a_newer_release_added_or_an_older_one_lacked() -> None:
    tree = {MARK: 4, "job": ["j"], "generation": [1], "rank": [0, 1, 2, 3], "pid": [5], "colour": ["red"]}
    found = loads(json.dumps({"version": 1, "workers": tree}).encode(), WorkersChanged)
    assert found.workers == tuple(RunningWorker("j", 1, rank, 5) for rank in range(4))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({MARK: 10**12}, "do not have the length"),
        ({MARK: 1}, "do not have the length"),
        ({MARK: "4"}, "do not have the length"),
        ({"pid": [1, 2]}, "pid is not as long"),
        ({"pid": []}, "pid is not as long"),
        ({"pid": 3}, "pid is not as long"),
        ({"pid": None}, "pid"),
        ({"pid": ["x"]}, "'x' is not an int"),
        ({"pid": [1, 2, 3, True]}, "True is not an int"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any], problem: str) -> None:
    tree = {MARK: 4, "job": ["j"], "generation": [1], "rank": [0, 1, 2, 3], "pid": [5]} | change
    with pytest.raises(MalformedMessage, match=problem):
        loads(json.dumps({"version": 1, "workers": tree}).encode(), WorkersChanged)
