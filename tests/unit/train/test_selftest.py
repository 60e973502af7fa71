"""Exact products: the constants are those of whole numbers, any wrong bit shows, and a device that fails is an answer."""

from __future__ import annotations

import json

import pytest
import torch

from holdfast.train.selftest import gemm, memory
from holdfast.train.selftest.__main__ import main

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", range(gemm.VARIANTS))
def test_the_constants_are_those_of_whole_numbers(variant: int) -> None:
    """In 64-bit integers, where nothing is ever rounded: by no unit that is tested."""
    a, b = gemm.factors(variant)
    whole = a @ b
    assert int(whole.abs().max()) < 2**24, "not exact in a 32-bit accumulator"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        block = gemm.rounded(whole, dtype)
        assert bool(block.isfinite().all())
        assert gemm.block_hash(block) == gemm.GOLDEN[dtype, variant]


def test_a_healthy_device_makes_no_wrong_product() -> None:
    (products,) = gemm.multiply(CPU, 0.05)
    assert (products.kind, products.wrong, products.first_wrong) == ("float32", 0, "")
    assert products.made >= gemm.VARIANTS


def test_one_wrong_bit_in_a_grid_of_blocks_is_found_where_it_is() -> None:
    block = gemm.reference(0, torch.float32)
    product = block.repeat(2, 3)
    product.view(torch.int32)[700, 1100] ^= 1
    assert gemm.wrong_elements(product, block).nonzero().tolist() == [[700, 1100]]


def test_a_device_that_computes_wrongly_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = gemm.factors(0)
    wrong = a.clone()
    wrong[3, 5] += 1
    monkeypatch.setattr(gemm, "factors", lambda variant: (wrong, b))
    (products,) = gemm.multiply(CPU, 0.0)
    assert products.wrong == products.made == 1
    assert "wrong hash" in products.first_wrong


def test_settings_of_the_process_are_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    gemm.multiply(CPU, 0.0)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_memory_has_a_speed() -> None:
    assert memory.bandwidth_gb_s(CPU) > 0.1


def test_the_program_prints_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["selftest", "--budget-s", "0.0"])
    main()
    (device, *_) = json.loads(capsys.readouterr().out)["devices"]
    assert device["products"][0]["wrong"] == 0
    assert device["memory_gb_s"] > 0
