"""The example plug-ins, installed from their packages, at work in a real stack."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plugged
from training import cluster, gpt_job
from waiting import wait_until
from warm_processes import COMMANDS, warm

from holdfast.plugins import Group


def test_a_plug_in_of_every_group_works_in_a_real_stack(tmp_path: Path) -> None:
    environment = plugged.install(tmp_path / "site")
    inlet, database = tmp_path / "inlet", tmp_path / "checkpoints.db"
    inlet.write_text("21.5\n")
    spec = gpt_job("gpt", tmp_path / "out", dp=2, pp=1, steps=100_000, min_dp=1)
    spec["checkpoint"] |= {"store": f"sqlite://{database}", "store_interval_s": 1}
    spec["policy"] = "plugin:keep_size"
    tickets = tmp_path / "tickets"
    examples = {"EXAMPLE_INLET_FILE": str(inlet), "EXAMPLE_TICKETS": str(tickets)}
    lines = tmp_path / "alerts.jsonl"
    asking = {"HOLDFAST_PROVIDER": "ticket", "HOLDFAST_ALERT_URLS": f"lines://{lines}"}
    with cluster(tmp_path / "stack", nodes=3, environment=environment | examples | asking) as run:
        run.client.submit(spec)
        run.wait_step("gpt", 10)
        store = ("checkpoints", "list", "gpt", "--store", f"sqlite://{database}", "--json")
        wait_until(lambda: '"step"' in _holdfast(environment, *store), description="a checkpoint in the file")

        inlet.write_text("60\n")
        wait_until(lambda: len(_hot(run.client.findings())) == 3, description="inlet_hot about all nodes")
        assert {finding["evidence"]["plugin"] for finding in _hot(run.client.findings())} == {"inlet_hot"}

        spare = ({node["node"] for node in run.client.nodes()} - {run.node_of("gpt", rank) for rank in (0, 1)}).pop()
        run.inject.xid(spare, 79)
        wait_until(lambda: list(tickets.glob(f"{spare}-*.json")), description="a ticket")

        run.inject.node_loss(run.node_of("gpt", 1))
        decided = run.wait_decided("gpt")
        assert (decided["decided_by"], decided["action"]["kind"]) == ("plugin:keep_size", "wait"), decided

        wait_until(lambda: ("waiting", "gpt cannot run") in _alerts(lines), description="the alert that the job waits")

    doctor = _holdfast(environment, "doctor", check=False)
    for name in (
        "collector inlet",
        "detector inlet_hot",
        "object store sqlite",
        "provider ticket",
        "policy keep_size",
        "notifier lines",
    ):
        assert name in doctor, doctor
    assert len(Group) == len(plugged.ALL), "each group has its example"


def _alerts(lines: Path) -> list[tuple[str, str]]:
    written = lines.read_text().splitlines() if lines.exists() else []
    return [(each["topic"], each["title"]) for each in map(json.loads, written)]


def _hot(findings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in findings if "inlet_c" in finding["evidence"]]


def _holdfast(environment: dict[str, str], *arguments: str, check: bool = True) -> str:
    finds_plug_ins = {"PYTHONPATH": environment["PYTHONPATH"]}
    code, out, err = warm(COMMANDS, **finds_plug_ins)(
        arguments, Path.cwd(), {**os.environ, **environment, "COLUMNS": "200"}, 60.0
    )
    assert not check or code == 0, err
    return out
