"""What the import of a module has done to the process besides adding modules. If workers cannot share it, or it would happen
earlier than in the script, each worker must import the module by itself.

Each check compares the state before the import with that after it. Threads and devices are checked by the template
(`template.spoiled_by`), for modules that the job names as well. Exit handlers are allowed: each worker runs them at its end,
and the template does not. So are variables that the import sets: each worker gets them."""

from __future__ import annotations

import multiprocessing.context
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.train.observing import imports
from holdfast.train.warm.sources import is_of_interpreter

# Variables that differ between the workers of a node, or between two generations.
IDENTITY: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
# Variables that a worker may have although its template has not. If both have one, its value is the same: a module that goes
# through the whole environment may read it.
_ADDED: Final = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRACEPARENT", "SLURM_PROCID", "SLURM_LOCALID"})
_ADDED_PREFIXES: Final = ("HOLDFAST_", "TORCHELASTIC_", "FT_")
_HARMLESS_FILES: Final = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/")
_SIGNALS: Final = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_PATCHED: Final = (
    *(torch, torch.nn, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.optim.Optimizer),
    *(torch.utils.data, torch.utils.data.DataLoader, torch.distributed),
)
_NAMED_MAX: Final = 3


class SideEffects:
    """Compares the state before the import of each module with that after it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables`: further environment variables that a module must not read, unless they have these values
        (`imports.fingerprint`)."""
        self._expected = variables
        self._installed = tuple(f"{root}{os.sep}" for root in imports.roots())
        self._modules = set(sys.modules)
        self._read: set[str] = set()
        self._arguments = _Watched(sys.argv, lambda: self._read.add("sys.argv"))
        self._has_seeded = False
        self._watch_seeds()
        self._before = _state()

    def of(self, import_: Callable[[], object]) -> str:
        """Call `import_`, and return what it has done; empty = nothing that matters."""
        self._read.clear()
        self._has_seeded = False
        watched, original = os._Environ.__getitem__, sys.argv
        read, sys.argv = self._read, self._arguments

        def note(environ: Any, name: Any) -> Any:
            read.add(os.fsdecode(name))
            return watched(environ, name)

        os._Environ.__getitem__ = note  # type: ignore[method-assign]
        try:
            import_()
        finally:
            os._Environ.__getitem__ = watched  # type: ignore[method-assign]
            sys.argv = original
        return self._problem()

    def _watch_seeds(self) -> None:
        """For good: this process ends after the imports."""
        generators: list[Any] = [random, *([sys.modules["numpy"].random] if "numpy" in sys.modules else [])]
        for generator in generators:
            for name in ("seed", "setstate", "set_state"):
                if (original := getattr(generator, name, None)) is not None:
                    setattr(generator, name, self._noting(original))

    def _noting(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: Any, **named: Any) -> object:
            self._has_seeded = True
            return original(*arguments, **named)

        return call

    def _problem(self) -> str:
        before, self._before = self._before, _state()
        if done := self._before.changed_since(before):
            return done
        if self._has_seeded:
            return "it seeds a generator of random numbers"
        withheld = {name for name in self._read if self._is_withheld(name)}
        if withheld or "sys.argv" in self._read:
            return f"it reads {', '.join(sorted(withheld) or ['sys.argv'])} when it is imported"
        new, self._modules = set(sys.modules) - self._modules, set(sys.modules)
        if edited := sorted(name for name in new if self._may_be_edited(name)):
            return f"it imports {edited[0]}, which is not an installed package: its file may be edited before the next start"
        return ""

    def _is_withheld(self, name: str) -> bool:
        if name in IDENTITY:
            return True
        if name in _ADDED or name.startswith(_ADDED_PREFIXES):
            return name not in os.environ
        expected = self._expected.get(name)
        return expected is not None and imports.fingerprint(os.environ.get(name)) != expected

    def _may_be_edited(self, name: str) -> bool:
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if not isinstance(origin, str) or not os.path.isabs(origin) or name.partition(".")[0] == "holdfast":
            return False
        return not origin.startswith(self._installed) and not is_of_interpreter(origin)


@dataclass(frozen=True, slots=True)
class _State:
    directory: str
    handlers: dict[signal.Signals, Any]
    files: dict[str, str]  # by descriptor
    memory: frozenset[str]  # mappings that a fork shares and that can be written
    processes: frozenset[int]
    start_method: object
    random: bytes  # torch's state. The generators of Python and NumPy are seeded anew in each worker: drawing changes nothing
    torch: dict[str, object]

    def changed_since(self, old: _State) -> str:
        """Say what differs; empty = nothing."""
        if self.directory != old.directory:
            return f"it changes the working directory to {self.directory}"
        if handled := sorted(each.name for each in _SIGNALS if self.handlers[each] != old.handlers[each]):
            return f"it handles {', '.join(handled)}"
        if opened := sorted(file for number, file in self.files.items() if old.files.get(number) != file):
            return f"it leaves {', '.join(opened)} open"
        if shared := sorted(self.memory - old.memory):
            return f"it shares {', '.join(shared)} between processes"
        if left := sorted(self.processes - old.processes):
            return f"it leaves {len(left)} process(es) running"
        if self.start_method is not old.start_method:
            return "it sets the start method of multiprocessing"
        if self.random != old.random:
            return "it seeds, or draws from, torch's generator of random numbers"
        if replaced := [name for name, value in old.torch.items() if self.torch.get(name) is not value]:
            return f"it replaces {', '.join(replaced[:_NAMED_MAX])}"
        return ""


def _state() -> _State:
    return _State(
        directory=os.getcwd(),
        handlers={number: signal.getsignal(number) for number in _SIGNALS},
        files=_open_files(),
        memory=_shared_memory(),
        processes=frozenset(children()),
        start_method=multiprocessing.context._default_context._actual_context,  # type: ignore[attr-defined]
        random=torch.get_rng_state().numpy().tobytes(),
        torch={f"{each.__name__}.{name}": value for each in _PATCHED for name, value in vars(each).items()},
    )


def children() -> list[int]:
    """Return the direct children of this process; none on a kernel without CONFIG_PROC_CHILDREN."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def _open_files() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if not target.startswith(_HARMLESS_FILES):
            found[number] = target
    return found


def _shared_memory() -> frozenset[str]:
    with open("/proc/self/maps") as file:
        mappings = [line.split(maxsplit=5) for line in file]
    return frozenset(each[-1].strip() for each in mappings if each[1].startswith("rw") and each[1].endswith("s"))


class _Watched(list[str]):
    """A list that says when it is read."""

    def __init__(self, values: Iterable[str], on_read: Callable[[], None]) -> None:
        super().__init__(values)
        self._on_read = on_read

    def __getitem__(self, index: Any) -> Any:
        self._on_read()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self._on_read()
        return super().__iter__()

    def __len__(self) -> int:
        self._on_read()
        return super().__len__()

    def __contains__(self, value: object) -> bool:
        self._on_read()
        return super().__contains__(value)
