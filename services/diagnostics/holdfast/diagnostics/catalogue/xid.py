"""The Xid catalogue: the meaning of NVIDIA driver errors and the recommended actions. Operators can override its rows.

It consists of three tables, documented in `ORIGIN.md`: `xid.csv` (each code, its class and first action), `rules.csv` (bursts
and escalations) and `nvlink5.csv` (sub-codes with more information than their log line). Sources disagree on many codes, so
operators can correct the table without a release: rows of the file named by `HOLDFAST_XID_OVERRIDES` replace the shipped rows.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TypeVar

from holdfast.domain.errors import InvalidSpec

_ROWS_MAX = 10_000
BURST_S = 60.0  # lines within this time belong to one fault, unless rules.csv has another value
_VERSION = re.compile(r"#\s*version\s+(\S+)")


class FirstAction(StrEnum):
    """The first action that the catalogue recommends."""

    IGNORE = "IGNORE"
    REPORT = "REPORT"  # a code that the driver does not use, or that is for its vendor: report only
    WATCH = "WATCH"
    DIAG = "DIAG"  # run a diagnostic when the node is free
    RESTART_PROCESS = "RESTART_PROCESS"
    GPU_RESET = "GPU_RESET"
    DRAIN_THEN_GPU_RESET = "DRAIN_THEN_GPU_RESET"  # the job may continue; reset the GPU when it next stops
    NODE_REBOOT = "NODE_REBOOT"
    REPLACE_NODE = "REPLACE_NODE"
    BY_SUBCODE = "BY_SUBCODE"  # NVLink 5: the line contains fatal or nonfatal
    FOLLOW_48 = "FOLLOW_48"  # a detail of a double-bit error
    FOLLOW_NVML_RECOVERY_ACTION = "FOLLOW_NVML_RECOVERY_ACTION"  # the driver states the action


JOB_GOES_ON = frozenset(
    {
        FirstAction.IGNORE,
        FirstAction.REPORT,
        FirstAction.WATCH,
        FirstAction.DIAG,
        FirstAction.DRAIN_THEN_GPU_RESET,
    }
)


class Role(StrEnum):
    """The cause that a code indicates."""

    HARDWARE = "hardware"  # the machine or its firmware
    APPLICATION = "application"  # usually an error of the program
    AFTERMATH = "aftermath"  # follows from another fault, or from a killed process
    VERDICT = "verdict"  # an action that the driver requests, on every GPU of a node after one fault
    NOTE = "note"  # unused, informational or unknown


class Scope(StrEnum):
    """What two faults of a GPU must have in common to count as a repetition."""

    GPU = "gpu"
    LINK = "link"
    UNIT = "unit"  # GPC and TPC
    JOBS = "jobs"  # faults in several jobs, each of which had the error only on this GPU


@dataclass(frozen=True, slots=True)
class Escalation:
    count: int  # including the current fault
    window_s: float
    scope: Scope
    then: FirstAction
    source: str = ""


@dataclass(frozen=True, slots=True)
class XidRow:
    xid: int
    name: str
    class_: str  # proposed_class, e.g. "hw_bus", "app"
    first_action: FirstAction
    usual_cause: str = ""
    source: str = "catalogue"
    role: Role = Role.NOTE
    burst_s: float = BURST_S
    escalations: tuple[Escalation, ...] = ()  # the highest count first

    @property
    def is_hardware(self) -> bool:
        """Whether the code indicates a fault of the machine or its firmware, not of the program."""
        return self.role in (Role.HARDWARE, Role.VERDICT)


@dataclass(frozen=True, slots=True)
class LinkRule:
    xid: int
    unit: str  # prefix of the unit's name
    subcodes: range
    first_action: FirstAction
    blame: str


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue(Mapping[int, XidRow]):
    """Rows by code. `version`: version of the shipped data, and the name of the file of overrides if there is one."""

    rows: Mapping[int, XidRow]
    links: tuple[LinkRule, ...] = ()
    version: str = ""

    def __getitem__(self, xid: int) -> XidRow:
        return self.rows[xid]

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, xid: int) -> XidRow:
        """The row of a code; an unknown code is only reported."""
        return self.rows.get(xid) or XidRow(xid, "not in the catalogue", "unknown", FirstAction.REPORT)

    def link_rule(self, xid: int, unit: str, subcode: int) -> LinkRule | None:
        return next(
            (
                rule
                for rule in self.links
                if rule.xid == xid and unit.startswith(rule.unit) and subcode in rule.subcodes
            ),
            None,
        )


@dataclass(slots=True)
class _Rules:
    """A rule for one code, or for all codes of a role."""

    role: Role | None = None
    burst_s: float | None = None
    escalations: list[Escalation] = field(default_factory=list)


def load(overrides: Path | None = None) -> Catalogue:
    """Load the shipped tables, and the operator's rows, which replace shipped rows. Raises `InvalidSpec` with file, line and
    value."""
    text = _shipped("xid.csv")
    rows = {row.xid: row for row in _parse(text, "xid.csv")}
    version = found[1] if (found := _VERSION.match(text)) else "unversioned"
    if overrides is not None:
        try:
            text = overrides.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec("HOLDFAST_XID_OVERRIDES", str(overrides), f"a readable CSV file ({error})") from error
        for row in _parse(text, str(overrides)):
            known = rows.get(row.xid)
            if known is not None:
                row = replace(row, name=row.name or known.name, class_=row.class_ or known.class_)
            rows[row.xid] = row
        version = f"{version}+{overrides.name}"
    rules = _parse_rules(_shipped("rules.csv"), "rules.csv")
    return Catalogue(
        rows={xid: _ruled(row, rules) for xid, row in rows.items()},
        links=tuple(_parse_links(_shipped("nvlink5.csv"), "nvlink5.csv")),
        version=version,
    )


def _ruled(row: XidRow, rules: Mapping[str, _Rules]) -> XidRow:
    own = rules.get(str(row.xid), _Rules())
    role = own.role or _role(row.class_)
    general = rules.get(role.value, _Rules())
    escalations = sorted([*own.escalations, *general.escalations], key=lambda rule: -rule.count)
    return replace(row, role=role, burst_s=own.burst_s or general.burst_s or BURST_S, escalations=tuple(escalations))


def _role(class_: str) -> Role:
    if class_.startswith(("app", "driver_or_app")):
        return Role.APPLICATION
    if class_.startswith("side_effect"):
        return Role.AFTERMATH
    if class_.startswith("authoritative"):
        return Role.VERDICT
    if class_.startswith(("info", "unused", "unknown")) or not class_:
        return Role.NOTE
    return Role.HARDWARE


# ---------------------------------------------------------------- reading the tables


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _table(text: str, origin: str, *required: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (location, cells) of each row. Lines that begin with # are comments. Every cell is a stripped string."""
    lines = text.splitlines()
    skipped = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    reader = csv.DictReader(lines[skipped:])
    missing = set(required) - set(reader.fieldnames or ())
    if missing:
        raise InvalidSpec(origin, reader.fieldnames, f"a header with the columns {', '.join(sorted(missing))}")
    for count, cells in enumerate(reader):
        where = f"{origin}:{reader.line_num + skipped}"
        if count >= _ROWS_MAX:
            raise InvalidSpec(where, count, f"at most {_ROWS_MAX} rows")
        yield where, {key: (value or "").strip() for key, value in cells.items() if isinstance(key, str)}


def _parse(text: str, origin: str) -> Iterable[XidRow]:
    for where, cells in _table(text, origin, "xid", "proposed_first_action"):
        yield XidRow(
            xid=int(_number(cells["xid"], f"{where}: xid")),
            name=cells.get("name", ""),
            class_=cells.get("proposed_class", ""),
            first_action=_member(FirstAction, cells["proposed_first_action"], f"{where}: proposed_first_action"),
            usual_cause=cells.get("usual_cause", ""),
            source="catalogue" if origin == "xid.csv" else origin,
        )


def _parse_rules(text: str, origin: str) -> Mapping[str, _Rules]:
    found: dict[str, _Rules] = {}
    for where, cells in _table(text, origin, "xid", "role", "burst_s", "count", "window_s", "scope", "then", "source"):
        rules = found.setdefault(cells["xid"], _Rules())
        if cells["role"]:
            rules.role = _member(Role, cells["role"], f"{where}: role")
        if cells["burst_s"]:
            rules.burst_s = float(_number(cells["burst_s"], f"{where}: burst_s"))
        if cells["count"]:
            rules.escalations.append(
                Escalation(
                    count=_number(cells["count"], f"{where}: count"),
                    window_s=float(_number(cells["window_s"], f"{where}: window_s")),
                    scope=_member(Scope, cells["scope"], f"{where}: scope"),
                    then=_member(FirstAction, cells["then"], f"{where}: then"),
                    source=cells["source"],
                )
            )
    return found


def _parse_links(text: str, origin: str) -> Iterable[LinkRule]:
    for where, cells in _table(text, origin, "xid", "unit", "subcode", "first_action", "blame"):
        first, _, last = cells["subcode"].partition("-")
        low, high = (0, 63) if first == "*" else (_number(first, where), _number(last or first, where))
        yield LinkRule(
            xid=_number(cells["xid"], f"{where}: xid"),
            unit=cells["unit"],
            subcodes=range(low, high + 1),
            first_action=_member(FirstAction, cells["first_action"], f"{where}: first_action"),
            blame=cells["blame"],
        )


def _number(cell: str, where: str) -> int:
    if not cell.isdecimal():
        raise InvalidSpec(where, cell, "a number")
    return int(cell)


E = TypeVar("E", bound=StrEnum)


def _member(kind: type[E], cell: str, where: str) -> E:
    try:
        return kind(cell)
    except ValueError:
        raise InvalidSpec(where, cell, f"one of {', '.join(kind)}") from None
