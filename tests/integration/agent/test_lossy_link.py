"""Packets that are lost for a while, for real: two network namespaces of the test's own, joined by a link. In one of them
is the part of an agent that injects faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import TIMEOUT_S, wait_until

DEVICE = "hftest0"
ADDRESSES = ("10.213.0.1", "10.213.0.2")
PACKETS = 3000
PORT = 9999
PROBE = "1,6 0 0 4294967295"  # lets every packet pass

# The part of an agent that injects faults, in a generation that allows them. Each line of its input is an order.
AGENT = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import anyio, structlog
from anyio import to_thread
from holdfast.agent.injection.faults import Faults, MachineFaultRules
from holdfast.domain.errors import HoldfastError
from holdfast.domain.orders import Inject

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
directory, rules = Path(sys.argv[1]), json.loads(sys.argv[2])
generation = SimpleNamespace(order=SimpleNamespace(chaos=True), workers={0: SimpleNamespace(pid=1, alive=True)})
pool = SimpleNamespace(running_generation=lambda job, number: generation)
faults = Faults(pool, directory / "kmsg", disk_dir=directory, memory_dir=directory, agent_dir=directory,
                rules=MachineFaultRules(**rules))

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(faults.run)
        while line := await to_thread.run_sync(sys.stdin.readline):
            values = json.loads(line)
            try:
                said = await faults.inject(Inject("gpt", 1, "lossy_link", 0, xid=0, not_after=time.time() + 60,
                                                  operation="op", **values))
            except HoldfastError as error:
                said = f"refused: {error}"
            print(said, flush=True)
        tasks.cancel_scope.cancel()

anyio.run(main)
"""
SEND = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    out.sendto(b"x", (sys.argv[1], int(sys.argv[3])))
"""
RECEIVE = """
import socket, sys
into = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
into.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
into.bind((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
sys.stdin.read()
into.setblocking(False)
count = 0
try:
    while into.recv(8):
        count += 1
except BlockingIOError:
    print(count)
"""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass
class Link:
    names: tuple[str, str]  # of the namespaces: the agent's, and the one across

    def inside(self, side: int, *command: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.names[side]}", *command]

    def tc(self, *words: str) -> Any:
        return json.loads(run(*self.inside(0, "tc", "-j", *words)) or "[]")

    def state(self) -> Any:
        """What the device has to do with packets."""
        kept = [self.tc("qdisc", "show", "dev", DEVICE)]
        return kept + [self.tc("filter", "show", "dev", DEVICE, where) for where in ("ingress", "egress")]

    def lost(self, source: int) -> float:
        """Share of the packets from one side to the other."""
        target = 1 - source
        receiver = subprocess.Popen(
            self.inside(target, sys.executable, "-c", RECEIVE, ADDRESSES[target], str(PORT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        run(*self.inside(source, sys.executable, "-c", SEND, ADDRESSES[target], str(PACKETS), str(PORT)))
        count, _ = receiver.communicate(timeout=TIMEOUT_S)
        return 1 - int(count) / PACKETS


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid():
        pytest.skip("network namespaces need root")
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no program {tool}")
    names = (f"hftest-{os.getpid()}-a", f"hftest-{os.getpid()}-b")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            run("ip", "-n", name, "link", "set", DEVICE, "up")
        made = Link(names)
        macs = [json.loads(run("ip", "-j", "-n", name, "link", "show", DEVICE))[0]["address"] for name in names]
        for side in (0, 1):  # or a lost question for the address would delay the first packets
            neighbour = ("lladdr", macs[1 - side], "dev", DEVICE)
            run("ip", "-n", names[side], "neigh", "replace", ADDRESSES[1 - side], *neighbour)
        try:
            run(*made.inside(0, "tc", "qdisc", "add", "dev", DEVICE, "clsact"))
            run(
                *made.inside(
                    0, "tc", "filter", "add", "dev", DEVICE, "ingress", "bpf", "bytecode", PROBE, "direct-action"
                )
            )
        except AssertionError as error:
            pytest.skip(f"this kernel cannot filter packets by tc and bpf: {error}")
        run(*made.inside(0, "tc", "qdisc", "del", "dev", DEVICE, "clsact"))
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=TIMEOUT_S, check=False)


class Agent:
    def __init__(
        self,
        link: Link,
        directory: Path,
        *,
        before: Sequence[str] = (),
        interface: str = DEVICE,
        loss_percent_max: float = 50.0,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.log = directory / "agent.log"
        allowed = json.dumps({"link": interface, "loss_percent_max": loss_percent_max})
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                link.inside(0, *before, sys.executable, "-c", AGENT, str(directory), allowed),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def inject(self, loss_percent: float = 30.0, for_s: float = 600.0) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"loss_percent": loss_percent, "for_s": for_s}) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")

    def fault_process(self) -> psutil.Process:
        (found,) = (
            each
            for each in psutil.Process(self.process.pid).children()
            if "holdfast.agent.injection.machine_faults" in each.cmdline()
        )
        return found

    def end(self, number: signal.Signals | None = None) -> None:
        """As its input ends, or by a signal."""
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(timeout=TIMEOUT_S)


@contextmanager
def agent(link: Link, directory: Path, **options: Any) -> Iterator[Agent]:
    made = Agent(link, directory, **options)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.end()


def wait_whole(link: Link, before: Any) -> None:
    wait_until(lambda: link.state() == before, description="the link is as it was")


def test_packets_are_lost_in_both_directions_for_their_time(link: Link, tmp_path: Path) -> None:
    before = link.state()
    assert link.lost(0) == link.lost(1) == 0
    with agent(link, tmp_path / "agent") as made:
        assert made.inject(30.0, 12.0) == f"30 % of the packets of {DEVICE} are lost for 12 s"
        assert link.lost(0) == pytest.approx(0.3, abs=0.08)
        assert link.lost(1) == pytest.approx(0.3, abs=0.08)
        assert made.inject() == "refused: an injected lossy_link lasts already on this node"
        wait_whole(link, before)
        assert link.lost(0) == link.lost(1) == 0
        wait_until(lambda: "injected fault ended" in made.log.read_text(), description="the end in the log")
        assert made.inject(50.0) == f"50 % of the packets of {DEVICE} are lost for 600 s"
        assert link.lost(0) == pytest.approx(0.5, abs=0.08)
    assert link.state() == before, "an agent that ends waits for that"


def test_an_agent_that_is_killed_leaves_a_whole_link(link: Link, tmp_path: Path) -> None:
    before = link.state()
    with agent(link, tmp_path / "agent") as made:
        assert "are lost" in made.inject()
        assert link.state() != before
        made.end(signal.SIGKILL)
        wait_whole(link, before)


def test_whoever_is_left_makes_the_link_whole(link: Link, tmp_path: Path) -> None:
    before = link.state()
    with agent(link, tmp_path / "agent") as made:
        made.inject()
        made.fault_process().terminate()  # as a service manager does that ends the agent's group
        wait_whole(link, before)
        wait_until(lambda: "injected fault ended" in made.log.read_text(), description="the end in the log")
        made.inject()
        made.fault_process().kill()
        wait_whole(link, before)
        wait_until(lambda: not list(made.directory.glob("injected-*")), description="the record is gone")
        wait_until(lambda: made.log.read_text().count("injected fault ended") == 2, description="the end in the log")
        made.inject()
        left = made.fault_process()
        left.suspend()
        made.end(signal.SIGKILL)
        left.kill()
    assert link.state() != before, "nobody was left"
    with agent(link, tmp_path / "agent") as made:
        wait_whole(link, before)
        wait_until(
            lambda: "an earlier agent injected is undone" in made.log.read_text(), description="the line in its log"
        )


def test_what_others_have_set_up_stays(link: Link, tmp_path: Path) -> None:
    run(
        *link.inside(
            0, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", "10gbit", "burst", "1m", "limit", "10m"
        )
    )
    run(*link.inside(0, "tc", "qdisc", "add", "dev", DEVICE, "clsact"))
    before = link.state()
    filtered = link.inside(
        0, "tc", "filter", "add", "dev", DEVICE, "ingress", "bpf", "bytecode", PROBE, "direct-action"
    )
    with agent(link, tmp_path / "agent") as made:
        assert "are lost" in made.inject(30.0, 3.0)
        wait_whole(link, before)
        wait_until(lambda: "injected fault ended" in made.log.read_text(), description="the end in the log")
        made.inject()
        run(*filtered)  # by somebody else, meanwhile
    assert len(link.tc("filter", "show", "dev", DEVICE, "ingress")) == 2, "a filter and its chain"
    assert link.lost(1) == 0
    with agent(link, tmp_path / "agent") as made:
        assert made.inject().startswith(f"refused: {DEVICE} has filters of other programs")


def test_what_is_not_possible_or_not_allowed_is_refused_with_the_reason(link: Link, tmp_path: Path) -> None:
    before = link.state()
    with agent(link, tmp_path / "agent", loss_percent_max=20.0) as made:
        assert made.inject(30.0) == (
            "refused: 30 % of the packets are more than the 20 % that may be lost on this node "
            "(HOLDFAST_FAULT_LOSS_PERCENT_MAX of the agent)"
        )
    with agent(link, tmp_path / "agent", interface="nosuch0") as made:
        assert made.inject().startswith("refused: this node has no network interface nosuch0 (HOLDFAST_FAULT_LINK")
    drop = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
    with agent(link, tmp_path / "agent", before=drop) as made:
        said = made.inject()
        assert "Operation not permitted. It needs CAP_NET_ADMIN" in said, said
    without_tc = ("env", "PATH=/nonexistent")
    with agent(link, tmp_path / "agent", before=without_tc) as made:
        assert made.inject() == "refused: packets are dropped by `tc` of iproute2, which is not installed"
    assert link.state() == before
    assert not list((tmp_path / "agent").glob("injected-*"))
