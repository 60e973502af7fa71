"""docs/architecture.md, "where something new goes": one declaration is all that the rest of Holdfast needs to know.

The extension points that other packages use are tested with real packages: tests/acceptance/test_plugins.py."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
from fleet import job, running
from typer.testing import CliRunner

from holdfast.cli.main import application
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.domain.orders import CheckLink, Order, Prepare, PrepareTemplate
from holdfast.domain.tiers import TIERS
from holdfast.policy import ACTIONS, ActionSpec, Aim, Effect, JobView
from holdfast.supervisor.api import incident_models
from holdfast.supervisor.protocol import JobPhase
from holdfast.v1 import control_pb2
from holdfast.wire import records
from holdfast.wire.control import MESSAGES, decode_order

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
CODE = re.compile(r"`(\w+)`")


# ---------------------------------------------------------------- actions


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch) -> ActionKind:
    """An action that this release does not have: the named nodes leave, and spares take over as far as they suffice."""

    def check(action: Action, incident: Incident, job: JobView) -> str:
        return "" if action.nodes else "drain names no node"

    def aim(action: Action, incident: Incident, job: JobView) -> Aim:
        return Aim(job.dp, job.min_dp, frozenset(action.nodes))

    kind = ActionKind.CHECKPOINT_NOW  # in its place: every member is an action of this release
    spec = ActionSpec(kind, Effect.CHANGE, "Named nodes are drained.", check, aim, removes=True)
    monkeypatch.setitem(ACTIONS, kind, spec)
    return kind


def test_an_action_is_one_declaration(drain: ActionKind) -> None:
    fleet = running(job(dp=3, min_dp=1), spares=1, decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(Action(drain, "the rack is moved", nodes=("n1", "n2")), "policy.py")
    assert (fleet.incident.action, fleet.incident.decided_by) == (
        Action(drain, "the rack is moved", nodes=("n1", "n2")), "policy.py",
    )  # fmt: skip
    assert (fleet.job.phase, fleet.nodes()) == (JobPhase.PREPARING, ("n0", "n3"))


def test_an_answer_that_its_declaration_refuses_is_decided_by_the_default_policy(drain: ActionKind) -> None:
    fleet = running(job(dp=3, min_dp=1), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(Action(drain, "which nodes?"), "policy.py")
    assert "drain names no node" in fleet.incident.decided_by


@pytest.mark.parametrize("kind", ActionKind)
def test_every_action_travels_and_is_in_the_api_and_the_command(kind: ActionKind) -> None:
    action = Action(kind, "because", nodes=("n1",), dp=2)
    assert records.loads(records.dumps(action, Action), Action) == action
    assert kind in incident_models.Decision.model_json_schema()["$defs"]["ActionKind"]["enum"]
    listed = CliRunner().invoke(application("policy"), ["policy", "actions"])
    assert ACTIONS[kind].summary in re.sub(r"\s+", " ", listed.output)


def test_the_glossary_lists_the_actions() -> None:
    lines = (DOCS / "architecture.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| action | What"))
    assert {*CODE.findall(row)} == {*ActionKind}


# ---------------------------------------------------------------- orders


@pytest.mark.parametrize("kind", get_args(Order), ids=lambda kind: kind.__name__)
def test_an_order_is_a_dataclass_and_its_message(kind: type) -> None:
    """No list names it again: its codec follows from the union, its field in the command from its name. `MESSAGES`: orders that
    have been renamed since."""
    fields = {
        field.message_type.name: field.name for field in control_pb2.Command.DESCRIPTOR.fields if field.message_type
    }
    command = control_pb2.Command(command_id="c-1")
    field = fields[MESSAGES.get(kind, kind.__name__)]
    message = getattr(command, field)
    message.SetInParent()
    if "job" in message.DESCRIPTOR.fields_by_name:
        message.job = "gpt"  # that it is none is tried in tests/security
    with pytest.raises(MalformedMessage, match=field) if _has_parts(kind) else nullcontext():
        assert type(decode_order(command)) is kind


def _has_parts(kind: type) -> bool:
    """Whether an order's message cannot be empty: it has parts that are required."""
    return kind in (Prepare, PrepareTemplate, CheckLink)


# ---------------------------------------------------------------- tiers


def test_a_tier_is_one_declaration_and_its_enum_value() -> None:
    """In a process of its own: the declaration is read at import."""
    done = subprocess.run([sys.executable, TESTS / "one_more_tier.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tiers_are_documented() -> None:
    [row] = [line for line in (DOCS / "telemetry.md").read_text().splitlines() if line.startswith("| `tier` |")]
    assert row == f"| `tier` | {', '.join(TIERS)} |"
