"""The shell: lists, watches, and goes on whatever the API server does. Over real HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import certificates
import pytest
from kube_cluster import ClusterApi, node, pod, serving
from kube_fleet import KnownFleet
from waiting import wait_until_async

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound, Unavailable
from holdfast.kubernetes import bridge, watch
from holdfast.kubernetes.api import Access, Api, Refused, Resource
from holdfast.kubernetes.bridge import Bridge, Options
from holdfast.kubernetes.changes import DELETED, Announce, Known, Withdraw
from holdfast.kubernetes.machines import CONDEMNED, NODE
from holdfast.kubernetes.replace import FAULT_BEHAVIOR, Mark, Replacer

pytestmark = pytest.mark.anyio

CORDONED = "Kubernetes: cordoned"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server that refuses is asked again soon."""
    monkeypatch.setattr(watch, "PAUSE_S_MAX", 0.3)
    monkeypatch.setattr(bridge, "LOOK_S", 0.05)


@asynccontextmanager
async def running(api: ClusterApi, fleet: KnownFleet, token: Path | None = None) -> AsyncIterator[Bridge]:
    with serving(api) as url:
        shell = Bridge(Options(access=Access(url=url, token_file=token, ca_file=None), namespaces=("ml",)), time.time)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shell.run, fleet)
            await wait_until_async(lambda: api.requests, description="a request")
            yield shell
            tasks.cancel_scope.cancel()


async def until(what: str, condition: Callable[[], object]) -> None:
    await wait_until_async(condition, description=what)


async def test_nodes_and_their_changes_are_reported_once() -> None:
    api, fleet = (
        ClusterApi(node("m1", unschedulable=True), node("m2"), node("m3")),
        KnownFleet("m1", "m2", "p3", "away"),
    )
    api.page = 2
    api.put(pod("p3", "m3"))
    async with running(api, fleet):
        await fleet.until({"m1": CORDONED})
        api.put(node("m2", taints=("karpenter.sh/disrupted",)))
        await fleet.until({"m1": CORDONED, "m2": "Kubernetes: taint karpenter.sh/disrupted"})
        api.put(node("m1"))
        api.put({**node("m2"), "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
        api.put(node("m3", unschedulable=True))
        await fleet.until({"p3": CORDONED})
    assert len(fleet.said) == 5


async def test_a_watch_that_breaks_goes_on_where_it_was() -> None:
    api, fleet = ClusterApi(node("m1")), KnownFleet("m1")
    async with running(api, fleet):
        await until("both watches", lambda: api.watching == 2)
        listed = api.requests.count("GET nodes")
        api.drop()
        api.put(node("m1", unschedulable=True))
        await fleet.until({"m1": CORDONED})
        assert api.requests.count("GET nodes") == listed == 1


async def test_a_version_that_is_not_kept_any_more_is_listed_again_and_nothing_is_missed() -> None:
    api, fleet = ClusterApi(node("m1"), node("m2")), KnownFleet("m1", "m2")
    async with running(api, fleet):
        await until("both watches", lambda: api.watching == 2)
        api.delete("nodes", "m2")
        api.put(node("m1", unschedulable=True))
        await fleet.until({"m1": CORDONED, "m2": DELETED})
        api.put(node("m2"))
        api.put(node("m1"))
        api.forget()  # 410
        await until("another list", lambda: api.requests.count("GET nodes") == 2)
        await fleet.until({})


async def test_an_api_server_that_is_away_takes_no_notice_back() -> None:
    api, fleet = ClusterApi(node("m1", unschedulable=True)), KnownFleet("m1", "m2")
    async with running(api, fleet) as shell:
        await fleet.until({"m1": CORDONED})
        api.down = True
        api.drop()
        await until("it to be noticed", lambda: shell.problems)
        assert "does not answer" in shell.problems[0]
        api.put(node("m1"))
        api.put(node("m2", unschedulable=True))
        assert fleet.leaving() == {"m1": CORDONED}
        api.down = False
        await fleet.until({"m2": CORDONED})
        await until("all to be well", lambda: not shell.problems)


async def test_rights_that_are_missing_are_named_and_cost_no_more_than_they_give() -> None:
    api, fleet = ClusterApi(node("m1", unschedulable=True), pod("p2", "m1")), KnownFleet("m1", "p2")
    api.refuse["pods"] = 403
    async with running(api, fleet) as shell:
        await fleet.until({"m1": CORDONED})  # pods are needed only where machines are shared
        await until("the refusal", lambda: shell.problems)
        (problem,) = shell.problems
        assert problem.startswith("may not list pods of namespace ml: the service account has no right to")
        del api.refuse["pods"]
        await fleet.until({"m1": CORDONED, "p2": CORDONED})
        await until("all to be well", lambda: not shell.problems)


async def test_a_token_that_expires_is_read_again(tmp_path: Path) -> None:
    api, fleet, token = ClusterApi(node("m1")), KnownFleet("m1"), tmp_path / "token"
    token.write_text("old\n")
    api.token = "old"
    async with running(api, fleet, token) as shell:
        await until("both watches", lambda: api.watching == 2)
        api.token = "new"
        api.drop()
        await until("the refusal", lambda: shell.problems)
        assert "does not accept the token" in shell.problems[0]
        api.put(node("m1", unschedulable=True))
        token.unlink()
        await until("the file to be missed", lambda: "cannot be read" in "".join(shell.problems))
        token.write_text("new")
        await fleet.until({"m1": CORDONED})


async def test_two_terms_in_a_row_and_both_at_once_say_the_same() -> None:
    """A leader that does not know yet that it is none, and its successor: the supervisor's state decides."""
    api, fleet = ClusterApi(node("m1", unschedulable=True)), KnownFleet("m1")
    with serving(api) as url:
        options = Options(access=Access(url=url, token_file=None, ca_file=None))
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(Bridge(options, time.time).run, fleet)
            await fleet.until({"m1": CORDONED})
            await until("both watches", lambda: api.watching == 2)
            api.put(node("m1"))
            await fleet.until({})
            tasks.cancel_scope.cancel()
    assert fleet.said == [Announce("m1", CORDONED, None), Withdraw("m1")]


async def test_a_bug_of_the_bridge_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "FAILED_PAUSE_S", 0.01)
    api, fleet = ClusterApi(node("m1", unschedulable=True)), KnownFleet("m1")
    failures = [RuntimeError("one"), RuntimeError("two")]
    known = fleet.known

    def failing() -> Mapping[str, Known]:
        if failures:
            raise failures.pop()
        return known()

    monkeypatch.setattr(fleet, "known", failing)
    async with running(api, fleet):
        await fleet.until({"m1": CORDONED})
    assert not failures


async def test_an_authority_that_cannot_be_read_shows_until_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bridge, "FAILED_PAUSE_S", 0.01)
    missing = tmp_path / "ca.crt"
    shell = Bridge(Options(access=Access(url="https://127.0.0.1:1", token_file=None, ca_file=missing)), lambda: 1000.0)
    assert shell.sights() == []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shell.run, KnownFleet("m1"))
        await until("the failure", shell.sights)
        (sight,) = shell.sights()
        assert sight.problem.startswith("the bridge failed, and begins again: InvalidSpec: HOLDFAST_KUBERNETES_CA_FILE")
        assert sight.problem_since == pytest.approx(1000.0, abs=60.0)
        missing.write_bytes((certificates.make(tmp_path) / "ours-ca.pem").read_bytes())
        await until("the watch", lambda: shell.problems)
        assert [each.what for each in shell.sights()] == ["nodes"]
        tasks.cancel_scope.cancel()
    assert shell.sights() == [], "it does not lead any more"


async def test_answers_that_are_none_are_errors_of_the_api_server() -> None:
    api = ClusterApi()
    with serving(api) as url:
        async with Api(Access(url=url, token_file=None, ca_file=None)) as client:
            api.refuse["nodes"] = 500
            with pytest.raises(Unavailable, match="cannot list nodes: the API server answered 500"):
                await client.list(Resource(NODE, "nodes"))
    async with Api(Access(url=url, token_file=None, ca_file=None)) as client:
        with pytest.raises(Unavailable, match="does not answer"):
            await client.list(Resource(NODE, "nodes"))


# ---------------------------------------------------------------- machines that are replaced


def replacer(url: str, mark: Mark = Mark.CORDON) -> Replacer:
    return Replacer(Access(url=url, token_file=None, ca_file=None), ("other", "ml"), mark)


async def test_the_pod_of_a_condemned_machine_is_deleted_after_the_machine_is_cordoned() -> None:
    api = ClusterApi(node("m1"), node("m2"), pod("p1", "m1"), pod("p2", "m2"))
    with serving(api) as url:
        said = await replacer(url).replace("m1", "Xid 79\non GPU 3")
    assert said == "machine m1 is cordoned; pod p1 is deleted, and another one is scheduled"
    assert [each for each in api.requests if not each.startswith("GET")] == ["PATCH nodes/m1", "DELETE pods/p1"]
    machine = api.find("nodes", "m1")
    assert machine["spec"]["unschedulable"] is True
    assert machine["metadata"]["annotations"] == {CONDEMNED: "Xid 79 on GPU 3"}
    assert "unschedulable" not in api.find("nodes", "m2")["spec"]


async def test_a_cordon_of_somebody_else_stays_theirs_and_a_machine_may_be_reported() -> None:
    pods = (pod(f"shared-{letter}", "m1") for letter in "abc")
    api = ClusterApi(node("m1", unschedulable=True), *pods)
    with serving(api) as url:
        said = await replacer(url, Mark.REPORT).replace("shared-b", "wrong products")
        with pytest.raises(Conflict, match="several pods of agents"):
            await replacer(url).replace("m1", "which of them is not known")
    assert said.startswith("machine m1 was cordoned already and reported as faulty; pod shared-b is deleted")
    about = api.find("nodes", "m1")["metadata"]
    assert about["labels"][FAULT_BEHAVIOR] == "unspecified"
    assert "annotations" not in about


async def test_what_cannot_be_replaced_is_said_and_left_as_it_is() -> None:
    ended = pod("p1", "m1") | {"status": {"phase": "Failed"}}
    api = ClusterApi(node("m1"), ended, pod("p2", "m2"), node("m2"))
    with serving(api) as url:
        with pytest.raises(NotFound, match="no pod of an agent is on m1 in other, ml: nothing was deleted"):
            await replacer(url).replace("m1", "why")
        api.refuse["nodes"] = 403
        with pytest.raises(Refused, match="may not get node m2"):
            await replacer(url).replace("m2", "why")
        assert api.find("pods", "p2")
        said = await replacer(url, Mark.NONE).replace("m2", "why")
    assert said == "pod p2 is deleted, and another one is scheduled"
    with pytest.raises(InvalidSpec, match="HOLDFAST_KUBERNETES_NAMESPACES"):
        Replacer(Access(), (), Mark.CORDON)
