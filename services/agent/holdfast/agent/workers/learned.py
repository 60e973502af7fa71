"""The modules that the scripts of this node import: recorded by a worker at its first step
(`holdfast.train.observing.imports`), and read when the next worker is started. Also decides whether a script can be started
with them.

The lists are stored in a directory of the agent, by script, module or command. A job that is submitted again therefore begins
with the list of its last run.

A start with learned modules that ends before its first step is a *doubt*: the job starts without them until it has stepped. If
the first start without them reaches its first step, in the same run, they are not used again for this script until the script
imports others, or other versions of them. If it fails as well, or the doubt is only that the ranks were stopped early, the
modules are used again afterwards. If the communication of a rank has failed, another node may be the cause: the modules are
used again, and given up if the next start with them ends in the same way. Doubts are stored, so that a restart of the agent
does not repeat the failure."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from holdfast.agent.workers.apart import open_untrusted
from holdfast.domain.job import LEARN_IMPORTS, LaunchSpec

log = structlog.get_logger("holdfast.agent.learned")

FILE_BYTES_MAX = 1 << 20
FILES_MAX = 256  # scripts whose list is kept, and scripts whose doubt is kept
MODULES_MAX = 4000
VARIABLES_MAX = 1000
CASCADES_MAX = 2  # starts in a row that ended by a failed communication
MORE_MIN = 20  # number of new modules that justifies another template


@dataclass(frozen=True, slots=True)
class Imports:
    """What a script has imported by its first step."""

    modules: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # package → time and size of its file
    # Environment variable that the script has set → fingerprint of its value.
    variables: tuple[tuple[str, str], ...] = ()

    def differ(self, known: Imports) -> bool:
        """Whether a template with the modules `known` does not suffice. Fewer than `MORE_MIN` new modules do not count."""
        files, before = dict(self.files), dict(known.files)
        return (
            len(set(self.modules) - set(known.modules)) >= MORE_MIN
            or any(files[name] != before[name] for name in files.keys() & before.keys())
            or not set(self.variables) <= set(known.variables)
        )


@dataclass(frozen=True, slots=True)
class _Doubt:
    imports: Imports
    run: str  # in which the doubt arose
    reason: str
    of_ranks: bool  # a rank has failed by itself, or the start has taken very long
    cascades: int = 0  # starts in a row, the last one included, in which only the communication of a rank has failed
    without_too: bool = False  # a start without learned modules has failed as well
    over: bool = False  # the modules are used again; remembered because of `cascades`
    final: bool = False


class Learned:
    """The lists in `directory`. The user's process writes the files, so a file that is not a list of names is ignored. Doubts
    are in `doubts`, which only the agent writes."""

    def __init__(self, directory: Path, doubts: Path, uid: int | None = None) -> None:
        """`uid`: the user of the workers; None = that of this process."""
        self._directory, self._doubts = directory, doubts
        self._uid = os.geteuid() if uid is None else uid
        self._taken: dict[str, Imports] = {}  # by script, the list for which templates were started
        self._read: dict[str, int] = {}  # by script, the time of the file that was read last
        # By script, with the version of its file.
        self._stored_doubts: dict[str, tuple[tuple[int, int], _Doubt | None]] = {}

    def path(self, launch: LaunchSpec) -> Path:
        """Return the file to which a worker of this launch writes its list. Deletes the oldest of too many lists."""
        _bound(self._directory)
        return self._directory / _name(launch)

    def imports(self, launch: LaunchSpec) -> Imports | None:
        """Return the modules to import for this launch; None if there are none."""
        if LEARN_IMPORTS not in launch.preload:
            return None
        name = _name(launch)
        taken, path = self._taken.get(name), self._directory / name
        try:
            written = path.lstat().st_mtime_ns
        except OSError:
            return taken
        if self._read.get(name) == written:
            return taken
        self._read[name] = written
        found = _imports(_load(path, self._uid))
        if found is not None and (found.differ(taken) if taken is not None else len(found.modules) >= MORE_MIN):
            self._taken[name] = taken = found
        return taken

    def refused(self, launch: LaunchSpec, run: str) -> str:
        """Return why this run must be started without learned modules; empty = it may have them."""
        doubt, imports = self._doubt(launch), self.imports(launch)
        if doubt is None or doubt.over or (imports is not None and imports.differ(doubt.imports)):
            return ""
        return doubt.reason if doubt.final or doubt.run == run else ""

    def failed(self, launch: LaunchSpec, run: str, reason: str, *, of_ranks: bool, cascading: bool = False) -> None:
        """A start with learned modules has ended before its first step. `cascading`: because the communication of a rank has
        failed, which another node may have caused."""
        log.warning("learned modules are not used for the next start", script=launch.target, reason=reason)
        if (imports := self.imports(launch)) is not None:
            known = self._doubt(launch)
            before = known.cascades if known is not None and not imports.differ(known.imports) else 0
            self._write(launch, _Doubt(imports, run, reason, of_ranks, before + cascading))

    def stepped(self, launch: LaunchSpec) -> None:
        """A start with learned modules has reached its first step."""
        if self._doubt(launch) is not None:
            (self._doubts / _name(launch)).unlink(missing_ok=True)

    def failed_without(self, launch: LaunchSpec, run: str) -> None:
        """A start without learned modules has failed before its first step."""
        doubt = self._doubt(launch)
        if doubt is not None and doubt.run == run and not doubt.final:
            self._write(launch, replace(doubt, without_too=True))

    def reached(self, launch: LaunchSpec, run: str) -> None:
        """A start without learned modules has reached its first step."""
        doubt = self._doubt(launch)
        if doubt is None or doubt.run != run or doubt.final or doubt.over:
            return
        if (doubt.of_ranks or doubt.cascades >= CASCADES_MAX) and not doubt.without_too:
            self._write(launch, replace(doubt, final=True))
            given_up = "learned modules are given up until the script imports others"
            log.warning(given_up, script=launch.target, reason=doubt.reason)
        elif doubt.cascades and not doubt.without_too:
            self._write(launch, replace(doubt, over=True))
        else:
            (self._doubts / _name(launch)).unlink(missing_ok=True)

    def _doubt(self, launch: LaunchSpec) -> _Doubt | None:
        """Return the stored doubt. Reads its file only if it has changed: the agent asks again and again."""
        name = _name(launch)
        try:
            status = (self._doubts / name).lstat()
        except OSError:
            self._stored_doubts.pop(name, None)
            return None
        version = (status.st_mtime_ns, status.st_ino)
        if name not in self._stored_doubts or self._stored_doubts[name][0] != version:
            self._stored_doubts[name] = version, self._read_doubt(launch)
        return self._stored_doubts[name][1]

    def _read_doubt(self, launch: LaunchSpec) -> _Doubt | None:
        found = _load(self._doubts / _name(launch), os.geteuid())
        imports = _imports(found.get("imports"))
        if imports is None:
            return None
        of_ranks, without_too, over, final = (
            found.get(name) is True for name in ("of_ranks", "without_too", "over", "final")
        )
        cascades = found.get("cascades")
        times = cascades if isinstance(cascades, int) else 0
        return _Doubt(
            imports, str(found.get("run")), str(found.get("reason")), of_ranks, times, without_too, over, final
        )

    def _write(self, launch: LaunchSpec, doubt: _Doubt) -> None:
        path = self._doubts / _name(launch)
        temporary = path.with_suffix(".new")
        try:
            self._doubts.mkdir(mode=0o700, parents=True, exist_ok=True)
            _bound(self._doubts)
            temporary.write_text(json.dumps(asdict(doubt) | {"imports": _as_recorded(doubt.imports)}))
            temporary.replace(path)
        except OSError as error:
            log.error("doubt about learned modules not stored", path=str(path), reason=str(error))


def _name(launch: LaunchSpec) -> str:
    key = json.dumps([launch.script, launch.module, launch.command])
    return f"{zlib.crc32(key.encode()):08x}.json"


def _bound(directory: Path) -> None:
    files = list(directory.glob("*.json"))
    with suppress(OSError):  # a user's process may delete files as well, or put directories there
        for path in sorted(files, key=lambda each: each.lstat().st_mtime)[: max(0, len(files) - FILES_MAX + 1)]:
            path.unlink(missing_ok=True)


def _load(path: Path, uid: int) -> Mapping[str, object]:
    try:
        with open(open_untrusted(path, uid), "rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        found = json.loads(raw) if 0 < len(raw) <= FILE_BYTES_MAX else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _imports(found: object) -> Imports | None:
    """Return the recorded list; None if it is not one."""
    if not isinstance(found, dict):
        return None
    modules, files, variables = _texts(found.get("modules")), _table(found.get("files")), _table(found.get("variables"))
    if modules is None or files is None or variables is None:
        return None
    good = (name for name in dict.fromkeys(modules) if all(part.isidentifier() for part in name.split(".")))
    names = tuple(good)[:MODULES_MAX]
    return Imports(names, files[:MODULES_MAX], variables[:VARIABLES_MAX])


def _as_recorded(imports: Imports) -> dict[str, object]:
    return {"modules": imports.modules, "files": dict(imports.files), "variables": dict(imports.variables)}


def _texts(values: object) -> list[str] | None:
    return values if isinstance(values, list) and all(isinstance(each, str) for each in values) else None


def _table(values: object) -> tuple[tuple[str, str], ...] | None:
    if not isinstance(values, dict) or _texts([*values.values()]) is None:
        return None
    return tuple(sorted(values.items()))
