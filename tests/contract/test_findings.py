"""Findings that an earlier diagnostics has published: what decides stood in the evidence, and is read from there.

`findings.txt`: one finding a line, its bytes in base64.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from holdfast.domain.findings import Attribution, Blamed, Finding
from holdfast.domain.nodes import Notice
from holdfast.wire.events import decode_finding, encode_finding

LINES = (Path(__file__).parent / "data" / "findings.txt").read_text().split()
RECORDED = {finding.id: finding for finding in map(decode_finding, map(base64.b64decode, LINES))}


@pytest.mark.parametrize(
    ("finding", "attribution"),
    [
        ("f1", Attribution(Blamed.UNKNOWN, "crash", 0.25, from_outside=True)),
        ("f2", Attribution(Blamed.HARDWARE, "device", 0.01)),
        ("f3", Attribution(Blamed.USER, "script", tries=3, nodes=2)),
        ("f4", Attribution()),
        ("f8", Attribution(from_outside=True)),
        ("f9", Attribution(from_outside=True)),
    ],
)
def test_its_attribution(finding: str, attribution: Attribution) -> None:
    assert RECORDED[finding].attribution == attribution


def test_what_else_decides() -> None:
    assert RECORDED["f2"].supersedes == "f0"
    assert RECORDED["f4"].verified_step == 40
    assert RECORDED["f5"].contradicts == "f9"
    assert RECORDED["f6"].notice == Notice("file", "reboot", 1000.0, 5000.0)
    assert RECORDED["f7"].notice == Notice("file", "", 1000.0, None)


@pytest.mark.parametrize("finding", RECORDED.values(), ids=RECORDED)
def test_it_is_written_with_its_fields(finding: Finding) -> None:
    assert decode_finding(encode_finding(finding)) == finding
