"""Dumps of the flight recorder: read as plain values, refused whole when they are anything else."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from holdfast.diagnostics import flight_dumps
from holdfast.diagnostics.detectors.waiting import Standing
from holdfast.domain.collectives import compact, expand
from holdfast.domain.errors import MalformedMessage, NotFound
from holdfast.wire.flight_recorder import entered_total, parse_json, parse_pickle, rows_of

RECORDED = Path(__file__).parents[2] / "data" / "flight_recorder"


def entry(
    seq: int, *, group: str = "1", kind: str = "gloo:all_reduce", retired: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "pg_id": 0, "process_group": [group, "undefined"], "collective_seq_id": seq, "p2p_seq_id": 0,
        "profiling_name": kind, "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "state": "scheduled",
        "retired": retired, "is_p2p": False,
    } | more  # fmt: skip


def dump(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    status = {"0": {"last_enqueued_collective": "7", "last_started_collective": "-1", "last_completed_collective": "6"}}
    return {"version": "2.10", "pg_config": {}, "pg_status": status, "entries": list(entries)} | more


def test_rows_of_gloo_take_members_from_the_trainer() -> None:
    raw = json.dumps(dump(entry(6, retired=True), entry(7), entry(8))).encode()
    rows = rows_of([(3, parse_json(raw))], {"1": "0-3"})
    assert (rows.rank, rows.group, rows.members) == ((3,), ("1",), ("0-3",))
    assert (rows.kind, rows.sizes, rows.entered, rows.pending) == (("all_reduce",), ("Float[4,2]",), (8,), (7,))


def test_point_to_point_rows_name_global_ranks() -> None:
    config = {"9": {"name": "9", "desc": "pp", "ranks": "[2, 6, 10]"}}
    receive = entry(1, group="9", kind="nccl:recv 0<-2", is_p2p=True, p2p_seq_id=5)
    rows = rows_of([(2, dump(receive, pg_config=config))])
    assert list(zip(rows.kind, rows.peer, rows.pending, strict=True)) == [("", -1, -1), ("recv", 10, 5)]


def test_a_group_without_entries_counts_by_its_place() -> None:
    status = {number: {"last_enqueued_collective": count} for number, count in (("0", 3), ("4", 88))}
    config = {name: {"ranks": "[0, 1]"} for name in ("0", "35")}
    rows = rows_of([(0, dump(pg_status=status, pg_config=config))])
    assert dict(zip(rows.group, rows.entered, strict=True)) == {"0": 3, "35": 88}
    contradicted = dump(entry(1, group="0", pg_id=4), pg_status=status, pg_config=config)
    known = rows_of([(0, contradicted)])
    assert dict(zip(known.group, known.entered, strict=True)) == {"0": 1, "35": -1}


def test_a_group_that_was_never_used_has_entered_nothing() -> None:
    rows = rows_of([(0, dump(entry(7)))], {"1": "0-1", "2": "0-3"})
    assert dict(zip(rows.group, rows.entered, strict=True)) == {"1": 7, "2": 0}


@pytest.mark.parametrize(
    ("case", "standing", "ranks"),
    [("gpu_error_1st", Standing.STALLED, (12, 14)), ("lock_gil_1st", Standing.ABSENT, (9, 14))],
)
def test_recorded_hangs(case: str, standing: Standing, ranks: tuple[int, ...]) -> None:
    dumps = flight_dumps.read(RECORDED / case)
    verdict = dumps.diagnosis()
    assert verdict is not None
    assert (len(dumps.ranks), verdict.standing, verdict.ranks) == (16, standing, ranks)
    assert f"rank {ranks[0]}: " in flight_dumps.describe(dumps)


def test_a_dump_that_is_missing_names_nobody(tmp_path: Path) -> None:
    for path in (RECORDED / "lock_gil_1st").glob("_dump_*"):
        if path.name not in ("_dump_9", "_dump_14"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    verdict = flight_dumps.read(tmp_path).diagnosis()
    assert verdict is not None
    assert (verdict.standing, verdict.ranks, verdict.among) == (Standing.UNREACHABLE, (), (9, 14))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_that_wants_to_run_code_is_rejected_and_counted(tmp_path: Path) -> None:
    good = dump(entry(7))
    (tmp_path / "dump_0").write_bytes(pickle.dumps(good))
    (tmp_path / "dump_1").write_bytes(pickle.dumps({**good, "entries": [Bomb(tmp_path / "ran")]}))
    (tmp_path / "dump_2").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    (tmp_path / "dump_3").write_bytes(pickle.dumps([1, 2]))
    (tmp_path / "README.md").write_text("no dump")
    dumps = flight_dumps.read(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert dumps.ranks == (0,)
    assert [name for name, _ in dumps.rejected] == ["dump_1", "dump_2", "dump_3"]
    assert "posix.mkdir" in dumps.rejected[0][1]


@pytest.mark.parametrize(
    "raw",
    [b"\x80\x02Nr\xff\xff\xff\x3f.", b"Np1000000000\n.", b"\x80\x04N" + b"]q\x01" * 3 + b"."],
    ids=["nine bytes", "as text", "a gap"],
)
def test_a_pickle_whose_memo_would_take_gigabytes_is_refused(raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedMessage):
        parse_pickle(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_dump_of_any_pickle_protocol_is_read(protocol: int) -> None:
    good = dump(*(entry(number) for number in range(300)))
    assert parse_pickle(pickle.dumps(good, protocol)) == good


def test_a_directory_without_dumps_says_so(tmp_path: Path) -> None:
    (tmp_path / "dump_0").write_bytes(b"\x80garbage")
    with pytest.raises(NotFound, match="dump_0"):
        flight_dumps.read(tmp_path)


def read(raw: bytes) -> None:
    loaded = parse_pickle(raw)
    entered_total(loaded)
    rows_of([(0, loaded)])


def deep(levels: int) -> list[Any]:
    nested: list[Any] = [1]
    for _ in range(levels):
        nested = [nested, nested, nested, nested]
    return nested


@pytest.mark.parametrize(
    "broken",
    [
        {"version": "9.0"},
        {"pg_status": None},
        {"pg_status": {"0": {}}},
        {"pg_status": {"0": {"last_enqueued_collective": 10**30}}},
        {"pg_status": {"x": {"last_enqueued_collective": 1}}, "pg_config": {"0": {"ranks": "[0]"}}},
        {"pg_config": {"0": {"ranks": "0 1"}}},
        {"pg_config": {"0": {"ranks": [-5]}}},
        {"entries": 7},
        {"entries": [{}]},
        {"entries": [entry(-7)]},
        {"entries": [entry(1, process_group=None)]},
        {"entries": [entry(1, profiling_name=deep(60))]},
        {"entries": [entry(1, input_sizes=[deep(60)])]},
    ],
    ids=range(13),
)
def test_what_is_no_dump_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        read(pickle.dumps(dump() | broken))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"{}", b"[" * 100_000])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_json(raw)


@pytest.mark.parametrize("ranks", [(), (5,), (0, 1, 2, 3), (0, 8, 16), (3, 1, 2), (0, 1, 4, 5, 8, 9), (7, 7)])
def test_runs_of_ranks(ranks: tuple[int, ...]) -> None:
    assert expand(compact(ranks)) == ranks


@pytest.mark.parametrize("text", ["x", "1-", "-3", "0-9999999", "1,,2", "0-999999,0-999999"])
def test_what_is_no_run_of_ranks(text: str) -> None:
    with pytest.raises(ValueError, match="rank"):
        expand(text)
