"""Finds the rank that a hung job waits for, in the flight-recorder dumps that its ranks wrote to disk.

    python -m holdfast.diagnostics.flight_dumps DIR

NCCL's watchdog writes such a file for each rank when a collective times out (`TORCH_FR_DUMP_TEMP_FILE`, in older releases
`TORCH_NCCL_DEBUG_INFO_TEMP_FILE`), under any launcher. Files are pickles or JSON; their names end with the rank.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from holdfast.diagnostics.detectors.waiting import Waiting, find_blocking_ranks
from holdfast.domain.collectives import CollectiveRows, compact, expand
from holdfast.domain.errors import MalformedMessage, NotFound
from holdfast.wire.flight_recorder import DUMP_BYTES_MAX, parse_json, parse_pickle, rows_of

FILES_MAX = 200_000
_NAME = re.compile(r".*?(\d+)(?:\.json|\.pickle|\.pkl)?")


@dataclass(frozen=True, slots=True)
class Dumps:
    """The dumps of a directory. `rejected`: (file name, reason) of files that are not valid dumps."""

    rows: CollectiveRows
    ranks: tuple[int, ...]
    rejected: tuple[tuple[str, str], ...] = ()

    def diagnosis(self) -> Waiting | None:
        """Return the ranks that the others wait for; None if no rank is inside a collective. A missing dump proves nothing
        about its rank."""
        return find_blocking_ranks(self.rows, missing=self.missing())

    def missing(self) -> tuple[int, ...]:
        """Ranks without a dump that are members of a group in another rank's dump."""
        return tuple(sorted(self._world() - set(self.ranks)))

    def _world(self) -> set[int]:
        """All ranks of the job, from the dumps' `pg_config`. In dumps of gloo `pg_config` is empty; then all ranks up to the
        highest one with a dump."""
        named = set(chain.from_iterable(map(expand, set(self.rows.members))))
        return named or set(range(max(self.ranks, default=-1) + 1))


def read(directory: Path) -> Dumps:
    """Read all dumps in `directory`. Raises `NotFound` if it contains no valid dump."""
    parts, ranks, rejected = [], [], []
    named = ((path, _NAME.fullmatch(path.name)) for path in sorted(directory.iterdir())[:FILES_MAX] if path.is_file())
    for path, found in named:
        if found is None:
            continue  # the name is not that of a dump: a log or a readme
        rank = int(found[1])
        try:
            parts.append(_rows(path, rank))
            ranks.append(rank)
        except MalformedMessage as error:
            rejected.append((path.name, str(error)))
    if not ranks:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in rejected)
        raise NotFound(f"{directory} contains no valid flight-recorder dump whose name ends with a rank{reasons}")
    return Dumps(CollectiveRows.of(parts), tuple(ranks), tuple(rejected))


def _rows(path: Path, rank: int) -> CollectiveRows:
    with path.open("rb") as file:
        raw = file.read(DUMP_BYTES_MAX + 1)
    dump = parse_json(raw) if raw.lstrip()[:1] == b"{" else parse_pickle(raw)
    return rows_of([(rank, dump)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="holdfast.diagnostics.flight_dumps", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    if not directory.is_dir():
        parser.error(f"{directory} is not a directory")
    try:
        dumps = read(directory)
    except NotFound as error:
        parser.error(str(error))
    for name, reason in dumps.rejected:
        print(f"rejected {name}: {reason}", file=sys.stderr)  # noqa: T201
    print(describe(dumps))  # noqa: T201


def describe(dumps: Dumps) -> str:
    """Return the diagnosis as text."""
    diagnosis = dumps.diagnosis()
    missing = dumps.missing()
    without = f", {len(missing)} without a dump ({compact(missing)})" if missing else ""
    heading = f"{len(dumps.ranks)} ranks{without}, {len(dumps.rejected)} files rejected: "
    if diagnosis is None:
        return f"{heading}no rank is inside a collective; the dumps do not explain a hang"
    who = f"rank {diagnosis.ranks[0]}: " if diagnosis.ranks else "no rank is named: "
    return f"{heading}{who}{diagnosis.reason} ({diagnosis.standing.value})"


if __name__ == "__main__":
    main()
