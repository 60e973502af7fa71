"""Pre-flight tests of the node while it has no ranks: when it joins, after a job, and periodically.

A test never delays a job: an order to prepare cancels it within milliseconds, and the test is repeated when the node has no
ranks again. The exception is an order that requests a test after a silent corruption without a known node: the devices are
then tested before the new workers are ready, and a node with wrong results reports it.

The devices are tested in a separate process (a fork of the worker template, killed after `DEVICES_TIMEOUT_S`), because a
driver call may hang."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import structlog

from holdfast.agent.checks import preflight_checks
from holdfast.agent.collectors.protocol import Emit
from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.domain.hosts import host_and_port
from holdfast.domain.nodes import PEERS, Check, Preflight
from holdfast.domain.orders import Report, Tested
from holdfast.domain.signals import GpuHealth, GpuSample, NodeSignal, NodeTested
from holdfast.runtime import freeze
from holdfast.runtime.files import write_whole
from holdfast.wire import records

log = structlog.get_logger("holdfast.agent.checks.preflight")

LOOK_S = 1.0
IDLE_S = 5.0  # without ranks; the gap during a restart does not count as idle
AGAIN_S = 60.0  # retry interval after a failure, which may be temporary, such as a full disk
GPU_READING_S = 15.0  # for NVML's first reading after the agent's start
DEVICES_TIMEOUT_S = 60.0
DEVICE_BUDGET_S = 0.5
SUSPICION_BUDGET_S = 5.0  # a suspected device is tested for longer, because one pass proves little
PEER_TIMEOUT_S = 2.0
PEERS_MAX = 8
FILE = "preflight.json"

TestDevices = Callable[[float, float], Awaitable[str]]  # (budget, timeout in seconds) → output of the self-test


class Preflights:
    """`run` is a loop of the agent. `every_s` is the time between tests of an idle node.

    `path` is a file with the newest result, for start-up scripts and health checks of containers. After an agent restart the
    node counts as untested.
    """

    def __init__(
        self,
        *,
        node: str,
        every_s: float,
        gpus: int,
        watches_gpus: bool,
        test_devices: TestDevices,
        test_disk: Callable[[], Awaitable[Check]],
        test_ports: Callable[[], Awaitable[list[Check]]],
        is_idle: Callable[[], bool],
        emit: Emit,
        report: Callable[[Report], None],
        path: Path,
    ) -> None:
        self._node, self._every_s, self._gpus, self._watches_gpus = node, every_s, gpus, watches_gpus
        self._test_devices, self._test_disk, self._test_ports = test_devices, test_disk, test_ports
        self._is_idle = is_idle
        self._emit, self._report = emit, report
        self._path = path
        self._path.unlink(missing_ok=True)
        self._sample: GpuSample | None = None
        self._sampled = anyio.Event()
        self._health: GpuHealth | None = None
        self._peers: OrderedDict[str, None] = OrderedDict()  # endpoints, newest last
        self._under_way: anyio.CancelScope | None = None
        self._holds = 0
        self._busy_until = 0.0  # event loop's time
        self._was_busy = False
        self._tested_at = 0.0  # event loop's time; 0 = never
        self.newest = Preflight()  # empty until the first result

    # ------------------------------------------------------------------ inputs

    def watch(self, signal: NodeSignal) -> None:
        """Store the GPUs' last readings."""
        match signal:
            case GpuSample():
                self._sample = signal
                self._sampled.set()
            case GpuHealth():
                self._health = signal
            case _:
                pass

    def know_peers(self, endpoints: Iterable[str]) -> None:
        """Set the replicators of other nodes, with which the network is tested."""
        for endpoint in endpoints:
            self._peers[endpoint] = None
            self._peers.move_to_end(endpoint)
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)

    def replace_peers(self, endpoints: Sequence[str]) -> None:
        """Forget all other nodes but these, which have a session now. If the last test knew none of them, and failed because no
        other node answered, repeat it now."""
        outdated = self._peers.keys().isdisjoint(endpoints) and self.newest.has_failed(PEERS)
        self._peers = OrderedDict.fromkeys(endpoints[-PEERS_MAX:])
        if outdated:
            self._tested_at = 0.0

    def make_way(self) -> None:
        """Cancel a running test, because a job needs this node."""
        self._busy_until = anyio.current_time() + IDLE_S
        self._was_busy = True
        if self._under_way is not None:
            self._under_way.cancel()
        # This node was not tested before its first job. It is in use now, and is tested when it is idle.
        if not self._tested_at and not self._path.exists():
            self._keep(self.newest)

    # ------------------------------------------------------------------ tests

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            if self._is_due():
                with anyio.CancelScope() as scope:
                    self._under_way = scope
                    await self._test()
                self._under_way = None
            await anyio.sleep(LOOK_S)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Cancel a running test and begin none in the block, because GPUs are being reset. Drops earlier NVML readings."""
        self._holds += 1
        if self._under_way is not None:
            self._under_way.cancel()
        self._sample, self._sampled, self._health = None, anyio.Event(), None
        try:
            yield
        finally:
            self._holds -= 1

    async def after_reset(self) -> str:
        """Test the node now, even if periodic tests are off. Return the failures; "" if there are none."""
        await self._test()
        return self.newest.failures

    async def on_suspicion(self) -> None:
        """Test the devices now. Raises `Conflict` if a product is wrong. A test that cannot run is ignored."""
        checks = await self._devices(SUSPICION_BUDGET_S)
        wrong = [check for check in checks if check.ok is False and check.name == "products"]
        if not wrong:
            return
        now = time.time()
        self._publish(Preflight(now, 0.0, tuple(checks)))
        raise Conflict(f"{self._node} computes wrongly: {wrong[0].detail}")

    def _is_due(self) -> bool:
        now = anyio.current_time()
        if self._holds:
            return False
        if not self._is_idle():
            self._busy_until = now + IDLE_S
            self._was_busy = True
        if now < self._busy_until:
            return False
        again_s = AGAIN_S if self.newest.failures else self._every_s
        return self._was_busy or not self._tested_at or now >= self._tested_at + again_s

    async def _test(self) -> None:
        began = anyio.current_time()
        checks = [
            await self._gpu_check(),
            *await self._devices(DEVICE_BUDGET_S),
            await self._test_disk(),
            *await self._test_ports(),
            await self._peer_check(),
        ]
        self._tested_at, self._was_busy = anyio.current_time(), False
        self._publish(Preflight(time.time(), anyio.current_time() - began, tuple(checks)))

    def failed(self, preflight: Preflight) -> None:
        """Record that this node, as a suspect, has failed its quick tests. They replace the newest result."""
        if self._every_s:
            self._publish(preflight)
        else:  # no later test would replace this result; the supervisor receives it in the answer to the order
            self._emit(NodeTested(self._node, preflight.at, preflight))

    def _publish(self, preflight: Preflight) -> None:
        self.newest = preflight
        log.info(
            "pre-flight test completed",
            duration_s=round(preflight.duration_s, 2),
            failures=preflight.failures or "none",
        )
        self._report(Tested(preflight))
        self._emit(NodeTested(self._node, preflight.at, preflight))
        self._keep(preflight)

    def _keep(self, preflight: Preflight) -> None:
        try:
            write_whole(self._path, records.dumps(preflight, Preflight))
        except OSError as error:
            log.warning("pre-flight result not stored", path=str(self._path), error=error.strerror)

    async def _gpu_check(self) -> Check:
        if self._watches_gpus:
            with freeze.patience(GPU_READING_S):
                await self._sampled.wait()
        return preflight_checks.gpus(self._sample, self._health, watched=self._watches_gpus, expected=self._gpus)

    async def _devices(self, budget_s: float) -> list[Check]:
        try:
            return preflight_checks.devices(await self._test_devices(budget_s, DEVICES_TIMEOUT_S))
        except (
            HoldfastError,
            OSError,
        ) as error:  # no worker template, or a device that does not answer
            return [Check("devices", False, f"cannot be tested: {error}"[: preflight_checks.DETAIL_CHARS_MAX])]

    async def _peer_check(self) -> Check:
        reached: list[str] = []
        refused: list[str] = []
        silent: list[str] = []

        async def knock(endpoint: str) -> None:
            if (address := host_and_port(endpoint)) is None:
                silent.append(endpoint)
                return
            try:
                with freeze.patience(PEER_TIMEOUT_S) as limit:
                    stream = await anyio.connect_tcp(*address)
                    await stream.aclose()
            except OSError as error:
                (refused if _is_refusal(error) else silent).append(endpoint)
            else:
                (silent if limit.cancelled_caught else reached).append(endpoint)

        async with anyio.create_task_group() as tasks:
            for endpoint in self._peers:
                tasks.start_soon(knock, endpoint)
        return preflight_checks.peers(sorted(reached), sorted(refused), sorted(silent))


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the machine has answered that nothing listens at this port. anyio raises an OSError whose cause is the reason, a
    group of reasons if the name has several addresses."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_refusal, error.exceptions))
    return isinstance(error, ConnectionRefusedError) or (error is not None and _is_refusal(error.__cause__))
