"""A network namespace per node, connected by a switch in user space. Needs root, `ip`, `nsenter` and /dev/net/tun.

    with Network(nodes=5) as network:
        network.host                      address of this machine for the nodes
        network.address(2)                of node 2
        network.inside(2, command)        the command line that runs there
        network.cut(2, HOST)              packets of node 2 to this machine are lost from now on
        network.heal()

Ports: `HOST` is this machine, where the control plane runs; node i is port i + 1.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

HOST = -1  # as a node's number
MTU = 60_000
DEVICE = "hf0"  # in every node's namespace
PREFIX = "hfsoak"  # of namespaces, then the pid that made them
COMMAND_TIMEOUT_S = 10.0
SUBNETS = range(64, 250)  # 10.x.0.0/24

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def missing() -> str:
    """Return the reason why such a network is not possible on this machine; "" if it is possible."""
    if os.geteuid():
        return "not root"
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"no program {tool}"
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun"


class Network:
    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._subnet = _free_subnet()
        self._devices: list[int] = []
        self._switch: subprocess.Popen[bytes] | None = None
        self._cut: set[tuple[int, int]] = set()
        self._loss: dict[int, float] = {}
        self._delay_s: dict[int, float] = {}

    def __enter__(self) -> Self:
        _sweep()
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host(self) -> str:
        return self._address(0)

    def address(self, node: int) -> str:
        return self._address(node + 1)

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._name(node)}", *command]

    def cut(self, source: int, target: int) -> None:
        self._cut.add((source + 1, target + 1))
        self._send_rules()

    def lose(self, node: int, share: float) -> None:
        self._loss[node + 1] = share
        self._send_rules()

    def delay(self, node: int, seconds: float) -> None:
        self._delay_s[node + 1] = seconds
        self._send_rules()

    def heal(self, node: int) -> None:
        """End all cuts, losses and delays to and from this node."""
        self._cut = {ports for ports in self._cut if node + 1 not in ports}
        self._loss.pop(node + 1, None)
        self._delay_s.pop(node + 1, None)
        self._send_rules()

    @property
    def alive(self) -> bool:
        return self._switch is not None and self._switch.poll() is None

    def close(self) -> None:
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait(COMMAND_TIMEOUT_S)
            self._switch = None
        for device in self._devices:
            os.close(device)
        self._devices.clear()
        for node in range(self._nodes):
            _ip("netns", "del", self._name(node), check=False)

    def _connect(self) -> None:
        outside = f"hfs{os.getpid()}"
        self._devices.append(_open_tun(outside))
        _ip("addr", "add", f"{self.host}/24", "dev", outside)
        _ip("link", "set", outside, "mtu", str(MTU), "up")
        for node in range(self._nodes):
            name, device = self._name(node), f"hf{node}-{os.getpid()}"
            _ip("netns", "add", name)
            self._devices.append(_open_tun(device))
            _ip("link", "set", device, "netns", name, "name", DEVICE)
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.switch", *map(str, self._devices)],
            stdin=subprocess.PIPE,
            pass_fds=self._devices,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )

    def _send_rules(self) -> None:
        rules: dict[str, Any] = {"cut": sorted(self._cut), "loss": self._loss, "delay_s": self._delay_s}
        assert self._switch is not None, "the network has not been entered"
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(rules).encode() + b"\n")
        self._switch.stdin.flush()

    def _address(self, port: int) -> str:
        return f"10.{self._subnet}.0.{port + 1}"

    def _name(self, node: int) -> str:
        return f"{PREFIX}-{os.getpid()}-{node}"


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check, timeout=COMMAND_TIMEOUT_S)


def _free_subnet() -> int:
    used = {str(address.address) for addresses in psutil.net_if_addrs().values() for address in addresses}
    start = os.getpid() % len(SUBNETS)
    candidates: list[int] = [*SUBNETS[start:], *SUBNETS[:start]]
    for subnet in candidates:
        if not any(address.startswith(f"10.{subnet}.") for address in used):
            return subnet
    raise OSError("every subnet 10.64.0.0 to 10.249.0.0 is in use on this machine")


def _sweep() -> None:
    """Delete the namespaces of killed soaks."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
    )
    for line in listed.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            _ip("netns", "del", name, check=False)
