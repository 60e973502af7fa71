"""The values of GPUs that an agent tells whoever asks: the newest, and nothing that the driver did not say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from waiting import wait_until_async

from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.agent.gpus.gpu_states import GpuStates
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.gpus import GPUS_MAX, GpuState
from holdfast.domain.signals import GpuSample
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.gpus import decode_answer, encode_answer

RECORDED = Path(__file__).parents[2] / "data/nvml/two_gpus.jsonl"


def sample() -> GpuSample:
    return GpuSample(
        "n1", 5.0, (0, 1), ("a", "b"), (61.0, 44.0), (650.0, 90.0), (7, 3), (0, -1), (-1, -1), (False, False)
    )


def reported(states: GpuStates) -> tuple[GpuState, ...]:
    """What arrives at the supervisor."""
    return decode_answer(encode_answer(7, states.newest()).gpus_read)


@pytest.mark.anyio
async def test_a_recorded_node_as_it_arrives() -> None:
    states, collector = GpuStates(), NvmlCollector("n1", replay=RECORDED, interval_s=0.02)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, states.watch)
        await wait_until_async(
            lambda: any(each.ecc_uncorrected_ever for each in states.newest()), description="values of both kinds"
        )
        tasks.cancel_scope.cancel()
    first, second = reported(states)
    assert (first.uuid, first.margin_c, first.nvlinks_up, first.pcie_replays) == ("GPU-aaaa", 30.0, 18, 0)
    assert (second.temperature_c, second.power_w, second.memory_used) == (61.0, 650.0, 75161927680)
    assert (second.remapped_rows, second.remap_pending, second.remap_failed) == (2, True, False)
    assert (second.pcie_replays, second.margin_c) == (None, None), "the driver does not say"


def test_before_the_first_sample_and_without_health() -> None:
    states = GpuStates()
    assert reported(states) == ()
    states.watch(sample())
    first, second = reported(states)
    assert (first.temperature_c, first.ecc_uncorrected, first.utilization) == (61.0, 0, None)
    assert (second.temperature_c, second.ecc_uncorrected) == (44.0, None)


def test_of_a_lost_gpu_nothing_else_is_known() -> None:
    states = GpuStates()
    states.watch(sample())
    states.watch(replace(sample(), at=6.0, lost=(False, True), temperature_c=(62.0, 0.0)))
    first, second = reported(states)
    assert (first.temperature_c, first.at) == (62.0, 6.0)
    assert second == GpuState(1, "b", 6.0, lost=True)


@pytest.mark.parametrize(
    "gpus",
    [
        [pb.Gpu(uuid="x" * 200)],
        [pb.Gpu(temperature_c=math.nan)],
        [pb.Gpu(at=math.inf)],
        [pb.Gpu()] * (GPUS_MAX + 1),
    ],
)
def test_what_no_gpu_has_is_refused(gpus: list[pb.Gpu]) -> None:
    with pytest.raises(MalformedMessage, match=r"gpus_read\.gpus"):
        decode_answer(pb.GpusRead(gpus=gpus))
