"""When a node tests itself, what makes room for whom, and what each check calls a failure."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from waiting import VIRTUAL_TIME, wait_until_async

from holdfast.agent.checks import preflight_checks
from holdfast.agent.checks.preflight import AGAIN_S, Preflights
from holdfast.domain import orders
from holdfast.domain.errors import Conflict, Unavailable
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.signals import GpuHealth, GpuSample, NodeSignal, NodeTested
from holdfast.wire import records

virtual = pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])


def printed(wrong: int = 0, *speeds: float) -> str:
    products = [{"kind": "tf32", "made": 90, "wrong": wrong, "first_wrong": "product 3"}]
    devices = [
        {"device": f"cuda:{index}", "products": products, "memory_gb_s": speed}
        for index, speed in enumerate(speeds or (1500.0,))
    ]
    return json.dumps({"devices": devices})


@dataclass
class Stage:
    """An agent around `Preflights` that the test plays."""

    tests: Preflights = field(init=False)
    path: Path = field(init=False)
    idle: bool = True
    answer: str | Exception = field(default_factory=printed)
    takes_s: float = 0.5
    reports: list[Preflight] = field(default_factory=list)
    signals: list[NodeTested] = field(default_factory=list)
    cancelled: int = 0
    budgets: list[float] = field(default_factory=list)
    port_checks: tuple[Check, ...] = ()

    async def devices(self, budget_s: float, timeout_s: float) -> str:
        self.budgets.append(budget_s)
        try:
            await anyio.sleep(self.takes_s)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def disk(self) -> Check:
        return Check("disk", True, "9 GB free")

    async def ports(self) -> list[Check]:
        return list(self.port_checks)

    def report(self, report: orders.Report) -> None:
        assert isinstance(report, orders.Tested)
        self.reports.append(report.preflight)

    def emit(self, signal: NodeSignal) -> None:
        assert isinstance(signal, NodeTested)
        self.signals.append(signal)


@asynccontextmanager
async def stage(*, every_s: float = 1800.0, **options: Any) -> AsyncIterator[Stage]:
    played = Stage()
    with TemporaryDirectory() as directory:
        played.path = Path(directory) / "preflight.json"
        played.path.write_text("of a former agent")
        played.tests = Preflights(
            node="n0",
            every_s=every_s,
            gpus=options.get("gpus", 0),
            watches_gpus=options.get("watches_gpus", False),
            test_devices=played.devices,
            test_disk=played.disk,
            test_ports=played.ports,
            is_idle=lambda: played.idle,
            emit=played.emit,
            report=played.report,
            path=played.path,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(played.tests.run)
            yield played
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
@virtual
async def test_a_node_tests_itself_when_it_joins_and_every_so_often(anyio_backend: Any) -> None:
    async with stage() as played:
        assert played.tests.newest.at == 0, "until then it says that it is testing itself"
        assert not played.path.exists(), "what a former agent found says nothing about this one"
        await anyio.sleep(3)
        assert records.loads(played.path.read_bytes(), Preflight) == played.reports[0]
        assert len(played.reports) == len(played.signals) == 1
        assert played.reports[0].failures == ""
        await anyio.sleep(1700)
        assert len(played.reports) == 1
        await anyio.sleep(200)
        assert len(played.reports) == 2


@pytest.mark.anyio
@virtual
async def test_a_failure_is_looked_at_again_soon(anyio_backend: Any) -> None:
    async with stage() as played:
        played.answer = printed(1)
        await anyio.sleep(3)
        assert "1 of 90 tf32 products are wrong" in played.reports[0].failures
        played.answer = printed()
        await anyio.sleep(AGAIN_S + 3)
        assert [bool(report.failures) for report in played.reports] == [True, False]


@pytest.mark.anyio
@virtual
async def test_an_order_ends_a_test_at_once_and_it_is_made_up_for_when_the_node_is_idle(anyio_backend: Any) -> None:
    async with stage() as played:
        played.takes_s = 30.0
        await anyio.sleep(5)
        played.tests.make_way()
        await anyio.lowlevel.checkpoint()
        assert played.cancelled == 1
        assert records.loads(played.path.read_bytes(), Preflight) == Preflight(), "it serves, untested"
        played.idle, played.takes_s = False, 0.5
        await anyio.sleep(3600)
        assert played.reports == [], "never while a job has it"
        played.idle = True
        await anyio.sleep(4)
        assert played.reports == [], "a restart's gap is not idleness"
        await anyio.sleep(4)
        assert len(played.reports) == 1


@pytest.mark.anyio
@virtual
async def test_devices_that_cannot_be_tested_are_a_failure(anyio_backend: Any) -> None:
    async with stage() as played:
        played.answer = Unavailable("the self-test was killed (time limit 60 s): no output")
        await anyio.sleep(3)
        assert "cannot be tested" in played.reports[0].failures


@pytest.mark.anyio
@virtual
async def test_suspicion_condemns_by_wrong_products_alone(anyio_backend: Any) -> None:
    async with stage() as played:
        await anyio.sleep(3)
        played.answer = Unavailable("no template")
        await played.tests.on_suspicion()
        played.answer = printed(0, 1500.0, 100.0)
        await played.tests.on_suspicion()
        assert len(played.signals) == 1
        played.answer = printed(2)
        with pytest.raises(Conflict, match="n0 computes wrongly"):
            await played.tests.on_suspicion()
        assert "2 of 90" in played.signals[-1].preflight.failures
        assert played.budgets[-1] > played.budgets[0], "one pass proves little"


@pytest.mark.anyio
@virtual
async def test_gpus_are_judged_by_the_last_reading_that_is_waited_for(anyio_backend: Any) -> None:
    async with stage(gpus=2, watches_gpus=True) as played:
        await anyio.sleep(5)
        assert played.reports == []
        played.tests.watch(SAMPLE)
        await anyio.sleep(3)
        assert played.reports[0].failures == ""
    async with stage(gpus=2, watches_gpus=True) as played:
        await anyio.sleep(30)
        assert "NVML has given no reading" in played.reports[0].failures


@pytest.mark.anyio
@virtual
async def test_a_port_that_has_failed_keeps_an_idle_node_from_ranks(anyio_backend: Any) -> None:
    async with stage() as played:
        played.port_checks = (Check("ports", False, "mlx5_0 port 1 was active, and is DOWN (Polling)"),)
        await anyio.sleep(3)
        assert played.reports[0].failures == "ports: mlx5_0 port 1 was active, and is DOWN (Polling)"


@pytest.mark.anyio
async def test_addresses_at_which_nobody_listens_any_more_keep_no_node_from_ranks() -> None:
    with socket.socket() as gone, socket.socket() as gone_too:
        gone.bind(("127.0.0.1", 0))
        gone_too.bind(("127.0.0.2", 0))
        async with stage() as played:
            played.tests.know_peers([f"{host}:{port}" for host, port in (gone.getsockname(), gone_too.getsockname())])
            await wait_until_async(lambda: played.reports, description="a result")
    check = next(check for check in played.reports[0].checks if check.name == "peers")
    assert (check.ok, "refuses connections" in check.detail) == (None, True)


@pytest.mark.anyio
async def test_peers_are_knocked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        open_, closed = (f"127.0.0.1:{each.getsockname()[1]}" for each in (peer, nobody))
        async with stage() as played:
            played.tests.know_peers([open_, closed, "no-such-host.invalid:x"])
            await wait_until_async(lambda: played.reports, description="a result")
    check = next(check for check in played.reports[0].checks if check.name == "peers")
    assert check.ok is True
    assert "1 of 3" in check.detail


@pytest.mark.anyio
@virtual
async def test_nodes_that_are_gone_for_good_keep_no_node_from_ranks(anyio_backend: Any) -> None:
    async with stage() as played:
        played.tests.know_peers(["gone-1:x", "gone-2:x"])
        await anyio.sleep(3)
        assert "peers" in played.reports[0].failures
        played.tests.replace_peers(["gone-3:x", "gone-4:x"])  # none of them was known: the test is repeated at once …
        await anyio.sleep(3)
        assert "gone-4" in played.reports[1].failures
        assert "gone-1" not in played.reports[1].failures
        played.tests.replace_peers(["gone-4:x", "gone-5:x"])  # … but not for each node that is new
        await anyio.sleep(3)
        assert len(played.reports) == 2
        played.tests.replace_peers(())  # no other node is there
        await anyio.sleep(3)
        assert played.reports[2].failures == ""


# ---------------------------------------------------------------- what each check calls a failure

SAMPLE = GpuSample("n0", 1.0, (0, 1), ("a", "b"), (40.0,) * 2, (90.0,) * 2, (0, 0), (0, 0), (0, -1), (False, False))


def health(**columns: tuple[int, ...]) -> GpuHealth:
    names = GpuHealth.__dataclass_fields__
    base: dict[str, Any] = {name: (-1, -1) for name in names if name not in ("node", "at", "expected")}
    base |= {"node": "n0", "at": 1.0, "expected": 2, "gpu": (0, 1), "uuid": ("a", "b"), "margin_c": (math.inf,) * 2}
    return GpuHealth(**(base | columns))


@pytest.mark.parametrize(
    ("sample", "found", "words"),
    [
        (SAMPLE, health(), ""),
        (replace(SAMPLE, recovery_action=(0, 2)), None, "recovery action 2 for GPU 1"),
        (replace(SAMPLE, ecc_uncorrected=(3, 0)), None, "GPU 0 has 3 uncorrected"),
        (replace(SAMPLE, lost=(False, True)), None, "GPU 1 is lost"),
        (SAMPLE, health(remap_pending=(0, 1)), "GPU 1 waits for a reset"),
        (SAMPLE, health(remap_failed=(1, 0)), "GPU 0 has no spare memory row"),
        (SAMPLE, replace(health(), expected=8), "2 of 8 GPUs"),
    ],
)
def test_gpus(sample: GpuSample, found: GpuHealth | None, words: str) -> None:
    check = preflight_checks.gpus(sample, found, watched=True, expected=0)
    assert (check.ok, words in check.detail) == (not words, True)


def test_a_machine_without_gpus_is_no_fault_unless_some_are_expected() -> None:
    assert preflight_checks.gpus(None, None, watched=False, expected=0).ok is None
    assert preflight_checks.gpus(None, None, watched=False, expected=8).ok is False


def test_devices() -> None:
    well = preflight_checks.devices(f"a warning of a library\n{printed(0, 1500.0, 1490.0)}\n")
    assert [(check.name, check.ok) for check in well] == [("products", True), ("memory", True)]
    slow = preflight_checks.devices(printed(0, 1500.0, 800.0, 1490.0))
    assert [(check.name, check.ok) for check in slow] == [("products", True), ("memory", False)]
    assert "cuda:1 copies 800 GB/s" in slow[1].detail
    broken = preflight_checks.devices(json.dumps({"devices": [{"device": "cuda:0", "error": "CUDA error: ECC"}]}))
    assert [(check.name, check.ok) for check in broken if check.ok is False] == [("devices", False)]


@pytest.mark.parametrize("said", ["", "Segmentation fault", '{"devices": 3}', '{"devices": [{}]}', "[]", "{" * 5000])
def test_an_answer_that_cannot_be_read_says_nothing_of_the_node(said: str) -> None:
    (check,) = preflight_checks.devices(said)
    assert check.ok is None


def test_disks(tmp_path: Path) -> None:
    assert preflight_checks.disk((tmp_path, tmp_path)).ok is True
    gone = preflight_checks.disk((tmp_path, tmp_path / "gone"))
    assert (gone.ok, "No such file" in gone.detail) == (False, True)


def test_one_silent_machine_may_be_gone_several_are_this_node() -> None:
    assert preflight_checks.peers((), (), ()).ok is None
    assert preflight_checks.peers(("a:1",), (), ("b:1", "c:1")).ok is True
    assert preflight_checks.peers((), (), ("b:1",)).ok is None
    assert preflight_checks.peers((), (), ("b:1", "b:2")).ok is None  # one machine, whose agent was started again
    assert preflight_checks.peers((), (), ("b:1", "c:1")).ok is False
    assert preflight_checks.peers((), ("d:1",), ("b:1", "c:1")).ok is None  # it refuses, so the network reaches it


@pytest.mark.anyio
@virtual
async def test_while_gpus_are_reset_no_test_runs_and_none_begins(anyio_backend: Any) -> None:
    async with stage() as played:
        await wait_until_async(lambda: bool(played.budgets), description="a test to begin")
        with played.tests.held():
            await wait_until_async(lambda: played.cancelled == 1, description="it to be cancelled")
            await anyio.sleep(3600)
            assert (len(played.budgets), played.reports) == (1, [])
        await wait_until_async(lambda: len(played.reports) == 1, description="the test to be made up for")


@pytest.mark.anyio
@virtual
async def test_after_a_reset_the_node_is_tested_at_once_and_says_what_is_wrong(anyio_backend: Any) -> None:
    async with stage() as played:
        with played.tests.held():
            assert await played.tests.after_reset() == ""
            played.answer = printed(3)
            assert "products: " in await played.tests.after_reset()
        assert [bool(report.failures) for report in played.reports] == [False, True]


def failing_write(number: int) -> Any:
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    return write


def test_a_disk_that_is_broken_fails_and_one_that_is_full_or_missing_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = (tmp_path, tmp_path)
    assert preflight_checks.disk_answers(here) == Check("disk", True, "takes writes")
    assert preflight_checks.disk_answers((tmp_path / "none",)).ok is None
    monkeypatch.setattr(os, "write", failing_write(errno.ENOSPC))
    assert preflight_checks.disk_answers(here).ok is None
    monkeypatch.setattr(os, "write", failing_write(errno.EIO))
    broken = preflight_checks.disk_answers(here)
    assert (broken.ok, broken.detail) == (False, f"{tmp_path}: Input/output error")
    assert list(tmp_path.iterdir()) == []
