"""Hypothesis strategies for any domain value, derived from its annotations: a new field is covered without a new line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.incidents import Action
from holdfast.domain.job import ChecksSpec, EnvSource, JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.numbers import Numbers
from holdfast.domain.signals import (
    GpuHealth,
    GpuSample,
    HealthChecks,
    Measurements,
    NicSample,
    ObservedSteps,
    RankProgress,
    ReplicaChecks,
    StepColumns,
    Tick,
)

ROWS_MAX = 4
SINGLE_PRECISION = {"data_s", "stall_s", "comm_wait_s", "temperature_c", "power_w"}  # travel as 32-bit floats
COLUMNAR = (
    StepColumns, RankProgress, ReplicaChecks, GpuSample, GpuHealth, NicSample, HealthChecks, Measurements, StallSnapshot,
    CollectiveRows, ObservedSteps,
)  # fmt: skip

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
single = st.floats(allow_nan=False, allow_infinity=False, width=32)

meshes = st.dictionaries(
    st.sampled_from(["pp", "dp", "tp", "cp", "ep"]), st.integers(1, 8), min_size=1, max_size=4
).map(Mesh.of)


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    dp, pp = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    rest = {
        field.name: draw(value_of(hints_of(JobSpec)[field.name]))
        for field in dataclasses.fields(JobSpec)
        if field.name not in {"nodes", "nproc_per_node", "mesh", "min_dp", "max_dp"}
    }
    mesh = Mesh.of({"dp": dp, "pp": pp})
    rest["priority"] = draw(st.integers(-1000, 1000))
    if dp < 2:
        rest["checks"] = ChecksSpec()  # there is no other replica to compare with
    return JobSpec(nodes=dp * pp, nproc_per_node=1, mesh=mesh, min_dp=draw(st.integers(1, dp)), max_dp=dp + 1, **rest)


@st.composite
def columns(draw: st.DrawFn, kind: type) -> Any:
    rows = draw(st.integers(0, ROWS_MAX))
    values = {}
    for name, hint in hints_of(kind).items():
        if get_origin(hint) is tuple:
            item = value_of(get_args(hint)[0], name)
            values[name] = tuple(draw(st.lists(item, min_size=rows, max_size=rows)))
        else:
            values[name] = draw(value_of(hint, name))
    return kind(**values)


@st.composite
def ticks(draw: st.DrawFn) -> Tick:
    """An agent's tick: every signal is of its own node, in order of time, as `decode_tick` gives them back."""
    signals = draw(value_of(hints_of(Tick)["signals"]))
    node = draw(text.filter(bool))
    mine = sorted((dataclasses.replace(signal, node=node) for signal in signals), key=lambda signal: signal.at)
    return Tick(node, draw(text.filter(bool)), draw(counts), draw(finite), tuple(mine), draw(counts))


def actions() -> st.SearchStrategy[Action]:
    """Recipes: the only type that contains itself, and no deeper than this."""

    def built(before: st.SearchStrategy[Action] | None, fallbacks: st.SearchStrategy[Action] | None) -> Any:
        own = {name: hint for name, hint in hints_of(Action).items() if name not in ("before", "fallbacks")}
        parts = {"before": before, "fallbacks": fallbacks}
        rungs = {
            name: st.just(()) if part is None else st.lists(part, max_size=2).map(tuple) for name, part in parts.items()
        }
        return st.builds(Action, **{name: value_of(hint, name) for name, hint in own.items()}, **rungs)

    step = built(None, None)
    return built(step, built(step, None))  # type: ignore[no-any-return]


@cache
def hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache  # building strategies anew for each value takes longer than drawing it
def value_of(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """A strategy for one annotation; `name` is the field's."""
    if name == "tier":
        return st.sampled_from(["memory", "disk"])
    if name in ("digest", "root"):
        return text.filter(lambda digest: "," not in digest)
    if name == "members":
        return st.sampled_from(["", "0-3", "1-9:4,12"])
    if hint in _SPECIAL:
        return _SPECIAL[hint]()
    if hint in COLUMNAR:
        return columns(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = hints_of(hint)
        fields = [field for field in dataclasses.fields(hint) if field.init]
        return st.builds(hint, **{field.name: value_of(hints[field.name], field.name) for field in fields})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and hasattr(hint, "_fields"):  # a named tuple
        return st.builds(hint, *[value_of(part) for part in hints_of(hint).values()])
    return _composed(hint, name)


def _composed(hint: Any, name: str) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is float:
        return single if name in SINGLE_PRECISION else finite
    if origin in (Union, UnionType):
        return st.one_of([st.none() if part is NoneType else value_of(part, name) for part in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(value_of(arguments[0], name), max_size=ROWS_MAX).map(tuple)
    if origin is tuple:
        return st.tuples(*[value_of(part, name) for part in arguments])
    if origin is Sequence:
        return st.lists(value_of(arguments[0], name), max_size=ROWS_MAX).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(value_of(arguments[0]), value_of(arguments[1]), max_size=ROWS_MAX)
    raise TypeError(f"no strategy for {name} of type {hint}")


_SPECIAL: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    str: lambda: text,
    int: lambda: counts,
    bool: st.booleans,
    Numbers: lambda: st.lists(st.integers(0, 200), max_size=ROWS_MAX).map(Numbers),
    Mesh: lambda: meshes,
    JobSpec: jobs,
    Action: actions,
    Tick: ticks,
    LaunchSpec: lambda: st.builds(
        LaunchSpec,
        script=text,
        args=st.lists(text, max_size=ROWS_MAX).map(tuple),
        cwd=text,
        env=st.dictionaries(text, text, max_size=ROWS_MAX).map(lambda env: tuple(env.items())),
        preload=st.lists(text, max_size=ROWS_MAX).map(tuple),
        module=text,
        command=text,
        env_from=st.lists(st.builds(EnvSource, text, text, text), max_size=ROWS_MAX).map(tuple),
    ),
}
