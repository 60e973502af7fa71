"""The warnings that `holdfast run` prints while it follows a job: each condition once, in one line that says what to do.

A warning that has opened an incident is left out, because the lines of the incident say more. A kind of warning that many ranks
or nodes have is printed for the first few of them, then counted in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.markup import escape

NEWEST = 50  # findings of one request
OF_A_KIND_MAX = 3  # lines, in any `AGAIN_S`
AGAIN_S = 3600.0
_LATE_S = 5.0  # clocks of the machines; a warning about a node may also precede the submission by this much

Finding = Mapping[str, Any]
Condition = tuple[str, ...]


class WarningLines:
    """What was printed of one job. Pure."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._printed: set[Condition] = set()
        self._recent: dict[str, list[float]] = {}  # kind → when its last warnings were judged, at most `OF_A_KIND_MAX`
        self._counted: dict[str, float] = {}  # kind → when the line that stands for further ones was printed

    def new(self, findings: Iterable[Finding], job: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of markup for what is new. `findings`: in any order; those of other jobs, and of nodes without a rank
        of this one, are ignored. `job`: the view of the API."""
        nodes = {worker["node"] for worker in job["ranks"]}
        since = job.get("submitted_at", 0.0) - _LATE_S
        fresh: dict[Condition, Finding] = {}
        for finding in findings:
            mine = finding["job"] == self._job or (not finding["job"] and finding["node"] in nodes)
            if not mine or finding["severity"] != "warning" or finding["incident"] or finding["judged_at"] < since:
                continue
            condition, earlier = _condition(finding), fresh.get(_condition(finding))
            if condition not in self._printed and (earlier is None or finding["judged_at"] < earlier["judged_at"]):
                fresh[condition] = finding
        self._printed |= fresh.keys()
        for finding in sorted(fresh.values(), key=lambda each: (each["judged_at"], each["id"])):
            yield from self._line(finding)

    def _line(self, finding: Finding) -> Iterator[str]:
        kind, at = finding["kind"], finding["judged_at"]
        recent = [before for before in self._recent.get(kind, []) if at - before < AGAIN_S]
        if len(recent) < OF_A_KIND_MAX:
            self._recent[kind] = [*recent, at]
            yield describe(finding)
        elif at - self._counted.get(kind, -AGAIN_S) >= AGAIN_S:
            self._counted[kind] = at
            yield (
                f"[yellow]warning[/]   more warnings of kind {escape(kind)} follow and are not printed; "
                f"`holdfast explain --job {escape(self._job)}` lists them"
            )


def describe(finding: Finding) -> str:
    """Return one line of markup: what is wrong, what to do, and the command that shows the evidence."""
    summary, advice = (" ".join(str(finding[key]).split()).rstrip(".") for key in ("summary", "advice"))
    return (
        f"[yellow]warning[/]   {escape(summary)}. To do: {escape(advice)} (`holdfast explain {escape(finding['id'])}`)"
    )


def _condition(finding: Finding) -> Condition:
    """A key that is the same for all reports of one condition, whatever their ids, steps and generations."""
    evidence = finding["evidence"]
    what = [str(evidence.get(key, "")) for key in ("rule", "trouble", "place")]
    return (finding["kind"], finding["node"], str(finding["rank"]), str(finding["gpu"]), *what)
