"""A codec refuses, when it is made, what it could not carry."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.domain.errors import MalformedMessage
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.derived import Codec, Instead


@dataclass(frozen=True, slots=True)
class _Seen:
    job: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class _Lacking:
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class _Stranger:
    job: str
    generation: int
    step: int
    more: int


@dataclass(frozen=True, slots=True)
class _Within:
    job: str
    launch: _Seen


@dataclass(frozen=True, slots=True)
class _Pairs:
    job: str
    steps: tuple[tuple[int, int, int], ...]


@pytest.mark.parametrize(
    ("domain", "message", "why"),
    [
        (_Lacking, pb.StepReached, r"_Lacking and its message differ in \['observed', 'observed_step_s', 'step'\]"),
        (_Stranger, pb.StepReached, r"_Stranger and its message differ in \['more'\]"),
        (_Within, pb.Warm, "there is no codec for"),
        (_Pairs, pb.Prune, r"has the fields \('attempt', 'step'\)"),
    ],
)
def test_a_dataclass_and_its_message_that_have_drifted_apart(domain: type, message: type, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Codec(domain, message, "x")


def test_what_travels_apart_beside_and_under_another_name() -> None:
    codec = Codec(
        _Seen,
        pb.SetInterval,
        "x",
        apart=["generation"],
        beside=["generation", "from_step"],
        renamed={"step": "interval_steps"},
    )
    message = codec.encode(_Seen("gpt", 1, 50), generation=7, from_step=100)
    assert message == pb.SetInterval(job="gpt", generation=7, from_step=100, interval_steps=50)
    assert codec.decode(message, 3) == _Seen("gpt", 3, 50)


@dataclass(frozen=True, slots=True)
class _Many:
    job: str
    ranks: tuple[str, ...] = ()


BESIDE: dict[str, Any] = {"cwd": "", "env": (), "module": "", "command": "", "env_from": ()}


def test_an_earlier_form_is_read_and_not_written() -> None:
    """Ranks, which may be replaced with the arguments of a script."""

    def codec(name: str) -> Codec[_Many, pb.LaunchSpec]:
        return Codec(
            _Many,
            pb.LaunchSpec,
            "x",
            beside=[*BESIDE],
            renamed={"job": "script", "ranks": "preload"},
            instead={"ranks": Instead(name, lambda args: tuple(arg.upper() for arg in args), lambda args: args)},
        )

    with pytest.raises(TypeError, match=r"_Many and its message differ in \['more'\]"):
        codec("more")
    value = _Many("gpt", ("A", "B"))
    written = codec("args").encode(value, **BESIDE)
    assert written == pb.LaunchSpec(script="gpt", args=["A", "B"])
    assert codec("args").decode(written) == value
    assert codec("args").decode(pb.LaunchSpec(script="gpt", preload=["A", "B"])) == value, "of an earlier version"
    assert codec("args").decode(pb.LaunchSpec(script="gpt", args=["a", "b"])) == value


def test_an_empty_name_and_no_time_are_refused_by_name() -> None:
    @dataclass(frozen=True, slots=True)
    class Ended:
        job: str
        generation: int
        ranks: tuple[int, ...]
        at: float

    codec = Codec(Ended, pb.RanksFinished, "ended", named=["job"], times=["at"])
    with pytest.raises(MalformedMessage, match=r"ended\.job: missing"):
        codec.decode(pb.RanksFinished(at=1.0))
    with pytest.raises(MalformedMessage, match=r"ended\.at: inf is not a time"):
        codec.decode(pb.RanksFinished(job="gpt", at=float("inf")))


@pytest.mark.parametrize(
    "module", ["checks", "control", "events", "report_columns", "retention", "shards", "telemetry", "types"]
)
def test_a_module_brings_the_codecs_of_its_parts_along(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import holdfast.wire.{module}"], check=True)
