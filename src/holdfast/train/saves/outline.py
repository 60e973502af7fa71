"""The outline of a state: which objects and tensors its nested plain dicts contain, by key path.

A restore loads a checkpoint into the objects and tensors that the script has built before it, and sets plain values. So a
state whose objects or tensors differ from those of `run.restore` could be saved, and then never be restored. `Outline.require`
finds this at the first such save.

    state at run.restore     state at a save          a restart
    plain value              another plain value      gets the saved value
    –                        plain value or tensor    gets the saved value
    plain value              – (in a nested dict)     has no such key
    tensor                   other shape, dtype, –    refused: it would not be known what else refers to the tensor
    object with state_dict   –                        refused: its state would be lost
    –                        object with state_dict   refused: nothing would load its state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.domain.errors import InvalidSpec

Path = tuple[Any, ...]  # keys from the top
_OBJECT = "an object with state_dict"
_SAME = "as run.restore was given, because a restart loads into that"
_RESHAPED = f"{_SAME}; let an object with state_dict save a tensor that changes its shape"
_NEW = "an object that run.restore was given, because a restart loads into that: create it before run.restore"


def is_object(value: object) -> bool:
    """Return whether the value has `state_dict` and `load_state_dict`."""
    # A runtime_checkable protocol would be ten times slower, which costs milliseconds in every save.
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def shown(path: Path) -> str:
    """Return the path as a script would write it."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def objects(state: Mapping[Any, Any], above: Path = ()) -> Iterator[Path]:
    """Yield the paths of the objects."""
    return (path for path, kind in _kinds(state, above) if kind is None)


def holds(value: Any) -> bool:
    """Return whether the value is an object or a tensor, or a plain dict that contains one."""
    return any(True for _ in _kinds({"": value}, ()))


@dataclass(frozen=True, slots=True)
class Outline:
    """Path → dtype and shape of a tensor; None = an object."""

    kinds: Mapping[Path, tuple[torch.dtype, torch.Size] | None]

    @classmethod
    def of(cls, state: Mapping[Any, Any]) -> Outline:
        return cls(dict(_kinds(state, ())))

    def require(self, state: Mapping[Any, Any]) -> None:
        """Raise `InvalidSpec`, with the first path, if a start with this outline could not restore `state`."""
        now = Outline.of(state).kinds
        for path, kind in self.kinds.items():
            if path not in now:
                raise InvalidSpec(shown(path), f"without {_described(kind)}", f"{_described(kind)}, {_SAME}")
            if now[path] != kind:
                raise InvalidSpec(shown(path), _described(now[path]), f"{_described(kind)}, {_RESHAPED}")
        for path, kind in now.items():
            if kind is None and path not in self.kinds:
                raise InvalidSpec(shown(path), _OBJECT, _NEW)


def _kinds(state: Mapping[Any, Any], above: Path) -> Iterator[tuple[Path, tuple[torch.dtype, torch.Size] | None]]:
    for key, value in state.items():
        path = (*above, key)
        if isinstance(value, torch.Tensor):
            yield path, (value.dtype, value.shape)
        elif is_object(value):
            yield path, None
        elif type(value) is dict:
            yield from _kinds(value, path)


def _described(kind: tuple[torch.dtype, torch.Size] | None) -> str:
    return _OBJECT if kind is None else f"{kind[0]} {tuple(kind[1])}"
