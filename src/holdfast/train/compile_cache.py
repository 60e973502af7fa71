"""Stores the output of `torch.compile` next to the checkpoints, so that a restart does not compile the same graphs again.

One small file per rank, written once after the first steps and loaded before the script's `main`. It is valid for one version
of torch and Python, one device and one mesh. A file for another combination, or a damaged one, is ignored, and torch compiles.

torch keeps these artefacts in a global that is guarded by its compile lock, so they are read on the training thread, between
two steps (0.3 ms for one small graph); a background thread writes them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from holdfast.domain.mesh import Mesh
from holdfast.shards import sync_directory

log = logging.getLogger("holdfast.train")

AFTER_STEPS: Final = 3  # of this process; by then a script has usually compiled all its graphs
BYTES_MAX: Final = 256 << 20
FILES_MAX: Final = 4  # per rank, for several meshes: a job may be resized back to an earlier one
HEADER_BYTES_MAX: Final = 4096
WRITE_TIMEOUT_S: Final = 30.0  # at the end of the script
_MAGIC: Final = b"holdfast compile cache 1\n"


class Artefacts(Protocol):
    """The two calls of `torch.compiler` (2.6 and newer)."""

    def save_cache_artifacts(self) -> tuple[bytes, Any] | None: ...
    def load_cache_artifacts(self, serialized_artifacts: bytes) -> Any: ...


@dataclass(frozen=True, slots=True)
class Key:
    """The properties that compiled code depends on, apart from the source code, which torch checks."""

    release: str  # of torch
    python: str
    machine: str
    device: str
    mesh: str
    rank: int

    @classmethod
    def of(cls, device: torch.device, mesh: Mesh, rank: int) -> Key:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(torch.__version__, platform.python_version(), platform.machine(), name, str(mesh), rank)

    def encode(self) -> str:
        return json.dumps([getattr(self, name) for name in self.__slots__], separators=(",", ":"))

    @property
    def file_name(self) -> str:
        digest = hashlib.blake2b(self.encode().encode(), digest_size=6).hexdigest()
        return f"compile-rank-{self.rank}-{digest}.cache"


class CompileCache:
    """One rank's artefacts in `directory`. No method raises, because without the cache training only starts later."""

    def __init__(self, directory: Path, key: Key, artefacts: Artefacts) -> None:
        self._directory = directory
        self._key = key
        self._path = directory / key.file_name
        self._artefacts = artefacts
        self._loaded: object = None  # the artefacts that torch reports as loaded
        self._steps_left = AFTER_STEPS
        self._writer: threading.Thread | None = None

    def load(self) -> bool:
        """Load the artefacts of an earlier process into torch. Returns False if there are none that fit."""
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("cannot read the compile cache, torch compiles again: %s", error)
            return False
        began = time.monotonic()
        payload, why_not = _unpack(raw, self._key)
        if payload is None:
            log.warning("ignored the compile cache %s, torch compiles again: %s", self._path, why_not)
            return False
        try:
            info = self._artefacts.load_cache_artifacts(payload)
        except Exception as error:  # an exception in torch's decoder must not end the run
            log.warning("torch rejected its compile cache and compiles again: %r", error)
            return False
        if info is None:
            log.warning("torch rejected its compile cache and compiles again")
            return False
        self._loaded = _contents(info)
        log.info("compile cache: %d bytes loaded in %.2f s", len(payload), time.monotonic() - began)
        return True

    def step(self) -> None:
        """Count a finished step. After the first few, save what has been compiled."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.save()

    def save(self) -> bool:
        """Get the artefacts from torch and write them in the background. Returns False if there are no new ones."""
        if "torch._inductor.codecache" not in sys.modules and self._artefacts is torch.compiler:
            return False  # nothing was compiled, and the query would import the compiler
        try:
            taken = self._artefacts.save_cache_artifacts()
        except Exception as error:  # as in `load`
            log.warning("torch did not return its compile cache: %r", error)
            return False
        if taken is None or _contents(taken[1]) == self._loaded:
            return False
        payload, _ = taken
        if len(payload) > BYTES_MAX:
            log.warning("the compile cache of %d bytes is not stored: the limit is %d", len(payload), BYTES_MAX)
            return False
        self._writer = threading.Thread(target=self._write, args=(payload,), name="holdfast-compile-cache", daemon=True)
        self._writer.start()
        return True

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join(WRITE_TIMEOUT_S)

    def _write(self, payload: bytes) -> None:
        """Write the file atomically: a crash leaves the old file or the new one."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(_pack(payload, self._key))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)
            sync_directory(self._directory)
            self._limit()
        except OSError as error:
            temporary.unlink(missing_ok=True)
            log.warning("the compile cache is not stored: %s", error)

    def _limit(self) -> None:
        """Delete all but the newest few files of this rank, and partial files of killed processes."""
        mine = self._directory.glob(f"compile-rank-{self._key.rank}-*.cache")
        by_age = sorted(mine, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in [*by_age[FILES_MAX:], *self._directory.glob(f".compile-rank-{self._key.rank}-*.part")]:
            path.unlink(missing_ok=True)


def _contents(info: Any) -> object:
    """Return torch's `CacheInfo` as a comparable value: the keys of each kind of artefact."""
    return {kind: sorted(map(str, keys)) for kind, keys in info.artifacts.items()}


def _pack(payload: bytes, key: Key) -> bytes:
    header = json.dumps({"key": key.encode(), "size": len(payload), "crc32": zlib.crc32(payload)}).encode()
    return _MAGIC + header + b"\n" + payload


def _unpack(raw: bytes, key: Key) -> tuple[bytes | None, str]:
    """Return the payload, or None and the reason why it cannot be used."""
    if not raw.startswith(_MAGIC):
        return None, "not a compile cache"
    header, newline, payload = raw[len(_MAGIC) :].partition(b"\n")
    try:
        fields: dict[str, Any] = json.loads(header) if newline and len(header) <= HEADER_BYTES_MAX else {}
        made_for, size, crc = fields["key"], fields["size"], fields["crc32"]
    except (ValueError, KeyError, TypeError):
        return None, "its header is damaged"
    if made_for != key.encode():
        return None, f"it was made for {made_for}, this is {key.encode()}"
    if (len(payload), zlib.crc32(payload)) != (size, crc):
        return None, "it is damaged"
    return payload, ""
