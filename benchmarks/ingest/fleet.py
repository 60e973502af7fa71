"""The ticks of one node with eight GPUs: progress of its ranks and NVML values every second, other signals less often.

Every tick has a GPU sample, five times as often as by default. Steps, hosts, ports and slow health values have their own
intervals, spread over the nodes as in a real fleet.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.agent.connection.outbox import ACK_EVERY, IN_FLIGHT_MAX
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    GenerationStarted,
    GpuHealth,
    GpuSample,
    HostSample,
    KernelEvent,
    KernelLine,
    NicSample,
    NodeSignal,
    Phase,
    RankProgress,
    StepColumns,
    Tick,
)
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.telemetry import encode_tick

GPUS = 8
JOB = "gpt"
XID = 79  # a hardware error, which causes a finding for each node that reports it


class Node:
    """The ticks of one node. One message object is reused, with new numbers each time."""

    def __init__(self, number: int, nodes: int, *, step_s: float, host_s: int = 5, slow_s: int = 30) -> None:
        self.name = f"n{number}"
        self._number, self._nodes, self._step_s = number, nodes, step_s
        self._host_s, self._slow_s = host_s, slow_s
        self._seq = self._step = self._heard_of = 0
        self._usual = encode_tick(Tick(self.name, "a", 1, 0.0, (self._progress(), self._gpus())))
        self._steps = encode_tick(Tick(self.name, "a", 1, 0.0, (self._columns(),))).steps[0]
        self._host = encode_tick(Tick(self.name, "a", 1, 0.0, (self._sample(), self._ports())))
        self._slow = encode_tick(Tick(self.name, "a", 1, 0.0, (self._health(),)))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self._number * GPUS, (self._number + 1) * GPUS))

    @property
    def stalled(self) -> bool:
        """Whether too many ticks are unacknowledged, so that the node sends heartbeats only, as an agent does."""
        return self._seq - self._heard_of >= IN_FLIGHT_MAX

    @property
    def _wants_ack(self) -> bool:
        return (self._seq - self._heard_of) % ACK_EVERY == 0

    def hear(self, seq: int) -> None:
        """Record an acknowledgement of the tick `seq` and all earlier ones."""
        self._heard_of = max(seq, self._heard_of)

    def hello(self, at: float) -> bytes:
        mesh = Mesh.of({"dp": self._nodes, "tp": GPUS})
        return self._reliable(GenerationStarted(self.name, at, JOB, 1, mesh, self.ranks, HangSpec()))

    def broken(self, at: float) -> bytes:
        """Return a tick with a kernel line, which must cause a finding."""
        line = f"NVRM: Xid (PCI:0000:18:00): {XID}, pid=1, GPU has fallen off the bus."
        return self._reliable(KernelLine(self.name, at, line, XID, "0000:18:00", 0, KernelEvent.XID))

    def tick(self, at: float) -> bytes:
        """Return the tick for the time `at`. The whole fleet finishes a step at every multiple of the step time."""
        if self.stalled:
            return self.beat(at)
        self._seq += 1
        message = self._usual
        message.seq, message.at, message.wants_ack = self._seq, at, self._wants_ack
        progress = message.progress[0]
        progress.at = message.gpus[0].at = at
        step = int(at / self._step_s)
        if 0 < self._step < step:
            progress.step[:] = [step] * GPUS
            columns = message.steps.add()
            columns.CopyFrom(self._steps)
            columns.at, columns.step[:] = at, [step] * GPUS
            columns.ended_at[:] = [step * self._step_s] * GPUS
            columns.started_at[:] = [(step - 1) * self._step_s] * GPUS
        self._step = step
        raw = message.SerializeToString()
        del message.steps[:]
        return raw + b"".join(self._seldom(at))

    def _seldom(self, at: float) -> Iterator[bytes]:
        # Concatenated bytes of two messages are those of one message with the fields of both.
        if (self._seq + self._number) % self._host_s == 0:
            yield self._dated(self._host, at)
        if (self._seq + self._number) % self._slow_s == 0:
            yield self._dated(self._slow, at)

    def _dated(self, message: pb.Tick, at: float) -> bytes:
        message.seq, message.at = self._seq, at
        for parts in (message.host, message.nics, message.gpu_health):
            for part in parts:
                part.at = at
        return message.SerializeToString()

    def beat(self, at: float) -> bytes:
        """Return an empty tick."""
        self._seq += 1
        return encode_tick(Tick(self.name, "a", self._seq, at), wants_ack=self._wants_ack).SerializeToString()

    def goodbye(self, at: float) -> bytes:
        self._seq += 1
        return encode_tick(Tick(self.name, "a", self._seq, at), goodbye=True, wants_ack=True).SerializeToString()

    def _reliable(self, signal: NodeSignal) -> bytes:
        self._seq += 1
        return encode_tick(Tick(self.name, "a", self._seq, signal.at, (signal,))).SerializeToString()

    # ---------------------------------------------------------------- signals

    def _progress(self) -> RankProgress:
        ones = (1.0,) * GPUS
        phases, states = (Phase.STEP,) * GPUS, ("S",) * GPUS
        return RankProgress(self.name, 0.0, JOB, 1, self.ranks, (0,) * GPUS, phases, ones, states, ones, (5,) * GPUS)

    def _columns(self) -> StepColumns:
        return StepColumns(
            node=self.name,
            at=0.0,
            job=JOB,
            generation=1,
            rank=self.ranks,
            step=(0,) * GPUS,
            started_at=(0.0,) * GPUS,
            ended_at=(0.0,) * GPUS,
            data_s=tuple(0.01 + 0.001 * (rank % 7) for rank in self.ranks),
            stall_s=(0.0,) * GPUS,
            tokens=(4096,) * GPUS,
            loss=(2.5,) * GPUS,
            grad_norm=(1.0,) * GPUS,
            comm_wait_s=tuple(0.1 + 0.001 * (rank % 11) for rank in self.ranks),
        )

    def _gpus(self) -> GpuSample:
        uuids = tuple(f"GPU-{self._number:08x}-{gpu}" for gpu in range(GPUS))
        places, zeros = tuple(range(GPUS)), (0,) * GPUS
        return GpuSample(
            self.name,
            0.0,
            places,
            uuids,
            (61.5,) * GPUS,
            (640.0,) * GPUS,
            (60 << 30,) * GPUS,
            zeros,
            zeros,
            (False,) * GPUS,
        )

    def _sample(self) -> HostSample:
        disks = (("/agent", 10 << 30, 100 << 30), ("/disk", 1 << 40, 4 << 40), ("/dev/shm", 100 << 30, 900 << 30))
        return HostSample(self.name, 0.0, 12.0, 192, 500 << 30, 2000 << 30, disks)

    def _ports(self) -> NicSample:
        devices, zeros = tuple(f"mlx5_{i}" for i in range(GPUS)), (0,) * GPUS
        return NicSample(
            self.name,
            0.0,
            devices,
            (1,) * GPUS,
            ("InfiniBand",) * GPUS,
            ("ACTIVE",) * GPUS,
            ("LinkUp",) * GPUS,
            *[zeros] * 7,
        )

    def _health(self) -> GpuHealth:
        uuids = tuple(f"GPU-{self._number:08x}-{gpu}" for gpu in range(GPUS))
        zeros = (0,) * GPUS
        return GpuHealth(
            node=self.name,
            at=0.0,
            expected=GPUS,
            gpu=tuple(range(GPUS)),
            uuid=uuids,
            ecc_corrected=zeros,
            ecc_uncorrected_ever=zeros,
            remapped_rows=zeros,
            remap_pending=zeros,
            remap_failed=zeros,
            nvlinks_up=(18,) * GPUS,
            nvlinks_down=zeros,
            nvlink_errors=zeros,
            pcie_replays=zeros,
            pcie_width=(16,) * GPUS,
            pcie_width_max=(16,) * GPUS,
            pcie_gen=(5,) * GPUS,
            pcie_gen_max=(5,) * GPUS,
            utilization=(97,) * GPUS,
            thermal_slowdown_ns=zeros,
            power_brake_ns=zeros,
            margin_c=(25.0,) * GPUS,
            fabric_state=(3,) * GPUS,
            fabric_health=zeros,
            rejected=zeros,
        )
