"""The bridge on a real API server, under the service account and with the rights that the chart gives it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import charts
import pytest
from control_plane import GRACE_S, NAMESPACE, Cluster
from eventlogs import redis_log
from kube_fleet import KnownFleet
from supervising import MortalLog, PlayedAgent, Running, start_supervisor
from waiting import wait_until, wait_until_async

from holdfast.domain.errors import NotFound, Unavailable
from holdfast.kubernetes import api, bridge, watch
from holdfast.kubernetes.api import Access, Api, Expired, Refused, Resource
from holdfast.kubernetes.bridge import AGENTS, Bridge, Options
from holdfast.kubernetes.changes import DELETED, Announce, Change, Forget, Known, Withdraw
from holdfast.kubernetes.machines import CONDEMNED, NODE, SCHEDULED, Object
from holdfast.kubernetes.replace import FAULT_BEHAVIOR, Mark, Replacer

pytestmark = [pytest.mark.kubernetes, pytest.mark.anyio, pytest.mark.timeout(900), charts.NEEDS_HELM]

ACCOUNT = f"{charts.RELEASE}-supervisor"
BINDING = f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{ACCOUNT}-{NAMESPACE}"
CORDONED = "Kubernetes: cordoned"
IMPENDING = "cloud.google.com/impending-node-termination"
TERMINATED = f"Kubernetes: taint {IMPENDING}"
POD_SPEC = {"containers": [{"name": "agent", "image": "none"}], "terminationGracePeriodSeconds": 0}
WAIT_S = 90.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches end after seconds instead of a minute, and an API server that refuses is asked again soon."""
    monkeypatch.setattr(api, "WATCH_S", 3.0)
    monkeypatch.setattr(watch, "PAUSE_S_MAX", 0.5)
    monkeypatch.setattr(bridge, "LOOK_S", 0.1)


@pytest.fixture
def access(cluster: Cluster, tmp_path: Path) -> Iterator[Access]:
    """With a token that ends with the Secret of its name."""
    rights = charts.rendered("bridge.yaml", "serviceaccount.yaml", watch=True, replacePods=True)
    cluster.kubectl("apply", "-f", "-", stdin=rights)
    new_token(cluster, tmp_path, "first")
    yield Access(url=cluster.url, token_file=tmp_path / "token", ca_file=cluster.ca_file)
    cluster.wait_ready()
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=rights)
    cluster.kubectl("delete", "secret", "-n", NAMESPACE, "--ignore-not-found", "first", "second")


def new_token(cluster: Cluster, directory: Path, secret: str) -> None:
    cluster.post(f"/api/v1/namespaces/{NAMESPACE}/secrets", {"metadata": {"name": secret}})
    (directory / "token").write_text(cluster.token(ACCOUNT, bound_to=secret))


def agent_pod(cluster: Cluster, name: str, machine: str) -> None:
    """One that a scheduler has bound."""
    labels = dict(each.split("=") for each in AGENTS.split(","))
    body = {"metadata": {"name": name, "labels": labels}, "spec": {**POD_SPEC, "nodeName": machine}}
    cluster.post(f"/api/v1/namespaces/{NAMESPACE}/pods", body)


@asynccontextmanager
async def watching(access: Access, fleet: KnownFleet) -> AsyncIterator[Bridge]:
    shell = Bridge(Options(access=access, namespaces=(NAMESPACE,)), time.time)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.run, fleet)
        yield shell
        tasks.cancel_scope.cancel()


async def until(shell: Bridge, words: str) -> None:
    await wait_until_async(
        lambda: any(words in each for each in shell.problems), description=f"the problem {words!r}", timeout_s=WAIT_S
    )


async def until_seen(shell: Bridge) -> None:
    await wait_until_async(
        lambda: len(shell.sights()) == 2 and all(each.confirmed_at for each in shell.sights()),
        description="nodes and pods",
        timeout_s=WAIT_S,
    )


async def until_well(shell: Bridge) -> None:
    await wait_until_async(lambda: not shell.problems, description="no problem", timeout_s=WAIT_S)


async def in_thread(function: object, *arguments: object) -> None:
    await anyio.to_thread.run_sync(function, *arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what machines say


async def test_cordons_taints_labels_and_maintenance_are_announced_and_taken_back(
    cluster: Cluster, access: Access
) -> None:
    fleet, soon = KnownFleet("m1", "m2", "m3", "m4", "shared"), int(time.time()) + 600
    for name in ("m1", "m2", "m3"):
        cluster.add_machine(name)
    cluster.add_machine("m4", **{"topology.kubernetes.io/zone": "b"})
    agent_pod(cluster, "shared", "m4")
    async with watching(access, fleet):
        await wait_until_async(lambda: {"m4", "shared"} <= set(zones(fleet)), description="the failure domains")
        assert zones(fleet) == {"m4": "b", "shared": "b"}
        cluster.kubectl("cordon", "m1", "m4")
        cluster.kubectl("taint", "node", "m2", f"{IMPENDING}=:NoSchedule")
        cluster.kubectl("label", "node", "m3", f"{SCHEDULED}={soon}")
        maintenance = "Kubernetes: scheduled maintenance"
        cordoned = {"m1": CORDONED, "m4": CORDONED, "shared": CORDONED}
        await fleet.until({**cordoned, "m2": TERMINATED, "m3": maintenance})
        assert fleet.nodes["m3"].starts_at == soon
        cluster.kubectl("uncordon", "m1", "m4")
        cluster.kubectl("taint", "node", "m2", f"{IMPENDING}-")
        cluster.kubectl("label", "node", "m3", f"{SCHEDULED}-", "cloud.google.com/perform-maintenance=true")
        await fleet.until({"m3": "Kubernetes: label cloud.google.com/perform-maintenance=true"})
    assert len(fleet.said) == 2 + 5 + 5, "each change is reported once"


def zones(fleet: KnownFleet) -> dict[str, str]:
    return {name: each.zone for name, each in fleet.nodes.items() if each.zone}


async def test_a_machine_that_is_not_ready_is_no_finding(cluster: Cluster, access: Access) -> None:
    machine, fleet = cluster.add_machine("m1"), KnownFleet("m1", "m2")
    cluster.add_machine("m2")
    async with watching(access, fleet):
        machine.stop()

        def unreachable() -> bool:
            spec = cluster.find("/api/v1/nodes/m1")["spec"]  # type: ignore[index]
            return {each["key"] for each in spec.get("taints", [])} == {"node.kubernetes.io/unreachable"} and all(
                each["effect"] in ("NoSchedule", "NoExecute") for each in spec["taints"]
            )

        await in_thread(
            lambda: wait_until(
                unreachable, description="the taint of a machine that is away", timeout_s=GRACE_S + WAIT_S
            )
        )
        cluster.cordon("m2")  # reported after all earlier changes
        await fleet.until({"m2": CORDONED})
    assert fleet.said == [Announce("m2", CORDONED, None)]


async def test_a_deleted_machine_leaves_is_forgotten_when_it_is_away_and_may_come_again(
    cluster: Cluster, access: Access
) -> None:
    for name in ("m1", "m2"):
        cluster.add_machine(name)
    fleet = KnownFleet("m1", "m2")
    async with watching(access, fleet) as shell:
        await until_seen(shell)
        for name in ("m1", "m2"):
            cluster.machines[name].delete()
        await fleet.until({"m1": DELETED, "m2": DELETED})
        cluster.add_machine("m1")  # under the same name, with another uid
        fleet.nodes = {**fleet.nodes, "m2": Known("m2", event=DELETED, notified_at=time.time(), away=True)}
        await wait_until_async(lambda: "m2" not in fleet.nodes, description="m2 to be forgotten", timeout_s=WAIT_S)
        await fleet.until({})
    reported: set[Change] = {Announce("m1", DELETED, None), Announce("m2", DELETED, None), Withdraw("m1")}
    assert set(fleet.said) == {*reported, Forget("m2", DELETED)}
    assert len(fleet.said) == 4


async def test_machines_that_are_all_tainted_at_once_are_reported_once_each(cluster: Cluster, access: Access) -> None:
    names = [f"m{number:02}" for number in range(20)]
    for name in names:
        cluster.add_machine(name)
    await in_thread(cluster.wait_untainted)  # the controller replaces all taints of a node with those that it knows
    fleet = KnownFleet(*names)
    async with watching(access, fleet):
        for name in names:
            cluster.taint(name, IMPENDING)
            cluster.taint(name, IMPENDING)  # the same again is no change
        await fleet.until(dict.fromkeys(names, TERMINATED))
        cluster.kubectl("taint", "node", "--all", f"{IMPENDING}-")
        await fleet.until({})
    assert len(fleet.said) == len(set(fleet.said)) == 2 * len(names)
    again = KnownFleet(*names)
    async with watching(access, again) as shell:  # the next leader finds everything as it should be
        await until_seen(shell)
    assert again.said == []


# ---------------------------------------------------------------- what an API server does


async def test_an_api_server_that_is_killed_and_started_again_takes_nothing_back_and_hides_nothing(
    cluster: Cluster, access: Access
) -> None:
    for name in ("m1", "m2", "m3"):
        cluster.add_machine(name)
    fleet = KnownFleet("m1", "m2", "m3")
    async with watching(access, fleet) as shell:
        cluster.cordon("m1")
        await fleet.until({"m1": CORDONED})
        await in_thread(cluster.kill, "kube-apiserver")
        await until(shell, "does not answer")
        assert fleet.leaving() == {"m1": CORDONED}
        cluster.start_api_server()
        cluster.cordon("m1", cordoned=False)
        cluster.cordon("m2")
        cluster.machines["m3"].delete()
        await fleet.until({"m2": CORDONED, "m3": DELETED})
        await until_well(shell)
    assert len(fleet.said) == 4


async def test_versions_that_the_api_server_no_longer_has_are_listed_again(
    cluster: Cluster, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that has just started has only versions from then on: what the watch asks for is gone (410)."""
    for name in ("m1", "m2"):
        cluster.add_machine(name)
    fleet, listed, list_of = KnownFleet("m1", "m2"), [], Api.list

    async def recorded(client: Api, resource: Resource, **more: str) -> tuple[list[Object], str]:
        listed.append(str(resource))
        return await list_of(client, resource, **more)

    monkeypatch.setattr(Api, "list", recorded)
    async with watching(access, fleet) as shell:
        cluster.cordon("m1")
        await fleet.until({"m1": CORDONED})
        assert listed.count("nodes") == 1
        cluster.machines["m1"].stop()
        cluster.patch(f"/api/v1/namespaces/{NAMESPACE}", {"metadata": {"labels": {"newer": "than-machines"}}})
        cluster.kill("kube-apiserver")
        await until(shell, "does not answer")
        # Until the next await the bridge, which has the same event loop, sees nothing of this.
        cluster.start_api_server()
        cluster.cordon("m1", cordoned=False)
        cluster.machines["m2"].delete()
        await fleet.until({"m2": DELETED})
        await until_well(shell)
        assert listed.count("nodes") == 2
    assert fleet.said == [Announce("m1", CORDONED, None), Withdraw("m1"), Announce("m2", DELETED, None)]


async def first_event(client: Api, resource: Resource, version: str) -> object:
    async with client.watch(resource, version) as events:
        async for event in events:
            return event
    return None


async def test_a_watch_and_a_list_from_an_old_version_are_refused_as_expired(
    cluster: Cluster, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("m1", "m2", "m3"):
        cluster.add_machine(name)
    monkeypatch.setattr(api, "PAGE", 1)
    async with Api(access) as client:
        nodes = Resource(NODE, "nodes")
        objects, _ = await client.list(nodes)
        assert sorted(each["metadata"]["name"] for each in objects) == ["m1", "m2", "m3"]  # in three pages
        with pytest.raises(Expired):
            await first_event(client, nodes, "1")
        request = client.request

        async def slowly(*arguments: object, **more: object) -> object:
            answer = await request(*arguments, **more)  # type: ignore[arg-type]
            cluster.cordon("m2")
            cluster.cordon("m2", cordoned=False)
            await in_thread(cluster.compact)
            return answer

        monkeypatch.setattr(client, "request", slowly)
        with pytest.raises(Expired):  # its next page is of a version that is not kept
            await client.list(nodes)


async def test_a_token_that_has_expired_is_said_and_the_next_one_is_used(
    cluster: Cluster, access: Access, tmp_path: Path
) -> None:
    cluster.add_machine("m1")
    fleet = KnownFleet("m1")
    async with watching(access, fleet) as shell:
        cluster.cordon("m1")
        await fleet.until({"m1": CORDONED})
        cluster.delete(f"/api/v1/namespaces/{NAMESPACE}/secrets/first")  # the token with it
        await until(shell, "watch nodes: the API server does not accept the token (Unauthorized)")
        cluster.cordon("m1", cordoned=False)
        assert fleet.leaving() == {"m1": CORDONED}, "nothing is concluded"
        new_token(cluster, tmp_path, "second")  # as the kubelet does
        await fleet.until({})
        await until_well(shell)


async def test_a_right_that_is_taken_is_named_and_costs_no_more_than_it_gave(cluster: Cluster, access: Access) -> None:
    for name in ("m1", "m2"):
        cluster.add_machine(name)
    fleet = KnownFleet("m1", "m2")
    async with watching(access, fleet) as shell:
        cluster.cordon("m1")
        await fleet.until({"m1": CORDONED})
        binding = cluster.find(BINDING)
        assert binding is not None
        cluster.delete(BINDING)
        await until(shell, "watch nodes: the service account has no right to")
        (problem,) = shell.problems
        assert f'"system:serviceaccount:{NAMESPACE}:{ACCOUNT}" cannot watch resource "nodes"' in problem
        cluster.cordon("m1", cordoned=False)
        cluster.cordon("m2")
        assert fleet.leaving() == {"m1": CORDONED}
        del binding["metadata"]["resourceVersion"], binding["metadata"]["uid"]
        cluster.post(BINDING.rpartition("/")[0], binding)
        await fleet.until({"m2": CORDONED})
        await until_well(shell)


async def test_a_bridge_that_has_no_rights_from_the_start_watches_as_soon_as_it_has(
    cluster: Cluster, access: Access, tmp_path: Path
) -> None:
    cluster.add_machine("m1")
    cluster.cordon("m1")
    token = tmp_path / "stranger"
    token.write_text(cluster.token("default"))
    fleet = KnownFleet("m1")
    async with watching(Access(url=access.url, token_file=token, ca_file=access.ca_file), fleet) as shell:
        await until(shell, "list nodes: the service account has no right to")
        await until(shell, f"list pods of namespace {NAMESPACE}: the service account has no right to")
        assert fleet.said == []
        token.write_text((access.token_file or token).read_text())
        await fleet.until({"m1": CORDONED})
        await until_well(shell)


async def test_an_api_server_of_another_authority_is_not_believed(
    cluster: Cluster, access: Access, tmp_path: Path
) -> None:
    """Its certificate is not of the authority that this pod was given: it gets no token."""
    other = tmp_path / "other"
    other.mkdir()
    command = "req -x509 -newkey rsa:2048 -nodes -subj /CN=other -days 1 -keyout key.pem -out ca.pem"
    await anyio.run_process(["openssl", *command.split()], cwd=other)
    fleet = KnownFleet("m1")
    wrong = Access(url=access.url, token_file=access.token_file, ca_file=other / "ca.pem")
    async with watching(wrong, fleet) as shell:
        await until(shell, "certificate verify failed")
    assert fleet.said == []


async def test_a_leader_that_dies_in_the_middle_of_its_watch_leaves_nothing_unsaid(
    cluster: Cluster, access: Access, redis_url: str, tmp_path: Path
) -> None:
    """Two supervisors, with agents that speak the real protocol."""
    for name in ("m1", "m2"):
        cluster.add_machine(name)
    settings: dict[str, Any] = {
        "kubernetes_watch": True,
        "kubernetes_api": access.url,
        "kubernetes_token_file": access.token_file,
        "kubernetes_ca_file": access.ca_file,
        "kubernetes_namespaces": NAMESPACE,
    }
    async with anyio.create_task_group() as tasks:
        log = MortalLog(redis_log(redis_url))
        first = await start_supervisor(tasks, tmp_path / "1", log, name="sup-1", **settings)
        second = await start_supervisor(tasks, tmp_path / "2", redis_log(redis_url), name="sup-2", **settings)
        for name in ("m1", "m2"):
            tasks.start_soon(PlayedAgent(name, [first.control, second.control]).run)

        async def states(supervisor: Running, **wanted: str) -> None:
            async def there() -> bool:
                return {each["node"]: each["state"] for each in (await supervisor.get("/v1/nodes"))["items"]} == wanted

            await wait_until_async(there, description=f"{wanted}", timeout_s=WAIT_S)

        await states(first, m1="spare", m2="spare")
        cluster.cordon("m1")
        await states(first, m1="cordoned", m2="spare")
        log.die_when(lambda _: True, after=False)
        cluster.cordon("m1", cordoned=False)
        cluster.cordon("m2")
        await states(second, m1="spare", m2="cordoned")
        assert {each["what"]: each["problem"] for each in (await second.get("/v1/kubernetes"))["watched"]} == {
            "nodes": "",
            f"pods of namespace {NAMESPACE}": "",
        }
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------- machines that are replaced


async def test_a_condemned_machine_is_cordoned_and_its_pod_deleted(cluster: Cluster, access: Access) -> None:
    for name in ("m1", "m2"):
        cluster.add_machine(name)
        agent_pod(cluster, f"p-{name}", name)
    fleet = KnownFleet("m1", "m2")
    async with watching(access, fleet):
        said = await Replacer(access, (NAMESPACE,), Mark.REPORT).replace("m1", "Xid 79\non GPU 3")
        assert (
            said == "machine m1 is cordoned and reported as faulty; pod p-m1 is deleted, and another one is scheduled"
        )
        machine = cluster.find("/api/v1/nodes/m1")
        assert machine is not None
        assert machine["spec"]["unschedulable"] is True
        assert machine["metadata"]["annotations"][CONDEMNED] == "Xid 79 on GPU 3"
        assert machine["metadata"]["labels"][FAULT_BEHAVIOR] == "unspecified"
        cluster.cordon("m2")
        await fleet.until({"m2": CORDONED})  # and m1, which Holdfast itself has cordoned, is no notice
        with pytest.raises(NotFound, match="no pod of an agent is on m1"):
            await Replacer(access, (NAMESPACE,), Mark.NONE).replace("m1", "again")


async def test_a_pod_of_the_same_name_that_came_meanwhile_is_not_deleted(cluster: Cluster, access: Access) -> None:
    cluster.add_machine("m1")
    agent_pod(cluster, "p1", "m1")
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/p1"
    replacer = Replacer(access, (NAMESPACE,), Mark.NONE)
    condemn = replacer._pod

    async def another_comes(client: Api, node: str) -> object:
        found = await condemn(client, node)
        cluster.delete(path, grace_s=0)
        agent_pod(cluster, "p1", "m1")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replacer, "_pod", another_comes)
        with pytest.raises(Unavailable, match="delete pod ml/p1: the API server answered 409"):
            await replacer.replace("m1", "wrong products")
    assert cluster.find(path) is not None


async def test_a_replacement_without_the_right_to_it_deletes_nothing(cluster: Cluster, access: Access) -> None:
    less = charts.rendered("bridge.yaml", watch=True)  # as if replacePods had been switched off
    cluster.kubectl("apply", "-f", "-", stdin=less)
    cluster.add_machine("m1")
    agent_pod(cluster, "p1", "m1")
    with pytest.raises(Refused, match="may not get node m1: the service account has no right to"):
        await Replacer(access, (NAMESPACE,), Mark.CORDON).replace("m1", "why")
    with pytest.raises(Refused, match=f"may not delete pod {NAMESPACE}/p1"):
        await Replacer(access, (NAMESPACE,), Mark.NONE).replace("m1", "why")
    assert cluster.find(f"/api/v1/namespaces/{NAMESPACE}/pods/p1") is not None
