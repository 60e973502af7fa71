"""The Xid catalogue: what an NVIDIA driver error means and what to do first. Data, with operators' overrides on top.

`xid.csv` is documented in `ORIGIN.md`. Sources disagree on many codes, so the table can be corrected without a release: rows
of the file named by `HOLDFAST_XID_OVERRIDES` replace rows of ours.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path

from holdfast.domain.errors import InvalidSpec

_ROWS_MAX = 10_000


class FirstAction(StrEnum):
    """What the catalogue proposes to do first."""

    IGNORE = "IGNORE"
    REPORT = "REPORT"  # unused by the driver, or for its vendor: tell, do nothing
    WATCH = "WATCH"
    DIAG = "DIAG"  # run a diagnostic when the node is free
    RESTART_PROCESS = "RESTART_PROCESS"
    GPU_RESET = "GPU_RESET"
    DRAIN_THEN_GPU_RESET = "DRAIN_THEN_GPU_RESET"  # the job may go on; reset at its next boundary
    NODE_REBOOT = "NODE_REBOOT"
    REPLACE_NODE = "REPLACE_NODE"
    BY_SUBCODE = "BY_SUBCODE"  # NVLink 5: the line itself says fatal or not
    FOLLOW_48 = "FOLLOW_48"  # a detail of a double-bit error
    FOLLOW_NVML_RECOVERY_ACTION = "FOLLOW_NVML_RECOVERY_ACTION"  # the driver states the action


@dataclass(frozen=True, slots=True)
class XidRow:
    xid: int
    name: str
    class_: str  # proposed_class, e.g. "hw_bus", "app"
    first_action: FirstAction
    usual_cause: str = ""
    on_repeat: FirstAction | None = None  # the second time within a day on the same GPU
    source: str = "catalogue"

    @property
    def is_hardware(self) -> bool:
        """Its class speaks of the machine (or its firmware), not of the program."""
        return not self.class_.startswith(("app", "driver_or_app", "side_effect", "info", "unused", "unknown"))


Catalogue = Mapping[int, XidRow]

_REPEAT = re.compile(r"(?:\brepeat\b|>=\s*2)[^;]*?->\s*(RESTART_PROCESS|GPU_RESET|NODE_REBOOT|REPLACE_NODE)\b")


def load(overrides: Path | None = None) -> Catalogue:
    """The shipped table with the operator's rows on top. Raises `InvalidSpec` naming file, line and value."""
    shipped = resources.files(__package__).joinpath("xid.csv").read_text(encoding="utf-8")
    rows = {row.xid: row for row in _parse(shipped.splitlines(), "xid.csv")}
    if overrides is not None:
        try:
            text = overrides.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec("HOLDFAST_XID_OVERRIDES", str(overrides), f"a readable CSV file ({error})") from error
        for row in _parse(text.splitlines(), str(overrides)):
            known = rows.get(row.xid)
            if known is not None:
                row = replace(row, name=row.name or known.name, class_=row.class_ or known.class_)
            rows[row.xid] = row
    return rows


def _parse(lines: Iterable[str], origin: str) -> list[XidRow]:
    reader = csv.DictReader(lines)
    missing = {"xid", "proposed_first_action"} - set(reader.fieldnames or ())
    if missing:
        raise InvalidSpec(origin, reader.fieldnames, f"a header with the columns {', '.join(sorted(missing))}")
    rows: list[XidRow] = []
    for fields in reader:
        where = f"{origin}:{reader.line_num}"
        if len(rows) >= _ROWS_MAX:
            raise InvalidSpec(where, len(rows), f"at most {_ROWS_MAX} rows")
        rows.append(_row({key: value or "" for key, value in fields.items() if key}, where, origin))
    return rows


def _row(fields: Mapping[str, str], where: str, origin: str) -> XidRow:
    code = fields["xid"].strip()
    if not code.isdecimal():
        raise InvalidSpec(f"{where}: xid", code, "a number")
    action = fields["proposed_first_action"].strip()
    if action not in FirstAction.__members__:
        raise InvalidSpec(f"{where}: proposed_first_action", action, f"one of {', '.join(FirstAction.__members__)}")
    repeat = _REPEAT.search(fields.get("escalation", ""))
    return XidRow(
        xid=int(code),
        name=fields.get("name", "").strip(),
        class_=fields.get("proposed_class", "").strip(),
        first_action=FirstAction(action),
        usual_cause=fields.get("usual_cause", "").strip(),
        on_repeat=FirstAction(repeat[1]) if repeat else None,
        source="catalogue" if origin == "xid.csv" else origin,
    )
