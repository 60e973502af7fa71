"""The switch between the nodes' network namespaces: a separate process that forwards, delays or drops packets.

    python -m benchmarks.soak.switch <descriptor>… < rules      descriptors of TUN devices: the machine's first, then the nodes'

Rules are JSON lines, each of which replaces all rules: {"cut": [[from, to]…], "loss": {"<port>": fraction}, "delay_s":
{"<port>": seconds}}. Ports are numbered like their descriptors; a cut has one direction. The switch ends at the end of its
standard input.

It runs in user space, because netem of the kernel is not available on every machine. Packets are large (`network.MTU`), so
there are few.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import sys
import time
from typing import Any

PACKET_BYTES_MAX = 1 << 16
QUEUE_MAX = 20_000  # delayed packets in the queue; further packets are dropped
HOST_BYTE = 19  # position in an IPv4 header of the last byte of the destination, which is its port + 1


def main(devices: list[int]) -> None:
    for device in devices:
        os.set_blocking(device, False)
    os.set_blocking(0, False)
    switch = Switch(devices)
    waiting = select.epoll()
    for descriptor in (0, *devices):
        waiting.register(descriptor, select.EPOLLIN)
    rules = b""
    while True:
        for descriptor, _ in waiting.poll(switch.wait_s()):
            if descriptor:
                switch.take(descriptor)
                continue
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, rules = (rules + read).split(b"\n")
            for line in lines:
                switch.obey(json.loads(line))
        switch.send_due()


class Switch:
    def __init__(self, devices: list[int]) -> None:
        self._devices = devices
        self._port = {device: port for port, device in enumerate(devices)}
        self._cut: set[tuple[int, int]] = set()
        self._loss: dict[int, float] = {}
        self._delay_s: dict[int, float] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._chance = random.Random(0)

    def obey(self, rules: dict[str, Any]) -> None:
        self._cut = {(int(source), int(target)) for source, target in rules["cut"]}
        self._loss = {int(port): float(share) for port, share in rules["loss"].items()}
        self._delay_s = {int(port): float(seconds) for port, seconds in rules["delay_s"].items()}

    def take(self, device: int) -> None:
        """Read all packets from one device."""
        source = self._port[device]
        while True:
            try:
                packet = os.read(device, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if len(packet) > HOST_BYTE and packet[0] >> 4 == 4:
                self._pass_on(source, packet[HOST_BYTE] - 1, packet)

    def _pass_on(self, source: int, target: int, packet: bytes) -> None:
        if not 0 <= target < len(self._devices) or (source, target) in self._cut:
            return
        lost = self._loss.get(source, 0.0) + self._loss.get(target, 0.0)
        if lost and self._chance.random() < lost:
            return
        delay_s = self._delay_s.get(source, 0.0) + self._delay_s.get(target, 0.0)
        if not delay_s:
            self._send(target, packet)
        elif len(self._late) < QUEUE_MAX:
            self._number += 1
            heapq.heappush(self._late, (time.monotonic() + delay_s, self._number, target, packet))

    def wait_s(self) -> float:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1

    def send_due(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._late)
            self._send(target, packet)

    def _send(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._devices[target], packet)
        except (BlockingIOError, OSError):  # the queue is full or the node's device is down, so the packet is lost
            return


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
