"""What nvidia-resiliency-ext's clients say, as their bytes were recorded, and what may not be said in their place."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.workers import ft_messages
from holdfast.agent.workers.ft_messages import Authkey, Heartbeat, Init, Section, Timeouts, Update, decode
from holdfast.domain.errors import MalformedMessage

RECORDED = sorted((Path(__file__).parents[2] / "data" / "ft").glob("client-*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_conversation(path: Path) -> None:
    recorded = json.loads(path.read_text())
    messages = [decode(bytes.fromhex(each)) for each in recorded["said"]]
    assert messages[0] == Authkey()
    assert isinstance(messages[1], Init)
    assert messages[1].rank == 3
    assert messages[1].version == ("0.4 or 0.5" if recorded["version"] == "0.4.1" else "0.6 or later")
    step = [Section("open", "step"), Heartbeat(), Section("close", "step")]
    assert messages[2:11] == step * 3
    ends = [Section("close_all", "")] if recorded["version"] == "0.4.1" else []  # later clients do not send it
    assert messages[11:-1] == [Section("open", "save"), *ends]
    assert messages[-1:] == [Update((10.0, 5.0), ({"step": 4.0, "save": 20.0}, 2.5))]


def test_both_kinds_of_clients_were_recorded() -> None:
    assert [path.stem for path in RECORDED] == ["client-0.4.1", "client-0.6.0"]


class _Runs:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


class _Named:
    pass


HOSTILE = {
    "a call": pickle.dumps(_Runs(os.system, "touch /tmp/never")),
    "a class of ours": pickle.dumps(_Named()),
    "a class of the same package": b"cnvidia_resiliency_ext.fault_tolerance.launcher\nmain\n)R.",
    "an attribute of an allowed class": b"cnvidia_resiliency_ext.fault_tolerance.data\nInitMsg.__init__\n.",
    "builtins": b"cbuiltins\neval\n(X\x04\x00\x00\x001+11tR.",
    "an instance by INST": b"(invidia_resiliency_ext.fault_tolerance.data\nInitMsg\n.",
    "an extension": b"\x82\x01.",
    "a persistent id": b"Pabc\n.",
    "tuples in tuples": pickle.dumps(((1, 2), (3, 4))),
    "a frozen set": pickle.dumps(frozenset({1})),
    "a plain value": pickle.dumps({"rank": 1}),
    "nothing": b"",
    "no pickle": b"\xff" * 40,
    "an end that is missing": pickle.dumps({"a": 1})[:-1],
    "a length that is not there": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little"),
    "too many opcodes": b"\x80\x02" + b"N" * 5000 + b".",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_message_is_refused_and_runs_nothing(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(raw)
    assert not Path("/tmp/never").exists()


def test_every_prefix_and_every_changed_byte_of_a_message_is_refused_or_a_message() -> None:
    for path in RECORDED:
        for text in json.loads(path.read_text())["said"]:
            raw = bytes.fromhex(text)
            for at in range(len(raw)):
                for changed in (raw[:at], raw[:at] + bytes([raw[at] ^ 0x15]) + raw[at + 1 :]):
                    try:
                        decode(changed)
                    except MalformedMessage:
                        pass


@pytest.mark.parametrize("seconds", ["nan", "inf", -1.0, 0.0, True])
def test_time_outs_that_are_none(seconds: object) -> None:
    raw = bytes.fromhex(json.loads(RECORDED[0].read_text())["said"][13])
    value = float(seconds) if isinstance(seconds, str) else seconds
    changed = raw.replace(
        pickle.dumps(10.0)[-10:-1], pickle.dumps(value)[-10:-1] if isinstance(value, float) else b"\x88"
    )
    assert changed != raw
    with pytest.raises(MalformedMessage):
        decode(_reframed(changed))


def _reframed(raw: bytes) -> bytes:
    """Without frames, whose lengths have changed."""
    return pickletools.optimize(raw) if len(raw) == 0 else raw[:2] + raw[11:] if raw[2:3] == b"\x95" else raw


def test_answers_name_the_clients_own_classes() -> None:
    for framed, names in (
        (ft_messages.ok(), {"nvidia_resiliency_ext.fault_tolerance.data OkMsg"}),
        (ft_messages.error("why"), {"nvidia_resiliency_ext.fault_tolerance.data ErrorMsg"}),
        (
            ft_messages.ok_with_config(Timeouts(1.0, 2.0, {"step": None}, 3.0), 5.0),
            {
                "nvidia_resiliency_ext.fault_tolerance.data OkMsg",
                "nvidia_resiliency_ext.fault_tolerance.config FaultToleranceConfig",
            },
        ),
    ):
        assert int.from_bytes(framed[:4], "big") == len(framed) - 4
        operations = list(pickletools.genops(framed[4:]))
        assert {argument for opcode, argument, _ in operations if opcode.name == "GLOBAL"} == names
