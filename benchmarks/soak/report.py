"""report.json, the exit code, and the table of what is lost when a part dies. Pure."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.runtime.documents import written_between

# Rows of the table in docs/architecture.md: failed part → the kinds of fault that are counted.
PARTS: Mapping[str, tuple[str, ...]] = {
    "diagnostics": ("diagnostics_kill", "diagnostics_all_kill"),
    "supervisor": ("supervisor_leader_kill", "supervisor_standby_kill", "supervisor_all_kill"),
    "Redis": ("redis_kill",),
    "the whole control plane": ("control_plane_away",),
    "agent": ("agent_kill",),
    "replicator": ("replicator_kill",),
    "object store": ("store_away",),
    "worker template": ("template_kill",),
    "a worker's reaper": ("reaper_kill",),
    "an agent's last free file descriptor": ("descriptors_agent",),
    "a worker": ("worker_kill", "workers_kill"),
    "a node": ("node_power", "node_replaced"),
    "every node, their disks stay": ("fleet_power",),
    "every node with its disks": ("fleet_replaced",),
}


# The marks around the table in the page.
BEGIN, END = "<!-- measured by make soak -->", "<!-- end of what make soak measured -->"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one trial."""

    number: int
    kinds: tuple[str, ...]
    what: str  # description of the faults
    pause_s: float  # the longest time without a step of all ranks
    bound_s: float  # upper limit of `pause_s`
    rework_steps: int
    generations: int  # number of new generations
    findings: tuple[tuple[str, str], ...] = ()  # (kind of error, description)


@dataclass(slots=True)
class Report:
    """All results of a soak. Its counts are computed from the outcomes."""

    seed: int
    minutes: float
    nodes: int
    outcomes: list[Outcome] = field(default_factory=list)
    wrong_values: int = 0
    leaks: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # kind → reason
    slowest: float = 1.0  # the highest measured slowness of the machine
    broken_off: str = ""  # reason why the soak did not run to its end
    elapsed_s: float = 0.0

    def count(self, what: str) -> int:
        return sum(kind == what for outcome in self.outcomes for kind, _ in outcome.findings)

    @property
    def passed(self) -> bool:
        return not (
            self.count("unrecovered")
            or self.wrong_values
            or self.count("healthy_stopped")
            or self.count("healthy_evicted")
            or self.count("lost_work")
            or self.count("repeated")
            or self.count("untrue")
            or self.leaks
            or self.broken_off
        ) and bool(self.outcomes)

    def to_json(self) -> dict[str, Any]:
        faults: dict[str, int] = defaultdict(int)
        for outcome in self.outcomes:
            for kind in outcome.kinds:
                faults[kind] += 1
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "nodes": self.nodes,
            "elapsed_s": round(self.elapsed_s, 1),
            "passed": self.passed,
            "faults": dict(sorted(faults.items())),
            "unrecovered": self.count("unrecovered"),
            "wrong_values": self.wrong_values,
            "healthy_stopped": self.count("healthy_stopped"),
            "healthy_evicted": self.count("healthy_evicted"),
            "lost_work": self.count("lost_work"),
            "repeated": self.count("repeated"),
            "untrue": self.count("untrue"),
            "leaks": self.leaks,
            "pause_s": quantiles(outcome.pause_s for outcome in self.outcomes),
            "pause_s_by_kind": self._by_kind(),
            "skipped": self.skipped,
            "slowness": round(self.slowest, 2),
            "broken_off": self.broken_off,
            "findings": [
                {"trial": outcome.number, "what": outcome.what, "kind": kind, "finding": words}
                for outcome in self.outcomes
                for kind, words in outcome.findings
            ],
        }

    def _by_kind(self) -> dict[str, dict[str, float]]:
        """Return statistics by kind, from trials with a single fault, because otherwise a pause belongs to no single kind."""
        alone: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self.outcomes:
            if len(outcome.kinds) == 1:
                alone[outcome.kinds[0]].append(outcome)
        return {
            kind: {
                "n": len(outcomes),
                **quantiles(outcome.pause_s for outcome in outcomes),
                "rework_steps_max": max(outcome.rework_steps for outcome in outcomes),
                "generations_max": max(outcome.generations for outcome in outcomes),
            }
            for kind, outcomes in sorted(alone.items())
        }


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Return p50, p99 and max, by nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)

    return {"p50": rank(0.5), "p99": rank(0.99), "max": round(ordered[-1], 3)}


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown for docs/architecture.md from the report.json of one soak or several: failed parts and their cost."""
    rows = ["| dies | times | new generations | longest pause | steps done again |", "|---|---|---|---|---|"]
    for part, kinds in PARTS.items():
        found = [by[kind] for report in reports for by in [report["pause_s_by_kind"]] for kind in kinds if kind in by]
        if not found:
            rows.append(f"| {part} | 0 | – | – | – |")
            continue
        times = sum(int(each["n"]) for each in found)
        most = {name: max(each[name] for each in found) for name in ("generations_max", "max", "rework_steps_max")}
        rows.append(
            f"| {part} | {times} | {most['generations_max']:.0f} at most | {most['max']:.1f} s "
            f"| {most['rework_steps_max']:.0f} at most |"
        )
    return "\n".join(rows)


def with_table(page: str, table: str) -> str:
    """Return the page with `table` between its marks. Raises `ValueError` if the page has no marks."""
    return written_between(page, BEGIN, END, f"{table}\n")


def table_of(page: str) -> list[str]:
    """Return the lines between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()


def dumps(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2) + "\n"
