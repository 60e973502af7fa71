"""`holdfast doctor`: what it says of the Kubernetes cluster that the supervisors watch, and of a temporary directory."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import certificates
import httpx
import pytest

from holdfast.cli import doctor
from holdfast.cli.client import Client
from holdfast.cli.connection import HISTORY_BEHIND

URL = "http://127.0.0.1:1"
VERSION = {"version": "0.1.0", "protocol_version": 1}


def found(
    monkeypatch: pytest.MonkeyPatch,
    bridge: dict[str, Any] | None,
    url: str = URL,
    versions: Mapping[str, str] = MappingProxyType({}),
    services: Mapping[str, str] | None = None,
    behind: str = "",
    ahead_s: Mapping[str, float] = MappingProxyType({}),
    date: str = "",
    zone_of: Callable[[str], str] = str,
) -> list[tuple[str, str, str]]:
    """`bridge`: what `/v1/kubernetes` answers; None = the supervisor does not know it. `versions`: of agents, by node; those of
    nodes named `gone-` are not connected. `services`: versions of what their agents talk to.
    `ahead_s`: of nodes' clocks. `date`: of the answers."""
    headers = {HISTORY_BEHIND: behind} if behind else {}
    headers |= {"Date": date} if date else {}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/version":
            return httpx.Response(200, json=VERSION)
        if request.url.path == "/v1/nodes":
            items = [
                {"node": node, "version": version, "connected": not node.startswith("gone-"), **(services or {})}
                | {"zone": zone_of(node), "state": "lost" if node.startswith("gone-") else "spare"}
                | ({"clock_ahead_s": ahead_s[node]} if node in ahead_s else {})
                for node, version in versions.items()
            ]
            return httpx.Response(200, json={"items": items, "next_cursor": None})
        if request.url.path == "/v1/incidents":
            return httpx.Response(200, json={"items": []}, headers=headers)
        if bridge is None:
            return httpx.Response(
                404, json={"detail": "Not Found"}, headers={"content-type": "application/problem+json"}
            )
        return httpx.Response(200, json=bridge)

    monkeypatch.setattr(doctor, "Client", lambda url: Client(url, transport=httpx.MockTransport(answer)))
    return [(each.what, each.level, each.found) for each in doctor._api(url)]


def watched(what: str, problem: str = "") -> dict[str, Any]:
    since = 1_800_000_000.0 if problem else None
    return {"what": what, "problem": problem, "problem_since": since, "confirmed_at": None}


def test_a_cluster_that_is_not_watched_or_of_an_older_supervisor_is_not_mentioned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = [("API", "ok", f"{URL}, version 0.1.0")]
    assert found(monkeypatch, None) == api
    assert found(monkeypatch, {"watch": False, "watched": []}) == api


def test_a_history_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    _, problem = found(
        monkeypatch, None, behind="the history /data/h cannot be written: disk is full; free space in /data"
    )
    assert problem == (
        "history",
        "problem",
        "incidents are missing: the history /data/h cannot be written: disk is full",
    )


def test_agents_of_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {f"n{number}": "0.1.0" for number in range(3)}
    assert len(found(monkeypatch, None, versions=same | {"gone-1": "0.0.9"})) == 1
    old, newer = {f"old-{number}": "0.0.9" for number in range(5)}, {"new-1": "0.2.0"}
    _, *notes = found(monkeypatch, None, versions=same | old | newer)
    assert notes == [
        ("agents", "note", "version 0.0.9 on 5 nodes (old-0, old-1, old-2, …), the supervisor has 0.1.0"),
        ("agents", "note", "version 0.2.0 on 1 node (new-1), the supervisor has 0.1.0"),
    ]


def test_services_of_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    services = {"diagnostics_version": "0.2.0", "replicator_version": "0.0.9"}
    _, *notes = found(monkeypatch, None, versions={"n0": "0.1.0", "gone-1": "0.1.0"}, services=services)
    assert notes == [
        ("diagnostics", "note", "version 0.2.0 on 1 node (n0), the supervisor has 0.1.0"),
        ("replicators", "note", "version 0.0.9 on 1 node (n0), the supervisor has 0.1.0"),
    ]
    assert len(found(monkeypatch, None, versions={"n0": "0.1.0"}, services=dict.fromkeys(services, ""))) == 1


def test_a_failure_domain_that_is_lost_as_a_whole_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that fails is twelve incidents, and one cause."""

    def problems(*names: str) -> list[tuple[str, str, str]]:
        versions = dict.fromkeys(names, "0.1.0")
        return found(monkeypatch, None, versions=versions, zone_of=lambda name: name.split("-")[1])[1:]

    assert problems("gone-r1-a", "gone-r1-b", "n-r2-a") == [
        ("nodes", "problem", "all 2 nodes of the failure domain r1 are lost")
    ]
    assert problems("gone-r1-a", "n-r1-b", "gone-r2-a") == [], "one of two, and a node that is a domain of its own"


def test_clocks_that_differ_are_a_problem_that_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"n0": "0.1.0", "n1": "0.1.0", "n2": "0.1.0"}
    off = found(monkeypatch, None, versions=nodes, ahead_s={"n0": 0.0, "n1": -3600.0})
    assert off[1:] == [("clocks", "problem", "that of n1 is 1 h 0 min behind the supervisor's")]
    off = found(monkeypatch, None, versions=nodes, ahead_s={"n0": 90.0, "n1": -3600.0, "n2": 60.0})
    assert off[1][2].endswith(", and those of 2 other nodes differ, too")
    assert len(found(monkeypatch, None, versions=nodes, ahead_s=dict.fromkeys(nodes, 0.0))) == 1
    for seconds, problems in ((0.0, 0), (-7200.0, 1), (7200.0, 1)):
        _, *own = found(monkeypatch, None, date=formatdate(time.time() - seconds, usegmt=True))
        assert len(own) == problems
        assert all("that of this machine is 2 h 0 min" in each[2] or "1 h 59 min" in each[2] for each in own)
    assert len(found(monkeypatch, None, date="no date")) == 1


@pytest.mark.parametrize(("version", "level"), [("0.1.0", "ok"), ("0.0.9", "note")])
def test_the_version_of_the_standby_is_shown(monkeypatch: pytest.MonkeyPatch, version: str, level: str) -> None:
    monkeypatch.setitem(VERSION, "standby_api", "http://head-2:8470")
    monkeypatch.setitem(VERSION, "standby_version", version)
    assert found(monkeypatch, None)[1:] == [("standby", level, f"http://head-2:8470, version {version}")]


def test_a_cluster_that_is_seen_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cluster = found(monkeypatch, {"watch": True, "watched": [watched("nodes"), watched("pods of namespace ml")]})
    assert cluster == ("Kubernetes", "ok", "watched: nodes, pods of namespace ml")


def test_what_the_supervisor_cannot_see_is_a_problem_with_its_reason_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "may not watch nodes: the service account has no right to"
    _, cluster = found(
        monkeypatch, {"watch": True, "watched": [watched("nodes", refused), watched("pods of namespace ml")]}
    )
    assert cluster[:2] == ("Kubernetes", "problem")
    assert cluster[2].startswith("since 2027-01-1")
    assert cluster[2].endswith(refused)


@pytest.mark.parametrize("excess", [0, 1])
def test_a_temporary_directory_with_a_path_too_long_for_multiprocessing(
    excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        directory = Path(short) / ("x" * (doctor.TEMPORARY_BYTES_MAX + excess - len(short) - 1))
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        listens = "import multiprocessing.connection as c; c.Listener(family='AF_UNIX')"
        done = subprocess.run(
            [sys.executable, "-c", listens], env={"TMPDIR": str(directory)}, check=False, capture_output=True
        )
        assert bool(done.returncode) == bool(excess), "what doctor says is what happens"
        assert [check.level for check in doctor._temporary_directory()] == ["problem"] * excess


def test_the_certificate_of_the_api_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_API_TLS_CERT", raising=False)
    assert list(doctor._api_certificate()) == []
    certificates.make(tmp_path)
    certificates.issue_at(tmp_path, "old", names=["localhost"], begins_in_days=-3, days=2)
    levels = {}
    for leaf in ("ours", "old", "gone"):
        monkeypatch.setenv("HOLDFAST_API_TLS_CERT", str(tmp_path / f"{leaf}.pem"))
        (check,) = doctor._api_certificate()
        levels[leaf] = check.level
    assert levels == {"ours": "ok", "old": "problem", "gone": "problem"}


def test_an_api_that_answers_why_it_cannot_is_not_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    detail = "Redis at 10.0.0.2:6379 does not answer (Timeout connecting to server); check that it is running"
    problem = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": detail}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json=problem, headers={"content-type": "application/problem+json"})

    monkeypatch.setattr(
        doctor, "Client", lambda url: Client(url, transport=httpx.MockTransport(answer), sleep=lambda _: None)
    )
    (check,) = doctor._api(URL)
    assert (check.level, check.found) == (
        "problem",
        f"{URL} answers: Redis at 10.0.0.2:6379 does not answer (Timeout connecting to server)",
    )
    assert check.advice == "check that it is running"


def test_a_supervisor_that_cannot_lead_is_a_problem_although_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = "Redis at 10.0.0.2:6379 refused a command (NOREPLICAS); check its configuration"
    monkeypatch.setitem(VERSION, "trouble", trouble)
    (check,) = found(monkeypatch, None)
    assert check == ("API", "problem", f"{URL} cannot lead: Redis at 10.0.0.2:6379 refused a command (NOREPLICAS)")


@pytest.mark.parametrize(
    ("standby", "checks"),
    [
        ("https://head-2:8470", [("standby", "ok", "https://head-2:8470")]),
        ("", [("standby", "note", "no second supervisor asks for the lead")]),
    ],
)
def test_a_standby_that_is_missing_is_noticed_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, standby: str, checks: list[tuple[str, str, str]]
) -> None:
    monkeypatch.setitem(VERSION, "standby_api", standby)
    assert found(monkeypatch, None, "http://head-1:8470")[1:] == checks
    assert found(monkeypatch, None)[1:] == (checks if standby else [])


PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.5.1+cu121", "problem"), ("1.13.1", "problem"), ("2.6.0", "ok"), ("2.10.0a0+git1", "ok"), ("3.0", "ok")],
)
def test_a_torch_that_is_too_old_is_a_problem(monkeypatch: pytest.MonkeyPatch, version: str, level: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    (check,) = doctor._torch()
    assert (check.level, version in check.found) == (level, True)
    assert level == "ok" or "2.6" in check.advice


def test_the_oldest_torch_is_that_of_the_extra() -> None:
    assert PROJECT["optional-dependencies"]["train"] == [f"torch>={'.'.join(map(str, doctor.TORCH_MIN))}"]


def test_modules_without_the_metadata_of_a_package_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch in PYTHONPATH, and a `pynvml` that is not NVIDIA's."""

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("0000:01:00.0")])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert [(check.level, check.found) for check in (*doctor._torch(), *doctor._gpu())] == [
        ("note", "version not known"),
        ("problem", "1 GPU, no nvidia-ml-py"),
    ]
