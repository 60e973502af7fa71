"""A real supervisor and real replicators: the node whose network is slowed is found, is no spare, and comes back."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from eventlogs import redis_log
from replicator_node import Node, nodes
from slow_relay import SlowRelay, slow_relay
from supervising import PlayedAgent, start_supervisor
from waiting import wait_until_async

from holdfast.domain.links import LinkMeasured
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import CheckLink, OrderDone
from holdfast.wire.links import decode_measured

pytestmark = [pytest.mark.anyio]

NAMES = ("n0", "n1", "n2", "n3")
SLOWED = "n3"
SLOW = 2e5
FAST = 2e9


@dataclass(slots=True)
class Played(PlayedAgent):
    """Carries out tests of the network with a real replicator, which others reach through a relay."""

    replicator: Node | None = None
    relays: dict[str, SlowRelay] | None = None

    def facts(self) -> NodeFacts:
        assert self.relays is not None
        endpoint = self.relays[self.node].endpoint
        return replace(PlayedAgent.facts(self), replicator_endpoint=endpoint, tests_links=True)

    def check_link(self, command_id: str, order: CheckLink) -> OrderDone:
        node, relays = self.replicator, self.relays
        assert node is not None
        assert relays is not None
        limits = {"bytes_max": order.limits.bytes_max, "seconds_max": order.limits.seconds_max}
        if not order.endpoint:
            node.open_link(order.token, **limits, for_s=order.for_s)  # type: ignore[arg-type]
            return OrderDone(command_id, ok=True, at=time.time())
        # What the slowed node sends and receives is slow, whoever begins.
        there = order.endpoint if self.node != SLOWED else relays[f"from {SLOWED} to {order.partner}"].endpoint
        try:
            found: LinkMeasured = decode_measured(node.begin_link_test(there, order.token, **limits).result())  # type: ignore[arg-type]
        except grpc.RpcError as error:
            return OrderDone(command_id, ok=False, reason=str(error), at=time.time())
        return OrderDone(command_id, ok=True, at=time.time(), link=found)


async def test_a_slowed_node_is_found_and_comes_back(redis_url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = {node.name: node for node in stack.enter_context(nodes(tmp_path / "nodes", *NAMES))}
        relays = {name: stack.enter_context(slow_relay(node.endpoint, FAST)) for name, node in made.items()}
        for name in NAMES[:-1]:
            relay = stack.enter_context(slow_relay(made[name].endpoint, FAST))
            relays[f"from {SLOWED} to {name}"] = relay
        async with anyio.create_task_group() as tasks:
            supervisor = await start_supervisor(
                tasks,
                tmp_path / "sup",
                redis_log(redis_url),
                link_tests_every_s=3.0,
                link_test_bytes_max=1 << 20,
                link_test_s_max=0.2,
                node_hold_s=1.0,
                node_probation_s=2.0,
            )
            for name in NAMES:
                tasks.start_soon(Played(name, [supervisor.control], replicator=made[name], relays=relays).run)

            async def until(what: str, name: str, **wanted: object) -> Any:
                async def there() -> Any:
                    node = await supervisor.get(f"/v1/nodes/{name}")
                    return node if all(node[key] == value for key, value in wanted.items()) else None

                return await wait_until_async(there, description=what)

            async def judged() -> bool:
                rows = [(await supervisor.get(f"/v1/nodes/{name}"))["links"] for name in NAMES]
                return all(row and row[-1]["verdict"] == "good" for row in rows)

            async def connected() -> bool:
                return len((await supervisor.get("/v1/nodes"))["items"]) == len(NAMES)

            await wait_until_async(connected, description="the nodes")
            await wait_until_async(judged, description="good tests of everybody")
            slowed = [relay for name, relay in relays.items() if SLOWED in name]
            for relay in slowed:
                relay.bytes_per_s = SLOW
            out = await until("the slowed node to be found", SLOWED, state="cordoned", returns_by="itself")
            assert re.search(r"its network is slow with [23] nodes that are well with others", out["reason"]), out[
                "reason"
            ]
            newest = out["links"][-1]
            assert newest["verdict"] == "slow"
            assert newest["in_bytes_per_s"] < 5 * SLOW < newest["expected_bytes_per_s"]
            states = {node["node"]: node["state"] for node in (await supervisor.get("/v1/nodes"))["items"]}
            assert states == {**dict.fromkeys(NAMES, "spare"), SLOWED: "cordoned"}
            for relay in slowed:
                relay.bytes_per_s = FAST
            await until("the node to come back", SLOWED, state="spare")
            tasks.cancel_scope.cancel()
