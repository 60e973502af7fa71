"""What the log says of certificates that expire: of callers while they are known, and of one's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import certificates
import pytest
from structlog.testing import capture_logs

from holdfast.runtime.trust.expiry import DAY_S, GONE_S, CallerExpiry, OwnExpiry, certificate_of, own_problem
from holdfast.runtime.trust.identities import Identity, Role

AGENT = (Identity("main", Role.AGENT, "node-1"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates"))


def pem(folder: Path, leaf: str, days: float) -> bytes:
    return certificates.issue_at(folder, leaf, names=["localhost"], begins_in_days=0, days=days).read_bytes()


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def looked(expiry: CallerExpiry | OwnExpiry) -> list[Any]:
    with capture_logs() as lines:
        expiry.look()
    return list(lines)


def test_a_node_is_named_before_and_when_its_certificate_expires(folder: Path) -> None:
    clock = Clock()
    expiry = CallerExpiry(clock)
    with expiry.call(pem(folder, "node-1", 30), AGENT):
        assert looked(expiry) == []
        clock.now += 27.5 * DAY_S
        [soon] = looked(expiry)
        assert looked(expiry) == [], "once"
        clock.now += 3 * DAY_S
        [over] = looked(expiry)
    assert (soon["log_level"], soon["event"]) == ("warning", "certificate of a caller expires soon")
    assert (over["log_level"], over["event"]) == ("error", "certificate of a caller has expired")
    for line in (soon, over):
        assert (line["certificate"], line["common_name"]) == ("agent/node-1", "node-1")
        assert "holdfast ca issue agent/node-1 --out DIR" in line["advice"]
        assert line["expires"].endswith(" UTC")
    assert over["then"] == "keeps its connection, and cannot connect again"


def test_a_node_that_was_cut_off_by_its_certificate_is_named(folder: Path) -> None:
    clock = Clock()
    expiry = CallerExpiry(clock)
    clock.now += 0.999 * DAY_S
    with expiry.call(pem(folder, "node-2", 1), (Identity("main", Role.AGENT, "node-2"),)):
        pass
    clock.now += 0.01 * DAY_S
    [over] = looked(expiry)
    assert (over["certificate"], over["then"]) == ("agent/node-2", "cannot connect any more")


def test_a_node_that_left_long_before_is_not_named(folder: Path) -> None:
    clock = Clock()
    expiry = CallerExpiry(clock)
    with expiry.call(pem(folder, "node-3", 30), AGENT):
        pass
    clock.now += 29 * DAY_S
    assert looked(expiry) == []
    clock.now += GONE_S + DAY_S
    assert looked(expiry) == []


def test_a_renewed_certificate_is_not_named(folder: Path) -> None:
    clock = Clock()
    expiry = CallerExpiry(clock)
    with expiry.call(pem(folder, "old", 30), AGENT), expiry.call(pem(folder, "new", 60), AGENT):
        clock.now += 31 * DAY_S
        assert looked(expiry) == []


def test_a_certificate_without_an_identity_is_named_by_its_common_name(folder: Path) -> None:
    found = certificate_of(pem(folder, "trainer-7", 1), ())
    assert found is not None
    assert found.whose == "trainer-7"
    assert "another certificate for trainer-7" in found.advice


@pytest.mark.parametrize("given", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_left_alone(given: bytes) -> None:
    expiry = CallerExpiry()
    with expiry.call(given, AGENT):
        assert looked(expiry) == []


def test_ones_own_expired_certificate_is_named_with_its_file(folder: Path) -> None:
    certificates.issue_at(folder, "own", names=["localhost"], begins_in_days=-3, days=2)
    tls = certificates.tls(folder, "own", "ours")
    [line] = looked(own := OwnExpiry(tls))
    assert (line["event"], line["common_name"], line["file"]) == (
        "own certificate has expired",
        "own",
        str(folder / "own.pem"),
    )
    assert looked(own) == [], "once"
    assert f"(own, {folder / 'own.pem'}) expired at " in own_problem(tls, time.time())
    assert own_problem(tls, time.time() - 2 * DAY_S) == ""
    assert own_problem(None, time.time()) == ""
    certificates.issue_at(folder, "own", names=["localhost"], begins_in_days=0, days=2)
    assert own_problem(tls, time.time()) == "", "the files were replaced"
