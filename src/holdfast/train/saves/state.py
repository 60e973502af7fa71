"""The user's state as named tensors plus one small pickle, and back.

`collect` calls `state_dict` of every stateful object and walks the result. Each tensor gets a name (its key path) and goes
into the shard as it is; of a sharded tensor (DTensor), this rank's piece. The rest, containers and plain values, is pickled
without the tensors. `apply` writes a restored tree back into the live objects. A plain dict gets the keys that it had when it
was saved; what must be the same in the live state, objects and tensors, is the subject of `outline`. Lists, deques, sets and
arrays are filled in place, because the script may use them by another name: a list of averaged weights, a window of losses.

Names are those that a plain `torch.distributed.checkpoint` gives to the same nested dict. Optimizers are saved by the names of
their parameters (`optimizer_state`), so that their moments can be found with any number of ranks.

The pickle belongs to this job, but may come from another node. Its bytes are checksummed and authenticated on the way. In
addition, loading accepts only the types that `collect` allows, so that a pickle cannot run code. A value of another type is
rejected, with its key path and type, when it is saved."""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.train.saves import optimizer_state
from holdfast.train.saves.optimizer_state import ParameterNames
from holdfast.train.saves.outline import Path, holds, is_object, objects, shown
from holdfast.train.saves.sharded import Piece, Place, describe, find_place, is_sharded, place_of, take_apart

FORMAT = 2  # of the pickle; format 1 numbered an optimizer's parameters
# key of `also`: paths of the objects that had a state_dict; absent in checkpoints of earlier releases
OBJECTS = "objects"
DEPTH_MAX = 64  # of nested containers; a deeper state is taken for a cycle

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set, frozenset, deque, torch.Size)
_LOADABLE = {
    ("collections", "Counter"): Counter,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "deque"): deque,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}


class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`: a model, an optimizer, a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    return is_object(value)


@dataclass(frozen=True, slots=True)
class Collected:
    """The state at one moment. `tensors`, by name, share memory with the live objects; `extra` is a copy.

    `pieces` contains the location of each tensor that is a piece of a sharded tensor.
    """

    tensors: dict[str, torch.Tensor]
    pieces: dict[str, Piece]
    extra: bytes


def collect(state: Mapping[str, Any], **also: Any) -> Collected:
    """Separate the state into tensors and a pickle. `also` are further plain values; `disassemble` returns them and `OBJECTS`.

    Raises `InvalidSpec` that names the key path and type of the first value that cannot be saved.
    """
    names = _Names()
    with torch.no_grad():  # a DTensor then returns its local part without autograd
        tree = _snapshot(dict(state), ParameterNames(state))
        names.walk(tree, "", 0)
    buffer = io.BytesIO()
    also[OBJECTS] = tuple(objects(state))
    _Pickler(buffer, names.by_id).dump({"format": FORMAT, "tree": tree, "also": also})
    return Collected(names.tensors, names.pieces, buffer.getvalue())


# Returns the tensor of a name. The second argument describes its placement on the ranks that saved it; None = not
# sharded.
Leaf = Callable[[str, dict[str, Any] | None], torch.Tensor]


def disassemble(extra: bytes, tensor: Leaf) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree of `collect` with `tensor(name, …)` in place of every tensor, and the `also` values.

    Raises `IntegrityError` if the bytes were not written by `collect`.
    """
    try:
        content = _Unpickler(io.BytesIO(extra), tensor).load()
        if content["format"] != FORMAT:
            raise IntegrityError(f"the state is saved in format {content['format']}; this release reads {FORMAT}")
        return content["tree"], content["also"]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"the saved state cannot be read: {error}") from error


def apply(state: Mapping[str, Any], tree: Mapping[str, Any], also: Mapping[str, Any]) -> None:
    """Load a restored tree into the live objects. Mutable containers are filled in place, other plain values are set in the
    mapping that holds them; those that the tree does not have are removed from nested dicts. `also`: the values that
    `disassemble` returned with the tree.

    Raises `InvalidSpec` if the tree and the state differ in objects, tensors or types.
    """
    saved = also.get(OBJECTS)
    _Applied(ParameterNames(state), None if saved is None else frozenset(saved)).mapping(state, tree, ())


def leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the live tensors and arrays of a state, by the names that `collect` gives them."""
    return _leaves(state, ParameterNames(state))


def _leaves(state: Mapping[str, Any], names: ParameterNames) -> dict[str, Any]:
    walked = _Names()
    with torch.no_grad():
        walked.walk(_snapshot(dict(state), names), "", 0)
    return {name: leaf for leaf, (_, name) in zip(walked.leaves, walked.by_id.values(), strict=True)}


class Places:
    """Placement of each tensor of a live state, including tensors that do not exist yet, such as the moments of a new
    optimizer."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        names = ParameterNames(state)
        self._live = _leaves(state, names)
        self._parameters = dict(_parameters(state, "", names))
        spread = [leaf for leaf in (*self._parameters.values(), *self._live.values()) if is_sharded(leaf)]
        self._meshes = list({id(leaf.device_mesh): leaf.device_mesh for leaf in spread}.values())

    def of(self, name: str, global_shape: tuple[int, ...], described: dict[str, Any] | None) -> Place | None:
        """Return the tensor's placement in this run; None = not sharded.

        The placement of the live tensor; for an optimizer moment with its parameter's shape, that of the parameter; otherwise
        the saved placement.
        """
        live = self._live.get(name)
        if live is None:
            live = self._parameter_of(name, global_shape)
        if live is not None:
            return place_of(live) if is_sharded(live) else None
        return None if described is None else find_place(described, self._meshes)

    def _parameter_of(self, name: str, global_shape: tuple[int, ...]) -> torch.Tensor | None:
        stem = name
        while "." in stem:
            stem = stem.rpartition(".")[0]
            parameter = self._parameters.get(stem)
            if parameter is not None:
                return parameter if tuple(parameter.shape) == global_shape else None
        return None


def _parameters(value: Any, path: str, names: ParameterNames) -> list[tuple[str, torch.Tensor]]:
    """Return the parameter of each entry of an optimizer's state, by the entry's name in `collect`."""
    if optimizer_state.is_plain(value):
        parameters = optimizer_state.parameters_of(value)
        keys = names.of(value) or range(len(parameters))
        return [(f"{path}.state.{key}", parameter) for key, parameter in zip(keys, parameters, strict=True)]
    if type(value) is dict:
        below = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
        return [found for inner, item in below for found in _parameters(item, inner, names)]
    return []


@dataclass(frozen=True, slots=True)
class _Applied:
    """One `apply`. `objects`: paths of the objects that were saved; None = not known, and the keys must be equal."""

    names: ParameterNames
    objects: frozenset[Path] | None
    # Live container or tensor that was filled in place, by its id, and what it was filled with.
    filled: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def mapping(self, live: Mapping[Any, Any], saved: Any, path: Path) -> None:
        if not isinstance(saved, Mapping):
            raise InvalidSpec(shown(path), "a dict", f"{type(saved).__name__} as in the checkpoint")
        if live.keys() == saved.keys():
            for key, value in live.items():
                self._value(live, key, value, saved[key], (*path, key))
            return
        self._require_plain_difference(live, saved, path)
        for key, value in saved.items():
            if key in live:
                self._value(live, key, live[key], value, (*path, key))
            else:
                _set(live, key, _cloned(value), path)
        if isinstance(live, dict):  # the order counts where a script iterates over the dict
            ordered = {key: live[key] for key in saved}
            live.clear()
            live.update(ordered)

    def _require_plain_difference(self, live: Mapping[Any, Any], saved: Mapping[Any, Any], path: Path) -> None:
        added = [key for key in saved if key not in live]
        removed = [key for key in live if key not in saved]
        if self.objects is None or any(self._has_objects((*path, key)) for key in added):
            fits = False
        else:
            fits = not removed if not path else not any(holds(live[key]) for key in removed)
        if not fits:
            raise InvalidSpec(
                shown(path), sorted(map(str, live)), f"the keys that the checkpoint holds: {sorted(map(str, saved))}"
            )

    def _has_objects(self, path: Path) -> bool:
        return any(each[: len(path)] == path for each in self.objects or ())

    def _value(self, holder: Any, key: Any, live: Any, saved: Any, path: Path) -> None:
        if isinstance(live, nn.Module) and type(live).load_state_dict is nn.Module.load_state_dict:
            live.load_state_dict(saved)  # copies into its own parameters, so no further copy is needed
        elif optimizer_state.is_plain(live):
            keys = self.names.of(live) or range(len(optimizer_state.parameters_of(live)))
            live.load_state_dict(optimizer_state.to_numbers(_cloned(saved), live, keys, shown(path)))
        elif is_stateful(live):
            live.load_state_dict(_cloned(saved))  # may keep the given tensors, as optimizers do
        elif isinstance(live, torch.Tensor):
            if not isinstance(saved, torch.Tensor) or saved.shape != live.shape or saved.dtype != live.dtype:
                raise InvalidSpec(shown(path), _describe(live), f"{_describe(saved)} as in the checkpoint")
            with torch.no_grad():
                live.copy_(saved)
        elif isinstance(live, dict):
            self.mapping(live, saved, path)
        elif self._has_objects(path):
            raise InvalidSpec(shown(path), _describe(live), "the object whose state the checkpoint holds")
        elif (restored := self._fill(live, saved)) is not live:
            _set(holder, key, restored, path[:-1])

    def _fill(self, live: Any, saved: Any) -> Any:
        """Return `live` with the saved content if it is a container, array or tensor of the same kind; otherwise a copy of
        `saved`. A live object that stands in several places, as in `[torch.zeros(2)] * 3`, is filled once."""
        before = self.filled.setdefault(id(live), (live, saved))
        if before[1] is not saved:
            return _cloned(saved)
        if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor) and _has_room(live, saved):
            with torch.no_grad():
                return live.copy_(saved)
        if type(live) is not type(saved):
            return _cloned(saved)
        match live:
            case list() | deque():
                items = self._filled_each(live, saved)
                live.clear()
                live.extend(items)
            case tuple():
                return tuple(self._filled_each(live, saved))
            case set():
                live.clear()
                live.update(saved)
            case dict():
                entries = {key: self._fill(live.get(key), value) for key, value in saved.items()}
                live.clear()
                live.update(entries)
            case _ if (
                _is_array(live) and live.flags.writeable and (live.shape, live.dtype) == (saved.shape, saved.dtype)
            ):
                live[...] = saved
            case _:
                return _cloned(saved)
        return live

    def _filled_each(self, live: Collection[Any], saved: Collection[Any]) -> list[Any]:
        return [self._fill(mine, item) for mine, item in zip((*live, *[None] * len(saved)), saved, strict=False)]


def _has_room(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether `saved` can be copied into `live`, which must not be an expanded tensor."""
    overlaps = any(not stride and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True))
    return live.shape == saved.shape and live.dtype == saved.dtype and not overlaps


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _set(holder: Any, key: Any, value: Any, path: Path) -> None:
    try:
        holder[key] = value
    except TypeError:
        raise InvalidSpec(
            shown(path), type(holder).__name__, "a mutable dict around a value that is restored"
        ) from None


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _cloned(value: Any) -> Any:
    """Return a copy of the tree that does not share memory with the shard."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        for key in value:
            value[key] = _cloned(value[key])
        return value
    if type(value) is deque:
        return deque(map(_cloned, value), value.maxlen)
    if type(value) is list:
        return [_cloned(item) for item in value]
    if type(value) is tuple:
        return tuple(_cloned(item) for item in value)
    return value


def _snapshot(value: Any, names: ParameterNames) -> Any:
    """Replace stateful objects in nested plain dicts by their state dicts."""
    if isinstance(value, torch.Tensor):
        return value
    if optimizer_state.is_plain(value):
        named = names.of(value)
        return value.state_dict() if named is None else optimizer_state.to_names(value.state_dict(), named)
    if is_stateful(value):
        return value.state_dict()
    if type(value) is dict:
        return {key: _snapshot(item, names) for key, item in value.items()}
    return value


class _Names:
    """Names every tensor of a tree by its key path and rejects values that cannot be saved."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self.by_id: dict[int, tuple[Any, str]] = {}  # id of the leaf → (kind, name)
        self.leaves: list[object] = []  # parallel to by_id; keeps the objects alive, so that their ids stay unique

    def walk(self, value: Any, path: str, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise InvalidSpec(f"state{path}", "more than 64 levels", "containers without cycles")
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            self._array(value, path)
        elif type(value) in _MAPPINGS:
            for key, item in value.items():
                self._leaf_or_refuse(key, f"{path}.{key} (the key)")
                self.walk(item, f"{path}.{key}" if path else str(key), depth + 1)
        elif type(value) in _SEQUENCES:
            for index, item in enumerate(value):
                self.walk(item, f"{path}.{index}", depth + 1)
        else:
            self._leaf_or_refuse(value, path)

    def _leaf_or_refuse(self, value: Any, path: str) -> None:
        if type(value) not in _PLAIN and not (type(value) is tuple and all(type(item) in _PLAIN for item in value)):
            raise InvalidSpec(
                f"state: {path}",
                f"{type(value).__module__}.{type(value).__qualname__}",
                "an entry of a plain dict: in lists and other containers, objects are not restored"
                if is_object(value)
                else "tensors, arrays, numbers, strings and containers of them, or an object with state_dict/load_state_dict",
            )

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if id(tensor) in self.by_id:
            return  # the same object twice: saved once and restored as one object
        if is_sharded(tensor):
            local, piece = take_apart(tensor, path)
            self.pieces[self._add(describe(tensor), tensor, local, path)] = piece
            return
        if type(tensor) not in _TENSORS:  # its data is stored elsewhere or encoded, so a plain copy would be wrong
            raise InvalidSpec(
                f"state: {path}",
                f"{type(tensor).__module__}.{type(tensor).__qualname__}",
                "a plain tensor or a DTensor: other subclasses are not supported yet",
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise InvalidSpec(
                f"state: {path}", f"a {tensor.layout} tensor on {tensor.device}", "a dense tensor with data"
            )
        self._add("tensor", tensor, tensor.detach(), path)

    def _array(self, value: Any, path: str) -> None:
        import numpy

        if value.dtype.hasobject or value.dtype.kind not in "biufc":
            raise InvalidSpec(f"state: {path}", f"an array of {value.dtype}", "an array of numbers")
        scalar = isinstance(value, numpy.generic)
        self._add("scalar" if scalar else "array", value, torch.from_numpy(numpy.array(value)), path)

    def _add(self, kind: Any, leaf: object, tensor: torch.Tensor, path: str) -> str:
        name, copies = path or "value", 1
        while name in self.tensors:  # both {"a.b": …} and {"a": {"b": …}}
            copies += 1
            name = f"{path}#{copies}"
        self.tensors[name] = tensor
        self.by_id[id(leaf)] = (kind, name)
        self.leaves.append(leaf)
        return name


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, by_id: Mapping[int, tuple[Any, str]]) -> None:
        super().__init__(buffer, protocol=4)
        self._by_id = by_id

    def persistent_id(self, value: Any) -> tuple[Any, str] | None:
        return self._by_id.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensor: Leaf) -> None:
        super().__init__(buffer)
        self._tensor = tensor
        self._seen: dict[str, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, name = pid
        if name not in self._seen:
            self._seen[name] = self._leaf(kind, name)
        return self._seen[name]

    def _leaf(self, kind: Any, name: str) -> Any:
        match kind:
            case "tensor":
                return self._tensor(name, None)
            case "array":
                return self._tensor(name, None).clone().numpy()
            case "scalar":
                return self._tensor(name, None).clone().numpy()[()]
            case {"mesh": tuple(), "placements": tuple()}:
                return self._tensor(name, kind)
            case _:
                raise pickle.UnpicklingError(f"a leaf of unknown kind {kind!r}")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _LOADABLE[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not a type that a saved state may contain") from None


def nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
