"""What an agent reads that others write: none of it, however it is broken, ends a collector, hides the line after it, or
becomes a signal that cannot be sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until_async

from holdfast.agent.collectors.host import blocked_tasks
from holdfast.agent.collectors.infiniband import Ports
from holdfast.agent.collectors.kernel_lines import is_garbled, parse_record, recognise
from holdfast.agent.collectors.kernel_log import KernelLog, gpu_of
from holdfast.agent.collectors.maintenance import parse as parse_notice
from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.agent.collectors.nvrx import NvrxCollector
from holdfast.agent.workers.errors import read_error_file
from holdfast.domain import notes
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.signals import KernelLine, NodeSignal, Tick, WorkerExited
from holdfast.wire.flight_recorder import parse_json
from holdfast.wire.telemetry import encode_tick

XID = "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."
DIGITS = "9" * 5000
HOSTILE = [
    f"{DIGITS},1,1,-;{XID}",
    f"3,{DIGITS},55123,-;words",
    f"3,812,{DIGITS},-;words",
    f"NVRM: Xid (PCI:0000:18:00): {DIGITS}, words",
    f"NVRM: Xid (PCI:{'0' * 5000}): 79, words",
    "NVRM: Xid (PCI:0000:18:00 " + "(" * 5000,
    "3,1,1," + "-" * 100_000 + ";words",
    "\x00" * 5000,
    "\ufffd" * 5000,
    "a" * (1 << 20),
    "NVRM: " + "fallen off " * 10_000,
    "٣,٣,٣,-;words",
    "-1,-1,-1,-;words",
    "1e9,inf,nan,-;words",
    ",,,;",
    "",
]


@pytest.mark.parametrize("line", HOSTILE, ids=[line[:24] for line in HOSTILE])
def test_no_line_is_too_much(line: str) -> None:
    record = parse_record(line)
    recognise(record.text)
    is_garbled(record.text)
    assert record.sequence is None or record.sequence < 10**20


def test_a_number_beyond_any_is_counted_as_unreadable() -> None:
    assert is_garbled(parse_record(f"3,{DIGITS},1,-;{XID}").text) is False
    assert is_garbled(parse_record(f"{DIGITS},1,1,-;{XID}").text)


@pytest.mark.anyio
async def test_the_xid_after_hostile_lines_is_seen(tmp_path: Path) -> None:
    path, seen = tmp_path / "kernel.log", list[NodeSignal]()
    path.touch()
    collector = KernelLog("node-0", path, tmp_path / "position.json")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, seen.append)
        await wait_until_async((tmp_path / "position.json").exists, description="the log to be followed")
        with path.open("ab") as log:
            for line in HOSTILE:
                log.write(line.encode() + b"\n")
            log.write(b"\xff\xfe\x00 invalid\n" + b"b" * (3 << 20) + b"\n")
            log.write(f"6,900,1,-;{XID.replace('79', '48')}\n".encode())

        def last() -> bool:
            return any(isinstance(signal, KernelLine) and signal.xid == 48 for signal in seen)

        await wait_until_async(last, description="the Xid behind them")
        tasks.cancel_scope.cancel()
    assert collector.garbled >= 4
    encode_tick(Tick("node-0", "i", 1, 1.7e9, tuple(seen)))


@pytest.mark.parametrize(
    "saved",
    [f'"position": {value}' for value in (DIGITS, "Infinity", "-5", '"12"', "true", "[" * 20_000)],
    ids=["digits", "infinite", "negative", "text", "bool", "deep"],
)
@pytest.mark.anyio
async def test_a_position_that_is_none_means_from_the_end(tmp_path: Path, saved: str) -> None:
    path, position, seen = tmp_path / "kernel.log", tmp_path / "position.json", list[NodeSignal]()
    path.write_text(XID + "\n")
    position.write_text(f'{{"place": "{path.stat().st_ino}", {saved}}}')
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(KernelLog("node-0", path, position).run, seen.append)
        await wait_until_async(
            lambda: f'"position": {len(XID) + 1}' in position.read_text(), description="the end of the log"
        )
        tasks.cancel_scope.cancel()
    assert not seen


@pytest.mark.parametrize("information", [f"Device Minor: {DIGITS}\n", "Device Minor: \n", "Device Minor\n", "\x00", ""])
def test_a_driver_that_talks_nonsense_names_no_gpu(tmp_path: Path, information: str) -> None:
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "0000:18:00.0" / "information").write_text(information)
    assert gpu_of("0000:18:00", tmp_path) is None
    (tmp_path / "0000:18:00.0" / "information").unlink()
    assert gpu_of("0000:18:00", tmp_path) is None, "the line counts without it"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**64])
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
DEEP = b"[" * 30_000


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """With the right names, some of them missing, and anything in them."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUES))


def sendable(*signals: NodeSignal) -> None:
    encode_tick(Tick("node-0", "i", 1, 1.7e9, signals))


EXCEPTION = objects("type", "message", "frames", "at")
EXTRA = VALUES | st.fixed_dictionaries(
    {}, optional={"exception": EXCEPTION | VALUES, "timestamp": VALUES, "py_callstack": VALUES}
)
MESSAGE = VALUES | st.fixed_dictionaries({}, optional={"message": VALUES, "extraInfo": EXTRA})


@given(record=st.fixed_dictionaries({"message": MESSAGE}) | VALUES)
def test_an_error_file_that_a_script_has_written_itself(record: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "error.json"
    path.write_text(json.dumps(record))
    sendable(WorkerExited("node-0", 1.7e9, "j", 1, 0, 4, 1, None, 0, False, read_error_file(path)))


@pytest.mark.parametrize("raw", [DEEP, DIGITS.encode(), b'{"message": ' + DEEP, b"\xff", b""])
def test_an_error_file_of_bytes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "error.json").write_bytes(raw)
    assert read_error_file(tmp_path / "error.json") is None


def test_a_file_name_that_is_no_text_does_not_hide_the_exception(tmp_path: Path) -> None:
    exception = {
        "type": "FileNotFoundError",
        "message": "no such file: 'data\udcff'",
        "frames": ["\ud800"],
        "at": 1.7e9,
    }
    (tmp_path / "error.json").write_text(json.dumps({"message": {"extraInfo": {"exception": exception}}}))
    error = read_error_file(tmp_path / "error.json")
    assert error is not None
    assert error.message == "no such file: 'data?'"
    sendable(WorkerExited("node-0", 1.7e9, "j", 1, 0, 4, 1, None, 0, False, error))


@given(
    kind=st.sampled_from(["step", "phase", "started", "missed", "groups", "replica_check", "?"]),
    fields=objects(
        "step", "started_at", "ended_at", "data_s", "stall_s", "tokens", "loss", "grad_norm", "comm_wait_s", "digest",
        "took_s", "restored", "phase", "at", "phases_s", "reason", "members",
    ),
)  # fmt: skip
def test_a_note_is_whole_or_none_and_its_words_can_travel(kind: str, fields: dict[str, Any]) -> None:
    note = notes.parse(json.dumps({"type": kind, "job": "j", "generation": 1, "rank": 0, **fields}).encode())
    match note:
        case notes.ReplicaCheckNote():
            note.digest.encode()
        case notes.StartedNote():
            "".join(name for name, _ in note.phases_s).encode()
        case notes.GroupsNote():
            "".join(name + members for name, members in note.members).encode()
        case notes.MissedNote():
            note.reason.encode()


@pytest.mark.parametrize("members", [{"": None}, {"g": 0}, {"g": []}, {"g": "0-" + DIGITS}, None, []])
def test_a_note_of_groups_that_are_none(members: Any) -> None:
    fields = {"type": "groups", "job": "j", "generation": 1, "rank": 0, "members": members}
    assert notes.parse(json.dumps(fields).encode()) is None


@pytest.mark.parametrize("raw", [DEEP, DIGITS.encode(), b'{"type": ' + DEEP, b"\xff\x00"])
def test_a_note_of_bytes(raw: bytes) -> None:
    assert notes.parse(raw) is None


@given(record=objects("at", "checks", "version", "gpus", "health", "late", "refused", "event") | VALUES)
def test_what_a_reader_process_prints(record: Any) -> None:
    for collector in (NvrxCollector("node-0"), NvmlCollector("node-0")):
        for signal in collector.take(json.dumps(record).encode()):
            sendable(signal)


@pytest.mark.parametrize("raw", [DEEP, DIGITS.encode(), b'{"at": ' + DIGITS.encode() + b"}", b"\xff", b"\x00"])
def test_what_a_reader_process_prints_of_bytes(raw: bytes) -> None:
    for collector in (NvrxCollector("node-0"), NvmlCollector("node-0")):
        assert collector.take(raw) == []


@given(record=objects("event", "starts_at") | VALUES)
def test_a_maintenance_notice_of_anything(record: Any) -> None:
    event, _ = parse_notice(json.dumps(record))
    event.encode()


@pytest.mark.parametrize("text", [DEEP.decode(), DIGITS, f'{{"starts_at": {DIGITS}}}', "\x00", "\ufffd"])
def test_a_maintenance_notice_that_cannot_be_read_is_one_all_the_same(text: str) -> None:
    assert parse_notice(text)[0]


@pytest.mark.parametrize("raw", [DIGITS.encode(), b"\xff" * 300, b"\x00", b"-1", "٣".encode(), b"1e9", b""])
def test_a_port_that_counts_nonsense(tmp_path: Path, raw: bytes) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_bytes(raw)
    (port / "counters" / "symbol_error").write_bytes(raw)
    (tmp_path / "mlx5_0" / "ports" / DIGITS[:200]).mkdir()
    sendable(Ports("node-0", tmp_path).sample())


@pytest.mark.parametrize("raw", [b"", b"\xff", b")", DIGITS.encode(), b"1 (a) b) D", b"1 (\x00"])
def test_a_process_of_any_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(raw)
    assert blocked_tasks(tmp_path) in (0, 1)


@pytest.mark.parametrize("raw", [DEEP, DIGITS.encode(), b"\xff", b"{"])
def test_a_flight_recorder_that_answers_nonsense(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_json(raw)
