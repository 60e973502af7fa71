"""`/v1/nodes`."""

from __future__ import annotations

import time

from holdfast.domain.errors import NotFound
from holdfast.supervisor.api import bodies, models, node_models, node_views
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Commands, Cursor, Limit, Serving
from holdfast.supervisor.api.gpu_models import Gpu, NodeGpus
from holdfast.supervisor.protocol import AgentRestartRequested, NodeCordonRequested, NodeRepaired, NoticeRequested

router = guarded("/v1/nodes", tags=["nodes"])

INCIDENTS_MAX = 20  # shown with a node; GET /v1/incidents?node= has them all


@router.get("")
async def list_nodes(backend: Serving, limit: Limit = 100, cursor: Cursor = None) -> models.Page[node_models.Node]:
    """Every node that the supervisor knows, by name."""
    picture = await backend.picture()
    names = sorted(name for name in picture.state.nodes if cursor is None or name > cursor)
    now = backend.now()
    items = [node_views.node(picture, picture.state.nodes[name], now) for name in names[:limit]]
    return models.Page(items=items, next_cursor=names[limit - 1] if len(names) > limit else None)


@router.get("/{name}")
async def get_node(name: str, backend: Serving) -> node_models.NodeDetail:
    """One node, what counts against it, and its latest incidents."""
    picture = await backend.picture()
    if name not in picture.state.nodes:
        raise NotFound(f"there is no node {name}; `holdfast nodes list` shows those there are")
    past = await backend.history.incidents(node=name, limit=INCIDENTS_MAX)
    incidents = [incident for _, incident in past]
    return node_views.node_detail(picture, picture.state.nodes[name], backend.now(), incidents)


@router.get("/{name}/gpus")
async def get_gpus(name: str, backend: Serving) -> NodeGpus:
    """The newest values of a node's GPUs, asked of its agent."""
    picture = await backend.picture()
    if name not in picture.state.nodes:
        raise NotFound(f"there is no node {name}; `holdfast nodes list` shows those there are")
    gpus = await backend.agents.read_gpus(name)
    return NodeGpus(node=name, gpus=[Gpu.of(gpu) for gpu in gpus])


@router.post("/{name}/cordon", status_code=202)
async def cordon(name: str, commands: Commands, body: bodies.ReasonBody | None = None) -> models.Operation:
    """No more ranks for this node; a job that runs on it moves to a spare."""
    reason = (body or bodies.ReasonBody()).reason
    return await commands.command(NodeCordonRequested(time.time(), name, cordoned=True, reason=reason))


@router.post("/{name}/uncordon", status_code=202)
async def uncordon(name: str, commands: Commands, body: bodies.ReasonBody | None = None) -> models.Operation:
    """Let a cordoned node be used again."""
    reason = (body or bodies.ReasonBody()).reason
    return await commands.command(NodeCordonRequested(time.time(), name, cordoned=False, reason=reason))


@router.post("/{name}/restart-agent", status_code=202)
async def restart_agent(name: str, commands: Commands, body: bodies.ReasonBody | None = None) -> models.Operation:
    """Replace the agent of a node without ranks by a new one, for example after an update of its package."""
    reason = (body or bodies.ReasonBody()).reason
    return await commands.command(AgentRestartRequested(time.time(), name, reason))


@router.put("/{name}/notices/{source}", status_code=202)
async def announce(
    name: str, source: str, backend: Serving, commands: Commands, body: bodies.NoticeBody
) -> models.Operation:
    """The node's machine will be taken: its ranks leave in time, after a save, and it gets no new ones. A notice of the same
    source is replaced; one that is not repeated ends an hour after its start."""
    now = backend.now()
    starts_at = now + body.in_s if body.in_s is not None else body.starts_at
    return await commands.command(NoticeRequested(now, name, source, body.event, starts_at))


@router.delete("/{name}/notices/{source}", status_code=202)
async def withdraw(name: str, source: str, commands: Commands) -> models.Operation:
    """The node's machine will not be taken, as far as this source knows."""
    return await commands.command(NoticeRequested(time.time(), name, source, ""))


@router.post("/{name}/repair", status_code=202)
async def repair(name: str, commands: Commands, body: bodies.EmptyBody | None = None) -> models.Operation:
    """The node's hardware is good again: what was found against it is forgotten."""
    return await commands.command(NodeRepaired(time.time(), name))
