"""The lines of a trace about orders and records."""

from __future__ import annotations

from holdfast.domain import orders
from holdfast.domain.orders import Order
from holdfast.supervisor import protocol


def of_order(order: Order) -> str:
    match order:
        case orders.Prepare():
            ranks = f"{order.placement.first_rank}…{order.placement.first_rank + order.placement.nproc - 1}"
            return f"Prepare g{order.generation} ranks {ranks} of {order.mesh}, restore step {order.restore_step}"
        case orders.Start() | orders.Stop():
            return f"{type(order).__name__} g{order.generation}"
        case orders.CheckpointNow():
            return f"CheckpointNow step {order.at_step} {order.stage}".rstrip()
        case orders.SetInterval():
            return f"SetInterval to {order.interval_steps} steps from step {order.from_step}"
        case orders.Inject():
            return f"Inject {order.kind} into rank {order.rank}"
        case orders.Prune():
            return f"Prune {', '.join(str(step) for _, step in order.steps)}"
        case orders.CheckLink():
            return f"CheckLink with {order.partner}{'' if order.endpoint else ', and waits'}"
        case orders.ResetGpu():
            return f"ResetGpu {', '.join(map(str, order.gpus)) or 'all'}"
        case orders.PrepareTemplate() | orders.RestartAgent() | orders.RebootNode():
            return type(order).__name__


def of_record(record: protocol.Record) -> str:
    match record:
        case protocol.JobAccepted():
            return f"    job {record.job} accepted"
        case protocol.JobChanged():
            return f"    job is {record.phase}: {record.reason}"
        case protocol.GenerationChanged():
            nodes = " ".join(record.generation.nodes)
            return f"    generation {record.generation.number} {record.stage} on {nodes}: {record.reason}"
        case protocol.IncidentChanged(incident=incident):
            action = f" → {incident.action.kind} ({incident.action.reason})" if incident.action else ""
            return f"    incident {incident.id} {incident.kind} {incident.state}: {incident.cause}{action} {incident.outcome}"
        case protocol.NodeChanged():
            return f"    node {record.node} is {record.state}: {record.reason}"
        case protocol.FindingJudged(finding=finding):
            return f"    finding {finding.id} {record.verdict}: {finding.summary}"
        case protocol.PolicyChanged():
            return f"    policy of {record.job} is {record.policy.name or 'the default policy'}"
        case protocol.Noted():
            return f"    note on {record.subject}: {record.text}"
