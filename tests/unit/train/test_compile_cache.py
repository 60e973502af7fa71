"""The compile cache: whatever is wrong with it, torch only compiles again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.domain.mesh import Mesh
from holdfast.train import compile_cache
from holdfast.train.compile_cache import AFTER_STEPS, FILES_MAX, CompileCache, Key

KEY = Key.of(torch.device("cpu"), Mesh.of({"dp": 2}), 1)


def info(*graphs: str) -> Any:
    return SimpleNamespace(artifacts=defaultdict(list, {"inductor": list(graphs)} if graphs else {}))


class Torch:
    """What `torch.compiler` has compiled, and what it was given back."""

    def __init__(self, *graphs: str) -> None:
        self.graphs = graphs
        self.loaded: list[bytes] = []
        self.error: Exception | None = None

    def save_cache_artifacts(self) -> tuple[bytes, Any] | None:
        if self.error is not None:
            raise self.error
        return (repr(self.graphs).encode(), info(*self.graphs)) if self.graphs else None

    def load_cache_artifacts(self, serialized_artifacts: bytes) -> Any:
        if self.error is not None:
            raise self.error
        self.loaded.append(serialized_artifacts)
        return info(*self.graphs)


def kept(tmp: Path, torch_: Torch, key: Key = KEY) -> Path:
    """A file with what `torch_` has compiled."""
    cache = CompileCache(tmp, key, torch_)
    assert cache.save()
    cache.close()
    return tmp / key.file_name


def test_what_was_compiled_is_kept_after_the_first_steps_and_given_back(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, KEY, Torch("g1", "g2"))
    for _ in range(AFTER_STEPS - 1):
        cache.step()
    cache.close()
    assert list(tmp_path.iterdir()) == []
    cache.step()
    cache.step()
    cache.close()
    later = Torch("g1", "g2")
    assert CompileCache(tmp_path, KEY, later).load()
    assert later.loaded == [b"('g1', 'g2')"]


def test_nothing_compiled_nothing_kept(tmp_path: Path) -> None:
    assert not CompileCache(tmp_path, KEY, Torch()).save()
    assert not CompileCache(tmp_path, KEY, Torch()).load()


def test_what_was_loaded_is_not_written_again_and_what_is_new_is(tmp_path: Path) -> None:
    kept(tmp_path, Torch("g1"))
    compiler = Torch("g1")
    cache = CompileCache(tmp_path, KEY, compiler)
    assert cache.load()
    assert not cache.save()
    compiler.graphs = ("g1", "g2")
    assert cache.save()
    cache.close()


@pytest.mark.parametrize("field", ["release", "python", "machine", "device", "mesh", "rank"])
def test_another_torch_machine_or_mesh_compiles_again(
    tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept(tmp_path, Torch("g1"))
    changes: dict[str, Any] = {field: 7 if field == "rank" else "another"}
    other = replace(KEY, **changes)
    path.rename(tmp_path / other.file_name)  # even under its name
    compiler = Torch("g1")
    assert not CompileCache(tmp_path, other, compiler).load()
    assert compiler.loaded == []
    assert "torch compiles again: it was made for" in caplog.text


def test_any_damage_means_compiling_again(tmp_path: Path) -> None:
    path = kept(tmp_path, Torch("g1"))
    good = path.read_bytes()
    compiler = Torch("g1")
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        assert not CompileCache(tmp_path, KEY, compiler).load(), good[at : at + 10]
        path.write_bytes(good[:at])
        assert not CompileCache(tmp_path, KEY, compiler).load()
    assert compiler.loaded == []


def test_an_error_of_torch_is_said_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path, Torch("g1"))
    broken = Torch("g1")
    broken.error = RuntimeError("no such op")
    cache = CompileCache(tmp_path, KEY, broken)
    assert not cache.load()
    assert not cache.save()
    assert caplog.text.count("no such op") == 2


def test_size_and_number_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "BYTES_MAX", 100)
    assert not CompileCache(tmp_path, KEY, Torch("g" * 200)).save()
    (tmp_path / f".{KEY.file_name}.1.part").touch()
    for dp in range(2, 2 + 2 * FILES_MAX):
        kept(tmp_path, Torch("g1"), replace(KEY, mesh=f"dp {dp}"))
    other_rank = kept(tmp_path, Torch("g1"), replace(KEY, rank=0))
    assert len(list(tmp_path.iterdir())) == FILES_MAX + 1
    assert other_rank.exists()


def test_a_full_disk_is_said_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    cache = CompileCache(tmp_path, KEY, Torch("g1"))
    cache.save()
    cache.close()
    assert list(tmp_path.iterdir()) == []
    assert "the compile cache is not stored" in caplog.text
