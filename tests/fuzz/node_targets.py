"""What an agent and a worker read on their node: messages of workers, the kernel's log, drivers, other tools' output."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import scratch
from fuzz.mutations import damaged, documents, json_texts, pickles, texts
from fuzz.target import Target
from hypothesis import strategies as st
from values import value_of

from holdfast.agent.checks import preflight_checks
from holdfast.agent.collectors import kernel_lines, maintenance
from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.agent.collectors.nvrx import NvrxCollector
from holdfast.agent.records import Unreadable, read_record
from holdfast.agent.workers import errors, ft_messages, learned
from holdfast.domain import collectives, notes, template, tracing, worker
from holdfast.domain.errors import InvalidSpec, MalformedMessage
from holdfast.domain.signals import NodeSignal, Tick
from holdfast.runtime.processes.survivors import find as find_survivor
from holdfast.train import compile_cache
from holdfast.train.environment import Environment
from holdfast.train.warm import build_locks
from holdfast.wire import flight_recorder, telemetry

DATA = Path(__file__).parents[1] / "data"

# ---------------------------------------------------------------- workers


def _notes() -> st.SearchStrategy[bytes]:
    whole = value_of(notes.Note).map(_encoded)
    sender = {"job": "llm", "generation": 1, "rank": 0}
    examples = (
        {
            "type": "step",
            **sender,
            "step": 3,
            "started_at": 1.0,
            "ended_at": 2.0,
            "data_s": 0.1,
            "stall_s": 0.0,
            "tokens": 5,
        },
        {"type": "groups", **sender, "members": {"dp": "0-3", "tp": "0-8:4"}},
        {"type": "started", **sender, "phases_s": {"build": 1.0}},
        {"type": "saved", **sender, "step": 1, "attempt": 1, "image": "/dev/shm/x"},
        {"type": "observed_steps", **sender, "step": 9, "steps": 4, "started_at": 1.0, "ended_at": 2.0},
        {"type": "replica_check", **sender, "step": 9, "digest": "ab", "took_s": 0.1, "restored": True},
        {"type": "phase", **sender, "phase": "step", "at": 1.0, "step": 2},
        {"type": "missed", **sender, "step": 9, "reason": "busy"},
    )
    cut = json_texts(*examples).map(lambda raw: raw[: worker.MESSAGE_BYTES_MAX])
    return st.one_of(whole, damaged(whole), cut, cut)


def _encoded(note: notes.Note) -> bytes:
    try:
        return notes.encode(note)
    except ValueError:
        return b""


def _note(raw: bytes) -> None:
    """A note that is accepted is one of ours: it can be sent on, and means the same when it is read again."""
    if (note := notes.parse(raw)) is not None:
        notes.encode(note)


def _ft() -> st.SearchStrategy[bytes]:
    said = [
        bytes.fromhex(each)
        for path in sorted((DATA / "ft").glob("client-*.json"))
        for each in json.loads(path.read_text())["said"]
    ]
    return pickles(*dict.fromkeys(said))


def _error_files() -> st.SearchStrategy[bytes]:
    ours = {
        "type": "ValueError",
        "message": "x",
        "frames": ["a:1"],
        "at": 1.0,
        "uptime_s": 3.0,
        "collectives": [["dp", 1, "all_reduce"]],
    }
    return json_texts(
        {"message": {"message": "ValueError: x", "extraInfo": {"exception": ours}}},
        {
            "message": {
                "message": "RuntimeError: y",
                "extraInfo": {"py_callstack": '  File "a.py", line 3, in f\n', "timestamp": "1"},
            }
        },
        {"message": "text"},
    )


# ---------------------------------------------------------------- flight recorder


@cache
def _dump() -> dict[str, Any]:
    entry = {
        "pg_id": 0, "process_group": ["1", "dp"], "collective_seq_id": 7, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "state": "scheduled", "retired": False, "is_p2p": False,
    }  # fmt: skip
    message = {
        **entry,
        "profiling_name": "nccl:recv 0<-1",
        "is_p2p": True,
        "p2p_seq_id": 5,
        "pg_id": 1,
        "process_group": ["9", "pp"],
    }
    counters = {"last_enqueued_collective": "7", "last_started_collective": "-1", "last_completed_collective": "6"}
    config = {"1": {"name": "1", "desc": "dp", "ranks": "[0, 1, 2]"}, "9": {"name": "9", "desc": "pp", "ranks": [0, 2]}}
    return {
        "version": "2.10",
        "pg_config": config,
        "pg_status": {"0": counters, "1": counters},
        "entries": [entry, message],
    }


def _dumps() -> st.SearchStrategy[bytes]:
    return json_texts(_dump())


def _pickled_dumps() -> st.SearchStrategy[bytes]:
    plain = [pickle.dumps(_dump(), protocol) for protocol in (0, 2, 4, 5)]
    edited = documents(_dump()).map(lambda document: pickle.dumps(document, 4))
    return st.one_of(pickles(*plain), edited)


def _recorded(parse: Callable[[bytes], Mapping[str, Any]]) -> Callable[[bytes], None]:
    def read(raw: bytes) -> None:
        dump = parse(raw)
        flight_recorder.records_messages(dump)
        for use in (
            lambda: flight_recorder.rows_of([(0, dump)], {"1": "0-3"}),
            lambda: flight_recorder.entered_total(dump),
        ):
            try:
                use()
            except MalformedMessage:
                continue

    return read


# ---------------------------------------------------------------- the kernel, drivers, tools

KERNEL = (
    "3,1234,5678,-;NVRM: Xid (PCI:0000:18:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:18:00 GPU-I:05): 94, Contained: SM (0x1). RST: No, D-RST: No",
    "[ 1234.5678] NVRM: Xid (PCI:0000:18:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)",
    "Nov 27 06:53:43 host-1 kernel: [1.2] python[77]: segfault at 7f ip 00 sp 00 error 4 in libnccl.so.2[7f+1]",
    "<3>nvme nvme0: I/O 12 QID 3 timeout, aborting",
    "EXT4-fs (sda1): Remounting filesystem read-only",
    "mlx5_core 0000:18:00.0: poll_health:798:(pid 0): device's health compromised - reached miss count",
    "mce: [Hardware Error]: Machine check events logged",
    "NVRM: The NVIDIA GPU 0000:18:00.0",
    "task python:1234 blocked for more than 120 seconds.",
)


def _kernel(line: str) -> None:
    record = kernel_lines.parse_record(line)
    assert isinstance(record.is_of_the_kernel, bool)
    kernel_lines.gpu_named(record.text)
    kernel_lines.is_garbled(record.text)
    found = kernel_lines.recognise(record.text, "0000:18:00")
    assert found is None or len(found.text) <= kernel_lines.TEXT_CHARS_MAX


def _nvml() -> st.SearchStrategy[bytes]:
    gpu = {
        "gpu": 0,
        "uuid": "GPU-1",
        "temperature_c": 50.0,
        "power_w": 300.0,
        "memory_used": 1,
        "ecc_uncorrected": 0,
        "recovery_action": 0,
        "lost": False,
    }
    health = {
        "gpu": 0,
        "uuid": "GPU-1",
        "ecc_corrected": 1,
        "remapped": [1, 2, 0, 0],
        "nvlinks": [18, 0],
        "fabric": [3, 0],
        "margin_c": 20.0,
        "pcie_width": 16,
    }
    examples = (
        {"at": 1.0, "refused": {"nvmlX 3": 1}, "gpus": [gpu], "health": [health], "late": []},
        {"at": 1.0, "event": {"data": 79, "gpu": 0, "pci": "0000:18:00.0"}},
    )
    return json_texts(*examples)


def _nvrx() -> st.SearchStrategy[bytes]:
    check = {"check": "gpu", "gpu": 0, "verdict": "good", "reason": ""}
    return json_texts({"at": 1.0, "version": "0.4.1", "checks": [check, {**check, "gpu": None, "verdict": "bad"}]})


def _lines(collector: NvmlCollector | NvrxCollector) -> Callable[[bytes], None]:
    """Signals of a reader's line can be sent: nothing strange that a driver says stops an agent's telemetry."""

    def read(line: bytes) -> None:
        signals: list[NodeSignal] = sorted(collector.take(line), key=lambda signal: signal.at)
        if all(math.isfinite(signal.at) for signal in signals):
            telemetry.encode_tick(Tick("n", "i", 1, 1.0, tuple(signals))).SerializeToString()

    return read


def _self_tests() -> st.SearchStrategy[str]:
    device = {
        "device": "cuda:0",
        "products": [{"kind": "fp16", "made": 8, "wrong": 0, "first_wrong": ""}],
        "memory_gb_s": 900.0,
    }
    report = {
        "devices": [device, {**device, "device": "cuda:1", "error": "lost"}],
        "wants_gpus": True,
        "all_reduce": {"ranks": 2, "wrong": 0, "unfinished": ""},
    }
    return json_texts(report).map(lambda raw: raw.decode(errors="replace"))


def _environments() -> st.SearchStrategy[dict[str, str]]:
    valid = {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "29500",
        "HOLDFAST_MESH": '{"dp": 4}',
        "HOLDFAST_PREVIOUS_MESH": '{"dp": 2}', "HOLDFAST_RESTORE": '{"step": 1, "attempt": 1, "path": "/x", "paths": ["/x"]}',
        "HOLDFAST_GENERATION": "1", "HOLDFAST_ATTEMPT": "1", "HOLDFAST_CONTROL_FD": "3", "HOLDFAST_COPY_THREADS": "1",
        "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    values = st.one_of(
        texts(*valid.values()),
        json_texts({"dp": 4}, {"step": 1, "attempt": 1, "path": "/x"}).map(lambda raw: raw.decode(errors="replace")),
    )
    changed = st.dictionaries(st.sampled_from(sorted(valid)), values, max_size=3)
    return changed.map(lambda some: {**valid, **some})


_KEY = compile_cache.Key("2.13.0", "3.11", "x86_64", "cuda", "dp 2", 0)


def _caches() -> st.SearchStrategy[bytes]:
    whole = compile_cache._pack(b"payload", _KEY)
    head = whole[: whole.index(b"{")]
    header = {"key": _KEY.encode(), "size": 7, "crc32": 1}
    return st.one_of(damaged(st.just(whole)), json_texts(header).map(lambda raw: head + raw + b"\npayload"))


def _in_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    def written_then_read(raw: bytes) -> object:
        path = scratch.directory() / name
        path.write_bytes(raw)
        return read(path)

    return written_then_read


TARGETS = (
    Target("note of a worker", _notes, _note),
    Target("message of a launcher's client", _ft, ft_messages.decode, (MalformedMessage,)),
    Target("message of a template", lambda: json_texts({"type": "ready", "pid": 3}), template.decode, (ValueError,)),
    Target("message to a worker", lambda: json_texts({"type": "stop", "save": True}), worker.decode),
    Target("error file", _error_files, _in_file(errors.read_error_file, "error.json")),
    Target("flight recorder as JSON", _dumps, _recorded(flight_recorder.parse_json), (MalformedMessage,)),
    Target("flight recorder as pickle", _pickled_dumps, _recorded(flight_recorder.parse_pickle), (MalformedMessage,)),
    Target("ranks of a group", lambda: texts("0-3", "0-16:8,99", "1,2,3"), collectives.expand, (ValueError,)),
    Target("kernel line", lambda: texts(*KERNEL), _kernel),
    Target("line of NVML's reader", _nvml, _lines(NvmlCollector("n"))),
    Target("line of NVRx' reader", _nvrx, _lines(NvrxCollector("n"))),
    Target(
        "maintenance notice",
        lambda: json_texts({"event": "x", "starts_at": 5.0}).map(lambda raw: raw.decode(errors="replace")),
        maintenance.parse,
    ),
    Target(
        "maintenance window",
        lambda: st.one_of(
            json_texts({"window_start_time": "2026-01-01T00:00:00Z"}),
            json_texts({"startTime": "0001-01-01T00:00:00+23:59"}),
        ).map(lambda raw: raw.decode(errors="replace")),
        maintenance._scheduled,
    ),
    Target("self-test of a suspect", _self_tests, preflight_checks.devices),
    Target("self-test before a job", _self_tests, lambda report: preflight_checks.quick(report, gpus=2)),
    Target(
        "record of a fault",
        lambda: json_texts({"path": "/x", "was": 1}),
        _in_file(read_record, "record.json"),
        (Unreadable,),
    ),
    Target(
        "modules that were imported",
        lambda: json_texts({"modules": ["torch", "a.b"], "files": {"torch": "1 2"}, "variables": {"A": "1"}}),
        _in_file(lambda path: learned._imports(learned._load(path, os.geteuid())), "modules.json"),
    ),
    Target("pid file", lambda: json_texts({"pid": 1, "started": 2}), _in_file(find_survivor, "pid")),
    Target("environment of a worker", _environments, Environment.read, (InvalidSpec,)),
    Target(
        "holder of a build lock",
        lambda: json_texts({"holdfast": {"job": "j", "generation": 1, "rank": 0, "boot": "b"}}),
        build_locks.Holder.decode,
    ),
    Target("compile cache", _caches, lambda raw: compile_cache._unpack(raw, _KEY)),
    Target(
        "traceparent", lambda: texts("00-" + "a" * 32 + "-" + "b" * 16 + "-01"), lambda text: tracing.below(text, "x")
    ),
)
