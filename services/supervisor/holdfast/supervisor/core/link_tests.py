"""Nodes without ranks test the network between them while they wait.

    timer ──a pair──► CheckLink to the partner ──it waits──► CheckLink to the node that measures ──what it found──► both rows
                                                                                                       │
            out of service (returns.py) ◄──bad with two partners that are well (links.py)──────────────┘
                 └──two good tests in a row──► hold-down ──► spare on probation

Theory of operation. A timer looks who is idle: connected, no ranks, no order, nothing announced. Who was tested longest ago
comes first, and its partner is the idle node that it has met longest ago. A node is in one test at a time, and of a hundred
idle nodes at most two are: a healthy fleet tests each node about every `every_s`, spread evenly. A node in doubt (in service,
and its newest test was bad; or out of service, and its newest was good) is tested again after a tenth of that.

Nothing waits for a test. A job may take both nodes at any time: their agents end the test when they are told to prepare, and
what comes back of a node that has work by now is dropped. A test is nothing to carry on with: its orders are withdrawn when it
takes too long, and by a new leader. An answer that comes later, or twice, belongs to no order.

A bad switch, or a bug here, must not take all spares: of the idle nodes at most `OUT_SHARE_MAX` are out of service because of
their network, one in any case. Nodes with ranks are never acted on, and nobody is while the circuit breaker is open.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2s
from zlib import crc32

from holdfast.domain.evolve import evolve
from holdfast.domain.links import LinkMeasured
from holdfast.domain.orders import CheckLink, OrderDone
from holdfast.supervisor.core import breaker, links, quarantine, returns
from holdfast.supervisor.core.holddown import Cure
from holdfast.supervisor.core.index import By
from holdfast.supervisor.core.links import LinkTest, Verdict
from holdfast.supervisor.core.state import Node
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.timers import LinkTestsDue, LinkTestTimeout

PAIRS_SHARE = 0.01  # of the idle nodes: so many pairs at the same time, one in any case
DOUBT_SHARE = 0.1  # of the interval, for a node in doubt
DOUBTED_MAX = 4  # tests in a row with the same result leave no doubt
LOOK_SHARE = 0.1  # of the interval, between two looks when nobody is due
LOOK_S_MIN = 0.5
LOOK_S = (
    10.0  # between two looks while there is somebody to test; less, if the interval is shorter than ten minutes, since
)
LOOKS = 60  # … so many of them, with the share above, are enough for everybody within an interval
TEST_S = 30.0  # for both orders and the test: connecting takes seconds where nothing answers
WAITS_S = 20.0  # how long the partner waits for the node that measures
OUT_SHARE_MAX = 0.1

# ---------------------------------------------------------------- who tests with whom


def expect(turn: Turn) -> None:
    """A node is there that can take part."""
    if turn.config.links.every_s > 0 and LinkTestsDue() not in turn.timers:
        turn.set_timer(LinkTestsDue(), turn.at + _look_s(turn))


def abandon(turn: Turn) -> None:
    """Another leader has begun the tests that are under way: what they find is not waited for."""
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
    """Nodes that may be tested, by name."""
    names = {*turn.group(By.FREE), *turn.group(By.RETURNING)}
    return sorted(name for name in names if is_idle(turn, turn.nodes[name]))


def is_idle(turn: Turn, node: Node) -> bool:
    """Whether the node waits, without ranks, and nothing is about to happen to it. One that an operator has cordoned is left
    alone, and so is one whose fault wants something else first."""
    if not (node.connected and node.facts.tests_links and node.facts.replicator_endpoint):
        return False
    if node.unheard or node.lost or node.untested or node.suspicion is not None:
        return False
    if node.live_generations or node.workers or turn.group(By.CLAIM, node.name):
        return False
    if node.notice is not None or node.reset_due is not None:
        return False
    removal = node.removal
    if removal is None:
        return not node.unschedulable_reason
    return not removal.final and (removal.back_at is not None or removal.cure is Cure.LINKS)


def _is_in_doubt(node: Node) -> bool:
    """Whether another test of the node is wanted soon. Not for ever: what is bad again and again is known."""
    newest = [test.bad for test in node.links[-DOUBTED_MAX:]]
    if not newest or newest == [newest[-1]] * DOUBTED_MAX:
        return False
    return newest[-1] is not _is_out(node)


def _due(node: Node, every_s: float) -> float:
    """When the node should be tested next: not in step with others."""
    if not node.link_begun_at:
        return node.connected_at
    share = DOUBT_SHARE if _is_in_doubt(node) else 1.0
    return node.link_begun_at + share * every_s * _around_one(f"{node.name} {node.link_begun_at:.0f}")


def _around_one(of: str) -> float:
    return 0.75 + crc32(of.encode()) / 2**33


def _age(node: Node) -> tuple[bool, float, str]:
    return not _is_in_doubt(node), node.link_begun_at, node.name


def _partner(node: Node, candidates: Iterable[Node]) -> Node | None:
    """The node of its pool that it has met longest ago: pools may be separate networks. One in doubt needs somebody to be told
    from: rather one that is in no doubt itself, and after a bad test a neighbour of its zone."""
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
    """The partner first: when it waits, whoever does not reach it has found something."""
    for each in (node, partner):
        turn.put_node(each.name, link_begun_at=turn.at)
    timer = LinkTestTimeout(node.name, partner.name)
    turn.set_timer(timer, turn.at + TEST_S)
    turn.send(partner.name, CheckLink(node.name, _token(turn, timer), turn.config.links.limits, for_s=WAITS_S))


def _token(turn: Turn, timer: LinkTestTimeout) -> str:
    """What nobody can guess, and what is another one for each test."""
    return blake2s(f"{turn.secret}/{timer}/{turn.at}".encode(), digest_size=16).hexdigest()


def on_answer(turn: Turn, name: str, order: CheckLink, done: OrderDone) -> None:
    """Of either node: the partner waits, or the other one has measured."""
    is_partner = not order.endpoint
    timer = LinkTestTimeout(order.partner, name) if is_partner else LinkTestTimeout(name, order.partner)
    if timer not in turn.timers:
        return  # given up meanwhile
    pair = [turn.nodes.get(each) for each in (timer.node, timer.partner)]
    node, partner = pair
    if node is None or partner is None or not done.ok or not all(is_idle(turn, each) for each in (node, partner)):
        turn.cancel_timer(timer)  # a job has taken one of them, or the test came to no end: that says nothing
    elif is_partner:
        endpoint = partner.facts.replicator_endpoint
        turn.send(node.name, evolve(order, partner=name, endpoint=endpoint, for_s=0.0))
    else:
        turn.cancel_timer(timer)
        if done.link is not None:
            _record(turn, node, partner, done.link)


def on_timeout(turn: Turn, name: str, partner: str) -> None:
    """It has taken too long. Which part of it did not come about is not known: that says nothing of either node."""
    turn.cancel_timer(LinkTestTimeout(name, partner))
    for each, other in ((name, partner), (partner, name)):
        send = turn.order_to(each, CheckLink)
        if send is not None and isinstance(send.order, CheckLink) and send.order.partner == other:
            turn.forget_order(send)


def _record(turn: Turn, node: Node, partner: Node, measured: LinkMeasured) -> None:
    """Into the rows of both, judged by what others measure; and what follows for each."""
    since = turn.at - links.WINDOW * turn.config.links.every_s
    rows = {name: turn.nodes[name].links for name in idle_nodes(turn)}
    fewer, more = sorted((node.facts.capacity, partner.facts.capacity))
    within, between = (f"{fewer}-{more} workers, {way}" for way in ("within a zone", "between zones"))
    in_zone = _are_neighbours(node, partner)
    similar = within if in_zone else between
    for each, other, seen in ((node, partner, measured), (partner, node, links.mirrored(measured))):
        than = links.expected(each.name, similar, rows, since)
        if than is None and in_zone:  # what is usual between zones is the least there
            than = links.expected(each.name, between, rows, since)
        test = LinkTest(turn.at, other.name, similar, in_zone, seen, expected=than)
        test = evolve(test, verdict=links.verdict(test, than))
        turn.put_node(each.name, links=links.added(each.links, test))
        rows[each.name] = turn.nodes[each.name].links
    for name, tests in rows.items():  # others, too: one of the two may be who was good with somebody else
        if tests and tests[-1].bad and not _is_out(turn.nodes[name]):
            _judge(turn, name, rows, since)


def _judge(turn: Turn, name: str, rows: links.Rows, since: float) -> None:
    """Take the node out of service, if its newest tests say so and there is room for it."""
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
    """For metrics: what is known of the network of a node that takes part."""
    if _is_out(node):
        return "out"
    return node.links[-1].verdict.value if node.links else Verdict.UNJUDGED.value
