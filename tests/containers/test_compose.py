"""The stack of deploy/compose.yaml in real containers, and faults that cross a real network. `make compose-test`.

One stack for all tests, in this order: each waits until the job trains on four ranks again before it breaks something.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from containers.compose import LOSS_RANK, Compose, project_name
from containers.engine import NoEngine, engine, free_ports
from containers.images import ROOT, VERSION, build, fetch_wheels, make_base, run, settings
from waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    directory = tmp_path_factory.mktemp("containers")
    with ExitStack() as opened:
        try:
            opened.enter_context(engine(directory))
        except NoEngine as error:
            pytest.skip(str(error))
        make_base(directory, settings()["REDIS_IMAGE"])
        fetch_wheels()
        build()
        first, second = free_ports(2)
        compose = Compose(project_name(), {"HOLDFAST_VERSION": VERSION}, (first, second))
        try:
            compose("up", "--detach", "--no-build")
            compose.wait_steps()
            yield compose
        finally:
            compose.keep_logs(ROOT / "out" / "compose")
            compose("down", "--volumes", "--timeout", "5")


@pytest.fixture
def calm(stack: Compose) -> Compose:
    """The stack with every node up and the job training on all four."""
    stack.wait_steps()
    return stack


def test_a_killed_node_is_replaced_by_the_spare(calm: Compose) -> None:
    known = len(calm.incidents())
    calm.kill("node-2")
    incident = calm.wait_incident(known)
    assert (incident["kind"], incident["node"], incident["action"]["kind"]) == ("node_lost", "node-2", "hot_swap")
    view = calm.wait_steps()
    assert "node-2" not in {worker["node"] for worker in view["ranks"]}
    calm.start("node-2")


def test_a_paused_node_is_taken_for_lost_and_trains_no_more_when_it_is_back(calm: Compose) -> None:
    known = len(calm.incidents())
    before = calm.job()["generation"]
    calm.pause("node-1")
    incident = calm.wait_incident(known)
    assert incident["node"] == "node-1"
    calm.unpause("node-1")
    view = calm.wait_steps()
    assert view["generation"] > before
    # Its workers of the old generation woke up with it, and must not go on.
    _wait_workers(calm, "node-1", expected="node-1" in {worker["node"] for worker in view["ranks"]})


def test_a_partitioned_node_and_its_replacement_never_both_train(calm: Compose) -> None:
    known = len(calm.incidents())
    ranks = {worker["node"]: worker["rank"] for worker in calm.job()["ranks"]}
    victim = next(node for node in ("node-3", "node-0", "node-1", "node-2") if node in ranks)
    calm.disconnect(victim)
    incident = calm.wait_incident(known)
    assert incident["node"] == victim
    calm.connect(victim)
    view = calm.wait_steps()
    steps = sorted(calm.losses())
    assert steps == list(range(steps[0], steps[-1] + 1)), "no step is missing"
    _wait_workers(calm, victim, expected=victim in {worker["node"] for worker in view["ranks"]})


def test_training_goes_on_without_redis_and_so_does_the_supervisor_afterwards(calm: Compose) -> None:
    known = len(calm.incidents())
    before = calm.job()["generation"]
    written = max(calm.losses())
    writer = calm.container_of_rank(LOSS_RANK)
    calm.kill("redis")
    wait_until(
        lambda: max(calm.losses_in(writer)) > written + 20,
        description="20 steps without Redis",
        timeout_s=120,
        poll_s=0.5,
    )
    calm.start("redis")
    view = calm.wait_steps(20)
    assert view["generation"] == before, "nothing was restarted"
    assert len(calm.incidents()) == known


def test_the_standby_finishes_the_incident_of_a_killed_leader(calm: Compose) -> None:
    known = len(calm.incidents())
    leader = calm.leader()
    ranks = {worker["node"] for worker in calm.job()["ranks"]}
    victim = next(node for node in ("node-0", "node-1", "node-2", "node-3") if node in ranks)
    before = calm.job()["generation"]
    calm.kill(victim)
    calm.kill(leader)
    incident = calm.wait_incident(known)
    assert incident["node"] == victim
    view = calm.wait_steps()
    assert view["generation"] == before + 1, "one change, not two"
    assert calm.leader() != leader
    assert len([one for one in calm.incidents()[known:] if one["node"] == victim]) == 1
    calm.start(leader)
    calm.start(victim)


def test_diagnostics_is_replaced_by_a_rebuilt_image_while_training_goes_on(calm: Compose) -> None:
    known = len(calm.incidents())
    before = calm.job()["generation"]
    rebuilt = f"{VERSION}-rebuilt"
    run("docker", "tag", f"holdfast/trainer:{VERSION}", f"holdfast/services:{rebuilt}")
    calm("up", "--detach", "--no-deps", "--no-build", "diagnostics", HOLDFAST_VERSION=rebuilt)
    image = run("docker", "inspect", "--format", "{{.Config.Image}}", calm.container("diagnostics")).strip()
    assert image == f"holdfast/services:{rebuilt}"
    view = calm.wait_steps(20)
    assert view["generation"] == before
    assert len(calm.incidents()) == known


def _wait_workers(calm: Compose, service: str, *, expected: bool) -> None:
    """Wait until the node has a worker if it belongs to the job's present generation, and none if it does not."""
    wait_until(
        lambda: calm.workers(service) == int(expected),
        description=f"{int(expected)} workers on {service}",
        timeout_s=60,
        poll_s=0.5,
    )
