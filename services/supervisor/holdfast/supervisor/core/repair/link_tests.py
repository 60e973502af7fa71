"""Nodes without ranks test the network between them.

    timer ──a pair──► CheckLink to the partner ──it waits──► CheckLink to the node that measures ──result──► both rows
                                                                                                       │
            out of service (returns.py) ◄──bad with two good partners (links.py)───────────────────────┘
                 └──two good tests in a row──► hold-down ──► spare on probation

Theory of operation. A timer looks for idle nodes: connected, without ranks, orders or notices. The node that was tested
longest ago comes first, and its partner is the idle node that it was tested with longest ago. A node is in one test at a time,
and of a hundred idle nodes at most two are in a test: in a healthy fleet each node is tested about every `every_s`, spread
evenly. A node in doubt (in service, and its newest test was bad; or out of service, and its newest was good) is tested again
after a tenth of that.

Nothing waits for a test. A job may take both nodes at any time: their agents end the test when they receive a Prepare, and a
result for a node that has work by then is dropped. Tests are not continued: their orders are withdrawn if they take too long,
and by a new leader. A late or repeated answer belongs to no order.

A bad switch, or a bug here, must not take all spares out of service: at most `OUT_SHARE_MAX` of the idle nodes (one is always
allowed) are out of service because of their network. Nodes with ranks are never affected, and no node is while the breaker is
open.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2s
from zlib import crc32

from holdfast.domain.evolve import evolve
from holdfast.domain.links import LinkMeasured
from holdfast.domain.orders import CheckLink, OrderDone
from holdfast.supervisor.core.fleet import breaker, returns
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import quarantine
from holdfast.supervisor.core.rules import links
from holdfast.supervisor.core.rules.holddown import Cure
from holdfast.supervisor.core.rules.links import LinkTest, Verdict
from holdfast.supervisor.timers import LinkTestsDue, LinkTestTimeout

PAIRS_SHARE = 0.01  # pairs at the same time, as a share of the idle nodes; always at least one
DOUBT_SHARE = 0.1  # of the interval, until a node in doubt is tested again
DOUBTED_MAX = 4  # tests in a row with the same result leave no doubt
LOOK_SHARE = 0.1  # of the interval, between two runs of the timer when no node is due
LOOK_S_MIN = 0.5
# between two runs of the timer while nodes are due; less, if the interval is shorter than ten minutes, since
LOOK_S = 10.0
LOOKS = 60  # … this number of runs, with the share above, covers every node within an interval
TEST_S = 30.0  # for both orders and the test: connecting takes seconds if nothing answers
WAITS_S = 20.0  # how long the partner waits for the node that measures
OUT_SHARE_MAX = 0.1

# ---------------------------------------------------------------- the pairs


def expect(turn: Turn) -> None:
    """Start the timer: a node that can take part has connected."""
    if turn.config.links.every_s > 0 and LinkTestsDue() not in turn.timers:
        turn.set_timer(LinkTestsDue(), turn.at + _look_s(turn))


def abandon(turn: Turn) -> None:
    """Abandon the tests that another leader has begun."""
    for timer in _under_way(turn):
        on_timeout(turn, timer.node, timer.partner)
    if not turn.config.links.every_s:
        turn.cancel_timer(LinkTestsDue())
    elif any(turn.nodes[name].facts.tests_links for name in turn.group(By.CONNECTED)):
        expect(turn)


def on_timer(turn: Turn) -> None:
    """Begin tests. The timer ends with the last node that can take part, and begins with the next one's Hello."""
    rules = turn.config.links
    if not rules.every_s:
        return
    idle = [turn.nodes[name] for name in idle_nodes(turn)]
    under_way = _under_way(turn)
    busy = {name for timer in under_way for name in (timer.node, timer.partner)}
    free = {node.name: node for node in idle if node.name not in busy and not turn.orders(node=node.name)}
    room = max(1, int(PAIRS_SHARE * len(idle))) - len(under_way)
    due = sorted((node for node in free.values() if _due(node, rules.every_s) <= turn.at), key=_age)
    for node in due:
        if room <= 0:
            break
        if node.name in free and (partner := _partner(node, free.values())) is not None:
            _begin(turn, node, partner)
            del free[node.name], free[partner.name]
            room -= 1
    if idle or any(turn.nodes[name].facts.tests_links for name in turn.group(By.CONNECTED)):
        soonest = min((_due(node, rules.every_s) for node in idle), default=turn.at + rules.every_s)
        later = turn.at + max(LOOK_S_MIN, LOOK_SHARE * rules.every_s)
        turn.set_timer(LinkTestsDue(), min(max(soonest, turn.at + _look_s(turn)), later))


def idle_nodes(turn: Turn) -> list[str]:
    """Names of the nodes that may be tested, sorted."""
    names = {*turn.group(By.FREE), *turn.group(By.RETURNING)}
    return sorted(name for name in names if is_idle(turn, turn.nodes[name]))


def is_idle(turn: Turn, node: Node) -> bool:
    """Whether the node waits without ranks, and no event is due that would end that. A node that an operator has cordoned is
    not tested, nor one whose fault requires something else first."""
    if not (node.connected and node.facts.tests_links and node.facts.replicator_endpoint):
        return False
    if node.unheard or node.lost or node.untested or node.suspicion is not None:
        return False
    if turn.group(By.HELD, node.name) or node.workers or turn.group(By.CLAIM, node.name):
        return False
    if node.notice is not None or node.reset_due is not None:
        return False
    removal = node.removal
    if removal is None:
        return not node.unschedulable_reason
    return not removal.final and (removal.back_at is not None or removal.cure is Cure.LINKS)


def _is_in_doubt(node: Node) -> bool:
    """Whether the node should be tested again soon. Not indefinitely: repeated equal results leave no doubt."""
    newest = [test.bad for test in node.links[-DOUBTED_MAX:]]
    if not newest or newest == [newest[-1]] * DOUBTED_MAX:
        return False
    return newest[-1] is not _is_out(node)


def _due(node: Node, every_s: float) -> float:
    """When the node should be tested next, spread so that nodes do not keep in step."""
    if not node.link_begun_at:
        return node.connected_at
    share = DOUBT_SHARE if _is_in_doubt(node) else 1.0
    return node.link_begun_at + share * every_s * _around_one(f"{node.name} {node.link_begun_at:.0f}")


def _around_one(of: str) -> float:
    return 0.75 + crc32(of.encode()) / 2**33


def _age(node: Node) -> tuple[bool, float, str]:
    return not _is_in_doubt(node), node.link_begun_at, node.name


def _partner(node: Node, candidates: Iterable[Node]) -> Node | None:
    """The node of its pool that it was tested with longest ago; pools may be separate networks. A node in doubt preferably
    gets a partner that is not in doubt, to tell the two apart, and after a bad test a neighbour in its zone."""
    met = {test.partner: test.at for test in node.links}
    doubted = _is_in_doubt(node)
    wants_neighbour = doubted and node.links[-1].bad

    def order(other: Node) -> tuple[bool, bool, float, float, str]:
        return (
            doubted and _is_in_doubt(other),
            wants_neighbour and not _are_neighbours(node, other),
            met.get(other.name, 0.0),
            other.link_begun_at,
            other.name,
        )

    others = (other for other in candidates if other.name != node.name and other.facts.pool == node.facts.pool)
    return min(others, key=order, default=None)


def _are_neighbours(one: Node, other: Node) -> bool:
    return bool(one.zone) and one.zone == other.zone


def _look_s(turn: Turn) -> float:
    every_s = turn.config.links.every_s
    return min(LOOK_S, max(LOOK_S_MIN, every_s / LOOKS)) * _around_one(f"{turn.at:.3f}")


# ---------------------------------------------------------------- one test


def _under_way(turn: Turn) -> list[LinkTestTimeout]:
    return sorted(timer for timer in turn.timers if isinstance(timer, LinkTestTimeout))


def _begin(turn: Turn, node: Node, partner: Node) -> None:
    """Send the order to the partner first. When it waits, a node that cannot reach it has found a fault."""
    for each in (node, partner):
        turn.put_node(each.name, link_begun_at=turn.at)
    timer = LinkTestTimeout(node.name, partner.name)
    turn.set_timer(timer, turn.at + TEST_S)
    turn.send(partner.name, CheckLink(node.name, _token(turn, timer), turn.config.links.limits, for_s=WAITS_S))


def _token(turn: Turn, timer: LinkTestTimeout) -> str:
    """An unguessable token that differs for each test."""
    return blake2s(f"{turn.secret}/{timer}/{turn.at}".encode(), digest_size=16).hexdigest()


def on_answer(turn: Turn, name: str, order: CheckLink, done: OrderDone) -> None:
    """An answer of either node: the partner waits, or the other one has measured."""
    is_partner = not order.endpoint
    timer = LinkTestTimeout(order.partner, name) if is_partner else LinkTestTimeout(name, order.partner)
    if timer not in turn.timers:
        return  # abandoned meanwhile
    pair = [turn.nodes.get(each) for each in (timer.node, timer.partner)]
    node, partner = pair
    if node is None or partner is None or not done.ok or not all(is_idle(turn, each) for each in (node, partner)):
        turn.cancel_timer(timer)  # a job has taken one of them, or the test did not finish: no result
    elif is_partner:
        endpoint = partner.facts.replicator_endpoint
        turn.send(node.name, evolve(order, partner=name, endpoint=endpoint, for_s=0.0))
    else:
        turn.cancel_timer(timer)
        if done.link is not None:
            _record(turn, node, partner, done.link)


def on_timeout(turn: Turn, name: str, partner: str) -> None:
    """The test took too long. The failed part is unknown, so this is no evidence against either node."""
    turn.cancel_timer(LinkTestTimeout(name, partner))
    for each, other in ((name, partner), (partner, name)):
        send = turn.order_to(each, CheckLink)
        if send is not None and isinstance(send.order, CheckLink) and send.order.partner == other:
            turn.forget_order(send)


def _record(turn: Turn, node: Node, partner: Node, measured: LinkMeasured) -> None:
    """Store the test in the rows of both nodes, judged by the results of others, and draw the conclusions."""
    since = turn.at - links.WINDOW * turn.config.links.every_s
    rows = {name: turn.nodes[name].links for name in idle_nodes(turn)}
    fewer, more = sorted((node.facts.capacity, partner.facts.capacity))
    within, between = (f"{fewer}-{more} workers, {way}" for way in ("within a zone", "between zones"))
    in_zone = _are_neighbours(node, partner)
    similar = within if in_zone else between
    for each, other, seen in ((node, partner, measured), (partner, node, links.mirrored(measured))):
        than = links.expected(each.name, similar, rows, since)
        if than is None and in_zone:  # a pair within a zone should at least reach what is usual between zones
            than = links.expected(each.name, between, rows, since)
        test = LinkTest(turn.at, other.name, similar, in_zone, seen, expected=than)
        test = evolve(test, verdict=links.verdict(test, than))
        turn.put_node(each.name, links=links.added(each.links, test))
        rows[each.name] = turn.nodes[each.name].links
    for name, tests in rows.items():  # also other nodes: the new test may show that their partner is good with others
        if tests and tests[-1].bad and not _is_out(turn.nodes[name]):
            _judge(turn, name, rows, since)


def _judge(turn: Turn, name: str, rows: links.Rows, since: float) -> None:
    """Take the node out of service if its newest tests justify it and the limit allows it."""
    node = turn.nodes[name]
    neighbours = [other for other in rows if other != name and _are_neighbours(node, turn.nodes[other])]
    blame = links.blame(name, rows, neighbours, since, max(since, node.ranks_at))
    if blame is None:
        return
    out = sum(_is_out(turn.nodes[each]) for each in turn.group(By.RETURNING))
    most = max(1, int(OUT_SHARE_MAX * len(rows)))
    kept = ""
    if breaker.is_open(turn):
        kept = "while the circuit breaker is open"
    elif out >= most:
        kept = f"because {out} of {len(rows)} idle nodes are out of service for the same reason"
    if not kept:
        returns.failed_links(turn, name, blame)
        quarantine.count_bad_links(turn, name)
    elif node.links[-1].at == turn.at:  # once for each of its tests
        turn.note(name, f"stays in service {kept}: {blame.cause}")


def _is_out(node: Node) -> bool:
    return node.removal is not None and node.removal.cure is Cure.LINKS


STANDINGS = ("out", *(each.value for each in Verdict))


def standing(node: Node) -> str:
    """The standing of a node's network, for metrics."""
    if _is_out(node):
        return "out"
    return node.links[-1].verdict.value if node.links else Verdict.UNJUDGED.value
