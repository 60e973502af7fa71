"""Reads the fields that decisions use from the evidence of findings and incidents of earlier versions, which had them as texts.

Used only where a finding of an earlier version of diagnostics, or an incident of an earlier snapshot, is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.domain.faults import INJECTED
from holdfast.domain.findings import STOPPED, Attribution, Finding, FindingKind, blamed
from holdfast.domain.nodes import Notice

_DIGITS_MAX = 18  # of a number that a message can contain
_SIGNALS_FROM_OUTSIDE = ("1", "2", "9", "15")  # SIGHUP, SIGINT, SIGKILL, SIGTERM


def with_fields(finding: Finding) -> Finding:
    """Return `finding` with the fields that are set only in its evidence."""
    evidence = finding.evidence
    verified = evidence.get("verified_step", "")
    return replace(
        finding,
        supersedes=finding.supersedes or evidence.get("supersedes", ""),
        contradicts=finding.contradicts or evidence.get("contradicts", ""),
        verified_step=_count(verified)
        if finding.verified_step is None and verified.isdecimal()
        else finding.verified_step,
        attribution=attribution(finding.kind, evidence).refined(finding.attribution),
        notice=finding.notice or (_notice(finding) if finding.kind is FindingKind.MAINTENANCE else None),
    )


def attribution(kind: str, evidence: Mapping[str, str]) -> Attribution:
    repeated = kind == FindingKind.REPEATED_EXCEPTION
    return Attribution(
        blame=blamed(evidence.get("blame", "")),
        error_class=evidence.get("error_class", ""),
        prior_user=min(1.0, max(0.0, _number(evidence.get("prior_user", "")) or 0.0)),
        from_outside=_from_outside(kind, evidence),
        tries=_count(evidence.get("tries", "")) if repeated else 0,
        nodes=_count(evidence.get("nodes", "")) if repeated else 0,
    )


def _from_outside(kind: str, evidence: Mapping[str, str]) -> bool | None:
    signs = [INJECTED in evidence["line"]] if "line" in evidence else []
    if "signal" in evidence:
        signs.append(evidence["signal"] in _SIGNALS_FROM_OUTSIDE)
    if kind == FindingKind.HANG:
        signs.append(STOPPED in evidence.get("reason", ""))
    return any(signs) if signs else None


def _notice(finding: Finding) -> Notice:
    evidence = finding.evidence
    event = "" if "withdraws" in evidence else evidence.get("event", "") or finding.summary
    starts_at, incarnation = _number(evidence.get("starts_at", "")), evidence.get("incarnation", "")
    return Notice(evidence.get("source", ""), event, finding.at, starts_at, incarnation)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else 0
