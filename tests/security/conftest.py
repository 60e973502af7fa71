"""Certificates that several files here need: one for each role, and those that must be refused."""

from __future__ import annotations

from pathlib import Path

import certificates
import pytest

LEAVES = {
    "supervisor": ("holdfast://main/supervisor",),
    "diagnostics": ("holdfast://main/diagnostics",),
    "agent": ("holdfast://main/agent/node-0",),
    "node-9": ("holdfast://main/agent/node-9",),
    "any-agent": ("holdfast://main/agent/*",),
    "replicator": ("holdfast://main/replicator/node-0",),
    "operator": ("holdfast://main/operator/ada",),
    "other-fleet": ("holdfast://other/agent/node-0", "holdfast://other/supervisor", "holdfast://other/diagnostics"),
    "unreadable": ("holdfast://main/king",),
    "foreign-uri": ("spiffe://example.org/agent/node-0", "https://example.org/main/agent/node-0"),
}


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the CA `ours`: the leaves above, and `ours`, which has no identity."""
    folder = certificates.make(tmp_path_factory.mktemp("identities"))
    for leaf, uris in LEAVES.items():
        certificates.issue(folder, leaf, *uris)
    return folder
