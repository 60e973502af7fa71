"""The response models of nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.domain.clocks import TOLERATED_S
from holdfast.domain.nodes import NodeState
from holdfast.supervisor.api.incident_models import Incident
from holdfast.supervisor.api.models import Model


class Check(Model):
    """One thing that a node tested on itself."""

    name: str
    ok: Annotated[bool | None, Field(description="null = it could not be tested: that says nothing of the node")]
    detail: str


class Preflight(Model):
    """A node's newest tests of itself."""

    at: Annotated[float, Field(description="0 = they are under way")]
    passed: bool
    duration_s: float
    checks: list[Check]


class Notice(Model):
    """Somebody says that the node's machine will be taken."""

    source: str
    event: str
    starts_at: Annotated[float | None, Field(description="Unix seconds; null: it may be any moment")]


class Node(Model):
    node: str
    state: NodeState
    connected: bool
    job: str
    reason: Annotated[
        str,
        Field(
            description="why it is cordoned or lost, or will be, and what brings it back; that it is on probation; empty when "
            "there is nothing to say"
        ),
    ]
    zone: str
    capacity: int
    hostname: str
    address: str
    replicator_endpoint: str
    incarnation: str
    agent_pid: int
    directory: str
    kernel_log: str
    disk_dir: Annotated[
        str, Field(description="where shards are kept, each job in a directory of its name; empty = unknown")
    ]
    version: Annotated[str, Field(description="of its agent")]
    diagnostics_version: Annotated[
        str, Field(description="of the diagnostics that takes its telemetry; empty = not known")
    ] = ""
    replicator_version: Annotated[str, Field(description="of its checkpoint-replicator; empty = not known")] = ""
    inventoried: Annotated[bool, Field(description="its agent has reported which checkpoints are kept there")]
    quarantined: Annotated[bool, Field(description="cordoned because it keeps failing")]
    faults_per_day: Annotated[float, Field(description="to be expected, by its own past; spares are chosen by it")]
    preflight: Annotated[Preflight | None, Field(description="null: this node does not test itself")] = None
    boot_id: Annotated[str, Field(description="of its machine, another one after each boot; empty = unknown")] = ""
    hold_until: Annotated[
        float | None, Field(description="end of its hold-down after a fault, Unix seconds; null: it is not held down")
    ] = None
    probation_until: Annotated[
        float | None, Field(description="end of its probation, Unix seconds; null: it is not on probation")
    ] = None
    returns_by: Annotated[
        Literal["", "itself", "operator"],
        Field(description="what brings a node back that a fault or its own tests took out of service; empty: none did"),
    ] = ""
    notices: list[Notice] = Field([], description="of maintenance that is ahead or under way")
    telemetry_cut_since: Annotated[
        float | None,
        Field(
            description="since when diagnostics has acknowledged no telemetry of the node, while its control session stands, "
            "Unix seconds: faults of its ranks are found late or not at all; null: it is acknowledged, or not known"
        ),
    ] = None
    clock_ahead_s: Annotated[
        float | None,
        Field(
            description="how far the clock of its machine is ahead of that of the supervisor's, negative = behind; "
            f"0 = by less than {TOLERATED_S:g} s; null: its agent is not connected, or not known"
        ),
    ] = None
    pool: Annotated[str, Field(description="only jobs of this pool get the node; empty = jobs without one")] = ""


class Fault(Model):
    """An incident that counts against a node."""

    at: float
    incident: str
    job: str
    weight: Annotated[float, Field(description="1 = the node's fault; less = perhaps the script's")]
    shared: Annotated[bool, Field(description="other nodes failed at the same time: it does not count")]


class LinkTest(Model):
    """A test of the network with another node, while neither had ranks."""

    at: float
    partner: str
    out_bytes_per_s: Annotated[float, Field(description="to the partner; 0 with a failure")]
    in_bytes_per_s: Annotated[float, Field(description="from the partner; 0 with a failure")]
    round_trip_s: float
    failure: Annotated[
        str, Field(description="the partner was not reached, or data was damaged; empty: it was measured")
    ]
    verdict: Annotated[
        Literal["good", "slow", "failed", "unjudged"],
        Field(description="unjudged: there were too few tests of other nodes to compare it with"),
    ]
    expected_bytes_per_s: Annotated[
        float | None,
        Field(description="median of similar tests of other nodes, in the slower direction; null: unknown"),
    ]
    expected_round_trip_s: float | None


class NodeDetail(Node):
    """One node with its past."""

    faults_weigh: Annotated[float, Field(description="its faults, each worth less the older it is")]
    quarantine_limit: Annotated[float, Field(description="what they may weigh before the node is quarantined")]
    faults: Annotated[list[Fault], Field(description="what counts against it since its last repair, oldest first")]
    incidents: Annotated[list[Incident], Field(description="the latest ones that began here, newest first")]
    links: list[LinkTest] = Field([], description="the latest tests of the network with other idle nodes, oldest first")
