"""Suite `bitflips`: one flipped bit in weights, in products and in gradients, on the CPU, and the cost of the checks.

Weights: a real module with the trainer library's checksum and the engine's detector. The right node and the last step that
passed must be named. Products: the comparison of the pre-flight test. Gradients: norms of real gradients of eight replicas,
with one bit of one element flipped before the reduce. Most bits change a norm by less than the usual difference of replicas,
and cannot be detected. Gradients are reported by bit and not counted in the suite, because no detection is promised for them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from benchmarks.detection.score import Score
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.gradient_outlier import GradientOutlier
from holdfast.diagnostics.detectors.silent_corruption import SilentCorruption
from holdfast.domain.findings import Finding, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, ReplicaChecks, StepColumns
from holdfast.train.observing.replica_check import comparable_parameters, digest
from holdfast.train.selftest import gemm

REPLICAS = 3
GRADIENT_REPLICAS = 8
GRADIENT_STEPS = 24
CASES_PER_BIT = 4
CLEAN_RUNS = 50
EVERY_STEPS = 10
OVERHEAD_BLOCKS = 9
_T0 = 1_700_000_000.0
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def suite(rng: np.random.Generator) -> Score:
    torch.manual_seed(int(rng.integers(2**31)))
    torch.set_num_threads(1)  # as in a rank that shares its machine; other processes may use this machine as well
    score = Score("bitflips", unit="checks")
    for dtype in (torch.float32, torch.bfloat16):
        _weights(score.row(f"weights, {_name(dtype)}"), dtype, rng)
    for dtype in _BITS:
        _products(score.row(f"products, {_name(dtype)}"), dtype, rng)
    counted = [row.suite for row in score.rows]
    _gradients(score.row("gradients (not counted)"), rng)
    _overhead(score)
    return score.total(*counted)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element, in place."""
    words = tensor.view(-1).view(_BITS[tensor.dtype])
    width = 8 * tensor.element_size()
    mask = 1 << bit if bit < width - 1 else -(1 << bit)  # the sign bit is a negative number
    words[element] ^= mask


# ---------------------------------------------------------------- weights


def _weights(row: Score, dtype: torch.dtype, rng: np.random.Generator) -> None:
    module = nn.Sequential(nn.Linear(96, 128), nn.LayerNorm(128), nn.Linear(128, 33)).to(dtype)
    state = {"model": module}
    parameters = list(module.parameters())
    healthy = digest(list(comparable_parameters(state)))
    by_bit: dict[int, list[bool]] = defaultdict(list)
    for _ in range(CLEAN_RUNS):
        if found := _watch_digests([[healthy] * REPLICAS for _ in range(4)]):
            row.fail(found[0].summary, wrong=len(found), spoiled=True)
        else:
            row.clean += 1
    for bit in range(8 * parameters[0].element_size()):
        for _ in range(CASES_PER_BIT):
            parameter = parameters[int(rng.integers(len(parameters)))]
            element, rank = int(rng.integers(parameter.numel())), int(rng.integers(REPLICAS))
            with torch.no_grad():
                flip(parameter, element, bit)
                ill = digest(list(comparable_parameters(state)))
                flip(parameter, element, bit)
            last = [ill if replica == rank else healthy for replica in range(REPLICAS)]
            found = _watch_digests([[healthy] * REPLICAS, [healthy] * REPLICAS, last])
            right = [f for f in found if (f.node, f.evidence.get("verified_step")) == (f"n{rank}", "20")]
            by_bit[bit].append(bool(right))
            if right and len(found) == 1 and right[0].severity is Severity.FATAL:
                row.hit(0)
            else:
                row.fail(f"bit {bit} of rank {rank}: {[f.summary for f in found]}", wrong=len(found), missed=1)
    row.facts["recall by bit"] = _by_bit(by_bit)


def _watch_digests(checks: list[list[str]]) -> list[Finding]:
    """The findings for checks at steps 10, 20, 30 …, each with one digest per replica."""
    detector, found = Alone(SilentCorruption()), list[Finding]()
    for begun in _begun(REPLICAS):
        detector.observe(begun, _T0)
    for number, digests in enumerate(checks, start=1):
        at = _T0 + number
        for rank, value in enumerate(digests):
            item = ReplicaChecks(f"n{rank}", at, "job", 1, (rank,), (10 * number,), (value,), (0.0,), (False,))
            found += detector.observe(item, at)
    return found


def _begun(replicas: int) -> Iterable[GenerationStarted]:
    mesh = Mesh.of({"dp": replicas})
    return (GenerationStarted(f"n{rank}", _T0, "job", 1, mesh, (rank,), HangSpec()) for rank in range(replicas))


# ---------------------------------------------------------------- products


def _products(row: Score, dtype: torch.dtype, rng: np.random.Generator) -> None:
    block = gemm.reference(0, dtype)
    if gemm.block_hash(block) == gemm.GOLDEN[dtype, 0] and not gemm.wrong_elements(block.clone(), block).any():
        row.clean += 1
    else:
        row.fail(f"the right {_name(dtype)} product was called wrong", wrong=1, spoiled=True)
    by_bit: dict[int, list[bool]] = defaultdict(list)
    for bit in range(8 * block.element_size()):
        for _ in range(CASES_PER_BIT):
            product, element = block.clone(), int(rng.integers(block.numel()))
            flip(product, element, bit)
            wrong = gemm.wrong_elements(product, block)
            by_bit[bit].append(bool(wrong.view(-1)[element]) and int(wrong.sum()) == 1)
            if by_bit[bit][-1]:
                row.hit(0)
            else:
                row.fail(f"bit {bit} of element {element}", missed=1)
    row.facts["recall by bit"] = _by_bit(by_bit)


# ---------------------------------------------------------------- gradients


@dataclass(slots=True)
class _Gradients:
    norms: list[list[float]]  # by step, by rank
    values: list[torch.Tensor]  # of the last step, by rank


def _gradients(row: Score, rng: np.random.Generator) -> None:
    real = _real_gradients()
    for _ in range(CLEAN_RUNS):
        scatter = float(rng.uniform(0.05, 0.4))
        norms = rng.lognormal(0, scatter, (GRADIENT_STEPS, GRADIENT_REPLICAS)).tolist()
        if found := _watch_norms(norms):
            row.fail(found[0].summary, wrong=len(found), spoiled=True)
        else:
            row.clean += 1
    by_bit: dict[int, list[bool]] = defaultdict(list)
    for bit in range(32):
        for _ in range(CASES_PER_BIT):
            rank = int(rng.integers(GRADIENT_REPLICAS))
            gradient = real.values[rank].clone()
            flip(gradient, int(rng.integers(gradient.numel())), bit)
            norm = float(gradient.double().norm())
            last = [*real.norms[-1]]
            last[rank] = norm if math.isfinite(norm) else math.inf
            found = _watch_norms([*real.norms[:-1], last])
            right = [finding for finding in found if finding.rank == rank]
            by_bit[bit].append(bool(right))
            if right:
                row.hit(0)
            else:
                row.missed += 1
            row.wrong += len(found) - len(right)
    row.facts["recall by bit"] = _by_bit(by_bit)


def _real_gradients() -> _Gradients:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    norms: list[list[float]] = []
    values: list[torch.Tensor] = []
    for _ in range(GRADIENT_STEPS):
        values = []
        for _ in range(GRADIENT_REPLICAS):
            model.zero_grad()
            loss = nn.functional.mse_loss(model(torch.randn(16, 32)), torch.randn(16, 8))
            torch.autograd.backward(loss)
            values.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone())
        norms.append([float(value.double().norm()) for value in values])
    return _Gradients(norms, values)


def _watch_norms(norms: list[list[float]]) -> list[Finding]:
    detector, found = Alone(GradientOutlier()), list[Finding]()
    for begun in _begun(GRADIENT_REPLICAS):
        detector.observe(begun, _T0)
    for step, by_rank in enumerate(norms, start=1):
        at = _T0 + step
        ranks, none = tuple(range(len(by_rank))), (math.nan,) * len(by_rank)
        zero, one = (0.0,) * len(by_rank), (1,) * len(by_rank)
        item = StepColumns(
            "n0", at, "job", 1, ranks, (step,) * len(by_rank), (at,) * len(by_rank), (at,) * len(by_rank),
            zero, zero, one, none, none, none, tuple(by_rank),
        )  # fmt: skip
        found += detector.observe(item, at)
    return found


# ---------------------------------------------------------------- cost


def _overhead(score: Score) -> None:
    """CPU time of a check as a share of the steps between two checks, with one module, process and thread; measured in turn."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 4)
    batch = torch.randn(4, 128, 128)
    state = {"model": model}

    def step() -> None:
        model.zero_grad()
        torch.autograd.backward(model(batch).square().mean())
        with torch.no_grad():  # the cheapest optimizer; the share is smaller for all others
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(1e-4 * parameter.grad)

    step()
    shares, checks_ms = [], []
    for _ in range(OVERHEAD_BLOCKS):
        began = time.process_time()
        for _ in range(EVERY_STEPS):
            step()
        between = time.process_time()
        digest(list(comparable_parameters(state)))
        ended = time.process_time()
        shares.append((ended - between) / (between - began))
        checks_ms.append(1e3 * (ended - between))
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    score.facts["overhead of checksums"] = (
        f"{_spread(shares, '.3%')} of {EVERY_STEPS} training steps ({size:.1f} MB of parameters, "
        f"{_spread(checks_ms, '.2f')} ms of CPU a check)"
    )
    began = time.perf_counter()
    made = sum(products.made for products in gemm.multiply(torch.device("cpu"), 0.5))
    score.facts["self-test"] = f"{made} products in {time.perf_counter() - began:.2f} s"


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} … {max(values):{form}})"


def _by_bit(by_bit: dict[int, list[bool]]) -> str:
    """The recall of ranges of bits with equal recall: `0-22: 0.00, 23-29: 0.25, 30: 1.00`."""
    recall = {bit: sum(found) / len(found) for bit, found in sorted(by_bit.items())}
    return ", ".join(_run(bits, value) for bits, value in _runs(recall))


def _runs(recall: dict[int, float]) -> Iterable[tuple[list[int], float]]:
    runs: list[tuple[list[int], float]] = []
    for bit, value in recall.items():
        if runs and runs[-1][1] == value:
            runs[-1][0].append(bit)
        else:
            runs.append(([bit], value))
    return runs


def _run(bits: list[int], value: float) -> str:
    return f"{bits[0]}-{bits[-1]}: {value:.2f}" if len(bits) > 1 else f"{bits[0]}: {value:.2f}"
