"""The stack of docker-compose.yml in real containers, and faults that cross a real network. `make compose-test`.

One stack for all tests, in this order: each waits until the job trains on four ranks again before it breaks something.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from containers.compose import LOSS_RANK, Compose, command, gateway, project_name
from containers.engine import NoEngine, engine
from containers.images import ROOT, VERSION, build, fetch_wheels, make_base, run, settings
from ports import free_ports
from traces import parents_of, root_of
from waiting import wait_until

from holdfast.runtime.telling.fake_collector import FakeCollector, Received, collecting

NODES = 5  # four and a spare

# The first test has to wait for images that are built from nothing; what it waits for afterwards has deadlines of its own.
pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]


LOGS = ROOT / "out" / "compose"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An engine that has the images."""
    directory = tmp_path_factory.mktemp("containers")
    with ExitStack() as opened:
        try:
            opened.enter_context(engine(directory))
        except NoEngine as error:
            pytest.skip(str(error))
        make_base(directory, settings()["REDIS_IMAGE"])
        fetch_wheels()
        build()
        yield


@pytest.fixture(scope="module")
def collector() -> Iterator[FakeCollector]:
    with collecting(host="0.0.0.0") as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(images: None, collector: FakeCollector) -> Iterator[Compose]:
    first, second = free_ports(2)
    environment = {"HOLDFAST_VERSION": VERSION, "OTLP_ENDPOINT": collector.endpoint_at(gateway())}
    compose = Compose(project_name(), environment, (first, second))
    try:
        compose("up", "--detach", "--no-build")
        compose.wait_steps()
        yield compose
    finally:
        compose.keep_logs(LOGS)
        compose("down", "--volumes", "--timeout", "5")


@pytest.fixture
def calm(stack: Compose) -> Compose:
    """Every node is up, the job trains on four of them, and what the last test did to nodes is not held against them."""
    stack.restore()
    stack.wait_nodes(NODES)
    stack.ask(lambda client: client.reset_breaker("the next test begins"))
    stack.wait_steps()
    return stack


def test_a_setting_that_is_missing_is_named(images: None, tmp_path: Path) -> None:
    elsewhere = tmp_path / "empty.env"
    elsewhere.touch()
    with pytest.raises(AssertionError, match="start compose in the top directory of the checkout"):
        run(
            *command(),
            "--file",
            str(ROOT / "docker-compose.yml"),
            "--env-file",
            str(elsewhere),
            "config",
            "--quiet",
        )


def test_the_top_directory_needs_no_flags(images: None) -> None:
    services = run(*command(), "config", "--services").split()  # runs there
    assert {"redis", "supervisor-a", "node-0", "job"} <= set(services)


def test_the_job_starts_on_the_nodes_that_are_no_spares(stack: Compose) -> None:
    assert [worker["node"] for worker in stack.job()["ranks"]] == ["node-0", "node-1", "node-2", "node-3"]


def test_the_api_wants_the_token_which_supervisors_have_and_nodes_have_not(stack: Compose) -> None:
    for api in stack.apis:
        assert httpx.get(f"{api}/v1/jobs").status_code == 401
        assert httpx.get(f"{api}/v1/jobs", headers={"Authorization": f"Bearer {stack.token}"}).status_code == 200
    file = "/var/lib/passwords/api/password"
    for service in ("supervisor-a", "supervisor-b"):
        assert stack.inside(service, "stat", "-c", "%a %U", file).split() == ["600", "holdfast"]
        assert "demo" in stack.inside(service, "holdfast", "jobs", "show", "demo")
    asked = f"import os; print(any('API_TOKEN' in name for name in os.environ), os.path.exists('{file}'))"
    assert stack.inside("node-0", "python", "-c", asked).split() == ["False", "False"]


def test_a_killed_node_is_replaced_by_the_spare_and_one_trace_tells_how(
    calm: Compose, collector: FakeCollector
) -> None:
    known = len(calm.incidents())
    victim = _with_a_rank(calm, "node-2")
    calm.kill(victim)
    incident = calm.wait_incident(known)
    assert (incident["kind"], incident["node"], incident["action"]["kind"]) == ("node_lost", victim, "hot_swap")
    view = calm.wait_steps()
    assert victim not in {worker["node"] for worker in view["ranks"]}

    expected = {"incident": "finding", "decision": "incident", "generation change": "incident"}
    expected |= {
        "prepare": "generation change",
        "first step": "generation change",
        "fork": "prepare",
        "stage": "prepare",
    }
    expected |= {"fetch": "stage", "restore": "first step", "step": "first step"}

    def reported() -> list[Received]:
        """All of it: each process sends its part once a second."""
        spans = collector.trace(incident["trace_id"])
        whole = {span.parent_id for span in spans} <= {"", *(span.span_id for span in spans)}
        return spans if whole and expected.keys() <= {span.name for span in spans} else []

    spans = wait_until(reported, description=f"the spans {sorted(expected)}", timeout_s=60, poll_s=0.5)
    assert root_of(spans).name == "finding", "nobody announces a lost node"
    assert expected.items() <= parents_of(spans).items()
    assert {span.service for span in spans} == {
        "holdfast-agent", "holdfast-replicator", "holdfast-diagnostics", "holdfast-supervisor",
    }  # fmt: skip


def test_a_paused_node_is_taken_for_lost_and_trains_no_more_when_it_is_back(calm: Compose) -> None:
    known = len(calm.incidents())
    before = calm.job()["generation"]
    victim = _with_a_rank(calm, "node-1")
    calm.pause(victim)
    incident = calm.wait_incident(known)
    assert incident["node"] == victim
    calm.unpause(victim)
    view = calm.wait_steps()
    assert view["generation"] > before
    # Its workers of the old generation woke up with it, and must not go on.
    _wait_workers(calm, victim)


def test_a_partitioned_node_and_its_replacement_never_both_train(calm: Compose) -> None:
    known = len(calm.incidents())
    victim = _with_a_rank(calm, "node-3")
    calm.disconnect(victim)
    incident = calm.wait_incident(known)
    assert incident["node"] == victim
    calm.connect(victim)
    calm.wait_steps()
    steps = sorted(calm.losses())
    assert steps == list(range(steps[0], steps[-1] + 1)), "no step is missing"
    _wait_workers(calm, victim)


def test_training_cannot_reach_redis(calm: Compose) -> None:
    [address] = json.loads(run("docker", "inspect", calm.container("redis")))[0]["NetworkSettings"]["Networks"].values()
    program = "import socket, sys\nsocket.create_connection((sys.argv[1], 6379), 5)"
    for target in ("redis", address["IPAddress"]):
        with pytest.raises(AssertionError, match=r"gaierror|TimeoutError|Network is unreachable|Connection refused"):
            calm.inside("node-0", "python", "-c", program, target)
    calm.inside("supervisor-a", "python", "-c", program, "redis")  # as the program itself shows


def test_nobody_in_the_stack_is_root_or_can_become_it(calm: Compose) -> None:
    """By what the kernel says of the processes, as the engine's machine sees them."""
    containers = calm.containers()
    assert containers.keys() >= {"redis", "store", "diagnostics", "supervisor-a", "supervisor-b", "node-0", "spare"}
    for service, container in containers.items():
        processes = run("docker", "top", container, "-eo", "pid,uid").split("\n")[1:]
        pids = [line.split()[0] for line in processes if line.strip()]
        assert pids, service
        for pid in pids:
            try:
                lines = (Path("/proc") / pid / "status").read_text().splitlines()
            except FileNotFoundError:  # a probe that has ended meanwhile
                continue
            status = dict(line.split(":", 1) for line in lines)
            assert "0" not in status["Uid"].split(), f"{service}: {status['Name'].strip()} is root"
            assert {int(status[f"Cap{kind}"], 16) for kind in ("Prm", "Eff", "Inh", "Bnd", "Amb")} == {0}, service
            assert status["NoNewPrivs"].strip() == "1", service
    for service in ("redis", "diagnostics", "supervisor-a"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            calm.inside(service, "sh", "-c", "echo text > /usr/text")


def test_each_service_is_a_user_of_redis_and_nobody_else_is(calm: Compose) -> None:
    with pytest.raises(AssertionError, match="NOAUTH"):
        calm.inside(
            "redis", "sh", "-c", "redis-cli info server | grep -q redis_version || { redis-cli info server; exit 1; }"
        )
    passwords = {
        user: calm.inside(service, "cat", f"/var/lib/passwords/{user}/password")
        for user, service in (("supervisor", "supervisor-a"), ("diagnostics", "diagnostics"))
    }
    assert len(set(passwords.values())) == 2
    for user, password in passwords.items():
        asked = calm.inside("redis", "redis-cli", "--no-auth-warning", "--user", user, "--pass", password, "FLUSHALL")
        assert "NOPERM" in asked
    for service, other in (("diagnostics", "supervisor"), ("supervisor-a", "diagnostics"), ("node-0", "supervisor")):
        with pytest.raises(AssertionError, match=r"No such file or directory"):
            calm.inside(service, "cat", f"/var/lib/passwords/{other}/password")


def test_redis_reaches_nothing_outside_of_its_network(calm: Compose) -> None:
    """Not even what supervisors reach by their other network. (The test's Redis image has Python.)"""
    assert run("docker", "network", "inspect", "--format", "{{.Internal}}", f"{calm.project}_control").strip() == "true"
    [address] = json.loads(run("docker", "inspect", calm.container("store")))[0]["NetworkSettings"]["Networks"].values()
    program = "import socket, sys\nsocket.create_connection((sys.argv[1], 4443), 5)"
    with pytest.raises(
        AssertionError, match=r"TimeoutError|Network is unreachable|No route to host|Connection refused"
    ):
        calm.inside("redis", "python3", "-c", program, address["IPAddress"])
    calm.inside("supervisor-a", "python3", "-c", program, address["IPAddress"])


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
    assert not [one for one in calm.incidents()[known:] if one["kind"] == "node_lost"]


def test_the_standby_finishes_the_incident_of_a_killed_leader(calm: Compose) -> None:
    known = len(calm.incidents())
    leader = calm.leader()
    victim = _with_a_rank(calm, "node-0")
    before = calm.job()["generation"]
    calm.kill(victim)
    calm.kill(leader)
    incident = calm.wait_incident(known)
    assert incident["node"] == victim
    view = calm.wait_steps()
    assert view["generation"] == before + 1, "one change, not two"
    assert calm.leader() != leader
    assert len([one for one in calm.incidents()[known:] if one["node"] == victim]) == 1


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
    assert not [one for one in calm.incidents()[known:] if one["kind"] == "node_lost"]


def _with_a_rank(calm: Compose, wanted: str) -> str:
    """`wanted`, or another node that is no spare when earlier tests have made it one."""
    ranks = {worker["node"] for worker in calm.job()["ranks"]}
    return next(node for node in (wanted, "node-0", "node-1", "node-2", "node-3") if node in ranks)


def _wait_workers(calm: Compose, service: str) -> None:
    """Wait until the node has a worker if it belongs to the job's present generation, and none if it does not."""
    wait_until(
        lambda: calm.workers(service) == int(service in {worker["node"] for worker in calm.job()["ranks"]}),
        description=f"as many workers on {service} as the job has ranks there",
        timeout_s=60,
        poll_s=0.5,
    )
