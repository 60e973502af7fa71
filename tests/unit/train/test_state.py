"""Taking the state apart and putting it back: nothing lost, nothing shared, nothing executed."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.train.saves.state import apply, collect, disassemble

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    return saved_as(state)[0]


def saved_as(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tree and the plain values that a restore gets."""
    collected = collect(state)
    return disassemble(collected.extra, lambda name, _: collected.tensors[name].clone())


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
)
tensors = st.builds(
    lambda dtype, shape: (torch.rand(shape) * 100).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
keys = st.text("ab.#", max_size=3) | st.integers(0, 3)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, trees, max_size=4))
@settings(deadline=None, max_examples=150)
def test_any_tree_survives(state: dict[str, Any]) -> None:
    assert same(round_trip(state), state)


def test_names_are_key_paths_and_unique() -> None:
    state = {"model": nn.Linear(2, 2), "a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}
    assert set(collect(state).tensors) == {"model.weight", "model.bias", "a.b.c", "a.b.c#2"}


def test_arrays_and_their_scalars_come_back_as_what_they_were() -> None:
    state = {"array": np.arange(6, dtype=np.int32).reshape(2, 3), "scalar": np.float32(1.5), "flag": np.bool_(True)}
    tree = round_trip(state)
    assert tree["array"].dtype == np.int32
    assert (tree["array"] == state["array"]).all()
    assert (type(tree["scalar"]), tree["scalar"]) == (np.float32, 1.5)
    assert type(tree["flag"]) is np.bool_


def test_other_containers_survive() -> None:
    state = {"order": OrderedDict(b=1, a=2), "count": Counter("aab"), "set": {1, 2}, "frozen": frozenset({3}),
             "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu")}  # fmt: skip
    tree = round_trip(state)
    assert tree == state
    assert [type(value) for value in tree.values()] == [type(value) for value in state.values()]


class Opaque:
    pass


class Sharded(torch.Tensor):
    """Stands for DTensor and other subclasses whose bytes are not the whole story."""


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([torch.ones(2).as_subclass(Sharded)], r"state: x\.0.*Sharded.*not supported yet"),
        ({"deep": [1, Opaque()]}, r"state: x\.deep\.1.*Opaque"),
        (lambda: None, r"state: x.*function"),
        (defaultdict(list), r"state: x.*defaultdict"),
        ({Opaque(): 1}, r"the key.*Opaque"),
        (torch.eye(2).to_sparse(), r"state: x.*sparse"),
        (torch.empty(2, device="meta"), r"state: x.*meta"),
        (np.array([None]), r"state: x.*object"),
        ([nn.Linear(1, 1)], r"state: x\.0.*Linear.*an entry of a plain dict"),
    ],
    ids=["subclass", "object", "function", "defaultdict", "key", "sparse", "meta", "object array", "module in a list"],
)
def test_what_cannot_be_saved_is_named_by_path_and_type(value: Any, complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        collect({"x": value})


def test_a_cycle_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidSpec, match="64 levels"):
        collect({"loop": loop})


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code ran')",))


@pytest.mark.parametrize(
    "extra",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"format": 1, "tree": Evil()}),
        b"",
        b"\x80\x04garbage",
        pickle.dumps([1]),
        pickle.dumps({}),
    ],
    ids=["code", "code inside", "empty", "garbage", "other", "no format"],
)
def test_a_pickle_cannot_run_code_and_garbage_is_an_integrity_error(extra: bytes) -> None:
    with pytest.raises(IntegrityError):
        disassemble(extra, lambda name, _: torch.empty(0))


def test_every_truncation_is_noticed() -> None:
    extra = collect({"model": nn.Linear(2, 2), "text": "x" * 50}).extra
    for size in range(len(extra)):
        with pytest.raises(IntegrityError):
            disassemble(extra[:size], lambda name, _: torch.empty(0))


def trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "extra": {"best": 0.5, "ema": torch.rand(3)},
    }


def test_model_optimizer_scheduler_and_plain_values_go_back_into_live_objects() -> None:
    saved, live = trained(), trained()
    before = live["extra"]["ema"]
    apply(live, *saved_as(saved))
    assert same(live["model"].state_dict(), saved["model"].state_dict())
    assert same(live["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert live["scheduler"].state_dict() == saved["scheduler"].state_dict()
    assert live["extra"]["ema"] is before, "tensors are overwritten in place"
    assert torch.equal(before, saved["extra"]["ema"])


def test_nothing_restored_lies_in_the_given_memory() -> None:
    saved, live = trained(), trained()
    collected = collect(saved)
    lent = {name: tensor.clone() for name, tensor in collected.tensors.items()}
    tree, also = disassemble(collected.extra, lambda name, _: lent[name])
    apply(live, tree, also)
    expected = collect(live).tensors
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    for tensor in lent.values():
        tensor.zero_()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in collect(live).tensors.items())


@pytest.mark.parametrize(
    ("live", "complaint"),
    [
        ({"x": torch.zeros(3)}, r"state\['x'\].*\(2,\)"),
        ({"x": torch.zeros(2, dtype=torch.int64)}, r"state\['x'\].*float32"),
        ({"y": torch.zeros(2)}, r"state: .*\['x'\]"),
        ({"x": {"inner": 1}}, r"state\['x'\].*Tensor"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(live: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        apply(live, *saved_as({"x": torch.ones(2)}))


GROWN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"best": {}}, {"best": {"loss": 0.5, "at": 7}}),
    ({"seen": Counter()}, {"seen": Counter("aab")}),
    ({"queue": {"a": 1, "b": 2}}, {"queue": {"b": 2}}),
    ({"moments": {}}, {"moments": {"m": torch.ones(3), "deep": {"v": [torch.zeros(0)]}}}),
    ({"x": 1}, {"x": 2, "later": {"y": None}}),
    ({"order": {"b": 1, "a": 2}}, {"order": {"c": 3, "b": 1, "a": 2}}),
    ({"order": OrderedDict(b=1, a=2)}, {"order": OrderedDict(c=3, b=1)}),
]


@pytest.mark.parametrize(("live", "saved"), GROWN, ids="-".join)
def test_a_plain_dict_gets_the_keys_that_it_had_when_it_was_saved(live: dict[str, Any], saved: dict[str, Any]) -> None:
    """A script starts with the first state, and saves the second one after steps that have changed it."""
    holders = {key: value for key, value in live.items() if isinstance(value, dict)}
    apply(live, *saved_as(saved))
    assert same(live, saved)
    assert all(live[key] is holder for key, holder in holders.items())


@given(st.lists(trees, max_size=4), st.lists(trees, max_size=4), st.integers(0, 3) | st.none())
@settings(deadline=None, max_examples=150)
def test_what_the_script_calls_by_another_name_is_restored(
    before: list[Any], after: list[Any], maxlen: int | None
) -> None:
    """A list of averaged weights, a window of losses: the script uses them by its own names, not through the state."""
    history, window, seen = list(before), deque(before, maxlen), {len(before)}
    saved_window = deque(after, maxlen)
    saved = {"deep": {"history": after, "again": after}, "window": saved_window, "seen": {1, 2}}
    apply({"deep": {"history": history, "again": history}, "window": window, "seen": seen}, *saved_as(saved))
    assert same(history, after)
    assert same(window, saved_window)
    assert window.maxlen == maxlen
    assert seen == {1, 2}


def test_tensors_and_arrays_in_containers_are_overwritten_in_place_once() -> None:
    shadow, table = [torch.zeros(2), nn.Parameter(torch.zeros(3))], np.zeros(4, dtype=np.int32)
    one = torch.zeros(1)
    placeholder, pair, expanded = [one] * 3, (torch.zeros(2), 0), [torch.zeros(1).expand(2)]
    live: dict[str, Any] = {
        "shadow": shadow,
        "table": table,
        "places": placeholder,
        "pair": pair,
        "expanded": expanded,
        "x": [{}, table],
    }
    mine = [*shadow]
    saved = {
        "shadow": [torch.ones(2), torch.ones(3)],
        "table": np.arange(4, dtype=np.int32),
        "places": [torch.tensor([value]) for value in (1.0, 2.0, 3.0)],
        "pair": (torch.full((2,), 7.0), 1),
        "expanded": [torch.tensor([1.0, 2.0])],
        "x": [{"a": 1}, np.ones(4, dtype=np.int32)],
    }
    apply(live, *saved_as(saved))
    assert all(tensor is old and bool((tensor == 1).all()) for tensor, old in zip(shadow, mine, strict=True))
    assert live["table"] is table
    assert table.tolist() == [0, 1, 2, 3], "the array is in two places of the live state and in one of the checkpoint"
    assert [value.item() for value in placeholder] == [1.0, 2.0, 3.0], "one tensor cannot hold three values"
    assert live["pair"][0] is pair[0]
    assert live["pair"][1] == 1
    assert expanded[0].tolist() == [1.0, 2.0]
    assert live["x"][0] == {"a": 1}
    assert live["x"][1].tolist() == [1, 1, 1, 1]


class Meter:
    """Keeps what `load_state_dict` gives it, as most classes of scripts do."""

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=2)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_a_window_stays_as_long_as_it_was() -> None:
    saved, live = Meter(), Meter()
    saved.window.extend([1.0, 2.0])
    apply({"meter": live}, *saved_as({"meter": saved}))
    live.window.append(3.0)
    assert live.window == deque([2.0, 3.0])


OBJECT = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        ({"a": 1}, {"a": 1, "model": OBJECT}),
        ({"a": {}}, {"a": {"model": OBJECT}}),
        ({"a": {}}, {"a": {"deep": {"model": OBJECT}}}),
        ({"a": None}, {"a": OBJECT}),
        ({"a": {"model": OBJECT}}, {"a": {}}),
        ({"a": {"deep": {"model": OBJECT}}}, {"a": {}}),
        ({"a": {"x": torch.ones(2)}}, {"a": {}}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": {}}, {"a": 1}),
    ],
)
def test_a_restore_that_would_lose_something_is_refused(live: dict[str, Any], saved: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"(as in the checkpoint|the checkpoint holds)"):
        apply(live, *saved_as(saved))


def test_a_checkpoint_of_an_earlier_release_needs_equal_keys() -> None:
    """It does not say which of its values were objects."""
    tree, also = saved_as({"a": {"x": 1}})
    del also["objects"]
    apply({"a": {"x": 0}}, tree, also)
    with pytest.raises(InvalidSpec, match=r"state\['a'\]"):
        apply({"a": {}}, tree, also)
